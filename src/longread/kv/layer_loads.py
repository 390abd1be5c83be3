"""Loads of pages from pinned memory that nobody need wait for as a whole: layer after layer, on a stream of their own.

Knows records as the parts of storages, ranges of layers and a link; not whose the pages are, nor who waits
(``arrivals``). Nothing is staged: ``Spread`` reads the records where they lie and writes each layer's part to its page.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from longread.kv.arrivals import Arrival, Marks
from longread.kv.device_copies import DeviceCopies, Parts, indices

RANGES = 8  # of layers: the first is there after an eighth of the load. More are more launches, and waits in graphs
Layers = tuple[int, int]  # first and one behind the last
LEAST_BYTES = 16 * 2**20  # less is there (0.3 ms at 50 GB/s) before so many launches are made


class Spread(Protocol):
    """Layers first .. stop - 1 of a storage's part of records in pinned memory, each to its place (kernels/records)."""

    def __call__(
        self, memory: Tensor, starts: Tensor, places: Tensor, storage: Tensor, at: int, layers: Layers
    ) -> None: ...


class Link(Marks, Protocol):
    """Where loads run, in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Behind all that it was given before."""
        ...

    def mark(self, mark: int) -> None:
        """Make a mark behind all that it was given so far."""
        ...

    def begin(self) -> Callable[[], Arrival]:
        """A load begins here, and ends where the result is called."""
        ...

    def finish(self) -> None:
        """Wait until all of it is done."""
        ...


class CudaLink:
    """A stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream, marks: int):
        self._stream = stream
        # External: a captured graph waits for them as they are when it is replayed.
        self._marks = [torch.cuda.Event(external=True) for _ in range(marks)]
        for mark in self._marks:  # none that was never recorded could be captured
            mark.record(stream)

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def mark(self, mark: int) -> None:
        self._marks[mark].record(self._stream)

    def wait(self, mark: int) -> None:
        self._marks[mark].wait(torch.cuda.current_stream(self._stream.device))

    def begin(self) -> Callable[[], Arrival]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)

        def ended() -> Arrival:
            end.record(self._stream)
            return _CudaArrival(start, end)

        return ended

    def finish(self) -> None:
        done = torch.cuda.Event(blocking=True)  # as DeviceCopies.finish waits
        done.record(self._stream)
        done.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class _CudaArrival:
    start: torch.cuda.Event
    end: torch.cuda.Event

    def over(self) -> bool:
        return self.end.query()

    def seconds(self) -> float:
        return self.start.elapsed_time(self.end) / 1e3


class Direct:
    """Where nothing is asynchronous: a load is over when it has begun."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self, mark: int) -> None: ...

    def wait(self, mark: int) -> None: ...

    def begin(self) -> Callable[[], Arrival]:
        start = time.monotonic()
        return lambda: _Done(time.monotonic() - start)

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Done:
    took: float

    def over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self.took


class LayerLoads:
    """Of one kind of record. ``layers``: the model's layers that each storage of ``parts`` belongs to, ascending.

    ``firsts``: the first layer of each range, and ``link`` the marks behind them, for ``Arrivals``. ``least_bytes``: of
    a load that is worth it.
    """

    def __init__(self, copies: DeviceCopies, spread: Spread, parts: Parts, layers: Sequence[Sequence[int]]):
        self._spread, self._device = spread, parts.storages[0].device
        self.firsts, self.least_bytes = first_layers(layers), LEAST_BYTES
        self.link = link_of(copies, len(self.firsts))
        self._ranges: list[list[tuple[Tensor, int, Layers]]] = []
        for low, high in pairwise((*self.firsts, 1 + max(own[-1] for own in layers))):
            at, found = 0, []
            for storage, own in zip(parts.storages, layers, strict=True):
                first, stop = (sum(layer < bound for layer in own) for bound in (low, high))
                if first < stop:
                    found.append((storage, at, (first, stop)))
                at += storage.shape[0] * storage.shape[2] * storage.element_size()
            self._ranges.append(found)

    def begin(self, memory: Tensor, starts: Sequence[int], places: Sequence[int]) -> Arrival:
        """Records, from these bytes of ``memory`` on, to their places: all copies are put on the link, all marks made.

        ``memory`` must stay as it is until the load is over.
        """
        ended = self.link.begin()
        given: list[Tensor] = []
        self.link.run(lambda: given.extend(indices((starts, places), self._device)))
        for mark, parts in enumerate(self._ranges):
            self.link.run(partial(self._bring, memory, given, parts))
            self.link.mark(mark)
        return ended()

    def _bring(self, memory: Tensor, given: Sequence[Tensor], parts: Sequence[tuple[Tensor, int, Layers]]) -> None:
        starts, places = given
        for storage, at, layers in parts:
            self._spread(memory, starts, places, storage, at, layers)

    def finish(self) -> None:
        """Wait until every load that was begun is over."""
        self.link.finish()


def link_of(copies: DeviceCopies, marks: int) -> Link:
    """The stream that other loads come by, too, so that they keep their order."""
    return Direct() if copies.link_in is None else CudaLink(copies.link_in, marks)


def first_layers(layers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Where up to RANGES ranges begin, each of about equally many of the layers that have rows."""
    having = sorted({layer for own in layers for layer in own})
    count = min(RANGES, len(having))
    return tuple(having[len(having) * i // count] for i in range(count))
