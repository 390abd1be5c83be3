"""What a kind of document must say before one can be written: names, figures, duties, prohibitions and how to ask.

Knows the shape of a genre and nothing of documents. Templates are ``str.format`` texts over ``{e}`` entity, ``{a}``
what is said of it, ``{p}`` period, ``{v}`` value, ``{k}`` the joined keys of a question, ``{n}`` a running number.
Names are made of parts of fixed shape, so that no entity and no attribute is part of another one.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure with its unit: ``form`` over ``{v}``, drawn from ``low`` to ``high`` in units of 10**-decimals."""

    name: str
    form: str
    low: int
    high: int
    decimals: int = 0

    def value(self, rng: Random) -> str:
        drawn = self.low + rng.randrange(self.high - self.low + 1)
        if not self.decimals:
            return self.form.format(v=f"{drawn:,}")
        whole, part = divmod(drawn, 10**self.decimals)
        return self.form.format(v=f"{whole:,}.{part:0{self.decimals}}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that is so or is not: two statements that differ in the negation, and a question for yes or no."""

    name: str
    holds: str
    fails: str
    question: str


@dataclass(frozen=True, slots=True)
class Genre:
    """One kind of document in one language."""

    name: str
    language: str
    title: str  # {x} an entity, {n} a number
    headings: tuple[str, ...]  # {n}
    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    numbered: bool  # entities carry a number of four digits
    entity: str  # {x} of firsts, {y} of seconds, {n}
    periods: tuple[str, ...]  # one empty text: facts have no period
    quantities: tuple[Quantity, ...]
    roles: tuple[str, ...]
    people: tuple[str, ...]
    rules: tuple[Rule, ...]
    states: tuple[str, ...]  # a figure: sentences and table rows
    assigns: tuple[str, ...]  # who is responsible
    amends: tuple[str, ...]  # a figure stated before is corrected; {n}
    fillers: tuple[str, ...]  # {e}; no fact
    short: tuple[str, ...]  # a few tokens each, to reach a length exactly
    key: str  # a figure's key inside a question
    role_key: str
    what: tuple[str, ...]  # {k}
    who: tuple[str, ...]  # {k}
    latest: tuple[str, ...]  # {k}: a figure that was corrected
    all_of: tuple[str, ...]  # {k}: several keys
    joins: tuple[str, str]  # between keys, and before the last one
    where: tuple[str, ...] = ()  # {e}: which file or part holds it; the answer is the fact's value

    @property
    def size(self) -> int:
        """How many entities there are."""
        return len(self.firsts) * len(self.seconds) * (9000 if self.numbered else 1)

    def name_of(self, number: int) -> str:
        """The ``number``-th entity."""
        rest, n = divmod(number, 9000) if self.numbered else (number, 0)
        first, second = divmod(rest, len(self.seconds))
        return self.entity.format(x=self.firsts[first], y=self.seconds[second], n=1000 + n)
