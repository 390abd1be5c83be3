"""What steps cost: measured at the start within a bound, learnt from every step, kept from steps that broke."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from toy_model import RING_GROUPS, ToyModel, toy_engine

from longread.engine.calibrate import Calibration, calibrate, guess
from longread.engine.load import load_engine
from longread.kv.tensors import StateTensors
from longread.models.inputs import StepInputs
from longread.spec.config import EngineOptions, Slo
from longread.spec.engine import GenerationRequest, SamplingParams
from longread.spec.step_target import SHORTEST, UNSURE
from longread.weights.fixture import write_fixture


class Clock:
    """Stands still but for what the model says that it took: a busy machine changes no test."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


class Timed(ToyModel):
    """Moves the clock on by what a step of its size is said to take, and counts the sizes."""

    def __init__(self, launch: float, token: float, clock: Clock):
        super().__init__(RING_GROUPS)
        self.launch, self.token, self.clock = launch, token, clock
        self.prefix = 0.0  # seconds of a chunk for each token before it
        self.sizes: list[int] = []
        self.busy: Callable[[int], float] = lambda step: 1.0  # a step takes so many times as long

    def forward(self, inputs: StepInputs, state) -> torch.Tensor:  # type: ignore[no-untyped-def]
        self.sizes.append(len(inputs.token_ids))
        seconds = self.launch + self.token * len(inputs.token_ids)
        seconds += self.prefix * sum(each.start for each in inputs.segments if each.length > 1)
        self.clock.now += seconds * self.busy(len(self.sizes))
        return super().forward(inputs, state)


def state(pages: int = 16, slots: int = 4) -> dict[str, torch.Tensor]:
    return dict(StateTensors(RING_GROUPS, pages, slots, 2, torch.float32).views)


def calibrated(model: Timed, seconds: float) -> Calibration:
    return calibrate(model, state(), num_slots=4, num_pages=16, max_num_batched_tokens=1024, seconds=seconds)


def test_calibration_finds_launch_and_tokens(clock: Clock) -> None:
    model = Timed(0.004, 2e-4, clock)
    costs = calibrated(model, 1.5).costs
    assert costs.observations >= 7 and costs.known
    assert costs.cost.seconds((0, 0), [(512, 0)]) == pytest.approx(0.004 + 512 * 2e-4, rel=0.35)
    assert costs.cost.seconds((1, 64)) == pytest.approx(0.0042, rel=0.6)


def test_calibration_ends_in_time_and_says_something_anyhow(clock: Clock) -> None:
    model = Timed(0.02, 1e-3, clock)
    costs = calibrated(model, 0.0).costs
    assert len(model.sizes) == 6
    assert costs.cost.seconds((0, 0), [(512, 0)]) == pytest.approx(0.02 + 512e-3, rel=0.6)


@pytest.mark.parametrize(("pages", "slots", "budget"), [(1, 1, 1), (1, 1, 2), (2, 1, 5), (3, 2, 300)])
def test_calibration_fits_the_smallest_engines(pages: int, slots: int, budget: int, clock: Clock) -> None:
    model = Timed(0.0, 1e-4, clock)
    calibrate(model, state(pages, slots), num_slots=slots, num_pages=pages, max_num_batched_tokens=budget, seconds=0.1)
    assert max(model.sizes) <= max(budget, slots)


def test_the_target_is_the_smallest_step_that_reads_nearly_at_the_best_rate(clock: Clock) -> None:
    found = calibrated(Timed(0.012, 2e-4, clock), 5.0).target
    # With 1,024 tokens a step takes 0.2168 s; 0.9 of that rate is reached by 340, in 0.080.
    assert found.seconds == pytest.approx(0.080, rel=0.03)
    assert "within 10% of the best rate" in found.reason and "1,024 in 217 ms" in found.reason
    assert calibrated(Timed(0.0001, 1e-5, clock), 5.0).target.seconds == SHORTEST


def test_rates_are_measured_deep_in_a_book_too_and_the_longer_step_counts(clock: Clock) -> None:
    shallow, deep = Timed(0.004, 2e-4, clock), Timed(0.004, 2e-4, clock)
    deep.prefix = 5e-6
    assert calibrated(shallow, 5.0).target.seconds == SHORTEST
    found = calibrated(deep, 9.0)
    # Behind 3,500 tokens starting a chunk takes 0.0215 s in place of 0.004.
    assert found.target.seconds is not None and found.target.seconds > SHORTEST


def test_where_starting_takes_long_larger_steps_are_measured_until_that_gains_nothing(clock: Clock) -> None:
    model = Timed(0.1, 1e-4, clock)
    found = calibrate(model, state(64), num_slots=4, num_pages=64, max_num_batched_tokens=8192, seconds=20.0).target
    assert max(model.sizes) == 8192
    assert found.seconds == pytest.approx(2 * 0.1032) and "8,192 in 919 ms" in found.reason
    few = Timed(0.001, 1e-4, clock)
    calibrate(few, state(64), num_slots=4, num_pages=64, max_num_batched_tokens=8192, seconds=20.0)
    assert max(few.sizes) == 512


