"""Examination papers as rows of tokens with the positions of every answer, in batches of one shape.

Knows the chat layout through ``training.data``; knows no models. Worker processes import this module, not the program.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from longread.measure.reading import Question
from training.cells import Asked
from training.data import ANSWER, encode, fitting, render
from training.exam import Paper, paper, value_tokens
from training.tokenizer import EOS, PAD, load

PREFIX = 2  # BOS and the user's mark stand in front of the document
BATCH_TOKENS = 65536


@dataclass(frozen=True, slots=True)
class Row:
    """One tokenised conversation. Of each question: ``targets``, the indices that the model has to predict;
    ``values``, the span of the answer's value within the document, None where it is not one; ``starts``, the index of
    the answer's first token, behind its thought.
    """

    ids: list[int]
    document: tuple[int, int]
    asked: tuple[Asked, ...]
    targets: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, int] | None, ...]
    starts: tuple[int, ...]
    facts: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one length. ``row``, ``position``, ``question``: one entry a target, questions numbered in the batch."""

    rows: tuple[Row, ...]
    ids: Tensor
    row: Tensor
    position: Tensor
    question: Tensor

    @property
    def asked(self) -> list[Asked]:
        return [asked for row in self.rows for asked in row.asked]


@dataclass(frozen=True, slots=True)
class Exam(Dataset[Row]):
    """The rows of one length and mode as a data set: row k is the same whoever makes it. ``values``: find the values'
    spans, which costs as much again as the document.
    """

    length: int
    documents: int
    turns: int
    thinking: bool
    seed0: int = 0
    values: bool = False
    tokenizer: Tokenizer = field(default_factory=load)

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < self.documents:
            raise IndexError(number)
        exam = paper(self.tokenizer, self.length, number, self.turns, self.seed0)
        return row_of(exam, self.thinking, self.tokenizer, self.values)

    @property
    def rows(self) -> int:
        """Rows of a batch, about ``BATCH_TOKENS`` tokens."""
        return max(1, min(self.documents, BATCH_TOKENS // self.length))


def row_of(exam: Paper, thinking: bool, tokenizer: Tokenizer, values: bool = False) -> Row:
    """Tokenise a paper; questions that do not fit its length are left out, the last ones first.

    With thinking on the thoughts of earlier turns are kept (V4's ``drop_thinking`` false), so that every turn has one.
    """
    encoded = encode(exam.document, exam.questions, tokenizer)
    count = fitting(encoded, exam.length, thinking, keep=True)
    if not count:
        raise ValueError(f"a document of {len(encoded.document)} tokens leaves no room for a question in {exam.length}")
    made = render(encoded, count, thinking, tokenizer, keep=True)
    targets = turns_of(made.ids, made.weights)
    if len(targets) != count:
        raise ValueError(f"{count} questions, but {len(targets)} answers in the row")
    questions = exam.questions[:count]
    return Row(
        made.ids,
        (PREFIX, PREFIX + len(encoded.document)),
        tuple(exam.asked(question, thinking) for question in questions),
        tuple(targets),
        _value_spans(exam, questions, tokenizer) if values else (None,) * count,
        tuple(start for start, _, _ in made.answers),
        exam.document.facts,
    )


def turns_of(ids: Sequence[int], weights: Sequence[int]) -> list[tuple[int, ...]]:
    """For each turn the indices of what the model writes: all that is weighed ``ANSWER`` up to the end of the turn."""
    turns: list[tuple[int, ...]] = []
    open_turn: list[int] = []
    for i, weight in enumerate(weights):
        if weight == ANSWER:
            open_turn.append(i)
            if ids[i] == EOS:
                turns.append(tuple(open_turn))
                open_turn = []
    return turns


def _value_spans(
    exam: Paper, questions: Sequence[Question], tokenizer: Tokenizer
) -> tuple[tuple[int, int] | None, ...]:
    """Where in the row the value of each answer stands; of several lines about it, the last."""
    lines = [line.text for line in exam.document.lines]
    sizes = (len(encoding) for encoding in tokenizer.encode_batch_fast(lines, add_special_tokens=False))
    begins = list(accumulate(sizes, initial=PREFIX))
    spans: list[tuple[int, int] | None] = []
    for question in questions:
        span = value_tokens(tokenizer, lines[question.lines[-1]], question) if question.lines else None
        spans.append(
            None if span is None else (begins[question.lines[-1]] + span[0], begins[question.lines[-1]] + span[1])
        )
    return tuple(spans)


def collate(rows: Sequence[Row], length: int, count: int) -> Batch:
    """Right-padded ids [count, length], empty rows behind the given ones, and the flat list of targets."""
    ids = torch.full((count, length), PAD, dtype=torch.int64)
    flat: list[tuple[int, int, int]] = []
    question = 0
    for r, row in enumerate(rows):
        ids[r, : len(row.ids)] = torch.tensor(row.ids)
        for targets in row.targets:
            flat.extend((r, position, question) for position in targets)
            question += 1
    row_index, position, number = (torch.tensor(part, dtype=torch.int64) for part in zip(*flat, strict=True))
    return Batch(tuple(rows), ids, row_index, position, number)


def batches(exam: Exam, workers: int) -> Iterator[Batch]:
    """All of one shape, since another shape would compile the kernels anew; made by ``workers`` processes."""
    together = _Collate(exam.length, exam.rows)
    # Forked from a server that never saw the GPU or this process's threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    loader: DataLoader[Row] = DataLoader(
        exam, exam.rows, num_workers=workers, collate_fn=together, multiprocessing_context=context if workers else None
    )
    yield from loader


@dataclass(frozen=True, slots=True)
class _Collate:
    """``collate`` for one shape, in a form that a worker process can be sent."""

    length: int
    count: int

    def __call__(self, rows: Sequence[Row]) -> Batch:
        return collate(rows, self.length, self.count)
