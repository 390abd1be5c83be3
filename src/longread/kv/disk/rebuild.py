"""An index made anew from the segments, for one that is damaged or lost.

Knows segments, index and documents. Must not know models.

The new index is made aside and takes the old one's place at the end: interrupted at any moment before, all is as it
was. Old indexes are kept, each under a number of its own, since they alone tell of documents.
"""

import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from errno import EIO
from pathlib import Path

from longread.kv.disk import documents
from longread.kv.disk.catalogue import UNKNOWN, Catalogue, insert
from longread.kv.disk.format import HEADER_BYTES, MAGIC, fault, is_whole, parse
from longread.kv.disk.locks import open_own
from longread.kv.disk.segments import Place, segment_files, sync_folder
from longread.kv.disk.verify import Progress
from longread.kv.records import DocumentInfo, Layout, Record
from longread.spec.errors import StoreError

SEARCH_BYTES = 2**20
BLOCK_BYTES = 4096  # what is skipped at a time where the disk cannot read
NEW = ".new"
_LOGS = ("-wal", "-shm")  # what SQLite keeps beside a database
_SAVED = re.compile(r"\.damaged(?:\.([0-9]{1,9}))?")


def rebuild(index: Path, segments: Path, progress: Progress | None = None) -> int:
    """Put an index of all whole records in the place of ``index``, which need not be there. Returns their number.

    Nobody else may have the store open. Documents are taken over as far as the old index, or without one the index
    that was saved last, still tells of them. Raises StoreError or OSError; then the old index is still there.
    """
    saved = _saved(index)
    layouts, known = salvage(index if index.exists() or not saved else saved[max(saved)])
    new = index.with_name(index.name + NEW)
    _discard(new)  # of a rebuild that was killed
    with ExitStack() as undo:
        undo.callback(_discard, new)
        catalogue = Catalogue(new, read_only=False)
        try:
            entered = enter_all(catalogue, segments, layouts, progress)
            roots = {layout.root: number for number, layout in catalogue.layouts().items()}
            with catalogue.transaction() as write:
                for document in known:
                    if document.root in roots:
                        documents.enter(write, roots[document.root], document)
            catalogue.into_one_file()
        finally:
            catalogue.close()
        _swap(index, new, max(saved, default=0) + 1)
        undo.pop_all()
    return entered


def _swap(index: Path, new: Path, number: int) -> None:
    """The old index aside, the new one into its place. A log that stayed would be taken for the new one's."""
    if index.exists():
        aside = index.with_name(f"{index.name}.damaged{'' if number == 1 else f'.{number}'}")
        log = index.with_name(index.name + _LOGS[0])
        if log.exists():
            shutil.copyfile(log, aside.with_name(aside.name + _LOGS[0]))
        # Killed from here on, there is no index: the store cannot be opened, and a rebuild finds the one set aside.
        os.replace(index, aside)
    for suffix in _LOGS:
        index.with_name(index.name + suffix).unlink(missing_ok=True)
    os.replace(new, index)
    sync_folder(index.parent)


def _saved(index: Path) -> dict[int, Path]:
    """Indexes that earlier rebuilds set aside, by number."""
    found = {}
    for path in index.parent.iterdir():
        match = _SAVED.fullmatch(path.name.removeprefix(index.name))
        if path.name.startswith(index.name) and match is not None:
            found[int(match[1] or 1)] = path
    return found


def _discard(new: Path) -> None:
    for suffix in ("", *_LOGS):
        new.with_name(new.name + suffix).unlink(missing_ok=True)


def salvage(index: Path) -> tuple[dict[bytes, Layout], list[DocumentInfo]]:
    """What a damaged index still tells of models and documents: all of it, some, or nothing."""
    layouts: dict[bytes, Layout] = {}
    saved: list[DocumentInfo] = []
    try:
        old = Catalogue(index, read_only=True)
    except StoreError:
        return layouts, saved
    try:
        layouts = {layout.root: layout for layout in old.layouts().values()}
        for number, ident in old.query("SELECT root, id FROM documents"):
            document = documents.found(old, ident, number)
            if document is not None and document.token_ids:
                saved.append(document)
    except (StoreError, sqlite3.Error, ValueError, TypeError):
        pass  # the rest is lost with the index
    finally:
        old.close()
    return layouts, saved


def enter_all(
    catalogue: Catalogue, folder: Path, layouts: dict[bytes, Layout], progress: Progress | None = None
) -> int:
    """Enter every whole record of every segment into an empty index. Returns how many.

    Models whose description is lost get a label that says so; the next process that opens the store with the model
    corrects it.
    """
    paths = segment_files(folder)
    total, done, entered = sum(path.stat().st_size for path in paths), 0, 0
    for path in paths:
        found: dict[bytes, list[tuple[Record, Place]]] = {}
        for root, record, place in whole_records(path):
            # Payloads are not needed any more; only their sizes are.
            bare = Record(record.kind, record.key, record.parent, record.depth, record.run, b"")
            found.setdefault(root, []).append((bare, place))
            known = layouts.get(root, Layout(root, f"unknown model {root.hex()[:8]}", UNKNOWN, 0, 0))
            page = known.page_bytes or (len(record.payload) if record.kind != "ring" else 0)
            ring = known.ring_bytes or (len(record.payload) if record.kind == "ring" else 0)
            layouts[root] = Layout(root, known.label, known.dtype, page, ring)
        length = path.stat().st_size
        for root, placed in found.items():
            number = catalogue.root_id(layouts[root])
            with catalogue.transaction() as write:
                insert(write, number, placed, {path.name: length})
            entered += len(placed)
        done += length
        if progress is not None:
            progress(done, total)
    return entered


def whole_records(path: Path) -> Iterator[tuple[bytes, Record, Place]]:
    """Every record of a segment that is whole, with its cache root; what lies between or cannot be read is skipped."""
    file = open_own(path, os.O_RDONLY)
    try:
        end, at = os.fstat(file).st_size, 0
        while at + HEADER_BYTES <= end:
            header = _bytes(file, at, HEADER_BYTES)
            head = parse(header)
            if head is not None and at + head.size <= end:
                run = _bytes(file, at + HEADER_BYTES, head.run_bytes)
                payload = _bytes(file, at + HEADER_BYTES + head.run_bytes, head.payload_bytes)
                sound = fault(head.kind, head.key, head.parent, head.depth, run) is None
                if sound and is_whole(header, run, payload):
                    record = Record(head.kind, head.key, head.parent, head.depth, run, payload)
                    yield head.root, record, Place(path.name, at, head.size)
                    at += head.size
                    continue
            at = _next_magic(file, at + 1, end)
    finally:
        os.close(file)


def _next_magic(file: int, at: int, end: int) -> int:
    while at < end:
        data = _bytes(file, at, SEARCH_BYTES) or _bytes(file, at, BLOCK_BYTES)
        found = data.find(MAGIC)
        if found >= 0:
            return at + found
        at += max(len(data) - len(MAGIC) + 1, 1) if data else BLOCK_BYTES
    return end


def _bytes(file: int, at: int, size: int) -> bytes:
    """Nothing where the disk cannot read. Raises OSError for what says nothing about the disk."""
    try:
        return os.pread(file, size, at)
    except OSError as error:
        if error.errno != EIO:
            raise
        return b""
