"""Training batches: conversations about synthetic documents, as token ids with a weight for every target.

Knows the chat layout of DeepSeek-V3.1 and V4 (the two agree on these conversations; a test holds both to the server's
encoders) and how to fill a row of a given length. Knows nothing of models. Every batch is a function of its seed, its
length and its number alone, so any number of worker processes gives the same stream.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from longread.measure.reading import DOMAINS, Document, Question, write
from training.encoder import encoder
from training.tokenizer import BOS, EOS, PAD, load

IGNORED, ANSWER, DOCUMENT = 0, 1, 2  # weights[i] is about predicting ids[i]
FIRST_SEED = 1 << 40  # documents of training have seeds from here on; evaluation takes smaller ones
LEAST_LENGTH = 160
MIN_QUESTIONS, TOKENS_A_QUESTION = 3, 48
MAX_QUESTIONS, MANY_QUESTIONS, LONG = 48, 96, 16384  # long rows ask more, so that they teach more than reading
THINKING = 15  # per cent of the rows
# Means of the tokens that a line takes and that a question with its answer takes; they only have to be near.
LINE = {
    "en": {"contract": 17.7, "statute": 18.1, "log": 14.4, "code": 13.2, "table": 14.8},
    "zh": {"contract": 17.2, "statute": 16.3, "log": 16.0, "code": 14.9, "table": 17.6},
}
TURN = 25.0


class Row(NamedTuple):
    """One conversation. ``answers``: for each question the span ``ids[start:end]`` of its answer with the EOS behind
    it (not its thought), and the question.
    """

    ids: list[int]
    weights: list[int]
    answers: list[tuple[int, int, Question]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document and its questions as ids; ``turns``: question, thought and answer of each."""

    document: list[int]
    questions: Sequence[Question]
    turns: list[tuple[list[int], list[int], list[int]]]


def encode(document: Document, questions: Sequence[Question], tokenizer: Tokenizer) -> Encoded:
    """Ids without markup. The document has the newline behind it that parts it from the first question: with the last
    line's end it may be one token.
    """
    ids = encoder(tokenizer)
    turns = [(ids(question.text), ids(question.thought), ids(question.answer)) for question in questions]
    return Encoded(ids(document.text + "\n"), questions, turns)


def marks(tokenizer: Tokenizer) -> list[int]:
    """The ids of the chat's markup: user, assistant, thinking opened and closed. Raises ValueError without them."""
    ids = [tokenizer.token_to_id(name) for name in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")]
    found = [i for i in ids if i is not None]
    if len(found) < len(ids):
        raise ValueError("the tokenizer lacks the chat's markup")
    return found


def render(encoded: Encoded, count: int, thinking: bool, tokenizer: Tokenizer, keep: bool = False) -> Row:
    """The conversation about the first ``count`` questions; ``thinking`` and ``keep`` as in ``conversation``."""
    user, assistant, open_thought, close_thought = marks(tokenizer)
    ids, weights = [BOS, user, *encoded.document], [IGNORED, IGNORED] + [DOCUMENT] * len(encoded.document)
    answers: list[tuple[int, int, Question]] = []
    for i, (question, thought, answer) in enumerate(encoded.turns[:count]):
        if i:
            ids.append(user)
        ids += question
        ids.append(assistant)
        if thinking and (keep or i == count - 1):
            ids.append(open_thought)
            weights += [IGNORED] * (len(ids) - len(weights))
            ids += thought
        else:
            weights += [IGNORED] * (len(ids) + 1 - len(weights))
        ids.append(close_thought)
        start = len(ids)
        ids += answer
        ids.append(EOS)
        weights += [ANSWER] * (len(ids) - len(weights))
        answers.append((start, len(ids), encoded.questions[i]))
    return Row(ids, weights, answers)


def conversation(
    document: Document, questions: Sequence[Question], thinking: bool, tokenizer: Tokenizer, keep: bool = False
) -> tuple[list[int], list[int]]:
    """Ids and weights of a whole conversation, every answer given. ``thinking``: the last turn has its thought, the
    earlier ones are as the chat format leaves them, without; ``keep``: all have it (V4's ``drop_thinking`` false).
    """
    row = render(encode(document, questions, tokenizer), len(questions), thinking, tokenizer, keep)
    return row.ids, row.weights


def fitting(encoded: Encoded, length: int, thinking: bool, keep: bool) -> int:
    """How many questions fit into ``length`` tokens with the document."""
    used, count = 2 + len(encoded.document), 0
    for question, thought, answer in encoded.turns:
        turn = len(question) + len(answer) + 3  # assistant, end of thinking, EOS
        last = 1 + len(thought) if thinking else 0
        if used + turn + last > length:
            break
        # Every turn but the first also has a user mark, counted here for the next one.
        used += turn + 1 + (last if keep else 0)
        count += 1
    return count


def sample(length: int, rng: random.Random, tokenizer: Tokenizer) -> Row:
    """One conversation of at most ``length`` tokens, nearly filled: few lines too many cost questions, many another
    document of fewer lines.
    """
    language = "zh" if rng.randrange(10) < 3 else "en"
    domain = rng.choice(DOMAINS)
    thinking = rng.randrange(100) < THINKING
    keep = rng.randrange(3) > 0
    most = MANY_QUESTIONS if length >= LONG else MAX_QUESTIONS
    wanted = min(most, max(MIN_QUESTIONS, length // TOKENS_A_QUESTION))
    least = max(MIN_QUESTIONS, wanted * 2 // 3)
    lines = max(4, int((length - 2 - wanted * TURN) / LINE[language][domain]))
    while True:
        document = write(rng.randrange(FIRST_SEED, 1 << 62), lines, language, domain)
        encoded = encode(document, document.questions(wanted, seed=rng.randrange(1 << 32)), tokenizer)
        count = fitting(encoded, length, thinking, keep)
        if count >= min(least, len(encoded.turns)) and count:
            return render(encoded, count, thinking, tokenizer, keep)
        if lines <= 4:
            least = 1
            wanted = MIN_QUESTIONS
        lines = max(4, min(lines - 1, lines * 15 // 16))


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """An endless stream for ``DataLoader(..., num_workers=N, batch_size=None)``: ids int32 [rows, length], padded on
    the right, and weights uint8 [rows, length]. Of N workers each makes every N-th batch from ``first`` on, so the
    loader, which takes them in turn, yields batch first, first + 1, … whatever N is. Raises ValueError for rows too
    short to hold a document.
    """

    def __init__(self, length: int, rows: int, seed: int, first: int = 0):
        super().__init__()
        if length < LEAST_LENGTH:
            raise ValueError(f"rows need at least {LEAST_LENGTH} tokens for a document and a question, got {length}")
        self.length = length
        self.rows = rows
        self.seed = seed
        self.first = first

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        number = self.first + (0 if info is None else info.id)
        while True:
            yield self.batch(number)
            number += step

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The ``number``-th batch of the stream."""
        tokenizer = load()  # here, so that each worker process has its own
        rng = random.Random(f"{self.seed}/{self.length}/{number}")
        ids = np.full((self.rows, self.length), PAD, np.int32)
        weights = np.zeros((self.rows, self.length), np.uint8)
        for i in range(self.rows):
            row = sample(self.length, rng, tokenizer)
            ids[i, : len(row.ids)] = row.ids
            weights[i, : len(row.ids)] = row.weights
        return torch.from_numpy(ids), torch.from_numpy(weights)
