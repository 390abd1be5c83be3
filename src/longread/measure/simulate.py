"""Simulate a server under a load: the real schedule and cache books on a virtual clock, results by class of request.

Knows arrivals, the virtual engine and what is made of its runs. What is simulated is the engine alone: no network, no
tokenizing, no slower tiers, no refusal of a long queue.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from longread.engine.virtual import Cost, Limits, Run, Totals, VirtualEngine, alone
from longread.measure.arrivals import Arrival
from longread.measure.planned_cost import calibrated
from longread.spec.errors import LongreadError

PERCENTILES = (50, 90, 95, 99)
REPORT_EVERY = 32  # decisions
SAMPLE_TOKENS = 2**26  # of prompts: 1 GB as they wait


class SimulationError(LongreadError):
    """The schedule came to a standstill: requests are live and none of them will ever be granted a token."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds that a request would take with the engine to itself, with the same tokens reused."""

    ttft: float
    e2e: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """``runs`` in order of arrival, each with what it would be ``alone`` (None: it was not served).

    ``seconds``: virtual, from 0 to the last end; ``wall``: real ones that it took.
    """

    runs: tuple[Run, ...]
    alone: tuple[Alone | None, ...]
    totals: Totals
    seconds: float
    wall: float

    @property
    def speed(self) -> float:
        """Virtual seconds a real second."""
        return self.seconds / self.wall

    def of(self, kind: str) -> list[tuple[Run, Alone]]:
        """The served requests of a class."""
        pairs = zip(self.runs, self.alone, strict=True)
        return [(run, single) for run, single in pairs if run.kind == kind and single is not None]

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(run.kind for run in self.runs))


def simulate(
    arrivals: Sequence[Arrival],
    limits: Limits,
    cost: Cost,
    *,
    report: Callable[[int], None] | None = None,
    watch: Callable[[VirtualEngine], None] | None = None,
) -> Simulation:
    """Serve ``arrivals``, which are in order of time, to the last one. ``report``: told now and then how many tokens of
    prompts and answers are done. ``watch``: called after each decision. Raises SimulationError.
    """
    begun = time.perf_counter()
    engine = VirtualEngine(limits, cost, calibrated(cost, limits))
    runs = [
        Run(f"r{i}", each.kind, each.at, each.isl, each.osl, i, each.priority, each.owner)
        for i, each in enumerate(arrivals)
    ]
    at = done = 0
    while at < len(arrivals) or engine.live:
        if not engine.live:
            engine.now = max(engine.now, arrivals[at].at)
        while at < len(arrivals) and arrivals[at].at <= engine.now:
            if not engine.submit(runs[at], arrivals[at].runs()):
                done += arrivals[at].isl + arrivals[at].osl
            at += 1
        if engine.live:
            ended = _step(engine, arrivals[at].at if at < len(arrivals) else None)
            done += sum(run.prompt_tokens + run.output_tokens for run in ended)
            if report is not None and engine.totals.decisions % REPORT_EVERY == 0:
                report(done + sum(run.reached for run in engine.runs()))
            if watch is not None:
                watch(engine)
    single = tuple(_alone(run, limits, cost) for run in runs)
    return Simulation(tuple(runs), single, engine.totals, engine.now, time.perf_counter() - begun)


def _step(engine: VirtualEngine, coming: float | None) -> list[Run]:
    before = engine.totals.steps
    ended = engine.step() if coming is None else engine.step(coming)
    if engine.totals.steps == before and not ended:
        # A step that preempts may grant nothing; the next decision then starts anew. Twice in a row is for ever.
        ended = engine.step() if coming is None else engine.step(coming)
        if engine.totals.steps == before and not ended:
            if coming is None:
                raise SimulationError(f"{engine.live} requests wait at {engine.now:,.1f} s and nothing is granted")
            engine.now = coming
    return ended


