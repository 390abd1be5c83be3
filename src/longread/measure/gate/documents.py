"""What a gate asks: documents by seed and length, and the questions about them that serve levels 1 to 4.

Knows the generators of texts, not HTTP. One answer serves every level that can read something from it, so a document is
read once. A plan is written into the base, and the candidate is asked from the same plan: same seeds, same lines.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from longread.measure.gate import clauses
from longread.measure.gate.critical import values_of
from longread.measure.reading import Document, Question, write
from longread.measure.workloads import Ask, build
from longread.spec.errors import ConfigError

Style = Literal["plain", "instructed"]
VERSION = 1  # raise when the same seed gives other asks
FORMS = (("en", "contract"), ("zh", "statute"), ("en", "table"), ("zh", "contract"))
DEPTHS = (0.1, 0.35, 0.65, 0.9, 0.2, 0.5, 0.8, 0.0)  # aimed at in turn
SINGLES, PER_KIND = 4, {"multi-key": 1, "multi-value": 1, "absent": 2}
OFFERED = 64  # singles that those near the wanted depths are taken from
CUTS = 8  # places of a document where the next token of its own text is looked at
CLAUSES = 8  # asks about a document of clauses
ANSWER_TOKENS, CLAUSE_TOKENS, COPY_TOKENS = 96, 48, 512
COPIED = 12  # lines that a general model is to repeat: long enough to go astray
OWN = "own"
SET_HERE = ("temperature", "seed", "top_p", "top_k", "n", "logprobs", "top_logprobs", "return_token_ids", "ignore_eos")
RESERVE = 160  # tokens of a length that are left to markup, question and answer
MIN_LENGTH, MIN_LINES = 512, 12


@dataclass(frozen=True, slots=True)
class Paper:
    """One document, by what makes it. ``length``: tokens it was made for; ``source`` "reading", "clauses", or "own": an
    ask of the user's (number ``seed``; no length).
    """

    key: str
    turn: int
    length: int
    source: str
    language: str
    domain: str
    seed: int
    lines: int


@dataclass(frozen=True, slots=True)
class GateAsk:
    """One request. ``messages`` or ``prompt`` (text or ids to go on). ``expected``: the right answer; ``values``: what
    must stand in it; ``critical``: those are values that must not change. ``depth``: where the answer stands, 0..1.
    Of the user's asks: ``judged``: how (Expected.kind), ``alternatives``: as right as ``expected``; ``extra``: fields.
    """

    key: str
    paper: Paper
    kind: str
    levels: frozenset[int]
    max_tokens: int
    messages: tuple[Mapping[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    depth: float | None = None
    expected: str | None = None
    values: tuple[str, ...] = ()
    critical: bool = False
    judged: str | None = None
    alternatives: tuple[str, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Of what is sent."""
        said = json.dumps([self.messages, self.prompt, dict(self.extra)], ensure_ascii=False, sort_keys=True)
        return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Own:
    """The user's own asks, and the fingerprint of all of them."""

    asks: tuple[Ask, ...]
    sha256: str


