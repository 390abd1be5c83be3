"""Questions about a document, their answers and the short thought before an answer.

Knows what a document's records allow to ask. Everything an answer says stands in the document's lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from longread.measure.reading.grammar import MARK, Attribute
from longread.measure.reading.records import Facts, Record

KINDS: Final = ("single", "multi-key", "multi-value", "last", "count", "absent")


@dataclass(frozen=True, slots=True)
class Question:
    """``lines`` are the indices of the document's lines that hold the answer, in the answer's order; none if absent."""

    kind: str
    text: str
    answer: str
    thought: str
    lines: tuple[int, ...]


def questions(facts: Facts, count: int, seed: int, kinds: Sequence[str] | None = None) -> list[Question]:
    """Up to ``count`` different questions in mixed order, no two of which are about the same key.

    About half are "single" when that is among ``kinds`` (all by default), the others share the rest. Fewer come back
    when the document has not enough keys. Raises ``ValueError`` for an unknown kind.
    """
    kinds = KINDS if kinds is None else tuple(kinds)
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"no questions of kind {unknown}; there are {KINDS}")
    asker = _Asker(facts, Random(seed))
    others = [kind for kind in kinds if kind != "single"]
    wanted = ["single"] * (count if not others else (count + 1) // 2 if "single" in kinds else 0)
    asker.rng.shuffle(others)
    wanted += [others[turn % len(others)] for turn in range(count - len(wanted))]
    asked = []
    for kind in wanted:
        question = asker.make(kind)
        if question is None and "single" in kinds:
            # Amended keys and lists run out first in a short document. Absent keys never do, so they fill no gap.
            question = asker.make("single")
        if question is not None:
            asked.append(question)
    asker.rng.shuffle(asked)
    return asked


def ask(question: Question) -> str:
    """What the user says: after the document and a newline in the first turn, alone in later ones."""
    return question.text


class _Asker:
    """Hands out the keys of a document, each once."""

    def __init__(self, facts: Facts, rng: Random) -> None:
        self.facts, self.rng = facts, rng
        self.tongue, self.grammar = facts.tongue, facts.grammar
        self.left: dict[str, list[Record]] = {"single": [], "last": [], "list": []}
        for record in facts.records:
            self.left[record.kind].append(record)
        for records in self.left.values():
            rng.shuffle(records)
        self.stated = {(record.entity, record.attribute.name) for record in facts.records}
        # A list's attributes are never asked for as absent: their questions say "every".
        self.attributes = tuple(dict.fromkeys(record.attribute for record in facts.records if record.kind != "list"))
        self.present = tuple(dict.fromkeys(record.entity for record in facts.records))

    def make(self, kind: str) -> Question | None:
        if kind == "single":
            return self._one("single", "single")
        if kind == "last":
            return self._one("last", "last")
        if kind == "multi-key":
            return self._several()
        if kind == "absent":
            return self._absent()
        return self._list(kind)

    def _question(self, kind: str, text: str, answer: str, cites: Sequence[str], lines: Sequence[int]) -> Question:
        if not cites:
            thought = self.grammar.nowhere
        elif len(cites) == 1:
            thought = self.tongue.thought.format(c=cites[0])
        else:
            thought = self.tongue.thoughts.format(c=self._joined(cites))
        found = [text, answer, thought]
        if not self.facts.spaced:
            found = [part.replace(MARK, "") for part in found]
        return Question(kind, found[0], found[1], found[2], tuple(lines))

    def _joined(self, parts: Sequence[str]) -> str:
        comma, final = self.tongue.joins
        return comma.join(parts[:-1]) + (final if len(parts) > 1 else "") + parts[-1]

    def _key(self, entity: str, attribute: Attribute) -> str:
        return self.rng.choice(self.grammar.keys).format(e=entity, a=attribute.name)

    def _cite(self, record: Record, which: int = -1) -> str:
        return self.grammar.cite.format(r=record.references[which])

    def _answer(self, record: Record, which: int = -1) -> str:
        return self.tongue.answer.format(v=record.values[which], c=self._cite(record, which))

    def _one(self, kind: str, pool: str) -> Question | None:
        if not self.left[pool]:
            return None
        record = self.left[pool].pop()
        templates = self.tongue.single[record.attribute.kind] if kind == "single" else self.tongue.last
        text = self.rng.choice(templates).format(k=self._key(record.entity, record.attribute))
        return self._question(kind, text, self._answer(record), [self._cite(record)], record.lines[-1:])

    def _several(self) -> Question | None:
        size = 3 if self.rng.randrange(4) == 0 else 2
        pool = self.left["single"]
        if len(pool) < size:
            return None
        records = [pool.pop() for _ in range(size)]
        keys = self._joined([self._key(record.entity, record.attribute) for record in records])
        return self._question(
            "multi-key",
            self.rng.choice(self.tongue.several).format(k=keys),
            self.tongue.answers.join([self._answer(record) for record in records]),
            [self._cite(record) for record in records],
            [record.lines[0] for record in records],
        )

    def _list(self, kind: str) -> Question | None:
        if not self.left["list"]:
            return None
        record = self.left["list"].pop()
        every = self.rng.choice(self.grammar.every).format(e=record.entity, a=record.attribute.name)
        cites = [self._cite(record, which) for which in range(len(record.values))]
        if kind == "count":
            text = self.rng.choice(self.tongue.count).format(k=self._key(record.entity, record.attribute), l=every)
            answer = self.tongue.counted.format(c=self.tongue.cites.join(cites), n=len(cites))
        else:
            text = self.rng.choice(self.tongue.listing).format(k=every)
            answer = self.tongue.answers.join([self._answer(record, which) for which in range(len(cites))])
        return self._question(kind, text, answer, cites, record.lines)

    def _absent(self) -> Question | None:
        outside = self.rng.randrange(3) == 0
        for _ in range(100 if self.attributes else 0):
            attribute = self.rng.choice(self.attributes)
            entity = self._stranger() if outside else self.rng.choice(self.present)
            if (entity, attribute.name) not in self.stated:
                self.stated.add((entity, attribute.name))
                text = self.rng.choice(self.tongue.single[attribute.kind]).format(k=self._key(entity, attribute))
                return self._question("absent", text, self.tongue.absent, [], [])
        return None

    def _stranger(self) -> str:
        """An entity that the document does not name."""
        while True:
            name = self.tongue.name(self.rng.randrange(self.tongue.size), self.grammar.lower)
            if name not in self.facts.entities:
                return name
