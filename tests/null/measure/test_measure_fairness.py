"""Nobody waits for somebody else's book: the schedule's promises, simulated at lengths that no CPU can run.

Times are the planner's for V4-Flash on 2 x H20-96 in the first half, made up in the second, where traces are random.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from virtual_loads import fresh, small, two_h20

from longread.engine.policy import BYPASS_FACTORS, WEIGHTS
from longread.engine.scheduler import BYPASS_LIMIT
from longread.engine.virtual import Cost, Limits, Run
from longread.measure.arrivals import Arrival
from longread.measure.planned_cost import PlannedCost, planned_step_target
from longread.measure.simulate import Simulation, by_class, simulate, sustained
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import class_of
from longread.spec.step_target import StepTarget

STEP = Slo(tpot=0.2)  # what a step beside decodes may take; a chunk of 8,192 tokens takes 1 to 5 s there
GAP = 0.5  # seconds between two tokens of an answer that nobody promised anything for
LONG, SHORT = 2**20 - 64, 8192
LOAD = 0.8
# Twice the mean stretch of processor sharing, 1 / (1 - load): no class's request waits longer, in times of TTFT alone.
STRETCH = 2 / (1 - LOAD)


def _p99(simulation: Simulation, kind: str) -> float:
    (found,) = [each for each in by_class(simulation) if each.kind == kind]
    assert found.ttft is not None
    return found.ttft.percentiles[99]


def _shorts(at: float) -> list[Arrival]:
    return [fresh(at, SHORT, 64, "short") for _ in range(8)]


def _served(by: str) -> tuple[Limits, PlannedCost]:
    """``by`` default: as without any option; target: with ``STEP``; any: with steps as large as the budget."""
    limits, cost = two_h20()
    slo = STEP if by == "target" else None
    return replace(limits, slo=slo, step_target=None if by == "any" else planned_step_target(cost, limits)), cost


def test_the_default_step_is_as_short_as_the_cards_allow() -> None:
    """Launches take 0.095 s whatever is in them: below that nothing is gained."""
    limits, cost = two_h20()
    found = planned_step_target(cost, limits)
    assert found.seconds is not None and 0.1 < found.seconds < 0.25
    assert "within 10% of the best rate" in found.reason


@pytest.mark.parametrize(
    ("at", "by"), [(0.0, "any"), (0.0, "default"), (200.0, "default"), (0.0, "target"), (200.0, "target")]
)
def test_eight_short_prompts_beside_a_million_tokens(at: float, by: str) -> None:
    """Together with the book's arrival, and (at 200 s) when more than half of it is read and its chunks are slow."""
    limits, cost = _served(by)
    book = fresh(0.0, LONG, 64, "book")
    by_themselves = _p99(simulate(_shorts(at), limits, cost), "short")
    done = simulate([book, *_shorts(at)], limits, cost)
    assert _p99(done, "short") <= 2 * by_themselves
    long, single = done.runs[0], done.alone[0]
    assert single is not None
    assert long.e2e <= 1.25 * single.e2e
    if by != "any":
        assert max(run.longest_gap for run in done.runs) <= (GAP if by == "default" else 1.3 * (STEP.tpot or 0))


