"""All times of one deployment under one load, and a quick look at them by which a search prunes.

Knows which times belong together; what they mean for a target is ``judging``'s, how they arise is ``timing``'s.
"""

from dataclasses import dataclass, replace

from longread.plan.calibrate import Factors, path_of, phase
from longread.plan.deployment import Deployment, Workload
from longread.plan.estimate import Estimate
from longread.plan.raw import decode_step, prefill_step
from longread.plan.timing import (
    Timing,
    loaded_tpot,
    request_cost,
    stalled_tpot,
    throughput,
    tpot,
    ttft_at_load,
    ttft_cold,
    ttft_warm,
)


@dataclass(frozen=True, slots=True)
class Times:
    """``cold``, ``warm`` (None: nothing was read before): first token alone. ``load``: the mean with all streams busy,
    waiting for a seat included; ``burst``: the last of all at once. ``alone``: between tokens with all streams decoding
    and nothing else; ``steady``: with others' prompts read between; ``stall``: the longest gap, one chunk. ``rate``:
    output tokens/s of the whole hardware. ``reading``: share of the time spent on prompts.
    """

    cold: Timing
    warm: Timing | None
    load: Estimate
    burst: Estimate
    alone: Timing
    steady: Estimate
    stall: Estimate
    rate: Estimate
    reading: float

    @property
    def first(self) -> Timing:
        """The first token of this load's own prompt, alone."""
        return self.cold if self.warm is None else self.warm


def times(d: Deployment, asked: Workload, seats: int, factors: Factors) -> Times:
    """With ``seats`` of the ``asked`` requests running at once and the rest waiting for one of them to end."""
    running = replace(asked, concurrency=min(asked.concurrency, seats))
    streams = max(-(-running.concurrency // d.strategy.replicas), 1)
    context = asked.isl + asked.osl // 2
    cost = request_cost(d, running, factors=factors)
    cold = ttft_cold(d, asked.isl, factors=factors)
    suffix = max(asked.isl - asked.cached, 1)
    warm = ttft_warm(d, asked.isl, suffix, asked.tier, factors=factors) if asked.cached else None
    load, burst = ttft_at_load(d, running, factors=factors, cost=cost, alone=(warm or cold).total)
    rate = throughput(d, running, factors=factors, cost=cost)
    step = tpot(d, streams, context, factors=factors)
    waiting = asked.concurrency - running.concurrency
    if waiting:  # Little: who has no seat waits until as many requests have ended as wait before it
        load, burst = (_later(e, waiting * asked.osl, rate) for e in (load, burst))
    return Times(
        cold,
        warm,
        load,
        burst,
        step,
        loaded_tpot(d, running, factors=factors, cost=cost),
        stalled_tpot(d, streams, context, factors=factors) if streams > 1 else step.total,
        rate,
        cost[0].centre / (cost[0].centre + cost[1].centre),
    )


def _later(e: Estimate, tokens: float, rate: Estimate) -> Estimate:
    return replace(
        e, low=e.low + tokens / rate.high, centre=e.centre + tokens / rate.centre, high=e.high + tokens / rate.low
    )


@dataclass(frozen=True, slots=True)
class Glance:
    """Output tokens/s of the hardware, seconds to a first token alone and between tokens: good to sort by only."""

    rate: float
    first: float
    between: float


def glance(d: Deployment, w: Workload, seats: int, factors: Factors) -> Glance:
    """One chunk in the middle of the prompt stands for all of them, and loads are left out."""
    s = d.strategy
    running = min(w.concurrency, seats)
    streams = max(-(-running // s.replicas), 1)
    new = max(w.isl - w.cached, 1)
    chunk = min(d.chunk, new)
    middle = w.cached + (new - chunk) // 2
    reading = factors.scale(path_of(d, phase(new, w.cached))).centre
    decoding = factors.scale(path_of(d, "decode")).centre
    groups = min(s.dp, streams)
    shared = sum(prefill_step(d, chunk, middle, groups=groups).values()) * new / chunk * reading / s.pp / groups
    alone = sum(prefill_step(d, chunk, middle).values()) * (new / chunk + s.pp - 1) / s.pp * reading
    step = sum(decode_step(d, streams, w.isl + w.osl // 2).values()) * decoding
    seconds = shared + step * max(w.osl - 1, 0) / streams
    return Glance(w.osl * running / streams / seconds, alone, step)
