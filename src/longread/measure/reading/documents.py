"""Long documents full of similar facts, made from a seed: the same text on every machine and Python.

Knows how facts are laid out over lines and how a line says them; asking is the questions module's.
Only the integer methods of ``random.Random`` are used (``randrange``, ``choice``, ``shuffle``), and no set is iterated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isqrt
from random import Random
from typing import Final

from longread.measure.reading.grammar import MARK, Attribute, Grammar, Tongue
from longread.measure.reading.lexicon_en import ENGLISH
from longread.measure.reading.lexicon_zh import CHINESE
from longread.measure.reading.questions import Question, questions
from longread.measure.reading.records import Facts, Record

LANGUAGES: Final = ("en", "zh")
DOMAINS: Final = ("contract", "statute", "log", "code", "table")
TONGUES: Final = {"en": ENGLISH, "zh": CHINESE}
LAST_PERCENT, LIST_PERCENT, FILLER_PERCENT = 8, 4, 8
LARGEST_REFERENCE = 9999
CODES = ("KX", "QT", "RB", "VN", "HZ", "LD", "MW", "PJ", "SG", "TF", "XC", "ZR", "BK", "DV", "FN", "GM")
# The share of unnumbered headings in a contract or statute; the other domains have more filler lines instead.
HEADING_EVERY = (8, 9)  # at least 8 lines, and up to 8 more


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a document: ends with exactly one newline, begins with neither space nor newline."""

    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """A document and what it states; ``facts`` counts the lines that state a fact, the distractors of any one."""

    seed: int
    language: str
    domain: str
    lines: tuple[Line, ...]
    facts: int
    stated: Facts = field(repr=False, compare=False)

    @property
    def text(self) -> str:
        return "".join([line.text for line in self.lines])

    def questions(self, count: int, seed: int = 0, kinds: Sequence[str] | None = None) -> list[Question]:
        """See :func:`longread.measure.reading.questions.questions`."""
        return questions(self.stated, count, (self.seed << 32) ^ seed, kinds)

    def depth(self, question: Question) -> float:
        """Where the first line of the answer begins, in characters, from 0 to 1; 0 for an absent one."""
        lengths = [len(line.text) for line in self.lines]
        return sum(lengths[: min(question.lines, default=0)]) / sum(lengths)


@dataclass(slots=True)
class _Slot:
    """A line in the making: ``style`` is heading, filler or fact; ``reference`` as the line prints it."""

    style: str
    reference: str
    head: str = ""
    text: str = ""


def write(
    seed: int, lines: int, language: str | None = None, domain: str | None = None, spaced: bool = False
) -> Document:
    """The document of ``seed``: ``lines`` lines, two of them a title; language and domain drawn when not given.

    ``spaced`` marks the word boundaries of Chinese by U+2063 and changes nothing else. One seed gives the same
    facts in both languages. Raises ``ValueError`` for fewer than 4 lines or unknown names.
    """
    if lines < 4:
        raise ValueError(f"a document has at least 4 lines, not {lines}")
    rng = Random(seed)
    drawn_language, drawn_domain = rng.choice(LANGUAGES), rng.choice(DOMAINS)
    language, domain = language or drawn_language, domain or drawn_domain
    if language not in LANGUAGES or domain not in DOMAINS:
        raise ValueError(f"no documents in {language!r}, {domain!r}; languages {LANGUAGES}, domains {DOMAINS}")
    tongue = TONGUES[language]
    grammar = tongue.domains[domain]
    slots = _layout(rng, lines - 2, domain, len(grammar.headings) > 0)
    facts = sum(slot.style == "fact" for slot in slots)
    entities, attributes = _cast(rng, tongue, grammar, lines, facts)
    texts = _title(rng, tongue, grammar, slots[domain == "statute"].reference)
    for index, slot in enumerate(slots):
        slot.head = _head(grammar, slot.reference, index, len(slots))
    records = _state_facts(rng, tongue, grammar, slots, entities, attributes)
    for slot in slots:
        if slot.style == "heading":
            slot.text = rng.choice(grammar.headings).format(n=slot.reference)
        elif slot.style == "filler":
            slot.text = rng.choice(grammar.fillers).format(h=slot.head, e=rng.choice(entities))
    texts += [slot.text for slot in slots]
    if not spaced and language == "zh":
        texts = [text.replace(MARK, "") for text in texts]
    return Document(
        seed=seed,
        language=language,
        domain=domain,
        lines=tuple([Line(text) for text in texts]),
        facts=facts,
        stated=Facts(tongue, grammar, tuple(records), tuple(entities), spaced),
    )


