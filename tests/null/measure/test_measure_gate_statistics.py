"""The gate's arithmetic: bounds that hold, intervals that cover, sample sizes that are enough and not more."""

import math
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.measure.gate import statistics
from longread.measure.gate.distribution import (
    Position,
    difference,
    divergence_point,
    kl_divergence,
    largest_gap,
)
from longread.measure.gate.sampling import heat, judge_heat
from longread.measure.gate.verdict import at_least, at_most, together
from longread.measure.intervals import normal_quantile, t_quantile, wilson

WEIGHTS = st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=4, max_size=40)


def told(weights: list[float], count: int) -> Position:
    """What a server with that distribution tells: its ``count`` best."""
    total = math.fsum(weights)
    pairs = sorted(((f"t{i}", math.log(w / total)) for i, w in enumerate(weights)), key=lambda p: (-p[1], p[0]))
    return Position(pairs[0][0], pairs[0][1], tuple(pairs[:count]))


def true_kl(p: list[float], q: list[float]) -> float:
    a, b = math.fsum(p), math.fsum(q)
    return math.fsum(x / a * math.log((x / a) / (y / b)) for x, y in zip(p, q, strict=True))


@settings(max_examples=400, deadline=None)
@given(WEIGHTS, st.data())
def test_kl_with_a_tail_is_never_above_the_true_one_and_never_negative(p: list[float], data: st.DataObject) -> None:
    q = data.draw(st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=len(p), max_size=len(p)))
    ours, theirs = (data.draw(st.integers(min_value=1, max_value=len(p))) for _ in range(2))
    found = kl_divergence(told(p, ours), told(q, theirs))
    assert 0 <= found <= true_kl(p, q) + 1e-9


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.data())
def test_kl_is_the_true_one_where_everything_was_told(p: list[float], data: st.DataObject) -> None:
    q = data.draw(st.lists(st.floats(min_value=1e-6, max_value=1.0), min_size=len(p), max_size=len(p)))
    assert kl_divergence(told(p, len(p)), told(q, len(p))) == pytest.approx(true_kl(p, q), abs=1e-5, rel=1e-5)


def test_two_servers_with_nothing_in_common_are_far_apart() -> None:
    """A partition of common tokens alone would see one bucket, and no difference at all."""
    base = Position("a", -0.1, (("a", -0.1), ("b", -3.0)))
    other = Position("x", -0.1, (("x", -0.1), ("y", -3.0)))
    assert kl_divergence(base, other) > 2.0


def test_rounding_of_float32_is_no_difference() -> None:
    """A log-probability is good to 1e-6; a sharp distribution's tail is all rounding."""
    base = Position("a", -1e-6, (("a", -1e-6), ("b", -14.0), ("c", -15.0)))
    for change in (1e-6, 2e-6, -1e-6):
        other = Position("a", -1e-6, (("a", min(0.0, -1e-6 + change)), ("b", -14.000001), ("c", -15.000002)))
        assert kl_divergence(base, other) < 1e-6
    flat = told([1.0] * 20, 20)
    other = Position(flat.token, flat.logprob, tuple((t, v + 1e-6 * (-1) ** i) for i, (t, v) in enumerate(flat.top)))
    assert kl_divergence(flat, other) < 1e-11


def test_what_stands_for_part_of_a_character_is_in_the_tail_on_both_sides() -> None:
    base = Position("a", -0.7, (("a", -0.7), ("�", -1.0)))
    other = Position("a", -0.7, (("a", -0.7), ("�", -5.0)))
    assert kl_divergence(base, other) == pytest.approx(0.0)


def test_a_flip_between_equals_is_a_tie() -> None:
    base = Position("a", -0.70, (("a", -0.70), ("b", -0.7004)))
    other = Position("b", -0.70, (("b", -0.70), ("a", -0.7004)))
    assert difference(base, other, 0.001).tied and not difference(base, other, 0.001).flipped
    assert difference(base, other, 0.0001).flipped
    assert difference(base, Position("c", -0.1, (("c", -0.1),)), 1.0).flipped


