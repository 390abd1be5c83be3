"""What a language must say before documents can be written in it: words, line templates, question templates.

Knows the shape of a grammar and nothing of documents. The two lexicons fill it in parallel: the same number of words,
attributes and templates at the same places, so one seed gives a document and its twin in the other language.

Templates are ``str.format`` texts over ``{h}`` head of a line (its reference), ``{e}`` entity, ``{a}`` attribute,
``{v}`` value, ``{b}`` citation of an earlier line and ``{o}`` its bare reference, ``{n}`` a running number, ``{k}`` the
key and ``{l}`` the list as a question says them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

MARK = "\u2063"  # invisible separator: a word boundary in a text that has no spaces
QUANTITIES = ("amount", "percent", "days", "metres", "persons", "number")
VALUE_KINDS = (*QUANTITIES, "date", "code", "person", "place")


@dataclass(frozen=True, slots=True)
class Attribute:
    """What a fact is about: its name in the domain's spelling and the kind of its value."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """One domain in one language."""

    head: str  # how a line begins; {r} its reference, {t} the time of day
    cite: str  # how a reference is named in answers and back references; {r}
    lower: bool  # entities are spelled as identifiers
    quoted: bool  # words and codes stand in quotation marks
    attributes: tuple[Attribute, ...]
    lists: tuple[Attribute, ...]  # attributes that may have several values at once
    facts: tuple[str, ...]
    amended: tuple[str, ...]  # a later line about the same key
    first: tuple[str, ...]  # the first value of a list
    further: tuple[str, ...]  # a later one; {b} names the line before
    fillers: tuple[str, ...]
    headings: tuple[str, ...]  # empty: the domain has none
    titles: tuple[str, ...]  # two lines; {v}, {n} and {p}, {q} (two persons), {c}, {d} (two places)
    keys: tuple[str, ...]  # a key inside a question
    every: tuple[str, ...]  # a list inside a question
    nowhere: str  # the thought behind an absent answer


@dataclass(frozen=True, slots=True)
class Tongue:
    """One language: its words, what it says in every domain, and its grammar of each domain."""

    firsts: tuple[str, ...]
    seconds: tuple[str, ...]
    persons: tuple[str, ...]
    places: tuple[str, ...]
    months: tuple[str, ...]
    values: Mapping[str, str]  # kind -> template over {x}, {y}
    yearly: str  # a date inside prose
    entity: str  # {x} first word, {y} second word
    identifier: str
    single: Mapping[str, tuple[str, ...]]  # by kind of value
    last: tuple[str, ...]
    several: tuple[str, ...]  # {k} the joined keys
    listing: tuple[str, ...]
    count: tuple[str, ...]
    joins: tuple[str, str]  # between all but the last two things named, and between the last two
    answer: str  # {v} value, {c} reference
    answers: str  # between answers
    counted: str  # {c} references, {n} how many
    cites: str  # between the references of a counted answer
    absent: str
    thought: str  # one reference
    thoughts: str  # several
    domains: Mapping[str, Grammar]

    @property
    def size(self) -> int:
        """How many entities there are."""
        return len(self.firsts) * len(self.seconds)

    def name(self, number: int, lower: bool) -> str:
        """The ``number``-th entity, as a name or as an identifier."""
        first, second = divmod(number, len(self.seconds))
        if lower:
            return self.identifier.format(x=self.firsts[first], y=self.seconds[second]).lower()
        return self.entity.format(x=self.firsts[first], y=self.seconds[second])


def words(text: str) -> tuple[str, ...]:
    """The words of a text, in order."""
    return tuple(text.split())


def pairs(text: str) -> tuple[Attribute, ...]:
    """Attributes from lines ``kind: name, name``."""
    found = []
    for line in text.strip().splitlines():
        kind, names = line.split(":")
        if kind.strip() not in VALUE_KINDS:
            raise ValueError(f"unknown kind of value {kind.strip()!r}")
        found += [Attribute(name.strip(), kind.strip()) for name in names.split(",")]
    return tuple(found)
