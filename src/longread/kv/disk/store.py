"""The disk store: cached pages, tails and rings of one folder, under one size limit, shared by processes of one host.

Knows how segments and index are kept in step. Must not know what a page means, nor when to write.

Order of a write: append to the own segment, fdatasync, then one transaction. Killed anywhere in between, the index
names only what is whole on the disk. Whatever is read is checked against its checksum and its index row; what does not
match is dropped, counted, and is a miss from then on.

Safe from any thread. Look-ups (get, known, children, documents) touch the index only; read does one disk read; the
rest waits for the disk and belongs on a background thread. Not usable across a fork.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path

from longread.kv.disk import catalogue as index
from longread.kv.disk.catalogue import Catalogue, Row
from longread.kv.disk.format import Head, fault
from longread.kv.disk.segments import SEGMENT_BYTES, Place, SegmentReader, SegmentWriter
from longread.kv.records import DocumentInfo, Kind, Known, Layout, Record
from longread.spec.errors import StoreError, StoreFullError, StoreReadOnlyError, StoreVersionError

INDEX_NAME = "index.sqlite"
SEGMENTS = "segments"
LOCK_NAME = "lock"
TOUCH_SECONDS = 10.0  # how long a use may stay in memory before it is written down


class DiskStore:
    """One store folder, opened."""

    def __init__(self, path: Path, layout: Layout | None, max_bytes: int, read_only: bool):
        """Use ``open``."""
        self.path = path
        self.layout = layout
        self.max_bytes = max_bytes
        self.read_only = read_only
        self.corrupt = 0  # records that were not whole when they were read
        self._catalogue = Catalogue(path / INDEX_NAME, read_only)
        self._root = self._catalogue.root_id(layout) if layout is not None else -1
        self._reader = SegmentReader(path / SEGMENTS)
        self._writer = SegmentWriter(path / SEGMENTS, max(min(SEGMENT_BYTES, max_bytes // 8), 1))
        self._write_lock = threading.RLock()
        self._touched: dict[bytes, int] = {}
        self._bad: set[int] = set()  # rows whose record is not whole and that could not be deleted
        self._closed = False

    @classmethod
    def open(cls, path: Path, layout: Layout | None, *, max_bytes: int, read_only: bool = False) -> "DiskStore":
        """Open the store in ``path``, made if it is not there. ``layout`` None: all models' records, nothing written.

        Raises StoreVersionError (another format, or a folder with something else in it), StoreReadOnlyError,
        StoreDamagedError, StoreFullError or StoreError.
        """
        path = Path(path)
        with _system_errors(path):
            if not read_only:
                _make_folder(path)
            elif not (path / INDEX_NAME).is_file():
                raise StoreError(f"{path}: there is no store; `--store` makes one where a model is served or ingested")
            if read_only:
                return cls(path, layout, max_bytes, True)
            with _locked(path / LOCK_NAME):
                return cls(path, layout, max_bytes, False)

    def close(self) -> None:
        """Write down what was used, and let go of the files. A second close does nothing."""
        with self._write_lock:
            if self._closed:
                return
            self._closed = True
            try:
                if not self.read_only:
                    self._flush()
            finally:
                self._writer.finish()
                self._reader.close()
                self._catalogue.close()

    def get(self, kind: Kind, key: bytes) -> Known | None:
        """What the index has under this identity. Sees what other processes committed. Raises StoreError."""
        row = self._catalogue.get(kind, key)
        return row.known if row is not None and row.id not in self._bad else None

    def known(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, Known]:
        """``get`` for many keys at once, of those that are there."""
        rows = self._catalogue.get_many(kind, keys)
        return {key: row.known for key, row in rows.items() if row.id not in self._bad}

    def children(self, parent: bytes, limit: int = 256) -> list[Known]:
        """Pages and tails that follow ``parent``, those used last first."""
        return [row.known for row in self._catalogue.children(parent, limit) if row.id not in self._bad]

    def other_roots(self, content_key: bytes) -> list[str]:
        """Labels of other models and formats under which the same text (records.CONTENT_ROOT) is stored."""
        sql = "SELECT DISTINCT o.label, o.dtype, o.id FROM records r JOIN roots o ON o.id = r.root WHERE r.content = ?"
        return sorted(
            f"{label} {dtype}"
            for label, dtype, root in self._catalogue.query(sql, (content_key,))
            if root != self._root
        )

    def read(self, kind: Kind, key: bytes, into: memoryview) -> bool:
        """Read a record's payload into ``into``, which has exactly its size.

        False: it is not there, or not whole; then it has been dropped and counted in ``corrupt``. What ``into`` holds
        after False is undefined. Raises StoreError when the index cannot be asked.
        """
        for _ in range(2):  # again once: between index and segment another process may have moved or evicted it
            row = self._catalogue.get(kind, key)
            if row is None or row.id in self._bad:
                return False
            found = self._attempt(row.place, into)
            if found is not None and _agrees(row, *found):
                return True
            now_at = self._catalogue.get(kind, key)
            if now_at is not None and now_at.place == row.place:
                self._drop(row)
                return False
        return False

    def write(self, records: Sequence[Record], *, document: DocumentInfo | None = None) -> int:
        """Store records and a document: all of them, or with a StoreError none.

        Records that are there already are left alone. Parents should be there or come first. Returns the bytes that
        are new. Raises StoreFullError, StoreReadOnlyError or StoreError.
        """
        layout = self._own_layout()
        with self._write_lock, _system_errors(self.path):
            self._drop_unsound()
            fresh = self._fresh(records)
            for record in fresh:
                _check(record, layout)
            return self._commit(fresh, layout, self._root, document)

    def touch(self, keys: Iterable[bytes]) -> None:
        """These pages (a chain, its landing point last) were used now. Kept in memory at first."""
        if self.read_only:
            return
        moment = index.now()
        with self._write_lock:
            oldest = min(self._touched.values(), default=moment)
            self._touched.update((key, moment) for key in keys)
            if moment - oldest > TOUCH_SECONDS * 1e6:
                self._flush()

    def _own_layout(self) -> Layout:
        if self.read_only:
            raise StoreReadOnlyError(f"{self.path}: the store was opened for reading only")
        if self.layout is None:
            raise StoreError(f"{self.path}: the store was opened without a model, so nothing can be written to it")
        return self.layout

    def _fresh(self, records: Sequence[Record]) -> list[Record]:
        fresh: dict[tuple[Kind, bytes], Record] = {(record.kind, record.key): record for record in records}
        for kind in {record.kind for record in records}:
            keys = [record.key for record in records if record.kind == kind]
            for key in self._catalogue.get_many(kind, keys):
                del fresh[kind, key]
        return list(fresh.values())

    def _commit(self, records: Iterable[Record], layout: Layout, root: int, document: DocumentInfo | None) -> int:
        placed: list[tuple[Record, Place]] = []
        with ExitStack() as undo:
            undo.callback(self._writer.rollback)
            for record in records:
                placed.append((record, self._writer.append(record, layout.root)))
            lengths = self._writer.sync()
            with self._catalogue.transaction() as write:
                total = index.insert(write, root, placed, lengths)
            undo.pop_all()
        self._writer.commit()
        return total

    def _attempt(self, place: Place, into: memoryview) -> tuple[Head, bytes] | None:
        try:
            return self._reader.read(place, into)
        except OSError:  # a disk that does not read is a miss like any other damage
            return None

    def _drop(self, row: Row) -> None:
        """Take a record out that is not whole, unless it has been moved or written anew meanwhile."""
        self.corrupt += 1
        self._bad.add(row.id)
        if self.read_only:
            return
        try:
            with self._catalogue.transaction() as write:
                index.delete(write, [row.id])
        except StoreError:
            return  # it stays in _bad, so that this process does not meet it again

    def _drop_unsound(self) -> None:
        unsound = self._catalogue.unsound
        if unsound:
            self.corrupt += len(unsound)
            with self._catalogue.transaction() as write:
                index.delete(write, sorted(unsound))
            unsound.clear()

    def _flush(self) -> None:
        if not self._touched:
            return
        with self._catalogue.transaction() as write:
            write.executemany(
                "UPDATE records SET used = ? WHERE key = ? AND used < ?",
                [(used, key, used) for key, used in self._touched.items()],
            )
        self._touched.clear()


def _agrees(row: Row, head: Head, run: bytes) -> bool:
    known = row.known
    return (head.kind, head.key, head.parent, head.depth, run) == (
        known.kind,
        known.key,
        known.parent,
        known.depth,
        known.run,
    )


def _check(record: Record, layout: Layout) -> None:
    wrong = fault(record.kind, record.key, record.parent, record.depth, record.run)
    wanted = layout.payload_bytes(record.kind)
    if wrong is None and (len(record.payload) != wanted or not wanted):
        wrong = f"{len(record.payload)} bytes of payload, not {wanted}"
    if wrong is not None:
        raise StoreError(f"{record.kind} {record.key.hex()} cannot be stored: {wrong}")


def _make_folder(path: Path) -> None:
    """Raises StoreVersionError for a folder that holds something else."""
    if not (path / INDEX_NAME).exists() and path.is_dir():
        own = {INDEX_NAME, SEGMENTS, LOCK_NAME, "lost+found"}
        foreign = sorted(each.name for each in path.iterdir() if each.name not in own)
        if foreign:
            raise StoreVersionError(f"{path}: not empty and not a store (it has {foreign[0]!r}); give an empty folder")
    (path / SEGMENTS).mkdir(parents=True, exist_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time opens or tidies a store."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """The system's errors as the store's, with what to do next."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise StoreFullError(f"{path}: the disk is full; free space, or give the store a smaller size") from error
        if isinstance(error, PermissionError) or error.errno == EROFS:
            raise StoreReadOnlyError(f"{path}: the store cannot be written to ({error.strerror})") from error
        raise StoreError(f"{path}: {error.strerror or error}") from error
