"""What a document states, apart from how its lines say it: the common ground of writing and asking."""

from dataclasses import dataclass

from longread.measure.reading.grammar import Attribute, Grammar, Tongue


@dataclass(frozen=True, slots=True)
class Record:
    """All that a document says about one key (entity and attribute), in the order of its lines."""

    kind: str  # "single", "last" (amended later) or "list" (several values at once)
    entity: str
    attribute: Attribute
    values: tuple[str, ...]
    references: tuple[str, ...]
    lines: tuple[int, ...]  # indices into the document's lines


@dataclass(frozen=True, slots=True)
class Facts:
    """A document's records in the words of its grammar; ``entities`` includes those that only filler lines name."""

    tongue: Tongue
    grammar: Grammar
    records: tuple[Record, ...]
    entities: tuple[str, ...]
    spaced: bool  # word boundaries stay marked in what is asked and answered
