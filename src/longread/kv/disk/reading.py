"""Reading records by identity: where the index says they lie, checked against checksum and row, singly or many.

Knows index rows, segments and what was found damaged. Must not know how records are written, evicted or used.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from longread.kv.disk import catalogue as index
from longread.kv.disk.catalogue import Catalogue, Row
from longread.kv.disk.format import HEADER_BYTES, payload_of
from longread.kv.disk.segments import SegmentReader
from longread.kv.records import Kind, Layout, Record, Verdict
from longread.spec.errors import StoreError

ATTEMPTS = 3


class RecordReader:
    """The reading side of a store. ``path`` is for messages. Safe from any thread."""

    def __init__(self, path: Path, catalogue: Catalogue, segments: SegmentReader, read_only: bool):
        self.corrupt = 0  # records that were not whole when they were read
        self._path = path
        self._catalogue = catalogue
        self._segments = segments
        self._read_only = read_only
        self._bad: set[int] = set()  # rows whose record is not whole and that could not be deleted
        self._count_lock = threading.Lock()

    def usable(self, row: Row) -> bool:
        """Whether nothing is known against the record of this row."""
        return row.id not in self._bad

    def inspect(self, kind: Kind, key: bytes, into: memoryview) -> Verdict:
        """Read one payload into ``into``, which has exactly its size; what it holds is undefined unless "whole".

        A record that is not whole is dropped and counted. Raises StoreError if index or segment cannot be asked now.
        """
        for _ in range(ATTEMPTS):  # between index and segment another process may have moved or evicted it
            row = self._catalogue.get(kind, key)
            if row is None or not self.usable(row):
                return "absent"
            with self._reading(row.place.segment):
                found = self._segments.read(row.place, into)
            if found is not None and index.agrees(row, *found):
                return "whole"
            again = self._catalogue.get(kind, key)
            if again is not None and again.place == row.place:
                self._drop(row)
                return "corrupt"
        return "absent"

    def record(self, kind: Kind, key: bytes) -> Record:
        """One record in memory of its own. Raises StoreError if it is not there or not whole."""
        row = self._catalogue.get(kind, key)
        found = None
        if row is not None:
            with self._reading(row.place.segment):
                found = self._segments.record(row.place)
        if row is None or found is None or not index.agrees(row, found[0], found[1].run):
            raise StoreError(f"{self._path}: {kind} {key.hex()} is not whole; `longread store verify` finds all such")
        return found[1]

    def stream(self, layout: Layout, wanted: Sequence[tuple[Kind, bytes]]) -> Iterator[tuple[Verdict, memoryview]]:
        """Verdict and payload of each record, in order; a payload is valid until the next one is asked for.

        Neighbours are read together, and otherwise as by ``inspect``: what is not whole at once is looked up again
        singly, which tells a record that was moved or evicted from one that is damaged.
        """
        rows = self._rows(layout, wanted)
        read = self._segments.in_order([row.place for row in rows if row is not None])
        for (kind, key), row in zip(wanted, rows, strict=True):
            payload = None
            if row is not None:
                with self._reading(row.place.segment):
                    data = next(read)
                payload = payload_of(data, row.known, row.place.size, layout)
            if payload is not None:
                yield "whole", payload
            else:
                own = memoryview(bytearray(layout.payload_bytes(kind)))
                yield self.inspect(kind, key, own), own

    def drop_unsound(self) -> None:
        """Delete the rows that were found to contradict themselves."""
        unsound = self._catalogue.take_unsound()
        if unsound:
            with self._catalogue.transaction() as write:
                gone = index.delete(write, sorted(unsound))  # not those that a look-up found again meanwhile
            self.count_corrupt(gone)

    def count_corrupt(self, count: int) -> None:
        with self._count_lock:  # look-ups, loads and collections count at the same time
            self.corrupt += count

    def _rows(self, layout: Layout, wanted: Sequence[tuple[Kind, bytes]]) -> list[Row | None]:
        """Of each record whose row there is no reason to doubt."""
        rows: dict[tuple[Kind, bytes], Row] = {}
        for kind in {kind for kind, _ in wanted}:
            found = self._catalogue.get_many(kind, [key for each, key in wanted if each == kind])
            for key, row in found.items():
                sized = row.place.size == HEADER_BYTES + len(row.known.run) + layout.payload_bytes(kind)
                if sized and self.usable(row):  # before memory is taken for it
                    rows[kind, key] = row
        return [rows.get(ref) for ref in wanted]

    def _drop(self, row: Row) -> None:
        """Take a record out that is not whole, unless it has been moved or written anew meanwhile."""
        self.count_corrupt(1)
        self._bad.add(row.id)
        if self._read_only:
            return
        try:
            with self._catalogue.transaction() as write:
                index.delete(write, [row.id])
        except StoreError:
            return  # it stays in _bad, so that this process does not meet it again

    @contextmanager
    def _reading(self, segment: str) -> Iterator[None]:
        """What keeps a segment from being read now is no fault of the record."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self._path}: {segment} cannot be read now: {error.strerror or error}") from error