def test_a_machine_that_is_busy_now_and_then_changes_nothing(clock: Clock) -> None:
    model, draw = Timed(0.012, 2e-4, clock), random.Random(2)
    model.busy = lambda step: draw.choice((1.0, 1.02, 4.0))
    found = calibrated(model, 9.0)
    assert found.target.seconds == pytest.approx(0.080, rel=0.25)
    assert found.costs.cost.seconds((0, 0), [(400, 0)]) == pytest.approx(0.092, rel=0.35)


def test_what_a_machine_measured_that_is_busy_throughout_is_not_told(clock: Clock) -> None:
    model, draw = Timed(0.006, 2e-4, clock), random.Random(4)
    model.busy = lambda step: draw.uniform(1, 30)
    found = calibrated(model, 30.0)
    assert not found.costs.known
    assert SHORTEST <= found.target.seconds <= UNSURE and found.target.reason.endswith("on a busy machine")  # type: ignore[operator]
    for i in range(found.costs.REAL):
        assert not found.costs.known
        found.costs.observe((0, 0), [(100 + i, 0)], 0.02)
    assert found.costs.known


def test_an_engine_tells_no_times_before_it_knows_them() -> None:
    engine = toy_engine(num_pages=64, max_num_batched_tokens=64)
    engine._core.costs.doubt()
    engine._scheduler.predicts = engine._core.costs.known
    engine.submit(GenerationRequest("book", tuple(2 + i % 90 for i in range(3000)), SamplingParams(max_tokens=1)))
    for step in range(engine._core.costs.REAL):
        engine.step()
        standing, stats = engine.explain("book"), engine.stats()
        assert standing is not None and standing.cost_known == (step + 1 == engine._core.costs.REAL)
        assert (standing.first_token_in is not None) == standing.cost_known
        assert (stats.known_cost is not None) == standing.cost_known and stats.step_cost is not None
    engine.close()


def test_a_guess_is_a_cost_whatever_was_measured() -> None:
    for decode, chunk in ((0.01, 0.001), (1e-9, 1e-9), (0.001, 10.0)):
        cost = guess(decode, chunk, 64)
        assert cost.token > 0 and cost.seconds((1, 100)) >= decode


def test_steps_are_learnt_and_kept_within_the_target(clock: Clock) -> None:
    model = Timed(0.002, 1e-4, clock)
    engine = toy_engine(num_pages=64, max_num_batched_tokens=2048, model=model, slo=Slo(tpot=0.03), max_model_len=16000)
    engine.submit(GenerationRequest("chat", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)))
    for _ in range(20):
        engine.step()
    prompt = tuple(2 + i % 90 for i in range(9000))
    engine.submit(GenerationRequest("book", prompt, SamplingParams(temperature=0.0, max_tokens=1)))
    before = len(model.sizes)
    while engine.explain("chat") is not None:
        engine.step()
    beside = [size for size in model.sizes[before:] if size > 1]
    # 0.03 s hold 280 tokens; the first steps must find that out.
    assert sum(size <= 300 for size in beside) >= len(beside) * 0.7
    assert len(beside) >= 10 and max(beside[10:]) < 450
    stats = engine.stats()
    assert stats.step_cost is not None and stats.step_cost.token == pytest.approx(1e-4, rel=0.8)
    engine.close()


def test_a_step_that_broke_teaches_nothing() -> None:
    model = ToyModel(RING_GROUPS, fail_on=13)
    engine = toy_engine(model=model)
    engine.submit(GenerationRequest("bad", (13,), SamplingParams(max_tokens=1)))
    while engine.has_work():
        engine.step()
    assert engine._core.costs.observations == 0
    engine.close()


def test_a_real_engine_knows_its_cost_and_explains_its_requests(tmp_path: Path) -> None:
    write_fixture(tmp_path / "tiny", "v4-flash")
    engine = load_engine(EngineOptions(str(tmp_path / "tiny"), num_gpu_blocks_override=16, max_num_seqs=1))
    assert engine.stats().step_cost is not None
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.submit(GenerationRequest("first", tuple(range(5, 305)), sampling, owner="a"))
    engine.submit(GenerationRequest("second", tuple(range(9, 409)), sampling, priority=200, owner="b"))
    engine.step()
    first, second = engine.explain("first"), engine.explain("second")
    assert first is not None and first.phase == "decode" and first.computed_tokens == 300
    assert second is not None and (second.reason, second.request_class) == ("slots", "ingest")
    # A busy machine's times are not told.
    assert (second.first_token_in is not None) == second.cost_known == (engine.stats().known_cost is not None)
    assert second.first_token_in is None or second.first_token_in > 0
    while engine.has_work():
        engine.step()
    assert engine.explain("first") is engine.explain("second") is None
    assert engine.stats().step_cost_error >= 0
    engine.close()
