"""Runs each kind of step before the first request does: kernels get compiled, and what a step costs becomes known.

Knows the model's forward and its state's shape; must not know requests or the cache's books. Nothing stays: slots are
reset when the cache hands them out, and a row is written before it is ever read.
"""

import logging
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longread.engine.runner import Model
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.cost import CostModel, StepCost
from longread.spec.state import PAGE_TOKENS

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64
CONTEXT = 8192  # long enough to tell what a token looks back at, short enough to be there in most caches
LARGE_CHUNK = 1024
ROUNDS = 3
LOOKS = 8192  # of the order of a dense model's; a sparse one's are more, which is learnt

Part = tuple[int, int]  # (tokens, tokens before them)


def warm_up(model: Model, state: Mapping[str, Tensor], num_slots: int) -> None:
    """Run each kind of step once, so that no request pays for compiling kernels: a chunk, one decoding row, two."""
    for lengths in ([WARM_UP_TOKENS], [1], [1, 1][:num_slots]):
        segments = tuple(Segment(i, 0, n, i * n, (i,)) for i, n in enumerate(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])
        _forward(model, state, segments, positions)


def calibrate(
    model: Model,
    state: Mapping[str, Tensor],
    *,
    num_slots: int,
    num_pages: int,
    max_num_batched_tokens: int,
    seconds: float,
) -> CostModel:
    """Measure steps of several sizes and learn from them: for about ``seconds``, since a step that would go beyond is
    left out, beside the smallest two, which always run. What is left out is learnt when requests come.
    """
    end = time.perf_counter() + seconds
    context = min(CONTEXT, num_pages * PAGE_TOKENS)
    small, most = min(WARM_UP_TOKENS, max_num_batched_tokens), min(LARGE_CHUNK, max_num_batched_tokens, context)
    # A busy machine disturbs upwards only, and all else builds on these two.
    decode, chunk = (
        min(_measure(model, state, parts) for _ in range(ROUNDS)) for parts in ([(1, small - 1)], [(small, 0)])
    )
    costs = CostModel(guess(decode, chunk, small))
    kinds: list[list[Part]] = [
        [(1, small - 1)],
        [(small, 0)],
        [(1, context - 1)],
        [(1, small - 1)] * min(num_slots, 4),
        [(small, context - small)],
        [(min(256, most), 0)],
        [(most, 0)],
    ]
    for parts in kinds * ROUNDS:
        work = _work(parts)
        if time.perf_counter() + costs.cost.seconds(*work) <= end:
            costs.observe(*work, _measure(model, state, parts))
    log.info("a step takes %s", told(costs.cost))
    return costs


def guess(decode: float, chunk: float, tokens: int) -> StepCost:
    """From the seconds of one decoding row and of a chunk of ``tokens``: half of the first is the step itself, and
    looking back at ``LOOKS`` tokens costs what a token costs otherwise.
    """
    token = max(chunk - decode / 2, chunk / 4) / tokens
    return StepCost(decode / 2, decode / 2, decode / 2 / LOOKS, 0.0, token, token / LOOKS)


def told(cost: StepCost) -> str:
    """The model in words."""
    return (
        f"{cost.launch * 1e3:.3g} ms, {cost.decode * 1e3:.3g} ms a decoding sequence and "
        f"{cost.context * 1e6:.3g} ms a 1,000 tokens of its context, {cost.token * 1e6:.3g} ms a 1,000 prompt tokens "
        f"and {cost.pair * 1e9:.3g} ms more for each 1,000 tokens before them"
    )


def _work(parts: Sequence[Part]) -> tuple[Part, list[Part]]:
    """As ``StepCost`` counts it."""
    contexts = [prefix + 1 for tokens, prefix in parts if tokens == 1]
    return (len(contexts), sum(contexts)), [part for part in parts if part[0] > 1]


def _measure(model: Model, state: Mapping[str, Tensor], parts: Sequence[Part]) -> float:
    segments: list[Segment] = []
    positions: list[Tensor] = []
    offset = 0
    for slot, (tokens, prefix) in enumerate(parts):
        pages = tuple(range(-(-(prefix + tokens) // PAGE_TOKENS)))  # one after the other's: only times are looked at
        segments.append(Segment(slot, prefix, tokens, offset, pages))
        positions.append(torch.arange(prefix, prefix + tokens))
        offset += tokens
    start = time.perf_counter()
    _forward(model, state, tuple(segments), torch.cat(positions))
    return time.perf_counter() - start


def _forward(model: Model, state: Mapping[str, Tensor], segments: tuple[Segment, ...], positions: Tensor) -> None:
    rows = torch.tensor([segment.offset + segment.length - 1 for segment in segments])
    with torch.inference_mode():
        model.forward(StepInputs(torch.zeros_like(positions), positions, segments, rows), state)