def _layout(rng: Random, count: int, domain: str, headed: bool) -> list[_Slot]:
    """Styles and references of the lines. Short documents begin anywhere, so that all references get practice."""
    slots: list[_Slot] = []
    if domain == "contract":
        # Articles of 6 to 14 clauses after a heading each.
        article = 1 + rng.randrange(2) * rng.randrange(max(1, LARGEST_REFERENCE // 10 - count // 7))
        clause, size = 0, 6 + rng.randrange(9)
        for _ in range(count):
            if clause == 0:
                slots.append(_Slot("heading", str(article)))
            else:
                style = "filler" if rng.randrange(100) < FILLER_PERCENT else "fact"
                slots.append(_Slot(style, f"{article}.{clause}"))
            clause += 1
            if clause > size:
                article, clause, size = article + 1, 0, 6 + rng.randrange(9)
        return slots
    step = max(1, min(3, LARGEST_REFERENCE // (count + 1)))
    number = 1 + rng.randrange(max(1, LARGEST_REFERENCE - step * count))
    part, left = 1 + rng.randrange(9), 0
    fillers = FILLER_PERCENT if headed else 2 * FILLER_PERCENT
    for _ in range(count):
        if headed and left == 0:
            slots.append(_Slot("heading", str(part)))
            part, left = part + 1, HEADING_EVERY[0] + rng.randrange(HEADING_EVERY[1])
            continue
        left -= 1
        style = "filler" if rng.randrange(100) < fillers else "fact"
        slots.append(_Slot(style, str(number)))
        number += 1 + rng.randrange(step)
    return slots


def _cast(rng: Random, tongue: Tongue, grammar: Grammar, lines: int, facts: int) -> tuple[list[str], list[Attribute]]:
    """Few entities and few attributes, so that keys share their halves; at least 1.5 times as many keys as facts."""
    attributes = list(grammar.attributes)
    rng.shuffle(attributes)
    attributes = attributes[: max(4, isqrt(lines))]
    wanted = max(isqrt(3 * lines), 3 * facts // (2 * len(attributes)), 2)
    total = tongue.size
    entities: list[str] = []
    seen: set[int] = set()
    while len(entities) < min(wanted, total):
        drawn = rng.randrange(total)
        if drawn not in seen:
            seen.add(drawn)
            entities.append(tongue.name(drawn, grammar.lower))
    return entities, attributes


def _title(rng: Random, tongue: Tongue, grammar: Grammar, start: str) -> list[str]:
    person, place = rng.randrange(len(tongue.persons)), rng.randrange(len(tongue.places))
    words = {
        "v": f"{1000 + rng.randrange(9000)}-{rng.choice(CODES)}",
        "n": start,
        "p": tongue.persons[person],
        "q": tongue.persons[person - 1 - rng.randrange(len(tongue.persons) - 1)],
        "c": tongue.places[place],
        "d": tongue.places[place - 1 - rng.randrange(len(tongue.places) - 1)],
    }
    return [title.format(**words) for title in grammar.titles]


def _head(grammar: Grammar, reference: str, index: int, count: int) -> str:
    if "{t}" not in grammar.head:
        return grammar.head.format(r=reference)
    minute = index * 1440 // count  # a log covers one day
    return grammar.head.format(r=reference, t=f"{minute // 60:02}:{minute % 60:02}")


def _state_facts(
    rng: Random,
    tongue: Tongue,
    grammar: Grammar,
    slots: Sequence[_Slot],
    entities: Sequence[str],
    attributes: Sequence[Attribute],
) -> list[Record]:
    """Give every fact slot its text and return what they say; a record's lines count the title's two."""
    places = [index for index, slot in enumerate(slots) if slot.style == "fact"]
    keys = list(range(len(entities) * len(attributes)))
    rng.shuffle(keys)
    lists = list(range(len(entities) * len(grammar.lists)))
    rng.shuffle(lists)
    records = []
    for kind, members in _groups(rng, len(places)):
        pool, choice = (lists, grammar.lists) if kind == "list" else (keys, attributes)
        entity, number = divmod(pool.pop(), len(choice))
        chosen = [slots[places[member]] for member in members]
        values = _state(rng, tongue, grammar, kind, entities[entity], choice[number], chosen)
        references = tuple([slot.reference for slot in chosen])
        lines = tuple([places[member] + 2 for member in members])
        records.append(Record(kind, entities[entity], choice[number], values, references, lines))
    return records


def _state(
    rng: Random,
    tongue: Tongue,
    grammar: Grammar,
    kind: str,
    entity: str,
    attribute: Attribute,
    slots: Sequence[_Slot],
) -> tuple[str, ...]:
    """Write one key's lines into its slots; the values they state."""
    values: list[str] = []
    before = ""
    for turn, slot in enumerate(slots):
        template = _template(rng, grammar, kind, turn)
        value = _value(rng, tongue, attribute.kind, values)
        slot.text = template.format(
            h=slot.head,
            e=entity,
            a=attribute.name,
            v=_shown(tongue, grammar, attribute.kind, value),
            n=turn,
            b=grammar.cite.format(r=before),
            o=before,
        )
        values.append(value)
        before = slot.reference
    return tuple(values)


def _shown(tongue: Tongue, grammar: Grammar, kind: str, value: str) -> str:
    """A value as its line shows it: dates recur in the domains with headings, words are quoted among identifiers."""
    if kind == "date" and grammar.headings:
        return tongue.yearly.format(v=value)
    return f'"{value}"' if grammar.quoted and kind in ("code", "person", "place") else value


def _template(rng: Random, grammar: Grammar, kind: str, turn: int) -> str:
    if kind == "list":
        return rng.choice(grammar.further if turn else grammar.first)
    return rng.choice(grammar.amended if turn else grammar.facts)


def _groups(rng: Random, facts: int) -> list[tuple[str, list[int]]]:
    """Split the fact places into keys: amended ones (2 or 3 places), lists (2 to 4), and single ones for the rest.

    The line a question is measured by (the last of an amended key, the first of a list) is drawn first, so that its
    depth is uniform; the others follow before or after it.
    """
    free = [True] * facts
    groups: list[tuple[str, list[int]]] = []
    keys = facts * 5 // 6  # an amended key takes 2.5 places and a list 3, so 6 places hold 5 keys
    for kind, percent in (("last", LAST_PERCENT), ("list", LIST_PERCENT)):
        for _ in range((keys * percent + rng.randrange(100)) // 100):
            size = 2 + rng.randrange(2 if kind == "last" else 3)
            anchor = rng.randrange(facts)
            low, high = (0, anchor) if kind == "last" else (anchor + 1, facts)
            if not free[anchor] or not _room(free, low, high, size - 1):
                continue
            chosen = [anchor]
            while len(chosen) < size:
                place = low + rng.randrange(high - low)
                if free[place] and place not in chosen:
                    chosen.append(place)
            for place in chosen:
                free[place] = False
            groups.append((kind, sorted(chosen)))
    return groups + [("single", [place]) for place in range(facts) if free[place]]


def _room(free: Sequence[bool], low: int, high: int, wanted: int) -> bool:
    """Whether ``wanted`` places are free from ``low`` to before ``high``; looks at a few, not at all of a long text."""
    for place in range(low, high):
        wanted -= free[place]
        if wanted <= 0:
            return True
    return False


def _value(rng: Random, tongue: Tongue, kind: str, taken: Sequence[str]) -> str:
    """A value that the key has not had yet, as answers give it."""
    while True:
        x: object
        y: object = ""
        if kind == "amount":
            x = f"{1000 + rng.randrange(99000):,}"
        elif kind == "percent":
            x, y = 1 + rng.randrange(39), 1 + rng.randrange(9)
        elif kind == "number":
            x = 100 + rng.randrange(99900)
        elif kind == "date":
            x, y = rng.choice(tongue.months), 1 + rng.randrange(28)
        elif kind == "code":
            x, y = 1000 + rng.randrange(9000), rng.choice(CODES)
        elif kind == "person":
            x = rng.choice(tongue.persons)
        elif kind == "place":
            x = rng.choice(tongue.places)
        else:
            x = 2 + rng.randrange(998 if kind == "persons" else 198)
        value = tongue.values[kind].format(x=x, y=y)
        if value not in taken:
            return value
