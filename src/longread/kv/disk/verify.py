"""Reading everything back: which records are whole, and which documents are.

Knows segments, index and documents. Must not know models.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from longread.kv.disk import documents
from longread.kv.disk.catalogue import Catalogue
from longread.kv.disk.eviction import NODE_TYPES, Node, unreachable
from longread.kv.disk.format import HEADER_BYTES
from longread.kv.records import Kind, Verdict

Progress = Callable[[int, int], None]  # bytes done, bytes in all


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
    foreign: list[str] = field(default_factory=list)  # names of what lies among the segments and is none; no damage
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """Whether everything there is whole. Unreachable records waste space and are no damage."""
        return not (self.corrupt or self.unsound_rows or self.broken_documents or self.index_faults)


def verify(
    catalogue: Catalogue, inspect: Callable[[Kind, bytes, memoryview], Verdict], progress: Progress | None = None
) -> Report:
    """``inspect`` as RecordReader.inspect: it checks a record, and drops it if it is not whole."""
    report, started = Report(), time.monotonic()
    report.index_faults = index_faults(catalogue)
    total = int(catalogue.query("SELECT coalesce(sum(size), 0) FROM records")[0][0])
    layouts = {layout.root: layout for layout in catalogue.layouts().values()}
    largest = max((max(each.page_bytes, each.ring_bytes) for each in layouts.values()), default=0)
    buffer = bytearray()
    for row in catalogue.every():
        size = row.place.size - HEADER_BYTES - len(row.known.run)
        size = size if size <= largest else 0  # no model's record: not worth the memory to find it unsound
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
    report.unsound_rows = catalogue.unsound
    nodes = catalogue.query("SELECT id, kind, key, parent, depth, size, used FROM records", (), NODE_TYPES)
    report.unreachable = len(unreachable([Node(*row) for row in nodes]))
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
