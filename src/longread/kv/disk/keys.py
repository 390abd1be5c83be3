"""Which keys have a record, and where it lies: what the index is asked for each page of a book, without its runs.

Knows the tables of ``catalogue``. Must not know transactions, nor who asks. What was written together has numbers one
behind the other, so with a chain's first key most of it is found in one pass, in a fraction of the time of a search for
each key.
"""

import sqlite3
from collections.abc import Iterator, Sequence

from longread.kv.disk.ahead import Spot, spot_of
from longread.kv.records import KINDS, Kind

KEPT = 65_536  # numbers of each kind, of about 150 bytes each
BATCH = 500  # keys of one query; SQLite's own limit is 999 in old builds
GUESSES, GUESSED_LEAST = 4, 32  # how often, and keys from which on a guess is worth its query
_SPOTS = """
SELECT r.id, r.key, r.parent, r.depth, s.name, r.offset, r.size, s.bytes
FROM records r JOIN segments s ON s.id = r.segment WHERE r.id IN ({}) AND r.kind = ?
"""


class Keys:
    """Numbers of rows by key, kept until ``forget``. Whoever calls has the connection to himself."""

    def __init__(self) -> None:
        self._numbers: dict[Kind, dict[bytes, int]] = {kind: {} for kind in KINDS}

    def forget(self) -> None:
        """The index was changed."""
        for numbers in self._numbers.values():
            numbers.clear()

    def numbers(self, reader: sqlite3.Connection, kind: Kind, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Of those keys that have a row."""
        kept, number = self._numbers[kind], KINDS.index(kind)
        if len(kept) + 2 * len(keys) > KEPT:
            kept.clear()
        missing = self._guess(reader, kind, [key for key in keys if key not in kept])
        for start in range(0, len(missing), BATCH):
            part = missing[start : start + BATCH]
            sql = f"SELECT key, id FROM records WHERE key IN ({_marks(part)}) AND kind = ?"
            kept.update(reader.execute(sql, (*part, number)))
        return {key: kept[key] for key in keys if key in kept}

    def spots(self, reader: sqlite3.Connection, kind: Kind, keys: Sequence[bytes]) -> Iterator[Spot | int]:
        """In any order; in place of one that cannot be right the number of its row."""
        numbers = sorted(self.numbers(reader, kind, keys).values())
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            for row in reader.execute(_SPOTS.format(_marks(part)), (*part, KINDS.index(kind))):
                yield spot_of(kind, row) or row[0]

    def _guess(self, reader: sqlite3.Connection, kind: Kind, missing: list[bytes]) -> list[bytes]:
        """The keys that are not found behind the first one that is still missing."""
        kept, number = self._numbers[kind], KINDS.index(kind)
        for _ in range(GUESSES):
            if len(missing) < GUESSED_LEAST:
                break
            sql = "SELECT id FROM records WHERE key = ? AND kind = ?"
            first = reader.execute(sql, (missing[0], number)).fetchone()
            if first is None:
                break
            sql = "SELECT key, id FROM records WHERE id BETWEEN ? AND ? AND kind = ?"
            last = first[0] + len(missing) + len(missing) // 8  # rings lie in between
            kept.update(reader.execute(sql, (first[0], last, number)))
            missing = [key for key in missing if key not in kept]
        return missing


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))
