"""Batches with their training positions chosen, made by worker processes and handed to the loop in a fixed order.

Knows how a row's target weights (0 nothing, 1 answer, 2 document) become a fixed number of positions, so that every
step of one row length has the same shapes. Knows nothing of models.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.stages import Stage

INDEX_QUERIES = 128
_ANSWER_TOKENS_A_ROW = 1152
_PREFETCH = 2  # per worker: 14 of them keep 28 batches of 0.7 MB in shared memory


class Targets(NamedTuple):
    """Chosen positions of one batch, flat over [rows * length]: the hidden state at `at` predicts `ids`."""

    at: Tensor
    """int32 [P]"""
    ids: Tensor
    """int32 [P]: the token that follows"""
    weights: Tensor
    """float32 [P]: 1, or 0 where the fixed number was not filled"""


class Batch(NamedTuple):
    ids: Tensor
    """int32 [rows, length]"""
    answers: Targets
    spans: Tensor
    """int32 [P of answers]: which answer of the batch the position belongs to, below P"""
    document: Targets
    queries: Tensor
    """int32 [rows, S], increasing: where the indexer is taught"""


Source = Callable[[int, int, int, int], "IterableDataset[tuple[Tensor, Tensor]]"]
"""(length, rows, seed, first) -> batches (ids int32 [rows, length], weights uint8 [rows, length])"""


def _targets(ids: Tensor, candidates: Tensor, count: int, generator: torch.Generator) -> Targets:
    """`count` of the candidate positions (all, padded with weight 0, where there are fewer), in increasing order."""
    if len(candidates) > count:
        chosen = torch.randperm(len(candidates), generator=generator)[:count]
        candidates = candidates[chosen].sort().values
    at = torch.zeros(count, dtype=torch.int64)
    at[: len(candidates)] = candidates
    weights = torch.zeros(count)
    weights[: len(candidates)] = 1.0
    return Targets(at.int(), ids.flatten()[at + 1], weights)


def choose(ids: Tensor, weights: Tensor, generator: torch.Generator) -> Batch:
    """Choose the positions of a batch: the answers' targets, an eighth of the document's, and the index queries.

    Index queries are positions before answer tokens first, then any position of the row, then padding.
    """
    rows, length = ids.shape
    # Position i of a row predicts token i + 1; the last one predicts nothing.
    ahead = torch.zeros_like(weights)
    ahead[:, :-1] = weights[:, 1:]
    asked = ahead == 1
    starts = asked.clone()
    starts[:, 1:] &= ~asked[:, :-1]
    answers = _targets(ids, asked.flatten().nonzero()[:, 0], rows * min(length // 4, _ANSWER_TOKENS_A_ROW), generator)
    spans = (starts.flatten().cumsum(0) - 1).clamp(min=0).int()[answers.at]
    document = _targets(ids, (ahead == 2).flatten().nonzero()[:, 0], rows * length // 8, generator)
    # A later nonzero weight in the row makes a position a real one.
    real = (ahead != 0).flip(1).cumsum(1).flip(1) > 0
    order = torch.rand(rows, length, generator=generator) + asked + real
    queries = order.topk(min(INDEX_QUERIES, length), dim=1).indices.sort(1).values.int()
    return Batch(ids, answers, spans, document, queries)


class _Chosen(IterableDataset[Batch]):
    """The batches first, first + 1, ... of one stream; worker w of N makes every N-th from first + w."""

    def __init__(self, source: Source, length: int, rows: int, seed: int, first: int) -> None:
        super().__init__()
        self._batches = source(length, rows, seed, first)
        self._seed, self._length, self._first = seed, length, first

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        for turn, (ids, weights) in enumerate(self._batches):
            index = self._first + worker + turn * workers
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + self._length) * 1_000_003 + index)
            yield choose(ids, weights, generator)


class Feed:
    """The open loaders by (stage, length), and how many batches of each stream the loop has taken.

    Each (stage, length) is a stream of its own, so the loaders of the next stage can start while this one still draws.
    """

    def __init__(
        self,
        source: Source,
        stages: tuple[Stage, ...],
        *,
        seed: int,
        tokens: int,
        workers: int,
        pin: bool,
        taken: Mapping[tuple[int, int], int],
    ) -> None:
        self._source, self._stages = source, stages
        self._seed, self._tokens, self._workers, self._pin = seed, tokens, workers, pin
        self._open: dict[tuple[int, int], Iterator[Batch]] = {}
        # Workers are forked from a server that never saw the GPU or this process's threads, and has all imports done.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, source.__module__])
        self.taken = dict(taken)

    def rows(self, length: int) -> int:
        return max(1, self._tokens // length)

    def open(self, stage: int) -> None:
        """Start the loaders of a stage that are not running yet; returns at once, the workers fill their queues."""
        for length, weight in self._stages[stage].lengths.items():
            if (stage, length) in self._open:
                continue
            total = sum(self._stages[stage].lengths.values())
            workers = max(1, round(self._workers * weight / total)) if self._workers else 0
            first = self.taken.setdefault((stage, length), 0)
            stream = _Chosen(self._source, length, self.rows(length), self._seed * 1000 + stage, first)
            loader = DataLoader(
                stream,
                batch_size=None,
                num_workers=workers,
                pin_memory=self._pin,
                prefetch_factor=_PREFETCH if workers else None,
                multiprocessing_context=self._context if workers else None,
            )
            self._open[stage, length] = iter(loader)

    def take(self, stage: int, length: int) -> Batch:
        """The next batch of a stream; waits for its worker."""
        batch = next(self._open[stage, length])
        self.taken[stage, length] += 1
        return batch

    def close(self, before: int | None = None) -> None:
        """Stop the loaders of the stages before one (all of them without)."""
        for key in [key for key in self._open if before is None or key[0] < before]:
            # An iterator ends its workers when it is dropped.
            del self._open[key]