def _alone(run: Run, limits: Limits, cost: Cost) -> Alone | None:
    if run.error is not None:
        return None
    return Alone(*alone(limits, cost, run.prompt_tokens, run.output_tokens, run.cached))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of ``count`` values; percentiles are nearest-rank, so each is a value that somebody had."""

    count: int
    mean: float
    most: float
    percentiles: dict[int, float]


def spread(values: Sequence[tuple[float, int]]) -> Spread | None:
    """Of (value, how often); None of nothing."""
    ordered = sorted(values)
    count = sum(weight for _, weight in ordered)
    if not count:
        return None
    found: dict[int, float] = {}
    wanted = {p: -(-count * p // 100) for p in PERCENTILES}
    below = 0
    for value, weight in ordered:
        below += weight
        for p, rank in wanted.items():
            if p not in found and below >= rank:
                found[p] = value
    mean = sum(value * weight for value, weight in ordered) / count
    return Spread(count, mean, ordered[-1][0], found)


def plain(values: Sequence[float]) -> Spread | None:
    return spread([(value, 1) for value in values])


@dataclass(frozen=True, slots=True)
class ClassResult:
    """One class. ``slower``: TTFT over TTFT alone, and ``stretched``: E2E over E2E alone. ``gaps``: between tokens, of
    all its requests together. ``refused``: by the reason's text. ``good``: share that met the targets, None without.
    """

    kind: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    queue: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    gaps: Spread | None
    e2e: Spread | None
    slower: Spread | None
    stretched: Spread | None
    refused: dict[str, int]
    good: float | None


def sustained(
    arrivals: Sequence[Arrival], limits: Limits, cost: Cost, *, report: Callable[[int], None] | None = None
) -> float:
    """Requests/s that are served while all of ``arrivals`` wait from the start: the load that is called 100 %. Of very
    many or very long ones the first ``SAMPLE_TOKENS``, since what waits takes memory.
    """
    tokens = accumulate(each.isl for each in arrivals)
    together = [replace(each, at=0.0) for each, sum_ in zip(arrivals, tokens, strict=True) if sum_ <= SAMPLE_TOKENS]
    saturated = simulate(together, limits, cost, report=report)
    return sum(run.error is None for run in saturated.runs) / saturated.seconds if saturated.seconds else 0.0


def by_class(simulation: Simulation, targets: dict[str, float] | None = None) -> list[ClassResult]:
    """``targets``: seconds by "ttft" and "tpot"; a refused request meets none."""
    return [_class(simulation, kind, targets or {}) for kind in simulation.kinds]


def _class(simulation: Simulation, kind: str, targets: dict[str, float]) -> ClassResult:
    served = simulation.of(kind)
    everyone = [run for run in simulation.runs if run.kind == kind]
    refused: dict[str, int] = {}
    for run in everyone:
        if run.error is not None:
            refused[run.error] = refused.get(run.error, 0) + 1
    runs = [run for run, _ in served]
    return ClassResult(
        kind,
        len(everyone),
        sum(run.prompt_tokens for run in runs),
        sum(run.cached for run in runs),
        sum(max(run.computed - (run.prompt_tokens - run.cached), 0) for run in runs),
        sum(run.outputs for run in runs),
        sum(run.preemptions for run in runs),
        plain([run.queue for run in runs]),
        plain([run.ttft for run in runs]),
        plain([run.tpot for run in runs if run.tpot is not None]),
        spread(simulation.totals.gaps.get(kind, [])),
        plain([run.e2e for run in runs]),
        plain([run.ttft / single.ttft for run, single in served]),
        plain([run.e2e / single.e2e for run, single in served]),
        refused,
        sum(_meets(run, targets) for run in runs) / len(everyone) if targets else None,
    )


def _meets(run: Run, targets: dict[str, float]) -> bool:
    tpot = run.tpot
    return run.ttft <= targets.get("ttft", run.ttft) and (tpot is None or tpot <= targets.get("tpot", tpot))
