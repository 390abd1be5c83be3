"""``longread demo``: a long text and three questions, each asked of a server that has read nothing and of one that has
read the text, with the answers beside what was expected.

Knows what is asked and how it is shown. Asks through ``longread serve`` only.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longread.measure.reading import Document, write
from longread.measure.served import Asked, Server, serving
from longread.spec.errors import ConfigError
from longread.spec.model import ModelSpec
from longread.wire.encoding import encoding_for
from longread.wire.tokenizer import Tokenizer

MIN_CHARACTERS = 2000  # a page of the cache or two: less leaves nothing to reuse, and nothing to show
MIN_TOKENS = 2048  # of a written contract: enough lines for a question of each kind
MARKUP_TOKENS = 64  # chat markup around a turn, amply
KINDS = ("single", "absent", "multi-key")  # of the three questions about a contract
OFFERED = 24  # questions that the three are taken from: together, since one call asks about no key twice
QUESTIONS = {  # about a text of the user's
    "en": ("Which amount is to be paid?", "On which date does it end?", "Who signs it?"),
    "zh": ("应付金额是多少？", "何时终止？", "由谁签署？"),
}
FIRST_WORDS = "Hello"  # asked of each fresh server, so that what a process does only once counts nowhere
QUOTED = 200  # characters of an answer on the screen
PATIENCE = 10.0  # seconds without a terminal before it says that it goes on
OPENING = 3  # lines of a written contract that are shown
PREAMBLE = """\
Questions about a long text, put to `longread serve` on this machine as any client would; offline.
Each question is asked twice. Cold: the server has read nothing yet, so it reads the whole text first.
Warm: it has read the text with another question, takes that from its prefix cache and reads only what is new."""
A_QUOTE = re.compile(r"(.+?) ?[(（][^()（）]+[)）]")  # a value with its reference, as the bundled readers answer


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question, the answer where it is known, whether the model is to think first, and what the text says of it."""

    question: str
    expected: str | None
    thinking: bool
    stands: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exam:
    """A text and what is asked about it; ``title`` says what it is, ``opening`` how it begins."""

    title: str
    text: str
    inquiries: tuple[Inquiry, ...]
    opening: tuple[str, ...] = ()

    def turn(self, inquiry: Inquiry) -> str:
        """The user turn, as the readers were trained on it."""
        return f"{self.text}\n{inquiry.question}"


