"""Level 0's limits by what a server computes in: what rounding moves passes, what a fault moves does not."""

import asyncio
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_server import Toy

from longread.measure.gate.abilities import dtypes_of
from longread.measure.gate.client import Answer
from longread.measure.gate.distribution import Position, moved
from longread.measure.gate.exactness import compare
from longread.measure.gate.profiles import NAMES, built_in
from longread.measure.gate.report import told as told_lines
from longread.measure.gate.rounding import Rule, rule_of
from longread.measure.gate.run import Outcome, Settings, Watch, run_gate

LOGITS = st.lists(st.floats(-12, 12), min_size=3, max_size=30)


def rule(dtype: str | None, cache: str | None = None, profile: str = "lossless") -> Rule:
    abilities: Any = SimpleNamespace(dtype=dtype, cache_dtype=cache or dtype)
    return rule_of(abilities, built_in(profile))


def position(logits: list[float], count: int = 20) -> Position:
    """What a server with these logits tells."""
    total = math.log(math.fsum(map(math.exp, logits)))
    pairs = sorted(((f"t{i}", value - total) for i, value in enumerate(logits)), key=lambda pair: (-pair[1], pair[0]))
    return Position(*pairs[0], tuple(pairs[:count]))


def variation(one: list[float], other: list[float]) -> float:
    sums = [math.fsum(map(math.exp, side)) for side in (one, other)]
    return sum(abs(math.exp(a) / sums[0] - math.exp(b) / sums[1]) for a, b in zip(one, other, strict=True)) / 2


@given(LOGITS, st.data())
def test_the_share_that_moved_is_never_above_the_true_one(one: list[float], data: st.DataObject) -> None:
    other = data.draw(st.lists(st.floats(-12, 12), min_size=len(one), max_size=len(one)))
    ours, theirs = (data.draw(st.integers(1, len(one))) for _ in range(2))
    true = variation(one, other)
    assert 0 <= moved(position(one, ours), position(other, theirs)) <= true + 1e-9
    assert moved(position(one, 30), position(other, 30)) == pytest.approx(true, abs=1e-9)


@given(LOGITS, st.floats(0.01, 3), st.integers(0, 1000))
def test_logits_that_part_by_g_move_at_most_tanh_of_a_quarter_of_it(one: list[float], g: float, seed: int) -> None:
    draw = random.Random(seed)
    other = [value + draw.uniform(-g / 2, g / 2) for value in one]
    assert variation(one, other) <= math.tanh(g / 4) + 1e-9
    assert variation([g / 2, 0.0], [0.0, g / 2]) == pytest.approx(math.tanh(g / 4))  # it is reached


def test_nothing_in_common_has_moved_as_a_whole() -> None:
    one, other = Position("a", -1e-4, (("a", -1e-4), ("b", -10.0))), Position("x", -1e-4, (("x", -1e-4), ("y", -10.0)))
    assert moved(one, other) == pytest.approx(1.0, abs=1e-3)


def test_float32_is_held_to_each_log_probability_and_the_rest_to_probabilities() -> None:
    sure = [20.0, 0.0, -1.0, -2.0]
    tail = [20.0, 1.1, -1.0, -2.0]  # an H200: e^-20 moves by 1.1 nats, and nothing that anybody sees
    one, other = ([position(logits)] for logits in (sure, tail))
    answers = [Answer("x", "stop", positions=tuple(side)) for side in (one, other)]

    def verdict(told: Rule) -> str:
        return compare("cold = warm", "d", answers[0], answers[1], told).verdict

    assert verdict(rule("float32")) == "different"
    assert verdict(rule("bfloat16")) == verdict(rule(None)) == verdict(rule("float32", "fp8")) == "equal"
    assert [rule(dtype, profile="fp8-class").gap for dtype in ("float32", "bfloat16")] == [0.25, 3.0]


