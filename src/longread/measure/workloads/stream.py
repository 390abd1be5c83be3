"""Documents of a genre as an endless stream of lines, the same on every machine: cut anywhere, what is left is whole.

Knows how facts follow one another; asking and lengths are others'. A line states at most one fact, a key (entity,
subject, period) is stated once, and again only where a later line corrects it: so a stream's beginning states a set of
facts of its own, whatever comes after. Only integer methods of ``random.Random`` are used, and no set is iterated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from longread.measure.workloads.genre import Genre, Quantity, Rule

# Of a hundred lines: fillers, corrections, duties, prohibitions; the rest are figures.
FILLERS, AMENDS, ROLES, RULES = 12, 4, 12, 14
NEAR = 12  # entities that later lines come back to: distractors that share one half of a key
DRAWS = 40
SECTION = (9, 10)  # lines after a heading: at least 9, and up to 9 more


@dataclass(frozen=True, slots=True)
class Key:
    """What a fact is about."""

    entity: str
    subject: str
    period: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A line: its text, which ends with one newline, and what it states. ``sort``: figure, role, rule or where.
    ``amends``: an earlier line's key is given another value. A rule's value is "yes" or "no".
    """

    text: str
    key: Key | None = None
    sort: str = ""
    value: str = ""
    amends: bool = False


def stream(genre: Genre, seed: int) -> Iterator[Said]:
    """Lines without end. Memory: the keys stated so far."""
    return _Stream(genre, seed).lines()


class _Stream:
    def __init__(self, genre: Genre, seed: int):
        self.genre, self.rng = genre, Random(seed)
        self.taken: set[Key] = set()
        self.figures: list[tuple[Key, Quantity]] = []  # that may still be corrected
        self.values: dict[Key, str] = {}
        self.near: list[str] = []

    def lines(self) -> Iterator[Said]:
        genre, rng = self.genre, self.rng
        yield Said(genre.title.format(x=self._entity(), n=1000 + rng.randrange(9000)) + "\n")
        section, left, corrections = 0, 0, 0
        while True:
            if not left:
                section, left = section + 1, SECTION[0] + rng.randrange(SECTION[1])
                yield Said(rng.choice(genre.headings).format(n=section) + "\n")
            left -= 1
            drawn = rng.randrange(100)
            said = None
            if FILLERS <= drawn < FILLERS + AMENDS and self.figures:
                corrections += 1
                said = self._amend(corrections)
            elif FILLERS + AMENDS <= drawn < FILLERS + AMENDS + ROLES:
                said = self._role()
            elif FILLERS + AMENDS + ROLES <= drawn < FILLERS + AMENDS + ROLES + RULES:
                said = self._rule()
            elif drawn >= FILLERS + AMENDS + ROLES + RULES:
                said = self._figure()
            yield said or Said(rng.choice(genre.fillers).format(e=self._entity()) + "\n")

    def _entity(self) -> str:
        """One of the last few in three of five draws, else any."""
        rng = self.rng
        if self.near and rng.randrange(5) < 3:
            return rng.choice(self.near)
        entity = self.genre.name_of(rng.randrange(self.genre.size))
        if entity not in self.near:
            self.near.append(entity)
            del self.near[:-NEAR]
        return entity

    def _key(self, subject: str, dated: bool) -> Key | None:
        """A key that nothing was said of. None where it is hard to find one: the text has grown over its names."""
        for _ in range(DRAWS):
            period = self.rng.choice(self.genre.periods) if dated else ""
            key = Key(self._entity(), subject, period)
            if key not in self.taken:
                self.taken.add(key)
                return key
        return None

    def _figure(self) -> Said | None:
        quantity = self.rng.choice(self.genre.quantities)
        key = self._key(quantity.name, True)
        if key is None:
            return None
        value = quantity.value(self.rng)
        self.figures.append((key, quantity))
        self.values[key] = value
        text = self.rng.choice(self.genre.states).format(e=key.entity, a=key.subject, p=key.period, v=value)
        return Said(text + "\n", key, "figure", value)

    def _amend(self, number: int) -> Said:
        place = self.rng.randrange(len(self.figures))
        self.figures[place], self.figures[-1] = self.figures[-1], self.figures[place]
        key, quantity = self.figures.pop()
        before = value = self.values.pop(key)
        while value == before:
            value = quantity.value(self.rng)
        template = self.rng.choice(self.genre.amends)
        text = template.format(e=key.entity, a=key.subject, p=key.period, v=value, n=number)
        return Said(text + "\n", key, "figure", value, True)

    def _role(self) -> Said | None:
        key = self._key(self.rng.choice(self.genre.roles), False)
        if key is None:
            return None
        value = self.rng.choice(self.genre.people)
        text = self.rng.choice(self.genre.assigns).format(e=key.entity, a=key.subject, v=value)
        return Said(text + "\n", key, "role", value)

    def _rule(self) -> Said | None:
        rule: Rule = self.rng.choice(self.genre.rules)
        key = self._key(rule.name, False)
        if key is None:
            return None
        holds = self.rng.randrange(2) == 0
        text = (rule.holds if holds else rule.fails).format(e=key.entity)
        return Said(text + "\n", key, "rule", "yes" if holds else "no")
