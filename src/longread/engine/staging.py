"""Small inputs on their way to a device, and small results on their way back, through pinned memory.

Knows tensors only. A copy runs when the device gets there, so what it reads must not be overwritten before: of inputs
there are several host copies in turn, each with an event that says when it has been read.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

COPIES = 4  # a step sends each kind once or twice and ends by waiting for its tokens, so the oldest has long been read

Layout = dict[str, tuple[torch.dtype, int]]


class Staging:
    """Named arrays in one buffer on a device, filled by one copy. ``layout``: type and count by name, in order.

    ``arrays``: the host side, to be written between ``begin`` and ``send``. ``device``: views of the device's buffer,
    which is the same for life, so that graphs can read it. Each array begins at a multiple of 16 bytes.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self._cuda = device.type == "cuda"
        copies = COPIES if self._cuda else 1
        self._host = [torch.zeros(_size(layout), dtype=torch.uint8, pin_memory=self._cuda) for _ in range(copies)]
        self._read = [torch.cuda.Event() for _ in range(copies)] if self._cuda else []
        self._buffer = torch.zeros(_size(layout), dtype=torch.uint8, device=device)
        self._turn = 0
        self._arrays = [_arrays(layout, host) for host in self._host]
        self.device = _views(layout, self._buffer)

    def begin(self) -> dict[str, NDArray]:
        """The next host copy, which nothing reads any more; what it holds is from long ago."""
        self._turn = (self._turn + 1) % len(self._host)
        if self._cuda:
            self._read[self._turn].synchronize()  # an event that was never recorded is over
        return self._arrays[self._turn]

    def send(self) -> None:
        """Copy what was written since ``begin`` to the device, in the order of its stream."""
        self._buffer.copy_(self._host[self._turn], non_blocking=True)
        if self._cuda:
            self._read[self._turn].record()


class Arrival:
    """The way back: named arrays that a device writes (``device``, the same for life, so that graphs can write them),
    one host copy of them, and when it is there.
    """

    def __init__(self, layout: Layout, device: torch.device):
        self._cuda = device.type == "cuda"
        self._buffer = torch.zeros(_size(layout), dtype=torch.uint8, device=device)
        self._host = torch.zeros(_size(layout), dtype=torch.uint8, pin_memory=self._cuda)
        self._arrays = _arrays(layout, self._host)
        self._there = torch.cuda.Event() if self._cuda else None
        self._sent = 0
        self.device = _views(layout, self._buffer)

    def send(self) -> int:
        """Copy it to the host behind what the device is doing; what the last call brought is overwritten then. Its
        number, for ``wait``.
        """
        self._host.copy_(self._buffer, non_blocking=True)
        if self._there is not None:
            self._there.record()
        self._sent += 1
        return self._sent

    def there(self) -> bool:
        """Whether ``wait`` would not wait."""
        return self._there is None or self._there.query()

    def wait(self, number: int) -> dict[str, NDArray]:
        """What ``send`` copied; waits for the device to have come that far and no further."""
        if number != self._sent:
            raise AssertionError(f"copy {number} was overwritten by copy {self._sent}")
        if self._there is not None:
            self._there.synchronize()
        return self._arrays


def _places(layout: Layout) -> dict[str, tuple[int, int]]:
    """Where each array lies in a buffer: first byte, and the one behind it."""
    places, start = {}, 0
    for name, (dtype, count) in layout.items():
        places[name] = start, start + dtype.itemsize * count
        start += -(-dtype.itemsize * count // 16) * 16
    return places


def _size(layout: Layout) -> int:
    return sum(-(-dtype.itemsize * count // 16) * 16 for dtype, count in layout.values())


def _arrays(layout: Layout, host: Tensor) -> dict[str, NDArray]:
    places = _places(layout)
    return {name: host.numpy()[slice(*places[name])].view(_NUMPY[dtype]) for name, (dtype, _) in layout.items()}


def _views(layout: Layout, buffer: Tensor) -> dict[str, Tensor]:
    places = _places(layout)
    return {name: buffer[slice(*places[name])].view(dtype) for name, (dtype, _) in layout.items()}


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