def read_own(path: Path) -> Own:
    """From a file of ``longread bench workload --output``, or any other that the workload "custom" reads. Raises
    ConfigError.
    """
    asks = tuple(build("custom", {"path": str(path)}).asks)
    for ask in asks:
        if ask.answers:
            raise ConfigError(f"{path}: {ask.key} waits for the answer before it; a gate asks each by itself")
    said = [[a.key, a.messages, a.prompt, a.max_tokens, dict(a.extra), a.expected and asdict(a.expected)] for a in asks]
    text = json.dumps(said, ensure_ascii=False, sort_keys=True)
    return Own(asks, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, whole: the papers in the order of their turns (turn n of every length before turn n + 1).
    ``own_sha256``: of the user's own asks, None: there are none.
    """

    style: Style
    seed: int
    papers: tuple[Paper, ...]
    version: int = VERSION
    own_sha256: str | None = None

    @property
    def turns(self) -> int:
        return max((paper.turn for paper in self.papers), default=-1) + 1

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({paper.length for paper in self.papers if paper.source != OWN}))

    def of_turn(self, turn: int) -> list[Paper]:
        """Its papers, short ones first."""
        return sorted((p for p in self.papers if p.turn == turn), key=lambda p: (p.length, p.key))

    def document(self) -> dict[str, object]:
        """As JSON."""
        return {
            "version": self.version,
            "style": self.style,
            "seed": self.seed,
            "papers": [asdict(p) for p in self.papers],
        }


def make_plan(
    lengths: Sequence[int],
    turns: int,
    style: Style,
    seed: int,
    tokens_per_line: Mapping[tuple[str, str], float],
    own: Own | None = None,
) -> Plan:
    """``turns`` documents of each length. ``tokens_per_line``: measured on the server by (language, domain). ``own``:
    the user's asks, spread over the turns.
    """
    papers = []
    for turn in range(turns):
        for length in lengths:
            language, domain = FORMS[turn % len(FORMS)]
            papers.append(_paper("reading", turn, length, language, domain, seed, tokens_per_line))
            if style == "instructed":
                language = ("en", "zh")[turn % 2]
                papers.append(_paper("clauses", turn, length, language, "clauses", seed, tokens_per_line))
    count = 0 if own is None else len(own.asks)
    papers += [Paper(f"own-{at}", at * turns // count, 0, OWN, "en", OWN, at, 0) for at in range(count)]
    return Plan(style, seed, tuple(papers), own_sha256=None if own is None else own.sha256)


def _paper(
    source: str, turn: int, length: int, language: str, domain: str, seed: int, rates: Mapping[tuple[str, str], float]
) -> Paper:
    lines = max(MIN_LINES, int((length - RESERVE) / rates[language, domain]))
    key = f"{source}-{language}-{domain}-{length}-{turn}"
    drawn = int.from_bytes(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=6).digest())
    return Paper(key, turn, length, source, language, domain, drawn, lines)


def sample(language: str, domain: str, lines: int) -> str:
    """A text of that form, to see how many tokens a line has."""
    if domain == "clauses":
        return clauses.write(0, lines, language)[0]
    return write(0, lines, language, domain).text


def forms(style: Style) -> tuple[tuple[str, str], ...]:
    """All (language, domain) that a plan of that style has."""
    return (*FORMS, ("en", "clauses"), ("zh", "clauses")) if style == "instructed" else FORMS


def asks_of(
    paper: Paper, style: Style, levels: frozenset[int], cuts: bool, own: Own | None = None
) -> Iterator[GateAsk]:
    """All asks about one paper that serve one of ``levels``, in the order in which they are cheapest: what only begins
    the text first. ``cuts``: the server takes texts to go on.
    """
    if paper.source == OWN:
        if own is None:
            raise ValueError(f"{paper.key} without the user's asks")
        made: Iterator[GateAsk] = iter((_own(paper, own.asks[paper.seed]),))
    else:
        made = _clauses(paper) if paper.source == "clauses" else _reading(paper, style, cuts)
    for ask in made:
        if ask.levels & levels:
            yield ask


def _reading(paper: Paper, style: Style, cuts: bool) -> Iterator[GateAsk]:
    document = write(paper.seed, paper.lines, paper.language, paper.domain)
    text = document.text
    if cuts:
        yield from _cuts(paper, text)
    for at, question in enumerate(_chosen(document, paper.turn)):
        absent = question.kind == "absent"
        yield GateAsk(
            f"{paper.key}/{question.kind}-{at}",
            paper,
            question.kind,
            frozenset((1, 2, 3)) if absent else frozenset((1, 2, 3, 4)),
            ANSWER_TOKENS,
            instructed_chat(text, question.text, paper.language, style),
            depth=None if absent else document.depth(question),
            expected=question.answer,
            values=() if absent else values_of(question.answer),
            critical=not absent,
        )
    if style == "instructed":
        yield _copy(paper, [line.text for line in document.lines])


def _chosen(document: Document, turn: int) -> list[Question]:
    """Singles near the depths whose turn it is, and the other kinds as they come."""
    left = [(document.depth(question), question) for question in document.questions(OFFERED, 1, ("single",))]
    chosen = []
    for at in range(min(SINGLES, len(left))):
        aim = DEPTHS[(turn * SINGLES + at) % len(DEPTHS)]
        nearest = min(left, key=lambda pair: abs(pair[0] - aim))
        left.remove(nearest)
        chosen.append(nearest[1])
    for kind, count in PER_KIND.items():
        chosen += document.questions(count, 2, (kind,))
    return chosen


def _cuts(paper: Paper, text: str) -> Iterator[GateAsk]:
    """Beginnings of the text, evenly from the middle to the end: the longest one is as long as the length says."""
    words = [i for i in range(1, len(text)) if text[i].isspace() and not text[i - 1].isspace()]
    places = words if len(words) > 4 * CUTS else list(range(1, len(text)))
    rng = Random(paper.seed)
    for at in range(CUTS):
        low, high = (len(places) * (CUTS + at) // (2 * CUTS), len(places) * (CUTS + at + 1) // (2 * CUTS))
        end = places[low + rng.randrange(max(1, high - low))]
        yield GateAsk(f"{paper.key}/text-{at}", paper, "text", frozenset((1,)), 1, prompt=text[:end])


def _copy(paper: Paper, lines: Sequence[str]) -> GateAsk:
    first = Random(paper.seed).randrange(max(1, len(lines) - COPIED))
    wanted = "".join(lines[first : first + COPIED])
    quoted = lines[first].strip()
    if paper.language == "zh":
        question = f"从“{quoted}”这一行开始，逐字抄写连续的{COPIED}行。"
    else:
        question = f'Copy {COPIED} lines word for word, beginning with the line "{quoted}".'
    messages = ({"role": "user", "content": f"{''.join(lines)}\n{question}"},)
    return GateAsk(
        f"{paper.key}/copy", paper, "copy", frozenset((1, 3)), COPY_TOKENS, messages, expected=wanted, critical=False
    )


def _clauses(paper: Paper) -> Iterator[GateAsk]:
    text, probes = clauses.write(paper.seed, paper.lines, paper.language)
    for at, one in enumerate(probes[:CLAUSES]):
        yield GateAsk(
            f"{paper.key}/{one.kind}-{at}",
            paper,
            one.kind,
            frozenset((1, 2, 3, 4)),
            CLAUSE_TOKENS,
            instructed_chat(text, one.question, paper.language, "instructed"),
            depth=one.line / paper.lines,
            expected=one.value,
            values=(one.value,),
            critical=True,
        )


def _own(paper: Paper, ask: Ask) -> GateAsk:
    expected = ask.expected
    levels = {1} | ({3} if expected is not None else set())
    if expected is not None and expected.kind in ("exact", "contains", "absent"):
        levels.add(2)
    critical = expected is not None and expected.kind == "critical"
    return GateAsk(
        f"{paper.key}/{ask.key}",
        paper,
        ask.kind,
        frozenset(levels | ({4} if critical else set())),
        ask.max_tokens,
        ask.messages,
        ask.prompt,
        expected=None if expected is None else expected.text,
        values=expected.critical if expected is not None else (),
        critical=critical,
        judged=None if expected is None else expected.kind,
        alternatives=() if expected is None else expected.alternatives,
        extra={name: value for name, value in ask.extra.items() if name not in SET_HERE},
    )


def instructed_chat(text: str, question: str, language: str, style: Style) -> tuple[Mapping[str, str], ...]:
    """A question behind a document; "instructed": with what a general model must be told about the answer's form."""
    user = {"role": "user", "content": f"{text}\n{question}"}
    return (user,) if style == "plain" else ({"role": "system", "content": clauses.instruction(language)}, user)
