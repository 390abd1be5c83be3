"""Records between a device's storages and main memory: contiguous over the link, spread over the groups on the device.

Knows storages as [layers, places, bytes], streams and pinned memory; not which place belongs to whom, nor what a record
means. A record over the link is one copy, neighbours in memory are one copy together; a batch of them is spread over
the groups, or gathered from them, by one copy a group. All of it is plain torch, so that it runs on a CPU too, where
nothing is asynchronous.

Two threads use this, each its own half. *Loads* belong to the loading thread: batches alternate between two halves of a
staging buffer, so that the link never waits for the spreading; places are whole when ``finish`` returns. *Saves*
belong to the engine's thread: a place is gathered in the order of that thread's current stream, which must be the one
the model's work is put on, and leaves behind its back. ``fence`` and ``after`` order the one behind the other.
"""

import ctypes
import logging
import math
import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

STAGING_BYTES = 32 * 2**20  # of each of three buffers, if a record is not longer: 0.7 ms of a link of 50 GB/s
ALIGNMENT = 16


class Parts:
    """How a record of one kind lies in its storages, one behind the other, each as its layers and their rows.

    storages: [layers, places, rows, width] of any dtype, contiguous but for the choice of places.
    """

    def __init__(self, storages: Sequence[Tensor]):
        flat = [each.view(torch.uint8).flatten(2) for each in storages]
        # Copied in the largest numbers that fit every layer's part: a copy by bytes is a thread a byte.
        unit = math.gcd(8, *(each.shape[2] for each in flat))
        self.dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
        self.bytes = sum(each.shape[0] * each.shape[2] for each in flat)
        self.storages = [each.view(self.dtype) for each in flat]
        self.rows = [each.shape[2] for each in storages]

    def of(self, records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each storage with its part of ``records`` (uint8 [n, bytes]), as [n, layers, units]."""
        units, at = records.view(self.dtype), 0
        for storage in self.storages:
            layers, _, width = storage.shape
            yield storage, units[:, at : at + layers * width].unflatten(1, (layers, width))
            at += layers * width


@dataclass(slots=True)
class _Left:
    """Bytes of the saves' staging buffer that are still being read, until ``event``."""

    start: int
    end: int
    event: torch.cuda.Event


class DeviceCopies:
    """``longest``: bytes of the longest record. ``staging``: bytes of a staging buffer, more if a record needs it."""

    def __init__(self, device: torch.device, longest: int, staging: int = STAGING_BYTES):
        self._device = device
        self._cuda = device.type == "cuda"
        size = -(-max(staging, longest) // ALIGNMENT) * ALIGNMENT
        self._loading = [self._buffer(size), self._buffer(size)]
        self._saving = self._buffer(size)
        self.nbytes = 3 * size
        self._pinned: list[tuple[int, Tensor]] = []  # with its address
        # Records of other memory pass through these; made when the first one comes.
        self._bounce_in: list[Tensor] = []
        self._bounce_out: Tensor | None = None
        self.link_in, self._spread, self._link_out = (
            (torch.cuda.Stream(device, priority=-1) if self._cuda else None) for _ in range(3)
        )
        self._left: deque[_Left] = deque()
        self._half = 0  # of the loads' staging, whose turn is next
        self._linked: list[torch.cuda.Event | None] = [None, None]  # when each half was last filled
        self._spread_at: list[torch.cuda.Event | None] = [None, None]  # and last read
        self._next = 0  # where the next save is staged

    def allocate(self, size: int) -> memoryview:
        """Pinned zeros: records in them cross the link without a copy in between. They live as long as this does."""
        if not size:
            return memoryview(b"")
        memory = mmap.mmap(-1, size)
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # pinning goes page by page
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self._cuda:
            cudart = torch.cuda.cudart()
            failed = int(cudart.cudaHostRegister(tensor.data_ptr(), size, 0))
            if failed:
                log.warning("%d bytes could not be pinned (CUDA error %d): each record is copied twice", size, failed)
                return memoryview(memory)
            weakref.finalize(self, cudart.cudaHostUnregister, tensor.data_ptr()).atexit = False
        self._pinned.append((tensor.data_ptr(), tensor))
        return memoryview(memory)

    # Saves: the engine's thread.

    def fence(self) -> object:
        """What a load must come after: all that has been put on the current stream, and all saves."""
        if self._link_out is None:
            return None
        return torch.cuda.current_stream(self._device).record_event(), self._link_out.record_event()

    def read(
        self,
        parts: Parts,
        places: Sequence[int],
        into: Sequence[memoryview],
        valid: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Places as records, one behind the other. ``valid``: for each, rows of each storage that count; zeros for the
        rest.

        Of memory from ``allocate`` the bytes are there after ``settle``, or for loads behind the next ``fence``; what
        is done to the places on the current stream from here on does not touch them. Of other memory they are there
        now. One gather a storage and one copy a run of neighbours, for half of the staging buffer at a time: while one
        half crosses the link the other is filled.
        """
        where = indices(places, self._device) if len(places) > 1 else None
        count = max(1, self._saving.numel() // 2 // parts.bytes)
        for first in range(0, len(places), count):
            chosen = slice(first, first + count)
            start = self._stage(len(places[chosen]) * parts.bytes)
            staged = self._saving[start:][: len(places[chosen]) * parts.bytes].view(-1, parts.bytes)
            for storage, part in parts.of(staged):
                if where is None:
                    part[0].copy_(storage[:, places[0]])
                else:
                    torch.index_select(storage, 1, where[chosen], out=part.transpose(0, 1))
            if valid is not None:
                _clear(parts, staged, valid[chosen])
            self._send(staged, start, into[chosen])

    def _send(self, staged: Tensor, start: int, into: Sequence[memoryview]) -> None:
        """Records [n, bytes], staged from ``start`` on, to their memory."""
        at, (count, size) = 0, staged.shape
        bounced: list[tuple[Tensor, memoryview]] = []
        if self._link_out is not None:
            self._link_out.wait_event(torch.cuda.current_stream(self._device).record_event())
        while at < count:
            target = self._pinned_run(into[at:], size)
            if target is None:
                if self._bounce_out is None:
                    self._bounce_out = self._host_buffer(self._saving.numel())
                target = self._bounce_out[at * size : (at + 1) * size]
                bounced.append((target, into[at]))
            together = target.numel() // size
            with _on(self._link_out):
                target.copy_(staged[at : at + together].view(-1), non_blocking=True)
            at += together
        if self._link_out is not None:
            self._left.append(_Left(start, start + count * size, self._link_out.record_event()))
        if bounced:
            self.settle()
            for source, record in bounced:
                np.frombuffer(record, dtype=np.uint8)[:] = source.numpy()

    def settle(self) -> None:
        """Wait until every record that was read is in its memory."""
        if self._link_out is not None:
            self._link_out.synchronize()
        self._left.clear()

    def _stage(self, size: int) -> int:
        """Room for a record in the saves' buffer. What is put on the current stream from here on may use it."""
        start = self._next if self._next + size <= self._saving.numel() else 0
        end = start + size
        self._next = -(-end // ALIGNMENT) * ALIGNMENT
        while self._left and self._left[0].event.query():
            self._left.popleft()
        # They end in order, so the newest one in the way is the one to wait for.
        behind = max((i + 1 for i, left in enumerate(self._left) if left.start < end and start < left.end), default=0)
        if behind:
            torch.cuda.current_stream(self._device).wait_event(self._left[behind - 1].event)
            for _ in range(behind):
                self._left.popleft()
        return start

    # Loads: the loading thread.

    def after(self, fence: object) -> None:
        """What is loaded from now on comes after ``fence``."""
        if isinstance(fence, tuple):
            for stream in (self.link_in, self._spread):
                for event in fence:
                    if stream is not None:
                        stream.wait_event(event)

    def write(self, parts: Parts, places: Sequence[int], records: Sequence[memoryview]) -> None:
        """Records to their places, which are whole behind ``finish``; until then records of memory from ``allocate``
        must stay as they are. Other memory is done with on return.
        """
        if not places:
            return
        addresses = [_address(record) for record in records]
        order = sorted(range(len(places)), key=addresses.__getitem__)  # neighbours in memory next to each other
        count = max(1, self._loading[0].numel() // parts.bytes)
        with _on(self._spread):
            where = indices([places[i] for i in order], self._device)
        for first in range(0, len(places), count):
            half, chosen = self._half, [records[i] for i in order[first : first + count]]
            self._half ^= 1
            staged = self._loading[half][: len(chosen) * parts.bytes].view(len(chosen), parts.bytes)
            _wait(self.link_in, self._spread_at[half])
            with _on(self.link_in):
                self._fetch(staged, chosen, half, self._linked[half])
            self._linked[half] = _record(self.link_in)
            _wait(self._spread, self._linked[half])
            with _on(self._spread):
                for storage, part in parts.of(staged):
                    storage.index_copy_(1, where[first : first + count], part.transpose(0, 1))
            self._spread_at[half] = _record(self._spread)

    def located(self, records: Sequence[memoryview]) -> tuple[Tensor, list[int]] | None:
        """The pinned memory that all these records lie in, and where each begins in it. None: they do not."""
        addresses = [_address(record) for record in records]
        longest = max(len(record) for record in records)
        for start, memory in self._pinned:
            if start <= min(addresses) and max(addresses) + longest <= start + memory.numel():
                return memory, [address - start for address in addresses]
        return None

    def finish(self) -> None:
        """Wait until every place that was written is whole. To be called on an error, too: a place that somebody else
        is given must not be written behind his back.
        """
        if self._spread is not None:
            done = torch.cuda.Event(blocking=True)  # waiting must not take a processor from the engine's thread
            done.record(self._spread)
            done.synchronize()

    def _fetch(self, staged: Tensor, records: list[memoryview], half: int, last: torch.cuda.Event | None) -> None:
        """Records, by address, into the rows of ``staged``. last: when the half's bounce buffer was last read."""
        size, at = staged.shape[1], 0
        while at < len(records):
            run = self._pinned_run(records[at:], size)
            if run is None:
                if not self._bounce_in:
                    self._bounce_in = [self._host_buffer(each.numel()) for each in self._loading]
                if last is not None:
                    last.synchronize()
                    last = None
                run = self._bounce_in[half][at * size : (at + 1) * size]
                run.numpy()[:] = np.frombuffer(records[at], dtype=np.uint8)
            count = run.numel() // size
            staged[at : at + count].view(-1).copy_(run, non_blocking=True)
            at += count

    def _pinned_run(self, records: Sequence[memoryview], size: int) -> Tensor | None:
        """The first record and those that lie behind it in the same pinned memory, if it does lie in some."""
        first = _address(records[0])
        for start, memory in self._pinned:
            if start <= first and first + size <= start + memory.numel():
                fit = min(len(records), (start + memory.numel() - first) // size)
                count = next((n for n in range(1, fit) if _address(records[n]) != first + n * size), fit)
                return memory[first - start : first - start + count * size]
        return None

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda)


def indices(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 on a device; from pageable memory the copy would wait for what the stream still does."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _clear(parts: Parts, staged: Tensor, valid: Sequence[Sequence[int]]) -> None:
    """Zeros in the rows of records [n, bytes] that do not count."""
    for record, rows in zip(staged, valid, strict=True):
        if list(rows) != parts.rows:
            for (_, part), whole, count in zip(parts.of(record[None]), parts.rows, rows, strict=True):
                part[0].view(torch.uint8).unflatten(1, (whole, -1))[:, count:].zero_()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _address(record: memoryview) -> int:
    if not record.readonly:  # a sixth of numpy's time, and a load asks for thousands
        return ctypes.addressof(ctypes.c_char.from_buffer(record))
    return int(np.frombuffer(record, dtype=np.uint8).__array_interface__["data"][0])


def _record(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)
