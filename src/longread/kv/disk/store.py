"""The disk store: cached pages, tails and rings of one folder, under one size limit, shared by processes of one host.

Knows how segments and index are kept in step. Must not know what a page means, nor when to write.

Order of a write: append to the own segment, fdatasync, then one transaction. Killed anywhere in between, the index
names only what is whole on the disk. Whatever is read is checked against its checksum and its index row; what does not
match is dropped, counted, and is a miss from then on.

Safe from any thread. Look-ups (get, known, present, nearest, tails, documents) touch the index only; read and fetch do
one disk read, batches as many as it is asked for; the rest waits for the disk and belongs on a background thread. Not
usable across a fork.
"""

import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from errno import EDQUOT, ENOSPC, EROFS
from pathlib import Path

from longread.kv.disk import catalogue as index
from longread.kv.disk import documents
from longread.kv.disk.catalogue import Catalogue
from longread.kv.disk.collector import Collected, Collector
from longread.kv.disk.documents import DocumentState
from longread.kv.disk.folder import (
    COLLECT_LOCK,
    INDEX_NAME,
    LOCK_NAME,
    SEGMENTS,
    UseLock,
    holds_store,
    locked,
    make_folder,
    refuse_links,
    refuse_others,
    require_index,
)
from longread.kv.disk.format import HEADER_BYTES, RUN_BYTES_MAX, fault, record_size
from longread.kv.disk.locks import require_locks
from longread.kv.disk.reading import RecordReader
from longread.kv.disk.rebuild import rebuild
from longread.kv.disk.reserve import Reserve
from longread.kv.disk.segments import (
    SEGMENT_BYTES,
    Place,
    SegmentReader,
    SegmentWriter,
    foreign_names,
    segment_files,
)
from longread.kv.disk.transfer import RINGS_BACK, Description, read_description, read_records, write_file
from longread.kv.disk.verify import Progress, Report, verify
from longread.kv.records import ID_BYTES, KINDS, DocumentInfo, Kind, Known, Layout, Record, Verdict
from longread.spec.errors import StoreError, StoreFullError, StoreReadOnlyError
from longread.spec.state import PAGE_TOKENS

ATTEMPTS = 3
TOUCH_SECONDS = 10.0  # how long a use may stay in memory before it is written down


@dataclass(frozen=True, slots=True)
class StoreStats:
    """``live_bytes``: of all records; ``file_bytes``: of the segments they lie in; ``document_bytes``: of the texts and
    ids of documents, in the index; ``reserve_bytes``: kept back for the day the disk is full. The limit is for the last
    three together; the rest of the index comes on top (about 1.5 KB a page).
    """

    records: dict[Kind, int]
    live_bytes: int
    file_bytes: int
    document_bytes: int
    reserve_bytes: int
    segments: int
    corrupt: int


@dataclass(frozen=True, slots=True)
class ModelStats:
    """What one model and format has in the store."""

    layout: Layout
    records: int
    live_bytes: int


