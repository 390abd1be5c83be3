"""Questions about what a text of a genre states, with the answers and where they stand.

Knows the lines' keys and values; not how lines are worded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from longread.measure.workloads.ask import Expected
from longread.measure.workloads.genre import Genre
from longread.measure.workloads.stream import Key, Said

KINDS: Final = ("single", "role", "rule", "where", "last", "multi-key", "absent")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question. ``lines``: indices of the text's lines that hold the answer, none for an absent one; ``depth``: where
    the first of them begins, in characters, from 0 to 1.
    """

    kind: str
    text: str
    expected: Expected
    lines: tuple[int, ...]
    depth: float | None


@dataclass(frozen=True, slots=True)
class Record:
    """All that a text says about one key; a figure that was corrected has several lines, the last one holds."""

    key: Key
    sort: str
    value: str
    lines: tuple[int, ...]


class Book:
    """What a text states, ready to be asked about."""

    def __init__(self, genre: Genre, said: Sequence[Said], absent: Sequence[str]):
        self.genre, self.absent = genre, tuple(absent)
        found: dict[Key, Record] = {}
        for index, line in enumerate(said):
            if line.key is not None:
                before = found[line.key].lines if line.key in found else ()
                found[line.key] = Record(line.key, line.sort, line.value, (*before, index))
        self.records = found
        self.pools: dict[str, list[Record]] = {kind: [] for kind in ("single", "role", "rule", "where", "last")}
        names = {"role": "role", "rule": "rule", "where": "where"}
        for record in found.values():
            pool = "last" if len(record.lines) > 1 else names.get(record.sort, "single")
            self.pools[pool].append(record)
        self.entities = list(dict.fromkeys(key.entity for key, record in found.items() if record.sort == "figure"))
        self.starts: list[int] = [0]
        for line in said:
            self.starts.append(self.starts[-1] + len(line.text))

    def depth(self, lines: Sequence[int]) -> float | None:
        return self.starts[lines[0]] / max(self.starts[-1], 1) if lines else None


def questions(book: Book, count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Asked]:
    """Up to ``count`` questions in mixed order, no two about one key: about half single ones, where those are among
    ``kinds`` (all by default), the others share the rest. A kind that the text has not enough of gives its turn to a
    single one.
    """
    known = [kind for kind in (kinds or KINDS) if kind in KINDS and (kind != "where" or book.genre.where)]
    known = known or ["single"]
    asker = _Asker(book, Random(seed))
    others = [kind for kind in known if kind != "single"]
    asker.rng.shuffle(others)
    wanted = ["single"] * (count if not others else (count + 1) // 2 if "single" in known else 0)
    wanted += [others[turn % len(others)] for turn in range(count - len(wanted))]
    asker.rng.shuffle(wanted)
    found = [asker.make(kind) or asker.make("single") for kind in wanted]
    return [asked for asked in found if asked is not None]


class _Asker:
    """Hands out the keys of a text, each once."""

    def __init__(self, book: Book, rng: Random):
        self.book, self.genre, self.rng = book, book.genre, rng
        self.left = {kind: list(records) for kind, records in book.pools.items()}
        self.denied: set[Key] = set()

    def make(self, kind: str) -> Asked | None:
        if kind == "absent":
            return self._absent()
        if kind == "multi-key":
            return self._several()
        record = self._take(kind)
        if record is None:
            return None
        value, entity = record.value, record.key.entity
        if kind == "rule":
            text = next(rule.question for rule in self.genre.rules if rule.name == record.key.subject)
            return self._asked(kind, text.format(e=entity), Expected("exact", self._polarity(value)), record.lines)
        templates = {
            "single": self.genre.what,
            "last": self.genre.latest,
            "role": self.genre.who,
            "where": self.genre.where,
        }[kind]
        text = self.rng.choice(templates).format(k=self._key(record.key, record.sort), e=entity)
        return self._asked(kind, text, Expected("contains", value, critical=(value,)), record.lines[-1:])

    def _take(self, kind: str) -> Record | None:
        pool = self.left[kind]
        if not pool:
            return None
        place = self.rng.randrange(len(pool))
        pool[place], pool[-1] = pool[-1], pool[place]
        return pool.pop()

    def _key(self, key: Key, sort: str) -> str:
        template = self.genre.role_key if sort == "role" else self.genre.key
        return template.format(e=key.entity, a=key.subject, p=key.period)

    def _polarity(self, value: str) -> str:
        return value if self.genre.language == "en" else {"yes": "是", "no": "否"}[value]

    def _several(self) -> Asked | None:
        size = 2 + self.rng.randrange(2)
        if len(self.left["single"]) < size:
            return None
        records = [record for record in (self._take("single") for _ in range(size)) if record is not None]
        keys = [self._key(record.key, record.sort) for record in records]
        comma, last = self.genre.joins
        text = self.rng.choice(self.genre.all_of).format(k=comma.join(keys[:-1]) + last + keys[-1])
        values = tuple(record.value for record in records)
        expected = Expected("critical", ("; " if self.genre.language == "en" else "；").join(values), critical=values)
        lines = tuple(record.lines[0] for record in records)
        return self._asked("multi-key", text, expected, lines)

    def _absent(self) -> Asked | None:
        """About an entity that the text names, and a figure that it does not give for it."""
        for _ in range(100 if self.book.entities else 0):
            quantity = self.rng.choice(self.genre.quantities)
            key = Key(self.rng.choice(self.book.entities), quantity.name, self.rng.choice(self.genre.periods))
            if key not in self.book.records and key not in self.denied:
                self.denied.add(key)
                text = self.rng.choice(self.genre.what).format(k=self._key(key, "figure"))
                expected = Expected("absent", self.book.absent[0], self.book.absent[1:])
                return self._asked("absent", text, expected, ())
        return None

    def _asked(self, kind: str, text: str, expected: Expected, lines: tuple[int, ...]) -> Asked:
        return Asked(kind, text, expected, lines, self.book.depth(lines))