@dataclass(frozen=True, slots=True)
class Pair:
    """One question, asked cold and warm."""

    inquiry: Inquiry
    cold: Asked
    warm: Asked

    @property
    def right(self) -> bool:
        return all(answer.strip() == self.inquiry.expected for answer in self.answers())

    def answers(self) -> tuple[str, ...]:
        """What was said; two texts where warm and cold differ."""
        return tuple(dict.fromkeys((self.cold.answer, self.warm.answer)))


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint's results; memory in bytes, None where the system does not tell."""

    name: str
    pairs: tuple[Pair, ...]
    peak: int | None
    planned: int | None

    @property
    def cold_ttft(self) -> float:
        return median(pair.cold.ttft for pair in self.pairs)

    @property
    def warm_ttft(self) -> float:
        return median(pair.warm.ttft for pair in self.pairs)

    @property
    def decode_rate(self) -> float:
        """Tokens per second over all answers, the first token of each left out; 0 where there was only that."""
        asked = [asked for pair in self.pairs for asked in (pair.cold, pair.warm)]
        seconds = sum(one.decode_seconds for one in asked)
        return sum(one.output_tokens - 1 for one in asked) / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Reader:
    """A checkpoint, with what must be known of it to write its text and to ask it."""

    path: Path
    spec: ModelSpec
    tokenizer: Tokenizer

    @classmethod
    def open(cls, path: Path, spec: ModelSpec) -> "Reader":
        """Raises CheckpointError for its tokenizer."""
        return cls(path.resolve(), spec, Tokenizer.open(path, bos_id=spec.bos_id, eos_id=spec.eos_id))

    def template(self, thinking: bool) -> dict[str, object]:
        """``chat_template_kwargs``: the switch, where the family has one."""
        has_think = self.tokenizer.has("<think>")
        encoding, _ = encoding_for("auto", self.spec.family, self.spec.label, self.path.name, has_think=has_think)
        return {"thinking": thinking} if encoding.abilities.thinking == "switch" else {}

    def tokens(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


def run(exams: Sequence[tuple[Reader, Exam]], max_tokens: int) -> None:
    """Ask each reader its exam, print each answer as it comes and a table at the end. Raises ServedError."""
    console = Console(highlight=False)
    console.print(PREAMBLE)
    rows = []
    for reader, exam in exams:
        console.rule(Text(reader.path.name), align="left")
        console.print(Text(f"The text: {exam.title}; {reader.tokens(exam.text):,} tokens."))
        for line in exam.opening:
            console.print(Text(f"   {line}", style="dim"), no_wrap=True, overflow="ellipsis")
        rows.append(_examine(reader, exam, max_tokens, console))
    console.print(table(rows), verdict(rows), sep="\n")


def contract(reader: Reader, tokens: int, language: str, seed: int) -> Exam:
    """A written contract of about ``tokens`` tokens with one question of each of ``KINDS``, the last one to be thought
    about. Raises ConfigError for a length that the reader cannot have or that shows nothing.
    """
    if not MIN_TOKENS <= tokens <= reader.spec.max_position:
        raise ConfigError(
            f"a contract of {tokens:,} tokens: {reader.path.name} can be shown with {MIN_TOKENS:,} to "
            f"{reader.spec.max_position:,}"
        )
    document = document_of(reader, tokens, language, seed)
    offered = {q.kind: q for q in reversed(document.questions(OFFERED, seed, kinds=KINDS))}  # of each kind the first
    if len(offered) < len(KINDS):
        raise ConfigError(
            f"the contract of seed {seed} has not all kinds of questions; take another seed or more tokens"
        )
    questions = [offered[kind] for kind in KINDS]
    lines = [line.text.rstrip() for line in document.lines]
    inquiries = tuple(
        Inquiry(q.text, q.answer, q is questions[-1], tuple(f"{lines[i]}  (line {i + 1:,})" for i in q.lines))
        for q in questions
    )
    title = f"a made-up contract of {len(lines):,} lines with {document.facts:,} similar facts (seed {seed})"
    return Exam(title, document.text, inquiries, (*lines[:OPENING], "..."))


def document_of(reader: Reader, tokens: int, language: str, seed: int) -> Document:
    """A contract of about ``tokens`` tokens of this reader's: they vary little from line to line, so a guess corrected
    a few times lands within a few lines.
    """
    lines = 32
    for _ in range(5):
        document = write(seed, lines, language, "contract")
        found = reader.tokens(document.text)
        wanted = max(8, round(lines * tokens / found))
        if wanted == lines:
            break
        lines = wanted
    return document


def own_text(files: Sequence[Path], questions: Sequence[str], language: str) -> Exam:
    """The user's files, each under its name, with the user's questions or some that suit many texts; of several, the
    last one is to be thought about.

    Raises ConfigError for a file that is missing, a folder or not UTF-8, and for a text too short to show anything.
    """
    parts = []
    for file in files:
        try:
            parts.append(f"# {file.name}\n\n{file.read_text(encoding='utf-8')}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{file}: cannot be read as UTF-8 text ({error}); name a UTF-8 text file (convert others with iconv)"
            ) from error
    text = "\n\n".join(parts)
    if len(text) < MIN_CHARACTERS:
        raise ConfigError(
            f"the text has {len(text)} characters; the demo needs {MIN_CHARACTERS} to have something to reuse"
        )
    asked = tuple(dict.fromkeys(questions)) or QUESTIONS[language]
    inquiries = tuple(Inquiry(q, None, thinking=i == len(asked) - 1 > 0) for i, q in enumerate(asked))
    return Exam(", ".join(file.name for file in files), text, inquiries)


def _examine(reader: Reader, exam: Exam, max_tokens: int, console: Console) -> Row:
    """A server a round: the first question of the round is its cold one, the second its warm one."""
    longest = max(reader.tokens(exam.turn(inquiry)) for inquiry in exam.inquiries) + MARKUP_TOKENS + max_tokens
    room = min(longest, reader.spec.max_position)
    cold: dict[Inquiry, Asked] = {}
    warm: dict[Inquiry, Asked] = {}
    pairs, peaks, planned = [], [], None
    for number, (first, second) in enumerate(order := list(rounds(exam.inquiries)), 1):
        doing = f"round {number} of {len(order)}: a fresh server (the very first one compiles kernels) reads the text"
        with shown(console, doing), serving(reader.path, room) as server:
            server.ask(FIRST_WORDS, 1, reader.template(False))
            cold[first] = _ask(server, reader, exam, first, max_tokens)
            if second is not None:
                warm[second] = _ask(server, reader, exam, second, max_tokens)
            peaks.append(server.peak_bytes())
            planned = server.planned_bytes()
        for inquiry in (first, second):
            if inquiry in cold and inquiry in warm:
                pairs.append(Pair(inquiry, cold[inquiry], warm[inquiry]))
                console.print(*told(pairs[-1], exam.text, f"{len(pairs)}. "), sep="\n")
    known = [peak for peak in peaks if peak is not None]
    return Row(reader.path.name, tuple(pairs), max(known, default=None), planned)


@contextmanager
def shown(console: Console, doing: str) -> Iterator[None]:
    """What takes a while: a moving line on a terminal; elsewhere a line now, and one each ``PATIENCE`` seconds."""
    if console.is_terminal:
        with console.status(doing):
            yield
        return
    console.print(doing)
    over = threading.Event()
    reminder = threading.Thread(target=remind, args=(console, over.wait), daemon=True)
    reminder.start()
    try:
        yield
    finally:
        over.set()
        reminder.join()


def remind(console: Console, over: Callable[[float], bool]) -> None:
    """A line each time that ``over`` has waited in vain."""
    passed = 0.0
    while not over(PATIENCE):
        passed += PATIENCE
        console.print(f"   ... {passed:.0f} s")


def rounds(inquiries: Sequence[Inquiry]) -> Iterator[tuple[Inquiry, Inquiry | None]]:
    """Which question is asked cold and which one warm behind it: each once either way, never the same one twice of one
    server. A single one comes behind a question that is not shown.
    """
    if len(inquiries) == 1:
        yield Inquiry(FIRST_WORDS, None, thinking=False), inquiries[0]
        yield inquiries[0], None
        return
    for i, inquiry in enumerate(inquiries):
        yield inquiries[i - 1], inquiry


def _ask(server: Server, reader: Reader, exam: Exam, inquiry: Inquiry, max_tokens: int) -> Asked:
    return server.ask(exam.turn(inquiry), max_tokens, reader.template(inquiry.thinking))


def told(pair: Pair, text: str, number: str = "") -> list[Text]:
    """One question's lines for the screen; ``text`` is what it was about."""
    inquiry, cold, warm = pair.inquiry, pair.cold, pair.warm
    thinking = "  (thinking)" if inquiry.thinking else ""
    lines = [Text(f"{number}{inquiry.question}{thinking}", style="bold")]
    lines += [Text(f"   {'the text':10}{_quoted(line)}", style="dim") for line in inquiry.stands]
    if inquiry.expected is not None:
        lines.append(Text(f"   {'expected':10}{inquiry.expected}"))
    if inquiry.thinking:
        lines.append(Text(f"   {'thought':10}{_quoted(warm.thought)}", style="dim"))
    for answer in pair.answers():
        line = Text(f"   {'answer':10}{_quoted(answer)}")
        line.append_text(_judged(answer, inquiry, text))
        if len(pair.answers()) > 1:
            line.append(" when cold" if answer is cold.answer else " when warm")
        lines.append(line)
    lines.append(Text(f"   {'cold':10}first token after {cold.ttft:.2f} s: {_read(cold)}"))
    cached = f"{warm.cached_tokens:,} from the cache"
    lines.append(Text(f"   {'warm':10}first token after {warm.ttft * 1000:.0f} ms: {_read(warm)}, {cached}"))
    return lines


def _judged(answer: str, inquiry: Inquiry, text: str) -> Text:
    """Beside an answer: right or wrong where that is known, else whether what it quotes stands in the text."""
    if inquiry.expected is not None:
        right = answer.strip() == inquiry.expected
        return Text("  right", style="green") if right else Text("  WRONG", style="bold red")
    quotes = [A_QUOTE.fullmatch(part.strip()) for part in re.split("[;；]", answer)]
    values = [quote[1] for quote in quotes if quote]
    if len(values) < len(quotes):
        return Text()
    if all(value in text for value in values):
        return Text("  (these words stand in the text)")
    return Text("  (NOT in the text: made up)", style="bold red")


def _read(asked: Asked) -> str:
    return f"{asked.prompt_tokens - asked.cached_tokens:,} tokens read"


def _quoted(text: str) -> str:
    """An answer on one line: noise is shown as Python writes it."""
    shown = text if text and text.isprintable() else repr(text)
    return shown if len(shown) <= QUOTED else f"{shown[:QUOTED]}..."


def table(rows: Sequence[Row]) -> Table:
    """A column a checkpoint: answers, cold against warm, and memory against the plan."""
    out = Table(title="Medians of the questions")
    out.add_column("")
    for row in rows:
        out.add_column(Text(row.name), justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "right answers": _right,
        "prompt tokens": lambda row: f"{median(pair.warm.prompt_tokens for pair in row.pairs):,.0f}",
        "cold TTFT": lambda row: f"{row.cold_ttft:.2f} s",
        "warm TTFT, another question": lambda row: f"{row.warm_ttft * 1000:.0f} ms",
        "cold : warm": lambda row: f"{row.cold_ttft / row.warm_ttft:.0f}x",
        "cached tokens": lambda row: f"{median(pair.warm.cached_tokens for pair in row.pairs):,.0f}",
        "decode": lambda row: f"{row.decode_rate:.0f} tokens/s" if row.decode_rate else "not known",
        "peak memory of the server": lambda row: _mib(row.peak),
        "planned (an upper bound)": lambda row: _mib(row.planned),
    }
    for label, cell in lines.items():
        out.add_row(label, *(cell(row) for row in rows))
    return out


def _right(row: Row) -> str:
    judged = [pair for pair in row.pairs if pair.inquiry.expected is not None]
    return f"{sum(pair.right for pair in judged)} of {len(judged)}" if judged else "not known"


def verdict(rows: Sequence[Row]) -> Text:
    """The last line: how many answers were right, where that is known."""
    judged = [pair for row in rows for pair in row.pairs if pair.inquiry.expected is not None]
    right = sum(pair.right for pair in judged)
    if not judged:
        return Text("What would be right is not known: the text is your own.")
    if right == len(judged):
        return Text(f"All {right} questions were answered right, cold and warm.", style="green")
    return Text(f"{len(judged) - right} of {len(judged)} questions were answered WRONG.", style="bold red")


def _mib(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**20:,.0f} MiB"