class DiskStore:
    """One store folder, opened."""

    def __init__(self, path: Path, layout: Layout | None, max_bytes: int, read_only: bool, lock: "UseLock"):
        """Use ``open``."""
        self.path = path
        self.layout = layout
        self.max_bytes = max_bytes
        self.read_only = read_only
        self._catalogue = Catalogue(path / INDEX_NAME, read_only, may_make=not segment_files(path / SEGMENTS))
        self._root = self._catalogue.root_id(layout) if layout is not None else -1
        self._segments = SegmentReader(path / SEGMENTS)
        self._reader = RecordReader(path, self._catalogue, self._segments, read_only)
        self._lock = lock
        self._writer = SegmentWriter(path / SEGMENTS, max(min(SEGMENT_BYTES, max_bytes // 8), 1))
        # Without a model nothing is written, and the store's real limit is not known.
        self._reserve = Reserve(path, max_bytes if layout else 0, _largest_record(layout) if layout else 0)
        self._collector = Collector(path / SEGMENTS, self._catalogue, self._segments, self._writer, self._reserve)
        self._write_lock = threading.RLock()
        self._touched: dict[tuple[bytes, bool], int] = {}  # key, and whether its ring is meant
        self._named: dict[str, float] = {}  # documents that were asked for by id
        self._flushed = index.now()
        self._touch_lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: Path, layout: Layout | None, *, max_bytes: int, read_only: bool = False) -> "DiskStore":
        """Open the store in ``path``, made if it is not there. ``layout`` None: all models' records, nothing written.

        Raises StoreVersionError (another format, or a folder with something else in it), StoreReadOnlyError,
        StoreDamagedError, StoreFullError or StoreError.
        """
        path = Path(path)
        require_locks(path)
        with _system_errors(path), ExitStack() as undo:
            refuse_links(path)
            require_index(path)
            refuse_others(path)
            if not read_only:
                make_folder(path)
            elif not (path / INDEX_NAME).is_file():
                raise StoreError(f"{path}: there is no store; `--store` makes one where a model is served or ingested")
            lock = UseLock(path / LOCK_NAME, read_only)
            undo.callback(lock.release)
            if read_only:
                store = cls(path, layout, max_bytes, True, lock)
            else:  # what is full must be opened to be made smaller
                store = Reserve(path, 0).lend(lambda: cls(path, layout, max_bytes, False, lock))
            lock.share()
            undo.pop_all()
            undo.callback(store.close)
            if not read_only:
                store._prepare()
            undo.pop_all()
            return store

    @classmethod
    def rebuild(cls, path: Path, *, max_bytes: int, progress: Progress | None = None) -> tuple["DiskStore", int]:
        """Make the index anew from the segments, keeping the old one beside it. Returns the store and its records.

        For an index that is damaged or lost; no other process may have the store open. A full disk's reserve may be
        used. Documents are taken over as far
        as the old index still tells of them. Until it is done the old index stays in its place.
        """
        path = Path(path)
        require_locks(path)
        if not holds_store(path):
            raise StoreError(f"{path}: there is no store")
        with _system_errors(path), ExitStack() as undo:
            refuse_links(path)
            refuse_others(path, to_rebuild=True)
            lock = UseLock(path / LOCK_NAME, False)
            undo.callback(lock.release)
            if not lock.alone:
                raise StoreError(f"{path}: another process has the store open; stop it first")

            def work() -> int:
                with _system_errors(path):
                    return rebuild(path / INDEX_NAME, path / SEGMENTS, progress)

            reserve = Reserve(path, 0)  # what is full must be repaired to be made smaller
            entered = reserve.lend(work)
            store = reserve.lend(lambda: cls(path, None, max_bytes, False, lock))
            lock.share()
            undo.pop_all()
        return store, entered

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
                self._segments.close()
                self._catalogue.close()
                self._lock.release()

    @property
    def corrupt(self) -> int:
        """Records that were not whole when they were read, and rows that contradicted themselves."""
        return self._reader.corrupt

    def get(self, kind: Kind, key: bytes) -> Known | None:
        """What the index has under this identity. Sees what other processes committed. Raises StoreError."""
        row = self._catalogue.get(kind, key)
        return row.known if row is not None and self._reader.usable(row) else None

    def known(self, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, Known]:
        """``get`` for many keys at once, of those that are there."""
        rows = self._catalogue.get_many(kind, keys)
        return {key: row.known for key, row in rows.items() if self._reader.usable(row)}

    def present(self, kind: Kind, keys: Sequence[bytes]) -> set[bytes]:
        """Those of the keys under which there is a record, as far as the index's keys tell: what is wrong with its row
        or its bytes is found when it is read. For a caller who knows all else of a record from its key's chain.
        """
        return self._reader.sound(self._catalogue.numbers(kind, keys))

    def nearest(self, parent: bytes, ahead: bytes) -> list[Known]:
        """Of the pages and tails that follow ``parent`` the two whose runs stand next to ``ahead``, before and behind
        it: none shares a longer beginning with it.
        """
        return [row.known for row in self._catalogue.nearest(parent, ahead) if self._reader.usable(row)]

    def tails(self, ahead: Mapping[bytes, bytes]) -> dict[bytes, list[Known]]:
        """By parent, the tails with a ring whose run the bytes that are asked for behind the parent begin with."""
        found: dict[bytes, list[Known]] = {}
        for row in self._catalogue.tails(ahead):
            if self._reader.usable(row):
                found.setdefault(row.known.parent, []).append(row.known)
        return found

    def other_roots(self, content_key: bytes) -> list[str]:
        """Labels of other models and formats under which the same text (records.CONTENT_ROOT) is stored."""
        sql = "SELECT DISTINCT o.label, o.dtype, o.id FROM records r JOIN roots o ON o.id = r.root WHERE r.content = ?"
        return sorted(
            f"{label} {dtype}"
            for label, dtype, root in self._catalogue.query(sql, (content_key,))
            if root != self._root
        )

    def read(self, kind: Kind, key: bytes, into: memoryview) -> bool:
        """Whether ``fetch`` found it whole."""
        return self.fetch(kind, key, into) == "whole"

    def fetch(self, kind: Kind, key: bytes, into: memoryview) -> Verdict:
        """Read a record's payload into ``into``, which has exactly its size.

        One that is not whole has been dropped and counted in ``corrupt``. What ``into`` holds is undefined unless the
        record was whole. Raises StoreError when index or segment cannot be asked now (locked, too many open
        files...), which says nothing about the record. Counts as a use of this record.
        """
        verdict = self._reader.inspect(kind, key, into)
        if verdict == "whole":
            self._used([(kind, key)])
        return verdict

    def batches(
        self, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview] = ()
    ) -> Generator[Sequence[tuple[Verdict, memoryview]], None, None]:
        """``fetch`` for many records, as many together as one of ``rooms`` holds, their payloads one behind the
        other in it, while the next ones are read into the others: the way to load a chain. A batch is valid until the
        next one is asked for; nothing is written to the rooms once the iterator has ended or was closed. Without rooms
        in memory of its own. Raises ValueError for a room that a record does not fit into.
        """
        if self.layout is None:
            raise StoreError(f"{self.path}: the store was opened without a model, so no chain can be loaded from it")
        done = 0
        whole: list[tuple[Kind, bytes]] = []
        try:
            with closing(self._reader.batches(self.layout, wanted, rooms)) as read:
                for batch in read:
                    refs = wanted[done : done + len(batch)]
                    whole += [ref for ref, (verdict, _) in zip(refs, batch, strict=True) if verdict == "whole"]
                    done += len(batch)
                    yield batch
        finally:
            self._used(whole)

    def write(self, records: Sequence[Record], *, document: DocumentInfo | None = None) -> int:
        """Store records and a document: all of them, or with a StoreError none.

        Records that are there already are left alone. Parents should be there or come first. Returns the bytes that
        are new. Raises StoreFullError, StoreReadOnlyError or StoreError.
        """
        layout = self._own_layout()
        with self._write_lock, _system_errors(self.path):
            self._reader.drop_unsound()
            fresh = self._fresh(records)
            for record in fresh:
                _check(record, layout)
            if not fresh and document is None:
                return 0
            room = sum(record_size(record) for record in fresh)
            room += documents.most_bytes(document) if document is not None else 0
            self._reserve.stands()  # before the limit is looked at, in which it counts
            self._make_room(room, _ends(records, document))
            if not self._reserve.stands():
                raise _full(self.path)
            return self._commit(fresh, layout, self._root, document)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages (a chain, its landing point last, with its ring) were used now. Kept in memory at first."""
        if self.read_only or not keys:
            return
        moment = index.now()
        with self._touch_lock:
            self._touched.update(((key, False), moment) for key in keys)
            self._touched[keys[-1], True] = moment
        if moment - self._flushed > TOUCH_SECONDS * 1e6:
            with self._write_lock:
                self._flush()

    def documents(self) -> list[DocumentInfo]:
        """All documents of all models, without ids and texts, the newest first."""
        return documents.listed(self._catalogue)

    def document(self, ident: str, *, content: bool = True, any_model: bool = False) -> DocumentInfo | None:
        """One document with its ids and text, those that are undamaged: the own model's; without one, or with
        ``any_model``, the newest. Without ``content`` both are left out unread.
        """
        return documents.found(self._catalogue, ident, -1 if any_model else self._root, content)

    def use_document(self, ident: str) -> None:
        """It was asked for by its id now. Kept in memory at first."""
        if not self.read_only:
            with self._touch_lock:
                self._named[ident] = time.time()

    def document_state(self, document: DocumentInfo) -> DocumentState:
        """Whether all of a listed document is there, and how much that is."""
        layouts = {layout.root: layout for layout in self._catalogue.layouts().values()}
        return documents.state(self._catalogue, document, bool(layouts[document.root].ring_bytes))

    def whole_documents(self) -> set[tuple[str, bytes]]:
        """Ids and cache roots of the documents that are all there."""
        return documents.whole_ones(self._catalogue)

    def pin(self, ident: str) -> bool:
        """Keep a document from eviction. False: there is none of that id. So for ``unpin`` and ``remove``."""
        return self._set_pinned(ident, True)

    def unpin(self, ident: str) -> bool:
        return self._set_pinned(ident, False)

    def remove(self, ident: str, *, any_model: bool = False) -> bool:
        """Forget a document, and of its records those that no other document has, with all that hangs on them."""

        def work() -> bool:
            with self._catalogue.transaction() as write:
                numbers = documents.remove(write, ident, -1 if any_model else self._root)
                index.delete(write, numbers or [])
            return numbers is not None

        with self._write_lock, _system_errors(self.path):
            return self._reserve.lend(work)

    def gc(self, max_bytes: int | None = None) -> Collected:
        """Bring all segments under ``max_bytes`` (None: the store's), as far as pins and living writers allow."""
        self._require_writable()
        with self._write_lock, _system_errors(self.path), locked(self.path / COLLECT_LOCK):
            return self._collect(self.max_bytes if max_bytes is None else max_bytes, 0, [])

    def verify(self, progress: Progress | None = None) -> Report:
        """Read every record back. What is not whole is dropped, unless the store is open for reading only."""
        report = verify(self._catalogue, self._reader.inspect, progress)
        report.foreign = foreign_names(self.path / SEGMENTS)
        if not self.read_only:
            with self._write_lock:
                self._reserve.lend(self._reader.drop_unsound)
        return report

    def stats(self) -> StoreStats:
        """Sizes, from the index alone."""
        rows = self._catalogue.query("SELECT kind, count(*), sum(size) FROM records GROUP BY kind")
        counts = {KINDS[kind]: int(number) for kind, number, _ in rows}
        files = self._catalogue.query("SELECT count(*), coalesce(sum(bytes), 0) FROM segments")[0]
        live, texts = sum(int(size) for _, _, size in rows), documents.bytes_stored(self._catalogue)[1]
        return StoreStats(counts, live, int(files[1]), texts, self._reserve.size, int(files[0]), self.corrupt)

    def models(self) -> list[ModelStats]:
        """The models and formats that have records here."""
        sql = "SELECT root, count(*), sum(size) FROM records GROUP BY root"
        sizes = {row[0]: (int(row[1]), int(row[2])) for row in self._catalogue.query(sql)}
        return [ModelStats(layout, *sizes.get(number, (0, 0))) for number, layout in self._catalogue.layouts().items()]

    def export(self, ident: str, file: Path) -> int:
        """Write one document with its chain to a file. Returns its bytes.

        Raises StoreError: no such document, or not all of it is there. Raises OSError for the file.
        """
        document = self.document(ident)
        if document is None:
            raise StoreError(f"{self.path}: there is no document {ident}; `longread store ls` lists them")
        if not self.document_state(document).whole or not document.token_ids:
            raise StoreError(f"{ident}: not all of it is in the store any more; ingest it again, with --pin to keep it")
        layout = next(each for each in self._catalogue.layouts().values() if each.root == document.root)
        keys = [key for key, _ in documents.chain_keys(self._catalogue, document.tail)]
        ringed = self._catalogue.get_many("ring", keys[: RINGS_BACK + 1])
        order: list[tuple[Kind, bytes]] = []
        for at, key in reversed(list(enumerate(keys))):
            full = at or len(document.token_ids) % (PAGE_TOKENS * ID_BYTES) == 0
            order.append(("page" if full else "tail", key))
            if key in ringed:
                order.append(("ring", key))
        source = (self._reader.record(kind, key) for kind, key in order)
        return write_file(Path(file), layout, document, len(order), source)

    def import_(self, file: Path) -> DocumentInfo:
        """Enter an exported document. Nothing of it is, unless all of it is whole. Its model need not be the own one.

        Raises DocumentFileError, StoreFullError or another StoreError; OSError if the file cannot be opened.
        """
        self._require_writable()
        path = Path(file)
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            with self._write_lock, _system_errors(self.path):
                description = read_description(source, path)
                begin = source.tell()
                for _ in read_records(source, path, description):
                    pass  # all of it is checked before anything is evicted for it
                source.seek(begin)
                self._reserve.lend(self._reader.drop_unsound)
                self._reserve.stands()  # as in ``write``: it makes the store larger, so none of it is for this
                self._make_room(size, [])
                if not self._reserve.stands():
                    raise _full(self.path)
                records = (r for r in read_records(source, path, description) if self.get(r.kind, r.key) is None)
                self._import(records, description)
        return description.document

    def _set_pinned(self, ident: str, pinned: bool) -> bool:
        def work() -> bool:
            with self._catalogue.transaction() as write:
                return documents.set_pinned(write, ident, self._root, pinned)

        with self._write_lock, _system_errors(self.path):
            return self._reserve.lend(work)

    def _prepare(self) -> None:
        """Opened for writing: clear up behind who died, and keep room for the day the disk is full."""
        self._reserve.lend(self._collector.tidy)
        self._reserve.fit(self.max_bytes)
        self._reserve.make()

    def _make_room(self, room: int, ends: Sequence[bytes]) -> None:
        """Before a write of ``room`` bytes, which may not cost the chains that lead to ``ends``.

        Raises StoreFullError if what may be evicted is not enough.
        """
        if room > self.max_bytes:
            raise StoreFullError(
                f"{self.path}: {room:,} bytes are to be written, the store's size is {self.max_bytes:,}; give it more "
                f"(--store-size)"
            )
        for _ in range(ATTEMPTS):  # what comes free here another process may fill meanwhile
            if self._collector.counted_bytes(self.max_bytes) + room <= self.max_bytes:
                return
            with locked(self.path / COLLECT_LOCK):
                done = self._collect(self.max_bytes, room, ends)
            left = done.counted_bytes
            if left + room <= self.max_bytes:
                return
        raise StoreFullError(
            f"{self.path}: {left:,} of {self.max_bytes:,} bytes cannot be evicted (pinned, or still being written "
            f"by another process), {room:,} more do not fit; unpin or rm documents, or give more (--store-size)"
        )

    def _collect(self, limit: int, room: int, ends: Sequence[bytes]) -> Collected:
        """Raises StoreFullError where the disk has not even the room for that. What was done until then is done."""
        done = Collected()

        def work() -> None:
            with _system_errors(self.path):
                self._reader.drop_unsound()
                self._flush()
                self._writer.finish()  # so that its segment can be compacted too
                self._collector.collect(limit, room, ends, done)

        try:
            self._reserve.lend(work)
        finally:
            self._reader.count_corrupt(done.corrupt)
        self._reserve.fit(limit)  # not before: others would take the room
        done.file_bytes, done.counted_bytes = self._collector.file_bytes(), self._collector.counted_bytes(limit)
        return done

    def _require_writable(self) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self.path}: the store was opened for reading only")

    def _own_layout(self) -> Layout:
        self._require_writable()
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
                if document is not None:
                    documents.enter(write, root, document)
            undo.pop_all()
        self._writer.commit()
        return total

    def _import(self, records: Iterable[Record], description: Description) -> None:
        """Records, model and document in one transaction."""
        layout, document = description.layout, description.document
        with ExitStack() as undo:
            undo.callback(self._writer.rollback)
            # A document's payloads can be more than the memory: once written, only identities and places are kept.
            placed = [(replace(each, payload=b""), self._writer.append(each, layout.root)) for each in records]
            lengths = self._writer.sync()
            with self._catalogue.transaction() as write:
                root = index.enter_imported_root(write, layout, description.records)
                index.insert(write, root, placed, lengths)
                documents.enter_imported(write, root, document)
            undo.pop_all()
        self._writer.commit()

    def _used(self, refs: Sequence[tuple[Kind, bytes]]) -> None:
        if not self.read_only:
            moment = index.now()
            with self._touch_lock:
                self._touched.update(((key, kind == "ring"), moment) for kind, key in refs)

    def _flush(self) -> None:
        """Write down what was used. Only eviction's order depends on it, so that where it cannot be written (a full
        disk, which eviction is to help) it is kept for the next time and nothing fails.
        """
        self._flushed = index.now()
        self._segments.let_go()
        with self._touch_lock:
            touched, self._touched = self._touched, {}
            named, self._named = self._named, {}
        if not touched and not named:
            return
        try:
            with self._catalogue.transaction() as write:
                write.executemany(
                    "UPDATE records SET used = ? WHERE key = ? AND (kind = 2) = ? AND used < ?",
                    [(used, key, ring, used) for (key, ring), used in touched.items()],
                )
                documents.touch(write, named)
        except StoreError:
            with self._touch_lock:
                self._touched = touched | self._touched
                self._named = named | self._named


def _ends(records: Sequence[Record], document: DocumentInfo | None) -> list[bytes]:
    """Where the chains end that a write depends on: what it goes on from, and what of it is there already."""
    keys = {key: None for record in records for key in (record.key, record.parent)}
    return [*keys, *([document.tail] if document is not None else [])]


def _largest_record(layout: Layout) -> int:
    return HEADER_BYTES + RUN_BYTES_MAX + max(layout.page_bytes, layout.ring_bytes)


def _check(record: Record, layout: Layout) -> None:
    wrong = fault(record.kind, record.key, record.parent, record.depth, record.run)
    wanted = layout.payload_bytes(record.kind)
    if wrong is None and (len(record.payload) != wanted or not wanted):
        wrong = f"{len(record.payload)} bytes of payload, not {wanted}"
    if wrong is not None:
        raise StoreError(f"{record.kind} {record.key.hex()} cannot be stored: {wrong}")


def _full(path: Path) -> StoreFullError:
    return StoreFullError(f"{path}: the disk is full; free space, or give the store a smaller size")


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """The system's errors as the store's, with what to do next."""
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            raise _full(path) from error
        if isinstance(error, PermissionError) or error.errno == EROFS:
            raise StoreReadOnlyError(f"{path}: the store cannot be written to ({error.strerror})") from error
        raise StoreError(f"{path}: {error.strerror or error}") from error
