"""Long texts of a wanted number of tokens, with questions whose answers are known: our genres', and those of the
bundled readers' domains, in one shape.

Knows how to reach a length and what an answer is judged by; not how texts are worded, and nothing of requests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from longread.measure import reading
from longread.measure.workloads import codebase, genres_en, genres_zh
from longread.measure.workloads.ask import Expected
from longread.measure.workloads.counting import Counter
from longread.measure.workloads.genre import Genre
from longread.measure.workloads.questions import KINDS, Asked, Book, questions
from longread.measure.workloads.stream import Said, stream
from longread.spec.errors import ConfigError

GENRES: Final = {
    (genre.name, genre.language): genre
    for genre in (
        *(genres_en.REPORT, genres_en.MANUAL, genres_en.FORMULARY, codebase.ENGLISH),
        *(genres_zh.REPORT, genres_zh.MANUAL, genres_zh.FORMULARY, codebase.CHINESE),
    )
}
OWN_DOMAINS: Final = ("report", "manual", "formulary", "codebase")
DOMAINS: Final = (*OWN_DOMAINS, *reading.DOMAINS)
ALL_KINDS: Final = tuple(dict.fromkeys((*KINDS, *reading.KINDS)))
ABSENT: Final = {
    "en": ("Not in the document.", "does not say", "not stated", "not mentioned", "no information", "not specified"),
    "zh": ("文件中没有。", "文中没有", "文档中没有", "未提及", "没有提到", "未说明", "没有说明", "无相关信息"),
}
CHUNK_LINES = 256  # counted together
RESERVE = {True: 72, False: 36}  # tokens of a question with up to three keys, or with one
READ_LINES = 72_000  # a reader domain has no more names than that
READ_TRIES, EDITIONS = 4, 8
SAMPLE_LINES = 200
CLOSE = 250  # a length within one part in so many is met


@dataclass(frozen=True, slots=True)
class Asking:
    """Which questions a text is asked: they take their share of its length."""

    count: int
    seed: int
    kinds: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A document. ``tokens`` by the counter it was made for; ``facts``: lines that state one."""

    domain: str
    language: str
    text: str
    tokens: int
    facts: int
    ask: Callable[[Asking], list[Asked]] = field(repr=False)

    def questions(self, asking: Asking) -> list[Asked]:
        """Different questions about different facts, fewer where the text has fewer. Kinds that this domain does not
        have are passed over; where none is left, single ones are asked.
        """
        return self.ask(asking)


def compose(domain: str, language: str, seed: int, tokens: int, counter: Counter, asking: Asking | None = None) -> Text:
    """The document of ``seed``. ``tokens``: of the text and, behind a newline, of the first question of ``asking``.

    Within a few tokens for our genres, within half a line for a reader domain. Raises ConfigError.
    """
    if domain in reading.DOMAINS:
        return _read(domain, language, seed, tokens, counter, asking)
    genre = GENRES.get((domain, language))
    if genre is None:
        raise ConfigError(f"no documents of domain {domain!r} in {language!r}; domains: {', '.join(DOMAINS)}; en, zh")
    return _written(genre, seed, tokens, counter, asking)


def _written(genre: Genre, seed: int, tokens: int, counter: Counter, asking: Asking | None) -> Text:
    source = codebase.stream(genre, seed) if genre.name == "codebase" else stream(genre, seed)
    several = asking is not None and (asking.kinds is None or "multi-key" in asking.kinds)
    said, used = fill(source, tokens - (RESERVE[several] if asking else 0), counter)
    book = Book(genre, said, ABSENT[genre.language])
    room = tokens - used
    asked = questions(book, asking.count, asking.seed, asking.kinds) if asking else []
    if asked:
        room -= counter.count("\n" + asked[0].text)
    padding = list(pad(*padding_of(genre, said), room, counter))
    used += sum(map(counter.count, padding))
    whole = "".join([*(line.text for line in said), *padding])
    facts = sum(line.key is not None for line in said)

    def ask(wanted: Asking) -> list[Asked]:
        return questions(book, wanted.count, wanted.seed, wanted.kinds)

    return Text(genre.name, genre.language, whole, used, facts, ask)


