"""Ratios with intervals, against simulation: they hold the truth as often as they say, also where requests queued."""

import math

import numpy as np
import pytest

from longread.measure.report import ratios
from longread.measure.report.ratios import Ratio, more_needed, of_runs, of_samples, of_summaries

RNG = np.random.default_rng(20260901)
ROUNDS = 200


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratios, "DRAWS", 200)


def remembering(count: int, memory: float, spread: float) -> np.ndarray:
    """Log-normal latencies of which each looks like the one before it."""
    shocks = RNG.normal(size=count)
    found = np.empty(count)
    found[0] = shocks[0]
    for at in range(1, count):
        found[at] = memory * found[at - 1] + math.sqrt(1 - memory**2) * shocks[at]
    return np.exp(spread * found)


def coverage(count: int, percent: float | None, memory: float, paired: bool, truth: float = 1.0) -> float:
    hits = 0
    for number in range(ROUNDS):
        shared = np.exp(RNG.normal(size=count)) if paired else 1.0
        a, b = (shared * remembering(count, memory, 0.4) for _ in "ab")
        found = of_samples(a, truth * b, percent, 0.05, paired=paired, seed=number)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= truth <= found.high
    return hits / ROUNDS


@pytest.mark.parametrize(
    ("count", "percent", "memory", "paired"),
    [
        (40, None, 0.0, False),
        (150, None, 0.7, False),
        (150, None, 0.0, True),
        (200, None, 0.7, True),
        (150, 50.0, 0.5, False),
        (500, 99.0, 0.0, False),
    ],
)
def test_intervals_hold_the_truth(count: int, percent: float | None, memory: float, paired: bool) -> None:
    """95 % asked for; 200 rounds scatter by 1.5 points, and memory that is estimated costs a few more."""
    assert coverage(count, percent, memory, paired) >= (0.85 if memory else 0.89)


def test_a_shift_is_held_as_well_and_memory_ignored_is_not() -> None:
    assert coverage(150, None, 0.0, True, truth=1.3) >= 0.89
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ratios, "_length", lambda values: 1)
        assert coverage(200, None, 0.8, False) < 0.75  # what blocks are for


def test_a_pair_sees_what_two_crowds_do_not() -> None:
    shared = np.exp(RNG.normal(size=80))
    a = shared * remembering(80, 0, 0.1)
    b = 1.1 * shared * remembering(80, 0, 0.1)
    paired, apart = (of_samples(a, b, None, 0.05, paired=how) for how in (True, False))
    assert paired.low is not None and paired.low > 1
    assert apart.low is not None and apart.low < 1


@pytest.mark.parametrize(("percent", "least"), [(None, 10), (50.0, 10), (90.0, 50), (99.0, 500), (99.9, 5000)])
def test_too_few_samples_are_no_interval(percent: float | None, least: int) -> None:
    found = of_samples([1.0] * (least - 1), [1.0] * (least - 1), percent, 0.05, paired=False)
    assert (found.value, found.low, found.least) == (1.0, None, least)
    assert more_needed(found, 0.02) == 1
    assert of_samples([1.0] * least, [1.0] * least, percent, 0.05, paired=False).low == pytest.approx(1.0)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([0.0] * 20, [1.0] * 20), ([], [])])
def test_what_has_no_ratio_says_why(a: list[float], b: list[float]) -> None:
    found = of_samples(a, b, None, 0.05, paired=False)
    assert found.value is None
    assert found.why


def test_the_same_seed_gives_the_same_interval() -> None:
    a, b = remembering(100, 0.3, 0.5), remembering(100, 0.3, 0.5)
    assert of_samples(a, b, None, 0.05, paired=False) == of_samples(a, b, None, 0.05, paired=False)


def test_means_with_spreads_are_a_welch_interval() -> None:
    found = of_summaries((100.0, 20.0, 101), (110.0, 22.0, 101), 0.05)
    assert found.value == pytest.approx(1.1)
    assert found.half == pytest.approx(1.972 * math.sqrt(2 * (0.2**2) / 100), rel=0.01)
    assert of_summaries((100.0, None, 101), (110.0, 22.0, 101), 0.05).low is None
    assert of_summaries((100.0, 20.0, 5), (110.0, 22.0, 101), 0.05).least == 10


def test_runs_are_samples() -> None:
    found = of_runs([100.0, 104.0, 96.0], [150.0, 156.0, 144.0], 0.05)
    assert found.value == pytest.approx(1.5, rel=0.001)
    assert found.low is not None and found.low > 1.3
    assert of_runs([100.0], [150.0, 140.0], 0.05).least == 2
    assert of_runs([100.0, 0.0], [150.0, 140.0], 0.05).value is None


def test_more_requests_by_the_square_of_the_width() -> None:
    """Half a width of 10 % and a change of 5 %: four times the samples, so three times as many more."""
    open_one = Ratio(1.05, 1.05 / 1.1, 1.05 * 1.1, 100, math.log(1.1))
    assert more_needed(open_one, 0.0) == pytest.approx(100 * (math.log(1.1) / math.log(1.05)) ** 2 - 100, abs=1)
    assert more_needed(Ratio(1.0, 0.9, 1.1, 100, 0.1), 0.0) is None  # no change is never decided away from itself
    assert more_needed(Ratio(1.0, 0.9, 1.1, 100, 0.1), 0.02) == pytest.approx(
        100 * (0.1 / math.log(1.02)) ** 2, abs=101
    )
