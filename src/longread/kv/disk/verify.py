"""Reading everything back: which records are whole, which documents are, and an index made anew from the segments.

Knows segments, index and documents. Must not know models.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longread.kv.disk import documents
from longread.kv.disk.catalogue import UNKNOWN, Catalogue, insert
from longread.kv.disk.eviction import NODE_TYPES, Node, unreachable
from longread.kv.disk.format import HEADER_BYTES, MAGIC, fault, is_whole, parse
from longread.kv.disk.segments import SUFFIX, Place
from longread.kv.records import DocumentInfo, Kind, Layout, Record
from longread.spec.errors import StoreError

Verdict = Literal["whole", "absent", "corrupt"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all
SEARCH_BYTES = 2**20


@dataclass(slots=True)
class Report:
    """What a verification found. ``corrupt``: kind and key of each record that was dropped (or, in a store opened for
    reading only, left out).
    """

    records: int = 0
    bytes: int = 0
    corrupt: list[tuple[Kind, str]] = field(default_factory=list)
    unsound_rows: int = 0
    unreachable: int = 0
    broken_documents: list[str] = field(default_factory=list)
    index_faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether everything there is whole. Unreachable records waste space and are no damage."""
        return not (self.corrupt or self.unsound_rows or self.broken_documents or self.index_faults)


def verify(
    catalogue: Catalogue, inspect: Callable[[Kind, bytes, memoryview], Verdict], progress: Progress | None = None
) -> Report:
    """``inspect`` as DiskStore.inspect: it checks a record, and drops it if it is not whole."""
    report, started = Report(), time.monotonic()
    report.index_faults = index_faults(catalogue)
    total = int(catalogue.query("SELECT coalesce(sum(size), 0) FROM records")[0][0])
    buffer = bytearray()
    for row in catalogue.every():
        size = row.place.size - HEADER_BYTES - len(row.known.run)
        if len(buffer) < size:
            buffer = bytearray(size)
        verdict = inspect(row.known.kind, row.known.key, memoryview(buffer)[:size])
        report.bytes += row.place.size
        if verdict == "whole":
            report.records += 1
        elif verdict == "corrupt":  # "absent": evicted since its row was listed
            report.corrupt.append((row.known.kind, row.known.key.hex()))
        if progress is not None:
            progress(report.bytes, max(total, report.bytes))
    report.unsound_rows = len(catalogue.unsound)
    nodes = catalogue.query("SELECT id, kind, key, parent, depth, size, used FROM records", (), NODE_TYPES)
    report.unreachable = len(unreachable([Node(*row) for row in nodes]))
    layouts = {layout.root: layout for layout in catalogue.layouts().values()}
    for document in documents.listed(catalogue):
        state = documents.state(catalogue, document, bool(layouts[document.root].ring_bytes))
        if not state.whole:
            report.broken_documents.append(document.id)
    report.seconds = time.monotonic() - started
    return report


def index_faults(catalogue: Catalogue) -> list[str]:
    """What SQLite itself finds wrong with the database."""
    rows = catalogue.query("PRAGMA integrity_check(20)")
    return [str(text) for (text,) in rows if text != "ok"]


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


def rebuild(catalogue: Catalogue, folder: Path, layouts: dict[bytes, Layout], progress: Progress | None = None) -> int:
    """Enter every whole record of every segment into an empty index. Returns how many.

    Models whose description is lost get a label that says so; the next process that opens the store with the model
    corrects it.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
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
    """Every record of a segment that is whole, with its cache root; what lies between is skipped."""
    with path.open("rb") as file:
        end, at = os.fstat(file.fileno()).st_size, 0
        while at + HEADER_BYTES <= end:
            file.seek(at)
            header = file.read(HEADER_BYTES)
            head = parse(header)
            if head is not None and at + head.size <= end:
                run, payload = file.read(head.run_bytes), file.read(head.payload_bytes)
                sound = fault(head.kind, head.key, head.parent, head.depth, run) is None
                if sound and is_whole(header, run, payload):
                    record = Record(head.kind, head.key, head.parent, head.depth, run, payload)
                    yield head.root, record, Place(path.name, at, head.size)
                    at += head.size
                    continue
            at = _next_magic(path, at + 1, end)


def _next_magic(path: Path, at: int, end: int) -> int:
    with path.open("rb") as file:
        while at < end:
            file.seek(at)
            data = file.read(SEARCH_BYTES)
            found = data.find(MAGIC)
            if found >= 0:
                return at + found
            at += max(len(data) - len(MAGIC) + 1, 1)
    return end