def fill(source: Iterator[Said], tokens: int, counter: Counter) -> tuple[list[Said], int]:
    """The stream's first lines, as many as ``tokens`` hold, and their tokens. Counted in chunks, each once; only the
    chunk that goes over is counted line by line.
    """
    said: list[Said] = []
    used = 0
    while chunk := list(islice(source, CHUNK_LINES)):
        size = counter.count("".join([line.text for line in chunk]))
        if used + size <= tokens:
            said += chunk
            used += size
            continue
        for line in chunk:
            size = counter.count(line.text)
            if used + size > tokens:
                break
            said.append(line)
            used += size
        break
    return said, used


def pad(longer: Sequence[str], shorter: Sequence[str], tokens: int, counter: Counter) -> Iterator[str]:
    """Lines that state nothing: the longer ones in turn while they fit, then the longest that fits, until less than
    the shortest is left.
    """
    sizes = {line: counter.count(line) for line in (*longer, *shorter)}
    turn = 0
    while fitting := [line for line in longer if sizes[line] <= tokens]:
        line = fitting[turn % len(fitting)]
        turn += 1
        tokens -= sizes[line]
        yield line
    while fitting := [line for line in shorter if sizes[line] <= tokens]:
        line = max(fitting, key=lambda each: sizes[each])
        tokens -= sizes[line]
        yield line


def padding_of(genre: Genre, said: Sequence[Said]) -> tuple[list[str], list[str]]:
    """The genre's lines that ``pad`` takes, about the entity named last."""
    entity = next((line.key.entity for line in reversed(said) if line.key is not None), genre.name_of(0))
    return [filler.format(e=entity) + "\n" for filler in genre.fillers], [short + "\n" for short in genre.short]


def _read(domain: str, language: str, seed: int, tokens: int, counter: Counter, asking: Asking | None) -> Text:
    """A reader domain's text is made for a number of lines, so the number is corrected until the length is met. Of a
    short one a line may be too much: then other editions of it are tried.
    """
    found: list[tuple[int, reading.Document, int]] = []  # the best one so far
    sample = reading.write(seed, SAMPLE_LINES, language, domain).text
    guess = min(max(tokens * SAMPLE_LINES // max(counter.count(sample), 1), 8), READ_LINES)
    for edition in range(EDITIONS):
        lines = guess
        for _ in range(READ_TRIES):
            document = reading.write(seed + (edition << 64), lines, language, domain)
            size = counter.count(document.text)
            asked = _read_questions(document, asking) if asking else []
            error = size + (counter.count("\n" + asked[0].text) if asked else 0) - tokens
            if not found or abs(error) < abs(found[0][0]):
                found = [(error, document, size)]
            if lines == READ_LINES and error * CLOSE < -tokens:
                raise ConfigError(
                    f"a {domain} holds at most {size:,} tokens by this tokenizer, not {tokens:,}; ask for less or for "
                    f"one of {', '.join(OWN_DOMAINS)}"
                )
            before, lines = lines, min(max(lines - round(error * lines / max(size, 1)), 8), READ_LINES)
            if abs(error) * CLOSE <= tokens or lines == before:
                break
        guess = lines
        if abs(found[0][0]) * CLOSE <= tokens:
            break
    _, document, size = found[0]
    return Text(domain, language, document.text, size, document.facts, lambda wanted: _read_questions(document, wanted))


def _read_questions(document: reading.Document, asking: Asking) -> list[Asked]:
    known = None if asking.kinds is None else [kind for kind in asking.kinds if kind in reading.KINDS] or ["single"]
    found = document.questions(asking.count, asking.seed, known)
    starts = [0]
    for line in document.lines:
        starts.append(starts[-1] + len(line.text))
    return [
        Asked(
            each.kind,
            each.text,
            _read_expected(each, document.language),
            each.lines,
            starts[each.lines[0]] / starts[-1] if each.lines else None,
        )
        for each in found
    ]


def _read_expected(question: reading.Question, language: str) -> Expected:
    """What must stand in an answer: the values; a reader cites them, another model need not."""
    if question.kind == "absent":
        return Expected("absent", question.answer, tuple(each for each in ABSENT[language] if each != question.answer))
    if question.kind == "count":
        return Expected("contains", question.answer.replace("：", ":").rpartition(":")[2].strip("条行个处 "))
    open_, close, joint = ("（", "）", "；") if language == "zh" else (" (", ")", "; ")
    values = tuple(part.rpartition(open_)[0] for part in question.answer.removesuffix(close).split(close + joint))
    if len(values) == 1:
        return Expected("contains", values[0], critical=values)
    return Expected("critical", question.answer, critical=values)
