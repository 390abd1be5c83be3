"""The virtual engine decides step by step what the real one decides: who comes, who gets how many tokens, who goes."""

import random

import pytest
from toy_model import MLA_GROUPS, RING_GROUPS, toy_engine
from virtual_loads import small

from longread.engine.scheduler import Schedule, Scheduler
from longread.engine.sequence import Grant
from longread.engine.virtual import Run, VirtualEngine
from longread.measure.planned_cost import calibrated
from longread.spec.cost import CostModel, StepCost
from longread.spec.engine import GenerationRequest, SamplingParams

COST = StepCost(launch=0.01, token=1e-4)
Told = tuple[list[tuple[str, int, list[int]]], list[str], list[str]]


def saves(grant: Grant) -> dict[int, int]:
    assert grant.timeline.lease is not None
    return grant.timeline.lease.saves


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    """Everything that any schedule decides."""
    seen: list[Told] = []
    real = Scheduler.schedule

    def schedule(self: Scheduler) -> Schedule:
        plan = real(self)
        grants = [(g.timeline.key, g.length, sorted(saves(g))) for g in plan.grants]
        seen.append((grants, [each.key for each in plan.admitted], [each.key for each in plan.preempted]))
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(VirtualEngine, "_repeats", lambda self, plan, until, one: 1)
    return seen


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_requests_get_the_same_schedule(
    seed: int, rings: bool, decided: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    requests = []
    for number in range(9):
        shared = [(2 + k, 512) for k in range(draw.randrange(4))]
        own = [(20 + number, draw.randrange(1, 700))]
        requests.append(
            (number, [*shared, *own], draw.randrange(1, 300), draw.choice([0, 0, 5, 100]), draw.randrange(3))
        )
    starts = sorted(draw.randrange(30) for _ in requests)  # steps after which they are submitted
    limits = small(
        pages=18,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        snapshots=8 if rings else 0,
        rings=rings,
        snapshot_interval=1024,
        context=18 * 256,
    )
    virtual = VirtualEngine(limits, COST, calibrated(COST, limits))
    # What a step costs is measured by one and given to the other, and who gives way to whom follows from it.
    monkeypatch.setattr(CostModel, "cost", property(lambda self: COST))
    engine = toy_engine(
        RING_GROUPS if rings else MLA_GROUPS,
        num_pages=18,
        max_num_batched_tokens=256,
        num_snapshots=limits.snapshots,
        max_model_len=18 * 256,
    )

    def play(submit, step) -> list[Told]:  # type: ignore[no-untyped-def]
        decided.clear()
        waiting = list(zip(starts, requests, strict=True))
        steps = 0
        while True:
            while waiting and waiting[0][0] <= steps:
                submit(*waiting.pop(0)[1])
            steps += 1
            if not step() and not waiting:
                return list(decided)

    def submit_virtual(number: int, blocks: list[tuple[int, int]], output: int, priority: int, owner: int) -> None:
        prompt = sum(length for _, length in blocks)
        run = Run(f"r{number}", "any", virtual.now, prompt, output, number, priority, f"o{owner}")
        assert virtual.submit(run, blocks)

    def step_virtual() -> bool:
        if virtual.live:
            virtual.step()
        return virtual.live > 0

    def submit_real(number: int, blocks: list[tuple[int, int]], output: int, priority: int, owner: int) -> None:
        prompt = tuple(token for token, length in blocks for _ in range(length))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.submit(GenerationRequest(f"r{number}", prompt, params, priority=priority, owner=f"o{owner}"))

    def step_real() -> bool:
        engine.step()
        return engine.stats().num_requests_running + engine.stats().num_requests_waiting > 0

    simulated, served = play(submit_virtual, step_virtual), play(submit_real, step_real)
    assert len(served) > 150
    assert simulated == served
    engine.close()