def test_surprise_at_a_token_that_was_not_told_is_bounded_from_below() -> None:
    base = Position("a", -0.1, (("a", -0.1), ("b", -3.0)))
    other = Position("x", -0.1, (("x", -0.1), ("y", -4.0)))
    assert difference(base, other, 0.0).nll == pytest.approx(3.9)
    assert difference(base, other, 0.0).probability is None


def test_positions_are_compared_up_to_the_first_other_token() -> None:
    one = [Position(t, -0.1, ((t, -0.1),)) for t in "abcd"]
    other = [Position(t, -0.2, ((t, -0.2),)) for t in "abxd"]
    assert divergence_point(one, other) == 3
    assert divergence_point(one, one[:2]) == 2
    assert largest_gap(one[:2], other[:2]) == pytest.approx(0.1)


def covered(groups: int, size: int, runs: int, between: float, within: float) -> float:
    """How often the bootstrap's interval holds the true mean 0 of data that hang together by document."""
    rng = random.Random(groups * 1000 + size)
    hits = 0
    for run in range(runs):
        data = []
        for _ in range(groups):
            centre = rng.gauss(0, between)
            data.append([centre + rng.gauss(0, within) for _ in range(size)])
        low, high = statistics.bootstrap_mean(data, seed=run)
        hits += low <= 0 <= high
    return hits / runs


@pytest.mark.parametrize("groups", [5, 12])
def test_the_bootstrap_by_document_covers(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 300)
    assert 0.91 <= covered(groups, 10, 250, 1.0, 1.0) <= 0.995


def test_fewer_than_three_documents_tell_nothing() -> None:
    assert statistics.bootstrap_mean([[1.0] * 50, [1.1] * 50]) == (-math.inf, math.inf)
    finding = at_most(1, "kl", 0.0, (-math.inf, math.inf), 0.1, 2)
    assert finding.verdict == "INCONCLUSIVE" and finding.needed is None


@pytest.mark.parametrize(
    ("freedom", "exact"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227)]
)
def test_students_t_as_in_the_tables(freedom: int, exact: float) -> None:
    assert t_quantile(0.05, freedom) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize(("worse", "better", "count"), [(0.1, 0.05, 120), (0.02, 0.02, 200), (0.3, 0.0, 60)])
def test_the_interval_of_a_paired_drop_covers(worse: float, better: float, count: int) -> None:
    rng, hits, runs = random.Random(count), 0, 1500
    for _ in range(runs):
        draws = [rng.random() for _ in range(count)]
        lost, won = sum(d < worse for d in draws), sum(worse <= d < worse + better for d in draws)
        low, high = statistics.paired_drop(lost, won, count)
        hits += low <= worse - better <= high
    assert hits / runs >= 0.93


@pytest.mark.parametrize("limit", [0.005, 0.025, 0.05, 0.1, 0.5])
def test_clean_samples_are_just_enough(limit: float) -> None:
    count = statistics.clean_samples(limit)
    assert wilson(0, count)[1] <= limit < wilson(0, count - 1)[1]


@pytest.mark.parametrize(("deviation", "shift", "power"), [(1.0, 0.5, 0.8), (2.0, 0.4, 0.9)])
def test_the_power_formula_agrees_with_simulation(deviation: float, shift: float, power: float) -> None:
    count = statistics.samples_for_mean(deviation, shift, power)
    rng, found, runs = random.Random(7), 0, 1500
    for _ in range(runs):
        mean = fmean(rng.gauss(shift, deviation) for _ in range(count))
        found += abs(mean) > normal_quantile(0.05) * deviation / math.sqrt(count)
    assert found / runs == pytest.approx(power, abs=0.035)


