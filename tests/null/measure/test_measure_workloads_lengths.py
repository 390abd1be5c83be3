"""Distributions of lengths stay in their bounds and mean what they say; bad ones are refused with the limits."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.workloads.lengths import lengths, ranged
from longread.spec.errors import ConfigError

LOW, HIGH = 1, 1 << 20


def draws(form: str, count: int = 2000, seed: int = 0) -> list[int]:
    made, rng = lengths("isl", form, LOW, HIGH), Random(seed)
    return [made.draw(rng, turn) for turn in range(count)]


@given(st.integers(LOW, HIGH), st.integers(LOW, HIGH), st.integers(0, 99))
def test_even_draws_stay_between_their_ends(one: int, other: int, seed: int) -> None:
    low, high = sorted((one, other))
    assert all(low <= each <= high for each in draws(f"uniform:{low}:{high}", 50, seed))


@given(st.integers(LOW, HIGH), st.floats(0.01, 5), st.integers(0, 99))
def test_log_normal_draws_stay_within_the_limits(median: int, sigma: float, seed: int) -> None:
    assert all(LOW <= each <= HIGH for each in draws(f"lognormal:{median}:{sigma}", 50, seed))


def test_distributions_have_their_shape() -> None:
    assert draws("4K", 3) == [4096] * 3 == [lengths("isl", 4096, LOW, HIGH).draw(Random(0))] * 3
    assert draws("list:10,2K,30", 5) == [10, 2048, 30, 10, 2048]
    even = draws("uniform:1000:2000")
    assert abs(sum(even) / len(even) - 1500) < 25 and len(set(even)) > 800
    skewed = sorted(draws("lognormal:1000:0.5"))
    assert abs(skewed[1000] / 1000 - 1) < 0.05
    spread = [math.log(each / 1000) for each in skewed]
    assert abs(math.sqrt(sum(each * each for each in spread) / len(spread)) - 0.5) < 0.03


@given(st.integers(1, 100_000), st.floats(0, 0.99))
def test_range_ratio_is_vllms(size: int, ratio: float) -> None:
    made = ranged("isl", lengths("isl", size, LOW, HIGH), ratio, LOW, HIGH)
    assert made.low == max(math.floor(size * (1 - ratio)), 1) and made.high == math.ceil(size * (1 + ratio))


@given(st.text(max_size=30))
def test_any_text_is_a_distribution_or_refused(text: str) -> None:
    try:
        made = lengths("isl", text, LOW, HIGH)
    except ConfigError as error:
        assert "isl" in str(error)
    else:
        assert lengths("isl", made.text, LOW, HIGH) == made


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("0", "from 1 to 1,048,576"),
        ("2M", "isl"),
        ("uniform:5", "uniform:LOW:HIGH"),
        ("uniform:9:5", "above the upper"),
        ("uniform:1:2:3", "uniform:LOW:HIGH"),
        ("lognormal:100:0", "above 0"),
        ("lognormal:100:nan", "above 0"),
        ("lognormal:100:9", "at most 5"),
        ("list:", "list:N"),
        ("list:5,,6", "list:N"),
        ("list:" + "1," * 10_001, "at most 10,000"),
        ("normal:1:2", "isl"),
        (True, "True"),
        (None, "None"),
        (1.5, "1.5"),
    ],
)
def test_bad_forms_are_refused(form: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        lengths("isl", form, LOW, HIGH)


def test_a_ratio_needs_a_fixed_length() -> None:
    with pytest.raises(ConfigError, match="needs a fixed isl"):
        ranged("isl", lengths("isl", "uniform:5:9", LOW, HIGH), 0.5, LOW, HIGH)
