"""A leak is told from noise, steps and wandering; drift is not seen where there is none."""

import math
import random

import pytest

from longread.measure.stress.context import Point, judge, leak
from longread.measure.stress.limits import limits_of
from longread.measure.stress.memory import Sample
from longread.measure.stress.reasoning import Answer
from longread.measure.stress.reasoning import judge as judge_reasoning
from longread.measure.stress.trend import MIN_SAMPLES, difference, halves, share_change, slope

MIB = 2**20
LIMIT = 65_536.0


def noisy(seed: int, count: int, per_request: float, spread: float, hanging: float = 0.0) -> list[tuple[int, int]]:
    draw, rest, found = random.Random(seed), 0.0, []
    for i in range(count):
        rest = hanging * rest + math.sqrt(1 - hanging**2) * draw.gauss(0, spread)
        found.append((i, int(500 * MIB + per_request * i + rest)))
    return found


def test_a_steady_leak_is_found_and_its_size_is_right():
    found = leak("leak", noisy(1, 60, 256 * 1024, 512 * 1024), LIMIT)
    assert found.verdict == "FAIL"
    assert found.low is not None and found.high is not None
    assert found.low <= 256 * 1024 <= found.high and found.high - found.low < 128 * 1024


def test_no_leak_passes():
    found = leak("leak", noisy(2, 60, 0, 512 * 1024), LIMIT)
    assert found.verdict == "PASS" and found.needed is None


def test_memory_that_never_moves_passes():
    found = leak("leak", [(i, 500 * MIB) for i in range(20)], LIMIT)
    assert (found.verdict, found.value, found.low, found.high) == ("PASS", 0.0, 0.0, 0.0)


def test_growth_without_noise_is_a_leak_at_once():
    """Neighbours around a bent line hang together wholly, and there is hardly anything around it."""
    series = [(i, int(500 * MIB + 100_000 * i + 50 * i * i)) for i in range(12)]
    found = leak("leak", series, LIMIT)
    assert found.verdict == "FAIL"


def test_one_step_is_no_leak():
    """A cache that is allocated once in the middle of the run: a line by least squares would call it a leak."""
    series = [(i, 500 * MIB + (i >= 24) * 64 * MIB + i % 3 * 4096) for i in range(60)]
    xs, ys = [x for x, _ in series], [y for _, y in series]
    middle = sum(xs) / len(xs)
    squares = sum((x - middle) * y for x, y in series) / sum((x - middle) ** 2 for x in xs)
    assert squares > 10 * LIMIT and len(ys) == 60
    assert leak("leak", series, LIMIT).verdict != "FAIL"


def test_noise_too_large_is_inconclusive_and_the_number_told_would_decide():
    few = leak("leak", noisy(3, 16, 0, 2 * MIB), LIMIT)
    assert few.verdict == "INCONCLUSIVE"
    assert few.needed is not None and 16 < few.needed < 1000
    more = leak("leak", noisy(3, 2 * few.needed, 0, 2 * MIB), LIMIT)
    assert more.verdict == "PASS"


def test_samples_that_hang_together_do_not_make_a_leak():
    """Wandering without a trend is called a leak (above a limit of nothing) in few cases; with an interval for
    independent samples it would be in most.
    """
    false = sum(leak("leak", noisy(seed, 60, 0, MIB, hanging=0.9), 0.0).verdict == "FAIL" for seed in range(200))
    assert false <= 20


def test_the_interval_covers_the_slope_as_often_as_it_says():
    inside = 0
    for seed in range(300):
        x, y = zip(*noisy(seed, 40, 1000, 20_000), strict=True)
        line = slope(x, y)
        assert line is not None
        inside += line.low <= 1000 <= line.high
    assert inside >= 280  # 95 % is 285


def test_too_few_samples_say_nothing():
    assert slope(range(MIN_SAMPLES - 1), range(MIN_SAMPLES - 1)) is None
    found = leak("leak", noisy(1, MIN_SAMPLES - 1, 0, 1), LIMIT)
    assert (found.verdict, found.needed) == ("INCONCLUSIVE", MIN_SAMPLES)


def test_unknown_memory_is_missing_and_not_zero():
    found = leak("leak", [(i, None) for i in range(30)], LIMIT)
    assert (found.verdict, found.value) == ("INCONCLUSIVE", None)
    assert "--pid" in found.note


def test_warming_up_is_left_out():
    """Memory that grows over the first fifth and then stands."""
    points = [Point(i, 0.5, Sample(500 * MIB + min(i, 8) * 32 * MIB, None, None)) for i in range(50)]
    found = {each.name: each for each in judge(points, [], 50, limits_of(None, []))}
    assert found["leak_bytes_per_request"].verdict == "PASS"
    assert found["ttft_growth"].verdict == "PASS"
    assert found["context_failures"].verdict == "PASS"


def test_a_server_that_gets_slower_is_told():
    points = [Point(i, 0.5 * (1 + i / 50), Sample(MIB, None, None)) for i in range(50)]
    found = {each.name: each for each in judge(points, [], 50, limits_of(None, []))}
    assert found["ttft_growth"].verdict == "FAIL"


def answers(seed: int, count: int, drift: float = 0.0, think: float = 1.0) -> list[Answer]:
    draw = random.Random(seed)
    return [
        Answer(draw.random() < think, False, False, None, draw.lognormvariate(5 + drift * i / count, 0.5))
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [40, 200])
def test_drift_is_seen_falsely_in_few_runs(count):
    """No run of a server that does not change fails, up to one in twenty."""
    limits = limits_of(None, ["length_drift=0.05", "share_drift=0.02"])
    failed = 0
    for seed in range(200):
        found = judge_reasoning(answers(seed, count, think=0.9), limits)
        failed += any(each.verdict == "FAIL" for each in found if "drift" in each.name)
    assert failed <= 10


def test_drift_is_found():
    found = {each.name: each for each in judge_reasoning(answers(1, 200, drift=1.5), limits_of(None, []))}
    assert found["length_drift"].verdict == "FAIL"
    assert found["length_drift by trend"].verdict == "FAIL"
    steady = {each.name: each for each in judge_reasoning(answers(1, 400), limits_of(None, []))}
    assert steady["length_drift"].verdict == "PASS"


def test_a_share_that_falls_is_found():
    rows = [Answer(i < 100, False, False, None, 100.0) for i in range(200)]
    found = {each.name: each for each in judge_reasoning(rows, limits_of(None, []))}
    assert found["share_drift"].verdict == "FAIL"
    assert found["reasoning_share_min"].verdict == "FAIL"


def test_loops_empty_and_cut_answers_are_counted():
    rows = [Answer(True, i < 20, i < 30, "a b" if i < 40 else None, 100.0) for i in range(100)]
    found = {each.name: each for each in judge_reasoning(rows, limits_of(None, []))}
    shares = {name: found[name].value for name in ("empty_share", "truncated_share", "loop_share")}
    assert shares == {"empty_share": 0.2, "truncated_share": 0.3, "loop_share": 0.4}
    assert all(found[name].verdict == "FAIL" for name in shares)


def test_changes_against_known_values():
    change = difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert change is not None and change.value == 1.0
    assert change.high - change.value == pytest.approx(2.776 * math.sqrt(2 / 3), rel=1e-2)
    assert halves([1.0] * 20) is not None and halves([1.0] * 9) is None
    newcombe = share_change([True] * 56 + [False] * 14, [True] * 48 + [False] * 32)  # Newcombe 1998, example (a)
    assert newcombe is not None
    assert (round(newcombe.low, 4), round(newcombe.high, 4)) == (-0.3339, -0.0524)
