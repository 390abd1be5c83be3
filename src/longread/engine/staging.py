"""Small inputs on their way to a device: written into pinned memory, copied behind what the device is doing.

Knows tensors only. A copy runs when the device gets there, so what it reads must not be overwritten before: there are
several host copies in turn, each with an event that says when it has been read.
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
        starts, size = {}, 0
        for name, (dtype, count) in layout.items():
            starts[name] = size
            size += -(-dtype.itemsize * count // 16) * 16
        copies = COPIES if self._cuda else 1
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(copies)]
        self._read = [torch.cuda.Event() for _ in range(copies)] if self._cuda else []
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._turn = 0
        self._arrays = [
            {
                name: host.numpy()[starts[name] : starts[name] + dtype.itemsize * count].view(_NUMPY[dtype])
                for name, (dtype, count) in layout.items()
            }
            for host in self._host
        ]
        self.device: dict[str, Tensor] = {
            name: self._buffer[starts[name] : starts[name] + dtype.itemsize * count].view(dtype)
            for name, (dtype, count) in layout.items()
        }

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
    """The way back: a small tensor copied to pinned memory, and when it is there."""

    def __init__(self, values: Tensor):
        """``values``: any device tensor, not written before the copy is done in its stream's order."""
        self._cuda = values.device.type == "cuda"
        if not self._cuda:
            self._host = values.clone()
            return
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record()

    def wait(self) -> Tensor:
        """The values, on the host; waits for the device to have come that far and no further."""
        if self._cuda:
            self._there.synchronize()
        return self._host


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}
