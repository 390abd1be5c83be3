"""Reading records by identity: where the index says they lie, checked against checksum and row, singly or many.

Knows index rows, segments and what was found damaged. Must not know how records are written, evicted or used.
"""

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from longread.kv.disk import catalogue as index
from longread.kv.disk.ahead import READERS, Portion, Spot, fits, portions, read_ahead
from longread.kv.disk.catalogue import Catalogue, Row
from longread.kv.disk.segments import SegmentReader
from longread.kv.records import Kind, Layout, Record, Verdict
from longread.spec.errors import StoreError

ATTEMPTS = 3
ROOM_BYTES = 8 * 2**20  # that a load reads ahead into, where it gives no memory of its own


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

    def sound(self, numbers: Mapping[bytes, int]) -> set[bytes]:
        """The keys of those rows whose records nothing is known against."""
        return {key for key, number in numbers.items() if number not in self._bad} if self._bad else set(numbers)

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

    def batches(
        self, layout: Layout, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview] = ()
    ) -> Generator[list[tuple[Verdict, memoryview]], None, None]:
        """Verdict and payload of each record, in order, as many together as a room holds; valid until the next are
        asked for. The payloads of one batch lie one behind the other in one of the ``rooms``, which are read ahead
        into; none: in memory of this reader's own. Raises ValueError for a room that is too small.

        Otherwise as by ``inspect``: what is not whole at once is looked up again singly, which tells a record that was
        moved or evicted from one that is damaged.
        """
        sizes = [layout.payload_bytes(kind) for kind, _ in wanted]
        longest = max(sizes, default=0)
        if not rooms:
            rooms = _rooms_for(sizes)
        elif min(map(len, rooms)) < longest:
            raise ValueError(f"a room of {min(map(len, rooms)):,} bytes for records of {longest:,}; give larger ones")
        spots = list(zip(self._spots(layout, wanted), sizes, strict=True))
        with closing(self._read(layout, list(portions(spots, min(map(len, rooms)))), rooms)) as read:
            for portion in read:
                refs = wanted[portion.first : portion.first + len(portion.spots)]
                found: list[tuple[Verdict, memoryview]] = []
                for at, (kind, key) in enumerate(refs):
                    payload = portion.payload(at)
                    found.append(("whole" if portion.whole[at] else self.inspect(kind, key, payload), payload))
                yield found

    def _read(
        self, layout: Layout, parts: Sequence[Portion], rooms: Sequence[memoryview]
    ) -> Generator[Portion, None, None]:
        with closing(read_ahead(self._segments, layout, parts, rooms)) as read:
            for part in parts:
                with self._reading(next((each.place.segment for each in part.spots if each is not None), "a segment")):
                    portion = next(read)
                yield portion

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

    def _spots(self, layout: Layout, wanted: Sequence[tuple[Kind, bytes]]) -> list[Spot | None]:
        """Of each record whose row there is no reason to doubt."""
        spots: dict[tuple[Kind, bytes], Spot] = {}
        for kind in {kind for kind, _ in wanted}:
            for spot in self._catalogue.spots(kind, [key for each, key in wanted if each == kind]):
                if fits(spot, layout) and spot.number not in self._bad:
                    spots[kind, spot.key] = spot
        return [spots.get(ref) for ref in wanted]

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


def _rooms_for(sizes: Sequence[int]) -> list[memoryview]:
    """One that holds them all, or several to be read into at the same time."""
    size = min(sum(sizes), max(ROOM_BYTES, *sizes)) if sizes else 0
    return [memoryview(bytearray(size)) for _ in range(1 if size == sum(sizes) else READERS)]
