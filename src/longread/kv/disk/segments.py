"""Segment files: records one after another, written by one process each, read by all.

Knows files, offsets and locks. Must not know what is indexed.

A segment is only ever appended to, cut back to what was committed, or deleted whole. Its writer holds an exclusive
flock on it for as long as it may append; whoever gets that lock knows that nobody writes there any more. Deleting a
file that somebody is reading is harmless: an open file lives on.
"""

import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EIO
from pathlib import Path

from longread.kv.disk.format import HEADER_BYTES, RUN_BYTES_MAX, Head, is_whole, pack, parse
from longread.kv.disk.locks import ForeignFileError, open_own, sync_data, take_lock, try_lock
from longread.kv.records import Record

SEGMENT_BYTES = 256 * 2**20
SUFFIX = ".seg"
OPEN_FILES = 64
IDLE_SECONDS = 5.0  # then a reader lets go of its files: what others delete meanwhile would keep its space
EARLY_BYTES = 8 * 2**20  # of a batch, behind which the disk begins to write while more is appended
PARTS_MAX = 1024  # of one call: what Linux takes
_NAME = re.compile(r"[0-9a-f]{16}\.seg")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies."""

    segment: str
    offset: int
    size: int


class SegmentReader:
    """Reads from any segment in a folder, keeping the files open that were read last. Safe from any thread."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._lock = threading.Lock()
        self._open: OrderedDict[str, int] = OrderedDict()
        self._busy: dict[int, int] = {}  # file descriptor -> reads under way; a descriptor in use is never closed
        self._used = 0.0  # on the monotonic clock
        self._rest: threading.Timer | None = None  # runs while files are open

    def read(self, place: Place, payload: memoryview) -> tuple[Head, bytes] | None:
        """Read the record at ``place`` with its payload into ``payload``; its header and run if all of it is whole.

        None: the file is gone, too short or none of ours, the disk cannot read it, or the bytes are not those that
        were written. Raises OSError for what says nothing about the record: too many open files, no memory...
        """
        run_bytes = place.size - HEADER_BYTES - len(payload)
        if not 0 <= run_bytes <= RUN_BYTES_MAX:  # before memory is taken for it
            return None
        header, run = bytearray(HEADER_BYTES), bytearray(run_bytes)
        try:
            with self._file(place.segment) as file:
                done = _fill(file, [header, run, payload], place.offset)
        except OSError as error:
            if _is_damage(error):
                return None
            raise
        head = parse(header) if done == place.size else None
        if head is None or head.size != place.size or head.run_bytes != run_bytes:
            return None
        return (head, bytes(run)) if is_whole(header, run, payload) else None

    def record(self, place: Place) -> tuple[Head, Record] | None:
        """The whole record at ``place``, in memory of its own; None as for ``read``."""
        header = bytearray(HEADER_BYTES)
        try:
            with self._file(place.segment) as file:
                head = parse(header) if _fill(file, [header], place.offset) == HEADER_BYTES else None
                if place.offset + place.size > os.fstat(file).st_size:
                    return None
        except OSError as error:
            if _is_damage(error):
                return None
            raise
        if head is None or head.size != place.size:
            return None
        payload = bytearray(head.payload_bytes)
        found = self.read(place, memoryview(payload))
        return (head, Record(head.kind, head.key, head.parent, head.depth, found[1], payload)) if found else None

    def fill(self, place: Place, parts: Sequence[bytearray | memoryview]) -> int:
        """Read what lies from the beginning of ``place`` on into all parts in order; returns the bytes read, fewer
        where the file ends, is gone or none of ours, or cannot be read by the disk. Raises OSError as ``read``.
        """
        try:
            with self._file(place.segment) as file:
                return _fill(file, parts, place.offset)
        except OSError as error:
            if _is_damage(error):
                return 0  # whoever wants one of its records finds out which of them
            raise

    def forget(self, name: str) -> None:
        """Close a segment that was deleted, so that its space is given back."""
        with self._lock:
            file = self._open.pop(name, None)
            if file is not None and not self._busy.get(file):
                os.close(file)

    def let_go(self) -> None:
        """Forget the segments that another process has deleted: while they are open here, their space is not free."""
        with self._lock:
            gone = [name for name, file in self._open.items() if not os.fstat(file).st_nlink]
        for name in gone:
            self.forget(name)

    def close(self) -> None:
        with self._lock:
            names, rest = list(self._open), self._rest
            self._rest = None
        if rest is not None:
            rest.cancel()
            rest.join()  # whoever forks after a close has no thread of ours; it may wait for the lock, so not under it
        for name in names:
            self.forget(name)

    def _rest_later(self, seconds: float) -> None:
        """Under the lock. A system without a thread to spare keeps the files open until the next read."""
        timer = threading.Timer(seconds, self._idle)
        timer.daemon = True
        with suppress(RuntimeError):
            self._rest = None
            timer.start()
            self._rest = timer

    def _idle(self) -> None:
        """Close what nobody has read from for a while."""
        with self._lock:
            if self._rest is None:  # closed meanwhile
                return
            left = self._used + IDLE_SECONDS - time.monotonic()
            if left > 0 or self._busy:
                self._rest_later(max(left, IDLE_SECONDS / 2))
                return
            self._rest = None
            for file in self._open.values():
                os.close(file)
            self._open.clear()

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        with self._lock:
            file = self._open.get(name)
            if file is None:
                file = open_own(self.folder / name, os.O_RDONLY)
                _expect_in_order(file)
                self._open[name] = file
            self._open.move_to_end(name)
            self._busy[file] = self._busy.get(file, 0) + 1
            self._used = time.monotonic()
            if self._rest is None:
                self._rest_later(IDLE_SECONDS)
            self._trim()
        try:
            yield file
        finally:
            with self._lock:
                self._busy[file] -= 1
                if not self._busy[file]:
                    del self._busy[file]
                    if self._open.get(name) != file:  # forgotten meanwhile
                        os.close(file)

    def _trim(self) -> None:
        for name in list(self._open):
            if len(self._open) <= OPEN_FILES:
                return
            if not self._busy.get(self._open[name]):
                os.close(self._open.pop(name))


