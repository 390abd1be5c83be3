"""Examination papers: documents of a token length with questions spread over them, from seeds that training never uses.

Knows the reading documents and how to count tokens; knows no models and no chat format.

Seeds: paper ``number`` of length L in the examination ``seed0`` is document 10^12 + seed0 + L * 10^6 + number.
Examinations take 10^12 .. 2^40 - 1 (FIRST_SEED to below training.data.FIRST_SEED), training 2^40 .. 2^62 - 1, the
tokenizer's words come from 0 .. 119: disjoint by construction, and ``paper`` refuses any other seed. With seed0 = 0
that ends at a length of 99,511 tokens. Up to 10^6 papers a length stay apart from those of every other length. Two
examinations of P papers a length share no document if their seed0 differ by P .. 10^6 - P.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from longread.measure.reading import DOMAINS, LANGUAGES, Document, Question, write
from training import data
from training.cells import Asked

FIRST_SEED = 10**12
TURN_TOKENS = 42  # room for one question with its answer and markup, somewhat above the mean
SPARE_TOKENS = 96  # the longest question, with its thought and answer, takes so much more
CLASSES = 11  # ten deciles of depth, and the questions whose answer is nowhere
LINE_TOKENS = 24  # first guess


@dataclass(frozen=True, slots=True)
class Paper:
    """``tokens``: of the document."""

    length: int
    document: Document
    questions: tuple[Question, ...]
    tokens: int

    def asked(self, question: Question, thinking: bool) -> Asked:
        """The cell keys of one question."""
        document = self.document
        return Asked(
            self.length, question.kind, decile(document, question), document.language, document.domain, thinking
        )


def papers(
    tokenizer: Tokenizer, length: int, documents: int, questions: int, seed0: int = 0, turns: int | None = None
) -> Iterator[Paper]:
    """``documents`` papers in turn; see ``paper``."""
    for number in range(documents):
        yield paper(tokenizer, length, number, questions, seed0, turns)


def paper(
    tokenizer: Tokenizer, length: int, number: int, questions: int, seed0: int = 0, turns: int | None = None
) -> Paper:
    """Paper ``number`` of an examination; languages and domains take turns, so that all are asked equally often.

    The document fills ``length`` tokens but for the room of ``turns`` questions one behind the other, by default all.
    """
    seed = FIRST_SEED + seed0 + length * 10**6 + number
    if not FIRST_SEED <= seed < data.FIRST_SEED:
        raise ValueError(
            f"seed {seed} is none of an examination's ({FIRST_SEED} to {data.FIRST_SEED - 1}): length {length:,} takes "
            f"a seed0 from 0 on, below {data.FIRST_SEED - FIRST_SEED - length * 10**6 - number:,}"
        )
    language = LANGUAGES[number % len(LANGUAGES)]
    domain = DOMAINS[number // len(LANGUAGES) % len(DOMAINS)]
    budget = length - SPARE_TOKENS - TURN_TOKENS * (questions if turns is None else turns)
    document, tokens = fitted(tokenizer, seed, budget, language, domain)
    return Paper(length, document, tuple(spread(document, questions, seed, number)), tokens)


def fitted(tokenizer: Tokenizer, seed: int, budget: int, language: str, domain: str) -> tuple[Document, int]:
    """The longest document found that has at most ``budget`` tokens, and how many it has.

    Lines differ in length, so the number of lines is searched: each try corrects the last one's.
    """
    lines = max(4, budget // LINE_TOKENS)
    best: tuple[Document, int] | None = None
    for _ in range(5):
        document = write(seed, lines, language, domain)
        tokens = count_tokens(tokenizer, document)
        if tokens <= budget and (best is None or tokens > best[1]):
            best = document, tokens
        if 0.97 * budget <= tokens <= budget:
            break
        lines = max(4, int(lines * 0.985 * budget / tokens))
    if best is None:
        raise ValueError(f"no document of seed {seed} fits {budget} tokens")
    return best


def count_tokens(tokenizer: Tokenizer, document: Document) -> int:
    """Tokens of a document's lines."""
    encodings = tokenizer.encode_batch_fast([line.text for line in document.lines], add_special_tokens=False)
    return sum(len(encoding) for encoding in encodings)


def decile(document: Document, question: Question) -> int | None:
    """0..9: where in the document the answer (its first line) lies; None where it lies nowhere."""
    return min(9, int(10 * document.depth(question))) if question.lines else None


def spread(document: Document, count: int, seed: int, first: int) -> list[Question]:
    """At most ``count`` of the document's questions, taking turns over the deciles of depth and the absent ones.

    ``first``: the class that begins, so that papers with few questions cover all classes together. A class without
    questions is passed over.
    """
    classes: list[list[Question]] = [[] for _ in range(CLASSES)]
    for question in document.questions(4 * count + 4 * CLASSES, seed):
        where = decile(document, question)
        classes[CLASSES - 1 if where is None else where].append(question)
    chosen: list[Question] = []
    turn = first
    while len(chosen) < count and any(classes):
        waiting = classes[turn % CLASSES]
        if waiting:
            chosen.append(waiting.pop(0))
        turn += 1
    return chosen


def value_tokens(tokenizer: Tokenizer, line: str, question: Question) -> tuple[int, int] | None:
    """Token span of the answer's value within its line's encoding, for a question with one value; None elsewhere."""
    if question.kind not in ("single", "last"):
        return None
    value = question.answer.partition(" (")[0].partition("（")[0]
    begin = line.rfind(value)
    if begin < 0:
        return None
    offsets: Sequence[tuple[int, int]] = tokenizer.encode(line, add_special_tokens=False).offsets
    inside = [i for i, (start, stop) in enumerate(offsets) if start < begin + len(value) and stop > begin]
    return inside[0], inside[-1] + 1