def test_what_short_steps_cost_a_book_that_nobody_comes_beside() -> None:
    limits, cost = _served("default")
    (run,), (single,) = (done := simulate([fresh(0.0, LONG, 64, "book")], limits, cost)).runs, done.alone
    assert single is not None and run.ttft <= 1.2 * single.ttft
    (run,), (single,) = (done := simulate([fresh(0.0, LONG // 8, 64, "book")], limits, cost)).runs, done.alone
    assert single is not None and run.ttft <= 1.15 * single.ttft


class Wrong:
    """The planner's times off by a factor, and each step by some random part more."""

    def __init__(self, cost: Cost, factor: float, noise: float):
        self.cost, self.factor, self.noise, self.draw = cost, factor, noise, random.Random(1)

    def seconds(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]] = ()) -> float:
        return self.cost.seconds(decodes, chunks) * self.factor * (1 + self.noise * self.draw.uniform(-1, 1))


@pytest.mark.parametrize(("factor", "noise"), [(0.3, 0.0), (3.4, 0.0), (1.0, 0.4)])
def test_the_bounds_do_not_hang_on_the_planners_times(factor: float, noise: float) -> None:
    """At both ends of the planner's interval, and with steps that no model foresees."""
    limits, planned = two_h20()
    limits, cost, at = replace(limits, slo=STEP), Wrong(planned, factor, noise), 200 * factor
    by_themselves = _p99(simulate(_shorts(at), limits, cost), "short")
    done = simulate([fresh(0.0, LONG, 64, "book"), *_shorts(at)], limits, cost)
    assert _p99(done, "short") <= 2 * by_themselves
    assert done.alone[0] is not None
    assert done.runs[0].e2e <= 1.25 * done.alone[0].e2e


def _books_among_shorts(count: int, rate: float, seed: int) -> list[Arrival]:
    """A tenth of 256K, the others of 8K, in random order at random times."""
    draw = random.Random(seed)
    lengths = [262144] * (count // 10) + [SHORT] * (count - count // 10)
    draw.shuffle(lengths)
    at, arrivals = 0.0, []
    for isl in lengths:
        at += draw.expovariate(rate) if rate < math.inf else 0.0
        arrivals.append(fresh(at, isl, 256, "short" if isl == SHORT else "book"))
    return arrivals


@pytest.mark.parametrize(("seed", "by"), [(1, "default"), (2, "default"), (2, "target")])
def test_books_in_a_poisson_stream_at_80_percent_load(seed: int, by: str) -> None:
    """The class's bound holds without any option, and the pauses in answers are bounded."""
    limits, cost = _served(by)
    most = sustained(_books_among_shorts(100, math.inf, seed), limits, cost)
    done = simulate(_books_among_shorts(100, LOAD * most, seed), limits, cost)
    for result in by_class(done):
        assert result.slower is not None
        assert result.slower.count == {"short": 90, "book": 10}[result.kind]
        worst = max(run.ttft / single.ttft for run, single in done.of(result.kind))
        assert worst <= STRETCH, f"{result.kind}: {worst:.1f} times what it takes alone"
    assert max(run.longest_gap for run in done.runs) <= (GAP if by == "default" else 1.3 * (STEP.tpot or 0))


COST = StepCost(launch=0.005, decode=2e-4, context=1e-7, chunk=1e-4, token=1e-4, pair=2e-9)


@st.composite
def engines(draw: st.DrawFn) -> Limits:
    pages = draw(st.integers(11, 20))
    seqs = draw(st.integers(1, 6))
    rings = draw(st.booleans())
    return small(
        pages=pages,
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([8, 64, 256, 1000])),
        snapshots=draw(st.integers(0, 12)) if rings else 0,
        snapshot_interval=1024,
        context=pages * 256,
        rings=rings,
        slo=draw(st.sampled_from([None, Slo(tpot=0.02), Slo(ttft=0.1, tpot=0.05)])),
        step_target=draw(st.sampled_from([None, StepTarget(0.03, "drawn")])),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[Arrival]:
    """6 to 24 requests of all classes and some owners, some of which ask about the same document."""
    document = fresh(0.0, 2560, 1, "").blocks
    arrivals = []
    for at in sorted(draw(st.lists(st.floats(0, 5), min_size=6, max_size=24))):
        isl, osl = draw(st.integers(1, 2400)), draw(st.integers(1, 300))
        own = fresh(
            at, isl, osl, "any", draw(st.sampled_from([0, 0, 0, 5, 100])), draw(st.sampled_from(["", "a", "b"]))
        )
        shared = draw(st.integers(0, len(own.blocks) - 1)) if draw(st.booleans()) else 0
        arrivals.append(replace(own, blocks=(*document[:shared], *own.blocks[shared:])))
    return arrivals


@given(limits=engines(), arrivals=traces())
def test_every_request_of_any_trace_is_served_and_preempted_ones_get_further(
    limits: Limits, arrivals: list[Arrival]
) -> None:
    runs: dict[str, Run] = {}

    def watch(engine) -> None:  # type: ignore[no-untyped-def]
        for run in engine.runs():
            # Preempted again before it came further than it was: once is bad luck, a chain of them is a livelock.
            assert run.lost <= 3, f"{run.key}: {run.preemptions} preemptions, {run.lost} without progress"
            runs[run.key] = run
        engine.cache.check()

    done = simulate(arrivals, limits, COST, watch=watch)
    assert all(run.error is None and run.outputs == run.output_tokens for run in done.runs)
    work = sum(single.e2e for single in done.alone if single is not None)
    recomputed = sum(run.computed for run in done.runs) - sum(run.prompt_tokens - run.cached for run in done.runs)
    spent = work + recomputed * (COST.token + COST.pair * limits.context)
    # Steps under a target are smaller, so that there are more of them, each with its launch.
    assert done.seconds <= 5 + 1.5 * spent + 1


@pytest.mark.parametrize("rings", [False, True])
def test_sequences_that_outgrow_the_pool_take_turns(rings: bool) -> None:
    """Six that need seven pages each in a pool of sixteen: whoever gives way goes on later from about where it was."""
    limits = small(pages=16, max_num_seqs=6, snapshots=12 if rings else 0, rings=rings, context=16 * 256)
    done = simulate([fresh(i / 10, 300, 1400, "any") for i in range(6)], limits, COST)
    assert sum(run.preemptions for run in done.runs) >= 3
    for run in done.runs:
        assert run.outputs == 1400
        assert run.preemptions <= 6
        assert run.computed <= 300 + run.preemptions * 1700
    ends = [run.finished for run in done.runs]
    assert ends == sorted(ends), "the oldest is never preempted for a younger one"


# Each example serves up to 1,200 requests; shrinking would take minutes.
@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    priority=st.sampled_from([0, 5, 100]),
    isl=st.integers(1, 2500),
    stream=st.sampled_from([0, 5]),
    limits=engines(),
    seed=st.integers(0, 99),
)
def test_nobody_is_passed_for_ever(priority: int, isl: int, stream: int, limits: Limits, seed: int) -> None:
    """An endless stream of smaller, more urgent requests, more than can be served: a request is admitted before its
    class's limit of others has passed it, and then reads at its class's share or faster.
    """
    draw = random.Random(seed)
    level = ("interactive", "batch", "ingest").index(class_of(priority))
    bound = BYPASS_LIMIT * BYPASS_FACTORS[level] + limits.max_num_seqs
    victim = fresh(0.1, isl, 2, "victim", priority, "v")
    others = [fresh(0.0, draw.randrange(1, 300), 20, "other", stream, "s") for _ in range(limits.max_num_seqs)]
    each = COST.launch + 100 * COST.token
    at = 0.1
    for _ in range(bound + 200):
        at += draw.expovariate(2 / each)
        others.append(fresh(at, draw.randrange(1, 200), draw.randrange(1, 4), "other", stream, "s"))
    arrivals = sorted([victim, *others], key=lambda each: each.at)
    done = simulate(arrivals, limits, COST)
    (run,) = [run for run in done.runs if run.kind == "victim"]
    passed = sum(other.kind == "other" and run.arrived < other.admitted < run.admitted for other in done.runs)
    assert passed <= bound
    ((_, single),) = done.of("victim")
    share = WEIGHTS[level] / sum(WEIGHTS) / 2  # of its class's part, beside one other owner
    assert run.first_token - run.admitted <= 4 * single.ttft / share + 1
