"""Moves records between memory and disk on threads of its own, so that a step never waits for a disk.

Knows records, reserved page rows, and two threads: one loads, one writes, so that a hit does not queue behind a flush.
Must not know the cache's books: a load writes only to pages and rows that were reserved for it, and a write reads only
buffers that were copied for it. What a thread has done is handed back by flags that the engine's thread looks at.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal, Protocol

from longread.kv.arrivals import Arrival
from longread.kv.lease import Load, RecordStore
from longread.kv.records import Kind, Known, Record, Verdict

log = logging.getLogger(__name__)

Tier = Literal["host", "disk"]
Fault = Literal["absent", "corrupt", "error"]  # error: the store could not be asked
Found = tuple[Verdict, memoryview]
Batches = Generator[Sequence[Found], None, None]
STOP_SECONDS = 30.0  # a disk that hangs must not hold the process


class Disk(Protocol):
    """What the tiers need of ``kv.disk.store.DiskStore``; safe from any thread. Its methods may raise StoreError."""

    @property
    def corrupt(self) -> int: ...

    def present(self, kind: Kind, keys: Sequence[bytes]) -> set[bytes]: ...
    def nearest(self, parent: bytes, ahead: bytes) -> list[Known]: ...
    def tails(self, ahead: Mapping[bytes, bytes]) -> dict[bytes, list[Known]]: ...
    def other_roots(self, content_key: bytes) -> list[str]: ...
    def batches(
        self, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview]
    ) -> Generator[Sequence[tuple[Verdict, memoryview]], None, None]: ...
    def write(self, records: Sequence[Record]) -> int: ...
    def touch(self, keys: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Move:
    """One record to one place: a page, or a snapshot row for a ring. ``data``: its bytes, where they are in memory."""

    known: Known
    source: Tier
    target: int
    data: memoryview | None = None


@dataclass(slots=True, eq=False)
class Transfer:
    """A load in flight. ``moves`` in order: pages of the chain, then a tail, then a ring; the first that fails is the
    end (``broken``, for ``fault``). ``done`` is set by the loader when it will touch nothing any more, ``closed`` by
    the engine's thread when the books are straight. ``arrival``: its pages were only begun, layer by layer, and are
    whole when that is over. ``seconds`` by tier, of such pages until all of it was begun.
    """

    load: Load
    moves: Sequence[Move]
    tail: Known | None
    tokens: int  # where the prompt can land once it is done
    started: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    moved: int = 0
    broken: Move | None = None
    fault: Fault = "error"
    seconds: dict[Tier, float] = field(default_factory=dict)
    arrival: Arrival | None = None
    done: bool = False
    closed: bool = False
    ended: float = 0.0


@dataclass(slots=True, eq=False)
class Write:
    """Records that go to the disk together, or ``keys`` that were used. ``stretches``: of memory that come back with
    it. ``failed``: it did not reach the disk, or from the beginning: it must not.
    """

    records: list[Record]
    size: int
    keys: Sequence[bytes] = ()
    stretches: int = 0
    failed: bool = False
    written: int = 0


class IOThreads:
    """The two threads. ``signal`` is set whenever one of them has finished something."""

    def __init__(self, pages: RecordStore, disk: Disk | None):
        self.signal = threading.Event()
        self.finished: deque[Write] = deque()
        self.queued_bytes = 0  # changed on the engine's thread only
        self.errors = 0
        self._error_lock = threading.Lock()
        self._disk = disk
        self._pages = pages
        self._loader = _Thread("longread-load")
        self._writer = _Thread("longread-store")

    def load(self, transfer: Transfer) -> None:
        # Of its pages some were evicted just now, and what lay there may still be on its way out of them.
        fence = self._pages.fence()
        self._loader.submit(lambda: self._run_load(transfer, fence))

    def write(self, write: Write) -> None:
        self.queued_bytes += write.size
        self._writer.submit(lambda: self._run_write(write))

    def stop(self, finish_writes: bool = True) -> bool:
        """End both threads; a load stops at its next record. False: one of them hangs and was left behind."""
        ended = self._loader.stop(drain=True)
        return self._writer.stop(drain=finish_writes) and ended

    def note_error(self, what: str, error: Exception) -> None:
        """The store's errors: the first one is told, all are counted, and service goes on."""
        with self._error_lock:  # the engine's thread and both I/O threads
            self.errors += 1
            first = self.errors == 1
        if first:
            log.error("the store: %s failed: %s; later errors are only counted (store_errors)", what, error)

    def _run_load(self, transfer: Transfer, fence: object) -> None:
        try:
            self._pages.after(fence)
            if self._begin_all(transfer):
                return
            try:
                with closing(self._read(transfer.moves)) as batches:
                    self._move_all(transfer, batches)
            finally:  # on an error, too: pages are given back that must not be written behind somebody's back
                begun, transfer.moved = transfer.moved, 0  # if this fails, nobody knows which of them are whole
                self._pages.finish()
                transfer.moved = begun
        except Exception as error:  # a thread's edge: whatever it is, the request must not wait for ever
            transfer.broken = transfer.moves[min(transfer.moved, len(transfer.moves) - 1)]
            log.debug("a load failed", exc_info=True)
            self.note_error("a load", error)
        finally:
            transfer.done = True
            self.signal.set()

    def _begin_all(self, transfer: Transfer) -> bool:
        """Begin to bring a load that is in memory, layer by layer, so that it can be used before it is there. False:
        it is not such a load.

        What is copied when a sequence opens, a tail and a ring, comes first and is waited for.
        """
        last = transfer.tail  # a whole page's record, where another text goes on behind some of its tokens
        pages = [move for move in transfer.moves if move.known.kind == "page" and move.known is not last]
        data = [move.data for move in transfer.moves if move.data is not None]
        if transfer.cancelled or not pages or len(data) < len(transfer.moves):
            return False
        begin = self._pages.layered([move.target for move in pages], data[: len(pages)])
        if begin is None:
            return False
        start = time.monotonic()
        try:
            for move in transfer.moves[len(pages) :]:
                assert move.data is not None
                self._write([move], [move.data])
            transfer.arrival = begin()
        except BaseException:
            self._pages.finish()
            raise
        transfer.seconds["host"] = time.monotonic() - start
        transfer.moved = len(transfer.moves)
        return True

    def _read(self, moves: Sequence[Move]) -> Batches:
        """What of these comes from the disk, in order."""
        wanted = [(move.known.kind, move.known.key) for move in moves if move.data is None]
        if self._disk is not None and wanted:
            yield from self._disk.batches(wanted, self._pages.rooms())

    def _move_all(self, transfer: Transfer, batches: Batches) -> None:
        runs = _runs(transfer.moves, self._pages.pages_at_once, batches)
        while not transfer.cancelled:
            start = time.monotonic()
            run, found = next(runs, ((), ()))
            if not run:
                return
            whole = [data for _, data in takewhile(lambda each: each[0] == "whole", found)]
            if whole:
                self._write(run[: len(whole)], whole)
            spent = transfer.seconds.get(run[0].source, 0.0) + time.monotonic() - start
            transfer.seconds[run[0].source] = spent
            transfer.moved += len(whole)
            verdict = found[len(whole)][0] if len(whole) < len(run) else "whole"
            if verdict != "whole":
                transfer.broken, transfer.fault = run[len(whole)], verdict
                return

    def _write(self, run: Sequence[Move], data: Sequence[memoryview]) -> None:
        if run[0].known.kind == "ring":
            self._pages.write_ring(run[0].target, data[0])
        else:
            self._pages.write_pages([move.target for move in run], data)

    def _run_write(self, write: Write) -> None:
        try:
            if self._disk is not None and write.keys:
                self._disk.touch(write.keys)
            if self._disk is not None and write.records and not write.failed:
                write.written = self._disk.write(write.records)
        except Exception as error:  # a thread's edge: the queue must go on moving
            write.failed = True
            log.debug("a write failed", exc_info=True)
            self.note_error("a write", error)
        finally:
            self.finished.append(write)
            self.signal.set()