@dataclass(slots=True)
class _File:
    name: str
    descriptor: int
    size: int


class _EarlySync:
    """Puts what a file has on the disk while more is appended, so that little is left for the sync that counts.

    The system tells of a write that was lost only once, so an early sync that fails is the batch's failure: ``end``.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def begin(self, descriptor: int) -> bool:
        """Start one, which must be ended before the file is closed. False: one is under way, or there can be none."""
        if not hasattr(os, "fdatasync") or (self._thread is not None and self._thread.is_alive()):
            return False
        thread = threading.Thread(target=self._sync, args=(descriptor,), name="longread-sync", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            self._thread = thread
        return self._thread is thread

    def end(self) -> None:
        """Wait for it. Raises the OSError that one of them met since the last time."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def _sync(self, descriptor: int) -> None:
        try:
            sync_data(descriptor)
        except OSError as error:
            self._error = error


class SegmentWriter:
    """Appends records in batches that are kept whole or not at all. Not thread-safe: one batch at a time."""

    def __init__(self, folder: Path, segment_bytes: int):
        self.folder = folder
        self.segment_bytes = segment_bytes
        self._current: _File | None = None
        self._batch: dict[str, tuple[_File, int]] = {}  # files of this batch, and their length before it
        self._early = _EarlySync()
        self._unsynced = 0  # bytes of the batch, about, since the disk was last told to begin

    def append(self, record: Record, root: bytes) -> Place:
        """Raises OSError (the disk is full...); then ``rollback``."""
        head = pack(record, root)
        size = len(head) + len(record.payload)
        file = self._current
        if file is None or (file.size and file.size + size > self.segment_bytes):
            if file is not None and file.name not in self._batch:
                self.finish()  # full since an earlier batch; one of this batch stays open until it is kept or undone
            file = self._current = self._create()
        self._batch.setdefault(file.name, (file, file.size))
        _drain(file.descriptor, [head, record.payload], file.size)
        place = Place(file.name, file.size, size)
        file.size += size
        self._unsynced += size
        if self._unsynced >= EARLY_BYTES and self._early.begin(file.descriptor):
            self._unsynced = 0
        return place

    def sync(self) -> dict[str, int]:
        """Put the batch on the disk. Returns the length of each file in it, to be committed with it."""
        self._early.end()
        self._unsynced = 0
        for file, _ in self._batch.values():
            sync_data(file.descriptor)
        if any(before == 0 for _, before in self._batch.values()):
            sync_folder(self.folder)
        return {name: file.size for name, (file, _) in self._batch.items()}

    def commit(self) -> None:
        """The batch is indexed: it stays."""
        for file, _ in self._batch.values():
            if file is not self._current:
                os.close(file.descriptor)
        self._batch.clear()

    def rollback(self) -> None:
        """The batch is not indexed: cut it off again."""
        with suppress(OSError):  # of bytes that go
            self._early.end()
        self._unsynced = 0
        for file, before in self._batch.values():
            if before:
                os.ftruncate(file.descriptor, before)
                file.size = before
            else:
                (self.folder / file.name).unlink(missing_ok=True)
            if file is not self._current or not before:
                os.close(file.descriptor)
            if file is self._current and not before:
                self._current = None
        self._batch.clear()

    def finish(self) -> None:
        """Give up the lock on the current segment, which is in no open batch: the next append begins a new one."""
        if self._current is not None:
            os.close(self._current.descriptor)
            self._current = None

    def _create(self) -> _File:
        while True:
            name = f"{secrets.token_hex(8)}{SUFFIX}"
            path = self.folder / name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            take_lock(descriptor)
            if path.exists():  # between create and lock a garbage collection may have taken it for an orphan
                return _File(name, descriptor, 0)
            os.close(descriptor)