def test_the_number_of_samples_that_decides_does_decide() -> None:
    """Take as many as were said to be needed, of the same kind: now the interval is on one side in most cases."""
    rng, decided, runs = random.Random(3), 0, 200
    for _ in range(runs):
        first = [rng.gauss(0.1, 1.0) for _ in range(40)]
        half = 1.96 / math.sqrt(40)
        needed = statistics.samples_to_decide(40, 0.1, 0.1 - half, 0.1 + half, 0.5)
        assert needed is not None and len(first) == 40
        mean = fmean(rng.gauss(0.1, 1.0) for _ in range(2 * needed))
        decided += mean + 1.96 / math.sqrt(2 * needed) <= 0.5
    assert decided / runs > 0.8
    assert statistics.samples_to_decide(40, 0.5, 0.4, 0.6, 0.5) is None


def test_rate_needs_as_many_as_simulation_says() -> None:
    count = statistics.samples_for_rate(0.03, 0.9)
    rng = random.Random(1)
    seen = sum(any(rng.random() < 0.03 for _ in range(count)) for _ in range(4000)) / 4000
    assert seen == pytest.approx(0.9, abs=0.02)


def test_several_looks_spend_no_more_than_one() -> None:
    assert sum(statistics.error_of_look(look, 4) for look in range(1, 5)) == pytest.approx(statistics.ERROR)
    rng, wrong, runs = random.Random(5), 0, 2000
    for _ in range(runs):  # the truth is the limit itself: each decision is an error of one side
        values = [rng.gauss(0, 1) for _ in range(80)]
        for look in range(1, 5):
            part = values[: 20 * look]
            half = normal_quantile(statistics.error_of_look(look, 4)) / math.sqrt(len(part))
            if abs(fmean(part)) > half:
                wrong += 1
                break
    assert wrong / runs <= 0.055


def drawn(position: Position, temperature: float, count: int, seed: int) -> list[str]:
    names = [token for token, _ in position.top]
    weights = [math.exp(value / temperature) for _, value in position.top]
    return random.Random(seed).choices(names, weights, k=count)


OPEN = told([30, 20, 10, 8, 6, 5, 4, 3, 3, 2, 2, 1, 1, 1], 14)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_the_temperature_is_read_from_what_was_drawn(temperature: float) -> None:
    inside = 0
    for seed in range(60):
        found = heat(OPEN, drawn(OPEN, temperature, 96, seed))
        assert found is not None
        inside += found.low <= temperature <= found.high
    assert inside >= 59


def test_an_ignored_temperature_fails_and_an_honoured_one_passes() -> None:
    assert judge_heat(0.5, heat(OPEN, drawn(OPEN, 1.0, 160, 1)), 160).verdict == "FAIL"
    assert judge_heat(1.0, heat(OPEN, [OPEN.best] * 32), 32).verdict == "FAIL"
    assert judge_heat(1.0, heat(OPEN, drawn(OPEN, 1.0, 160, 1)), 160).verdict == "PASS"
    few = judge_heat(1.0, heat(OPEN, drawn(OPEN, 1.0, 8, 2)), 8)
    assert few.verdict == "INCONCLUSIVE" and few.needed is not None and few.needed > 8


def test_nothing_measured_never_passes() -> None:
    assert together([]) == "INCONCLUSIVE" == together([None])
    assert together(["PASS", "INCONCLUSIVE"]) == "INCONCLUSIVE"
    assert together(["PASS", "INCONCLUSIVE", "FAIL"]) == "FAIL"
    assert together(["PASS", None]) == "PASS"


def test_a_finding_needs_its_whole_interval_on_one_side() -> None:
    assert at_most(1, "x", 0.1, (0.05, 0.2), 0.2, 10).verdict == "PASS"
    assert at_most(1, "x", 0.3, (0.21, 0.4), 0.2, 10).verdict == "FAIL"
    assert at_most(1, "x", 0.1, (0.05, 0.21), 0.2, 10).verdict == "INCONCLUSIVE"
    assert at_least(2, "x", 0.9, (0.86, 0.95), 0.856, 10).verdict == "PASS"
    assert at_least(2, "x", 0.5, (0.4, 0.6), 0.856, 10).verdict == "FAIL"