def _runs(moves: Sequence[Move], most: int, batches: Batches) -> Iterator[tuple[Sequence[Move], Sequence[Found]]]:
    """The moves in order, each with its verdict and bytes: pages that are in memory up to ``most`` together, those of a
    disk as many as it brings together, rings one by one.
    """
    came: deque[Found] = deque()
    first = 0
    while first < len(moves):
        read, room = moves[first].data is None, most
        if read:
            if not came:
                came.extend(next(batches, [("absent", memoryview(b""))]))
            room = len(came)
        end = first + 1
        if moves[first].known.kind != "ring":
            while end < min(first + room, len(moves)) and _alike(moves[first], moves[end]):
                end += 1
        run = moves[first:end]
        yield run, [came.popleft() for _ in run] if read else [("whole", m.data) for m in run if m.data is not None]
        first = end


def _alike(page: Move, move: Move) -> bool:
    return (move.data is None) == (page.data is None) and move.known.kind != "ring"


class _Thread:
    """Runs jobs in order; started with the first one."""

    def __init__(self, name: str):
        self._name = name
        self._jobs: deque[Callable[[], None] | None] = deque()
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._ready:
            self._jobs.append(job)
            self._ready.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self, drain: bool) -> bool:
        if self._thread is None:
            return True
        with self._ready:
            if not drain:
                self._jobs.clear()
            self._jobs.append(None)
            self._ready.notify()
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._jobs:
                    self._ready.wait()
                job = self._jobs.popleft()
            if job is None:
                return
            job()
