"""Runs each kind of step before the first request does: kernels get compiled, and what a step costs becomes known.

Knows the model's forward and its state's shape; must not know requests or the cache's books. Nothing stays: slots are
reset when the cache hands them out, and a row is written before it is ever read.
"""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.engine.runner import Model
from longread.models.inputs import StepInputs
from longread.plan.figures import seconds
from longread.spec.batch import Segment
from longread.spec.cost import CostModel, StepCost
from longread.spec.state import PAGE_TOKENS
from longread.spec.step_target import Curve, StepTarget, quick_step

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64
SIZES = (32, 64, 128, 256, 512)  # of chunks: where reading becomes quick lies among them on any machine seen so far
CONTEXT = 8192  # long enough to tell what a token looks back at, short enough to be there in most caches
DEEP = 16384  # tokens before a chunk in the middle of a book
DEEP_SIZES = (64, 128, 256, 512)
ROUNDS = 4
RISING = 1.04  # times the rate of half as large a chunk: then a still larger one may read faster
LOOKS = 8192  # of the order of a dense model's; a sparse one's are more, which is learnt
QUIET = 1.3  # times the least of a kind's times is its second least on a machine that does nothing else
EXACT = 0.35  # of a step's time may be missing in what the fit says of a step that it was made from

Part = tuple[int, int]  # (tokens, tokens before them)
Kind = tuple[Part, ...]  # the parts of one step


@dataclass(frozen=True, slots=True)
class Calibration:
    """What steps cost, and how long one should take where the user does not say."""

    costs: CostModel
    target: StepTarget


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
) -> Calibration:
    """Measure steps of several sizes and learn from them: for about ``seconds``, since a step that would go beyond is
    left out, beside the smallest two, which always run. What is left out is learnt when requests come.

    A busy machine disturbs upwards only, so that of each kind the least time counts, of rounds that lie apart; what is
    cold at first (caches, memory never touched) falls out in the same way. Where even the two least of a kind differ
    by much, or the fit does not meet what it was made from, the costs are not ``known`` before real steps were seen.
    """
    end = time.perf_counter() + seconds
    context, most = min(CONTEXT, num_pages * PAGE_TOKENS), max_num_batched_tokens
    small = min(WARM_UP_TOKENS, most)
    decode: Kind = ((1, small - 1),)
    chunk: Kind = ((small, 0),)
    lone: list[Kind] = [((min(n, most, context), 0),) for n in SIZES]
    room = min(DEEP, num_pages * PAGE_TOKENS)
    deep: list[Kind] = [((n, room - n),) for n in DEEP_SIZES if n <= min(most, room // 2)]
    kinds = dict.fromkeys([decode, chunk, ((1, context - 1),), decode * min(num_slots, 4), *lone, *deep])
    taken: dict[Kind, list[float]] = {
        kind: [_measure(model, state, kind) for _ in range(ROUNDS - 1)] for kind in (decode, chunk)
    }
    first = guess(min(taken[decode]), min(taken[chunk]), small)
    for _ in range(ROUNDS):
        for kind in sorted(kinds, key=lambda kind: first.seconds(*_work(kind))):  # what is cheap before time is up
            times = taken.setdefault(kind, [])
            if time.perf_counter() + (min(times) if times else first.seconds(*_work(kind))) <= end:
                times.append(_measure(model, state, kind))
    lone += _larger(model, state, lone, taken, min(most, context), end)
    least = {kind: min(times) for kind, times in taken.items() if times}
    costs = CostModel(first)
    for _ in range(ROUNDS):  # the prior, which is made from two of them, counts little beside that
        for kind, best in least.items():
            costs.observe(*_work(kind), best)
    sure = _quiet(taken) and _exact(costs.cost, least)
    if not sure:
        costs.doubt()
    target = quick_step([_curve(least, lone), _curve(least, deep)], sure)
    log.info(
        "a step takes %s%s", told(costs.cost), "" if sure else "; measured on a busy machine, so not told to anyone"
    )
    return Calibration(costs, target)


def _larger(
    model: Model,
    state: Mapping[str, Tensor],
    lone: Sequence[Kind],
    taken: dict[Kind, list[float]],
    most: int,
    end: float,
) -> list[Kind]:
    """Measure ever larger chunks as long as that reads faster: where starting a step takes long, the best rate is far
    beyond what fills a CPU. Writes ``taken``; returns the kinds.
    """
    found: list[Kind] = []
    before, last = lone[-2], lone[-1]
    while taken.get(before) and taken.get(last):
        size, seconds = last[0][0], min(taken[last])
        rising = size / seconds > RISING * before[0][0] / min(taken[before])
        if not rising or 2 * size > most or time.perf_counter() + 4 * seconds > end:
            break
        before, last = last, ((2 * size, 0),)
        taken[last] = [_measure(model, state, last) for _ in range(2)]
        found.append(last)
    return found


def _curve(least: Mapping[Kind, float], kinds: Sequence[Kind]) -> Curve:
    """What was measured of these kinds of one chunk, by tokens."""
    return sorted({kind[0][0]: least[kind] for kind in kinds if kind in least}.items())


def _quiet(taken: Mapping[Kind, Sequence[float]]) -> bool:
    """Whether most kinds were measured more than once, and their least times met twice."""
    ratios = [second / first for first, second, *_ in (sorted(times) for times in taken.values() if len(times) > 1)]
    return len(ratios) > len(taken) // 2 and statistics.median(ratios) <= QUIET


def _exact(cost: StepCost, least: Mapping[Kind, float]) -> bool:
    """Whether a step costs about what it took."""
    return statistics.median(abs(cost.seconds(*_work(kind)) / best - 1) for kind, best in least.items()) <= EXACT


def guess(decode: float, chunk: float, tokens: int) -> StepCost:
    """From the seconds of one decoding row and of a chunk of ``tokens``: half of the first is the step itself, and
    looking back at ``LOOKS`` tokens costs what a token costs otherwise.
    """
    token = max(chunk - decode / 2, chunk / 4) / tokens
    look = decode / 2 / LOOKS
    return StepCost(decode / 2, decode / 2, look, 0.0, token, token / LOOKS, look)


def told(cost: StepCost) -> str:
    """The model in words."""
    return (
        f"{seconds(cost.launch)}, {seconds(cost.decode)} a decoding sequence and {seconds(cost.context * 1e3)} a 1,000 "
        f"tokens of its context, {seconds(cost.token * 1e3)} a 1,000 prompt tokens and {seconds(cost.pair * 1e6)} more "
        f"for each 1,000 tokens before them, {seconds(cost.prefix * 1e3)} a chunk for each 1,000 before it"
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