def is_segment_name(name: str) -> bool:
    """Whether a name from a damaged index may be opened or deleted."""
    return _NAME.fullmatch(name) is not None


def segment_files(folder: Path) -> list[Path]:
    """All segments in a folder, by name. Anything else that lies there is not ours: neither read nor deleted."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [each.name for each in entries if is_segment_name(each.name) and each.is_file(follow_symlinks=False)]
    return [folder / name for name in sorted(names)]


def foreign_names(folder: Path) -> list[str]:
    """What lies in a folder of segments and is none."""
    own = {path.name for path in segment_files(folder)}
    return sorted(name for name in os.listdir(folder) if name not in own) if folder.is_dir() else []


@contextmanager
def unwritten(folder: Path, name: str) -> Iterator[int | None]:
    """Hold the writer's lock on a segment: its descriptor, or None if its writer lives, or it is gone or not ours."""
    try:
        descriptor = open_own(folder / name, os.O_RDWR)
    except (FileNotFoundError, ForeignFileError):
        yield None
        return
    try:
        yield descriptor if try_lock(descriptor) else None
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _expect_in_order(file: int) -> None:
    """The system keeps twice as far ahead of the reading. (Telling it what comes, by WILLNEED, costs more than it
    saves: it then keeps the file in the smallest pages.)
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _is_damage(error: OSError) -> bool:
    """Whether a failed read says that the record is lost, not that the system is short of something right now."""
    return isinstance(error, FileNotFoundError | ForeignFileError) or error.errno == EIO


def _fill(file: int, parts: Sequence[bytearray | memoryview], offset: int) -> int:
    """Read into all parts in order; returns the bytes read, fewer only at the end of the file."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    done = 0
    while views:
        got = os.preadv(file, views[:PARTS_MAX], offset + done)
        if not got:
            break
        done += got
        views = _behind(views, got)
    return done


def _drain(file: int, parts: Sequence[bytes | bytearray | memoryview], offset: int) -> None:
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        put = os.pwritev(file, views, offset)
        offset += put
        views = _behind(views, put)


def _behind(views: list[memoryview], done: int) -> list[memoryview]:
    while views and done >= len(views[0]):
        done -= len(views[0])
        views = views[1:]
    return [views[0][done:], *views[1:]] if views else []