@pytest.mark.parametrize(
    ("change", "passes"),
    [
        ((0.0, 0.7, 0.0), True),  # between two equal tokens: 0.17 of the probability
        ((0.0, 1.0, 0.0), False),  # 0.23
        ((0.0, 0.0, 2.9), True),  # far in the tail
        ((0.0, 0.0, 3.1), False),
    ],
)
def test_where_the_limits_of_bfloat16_lie(change: tuple[float, ...], passes: bool) -> None:
    logits = [20.0, 20.0, 0.0]
    one = position(logits)
    other = replace(position([a + b for a, b in zip(logits, change, strict=True)]), token=one.token)
    other = replace(other, logprob=other.of(one.token))
    found = compare(
        "n", "d", Answer("x", "stop", positions=(one,)), Answer("x", "stop", positions=(other,)), rule("bfloat16")
    )
    assert (found.verdict == "equal") == passes, found.apart


def test_answers_may_part_where_the_share_that_moved_explains_it() -> None:
    one, other = position([5.0, 4.8, 0.0]), position([4.8, 5.0, 0.0])
    assert (one.token, other.token) == ("t0", "t1")

    def verdict(a: Position, b: Position) -> str:
        return compare(
            "n", "d", Answer("x", "stop", positions=(a,)), Answer("y", "stop", positions=(b,)), rule("bfloat16")
        ).verdict

    assert verdict(one, other) == "tie"
    drawn = replace(one, token="t1", logprob=one.of("t1"))  # the same distribution, and not its best token
    assert verdict(one, drawn) == "different"
    assert verdict(position([6.0, 4.0, 0.0]), position([4.0, 6.0, 0.0])) == "different"


def outcome_of(toy: Toy) -> Outcome:
    wanted = Settings("http://toy", lengths=(512,), style="plain", levels=(0,), pressure_tokens=1024, fresh=1)
    return asyncio.run(run_gate(wanted, built_in("lossless"), None, Watch(), toy.transport()))


def test_a_server_that_rounds_passes_as_what_it_says_it_is() -> None:
    """Logits of a sure model that part by up to 0.1 out of the cache; the same in float32 is a fault."""
    assert len({tuple(built_in(name)[limit] for limit in ("moved", "moved_mean", "tail_gap")) for name in NAMES}) == 1
    rounding = {"rounding": 0.05, "sure": 2.0}
    for dtype in ("bfloat16", None):
        found = outcome_of(Toy(dtype=dtype, **rounding))
        judged = {f.name: f for f in found.levels[0].findings}
        assert found.verdict == "PASS", judged
        assert (
            judged["moved"].value
            and judged["moved"].limit == built_in("lossless")["moved"]
            and "logprob_gap" not in judged
        )
    assert outcome_of(Toy(dtype="float32", **rounding)).verdict == "FAIL"
    assert outcome_of(Toy(dtype="bfloat16", rounding=1.0, sure=2.0)).verdict == "FAIL"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_stale_state_fails_whatever_the_server_computes_in(dtype: str | None) -> None:
    assert outcome_of(Toy(dtype=dtype, stale=True)).verdict == "FAIL"


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", "the limit of float32, as the server tells: 0.001 nats"),
        ("bfloat16", "the limits of bfloat16 and FP8 (bfloat16, as the server tells): 20.0%"),
        (None, "the limits of bfloat16 and FP8 (the server does not tell which)"),
    ],
)
def test_the_verdict_says_which_limits_were_used(dtype: str | None, words: str) -> None:
    found = outcome_of(Toy(dtype=dtype))
    assert found.levels[0].notes[0].startswith(words)
    assert any(words in str(line) for line in told_lines(found))


def test_what_a_server_computes_in_is_read_from_its_metrics() -> None:
    ours = 'longread:cache_config_info{model_name="m",block_size="256",dtype="bfloat16",cache_dtype="fp8"} 1.0'
    assert dtypes_of(ours) == ("bfloat16", "fp8")
    assert dtypes_of('vllm:cache_config_info{block_size="16",cache_dtype="auto"} 1.0') == (None, None)
    assert dtypes_of('longread:cache_config_info{dtype="",cache_dtype=""} 1.0') == dtypes_of("") == (None, None)
