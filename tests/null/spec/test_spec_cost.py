"""What a step costs: the formula, its inverse, and what the online fit learns and refuses to learn."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.spec.cost import CostModel, StepCost, features

TRUE = StepCost(launch=0.010, decode=0.002, context=1e-6, chunk=0.001, token=5e-4, pair=2e-8, prefix=3e-7)
costs = st.builds(StepCost, *[st.floats(0, 1e-2)] * 5, st.floats(0, 1e-6))

Step = tuple[tuple[int, int], list[tuple[int, int]]]


def steps(count: int, seed: int = 1) -> list[Step]:
    """Decodes with contexts up to 30K, beside no to two prompts' chunks."""
    draw = random.Random(seed)
    made: list[Step] = []
    for _ in range(count):
        rows = draw.randrange(8)
        chunks = [(draw.randrange(1, 1024), draw.randrange(30000)) for _ in range(draw.randrange(0 if rows else 1, 3))]
        made.append(((rows, rows * draw.randrange(100, 30000)), chunks))
    return made


def test_a_step_costs_the_sum_of_its_parts() -> None:
    started = 0.010 + 0.004 + 0.001 + 0.001 + 10 * 3e-7
    assert TRUE.seconds((2, 1000), [(3, 10)]) == pytest.approx(started + 3 * (5e-4 + 2e-8 * 12))
    assert TRUE.seconds((0, 0)) == 0.010
    # Token by token, each looks back at all before it and itself.
    pairs = sum(p + 1 for p in range(100, 150))
    assert features((0, 0), [(50, 100)])[-2:] == (pairs, 100)


@given(cost=costs, tokens=st.integers(1, 4096), prefix=st.integers(0, 1_000_000))
def test_tokens_within_is_the_inverse_of_seconds(cost: StepCost, tokens: int, prefix: int) -> None:
    marginal = cost.seconds((0, 0), [(tokens, prefix)]) - cost.launch
    found = cost.tokens_within(marginal, prefix)
    if cost.token + cost.pair < 1e-9:
        assert found >= 0
    else:
        assert found == pytest.approx(tokens, rel=1e-3, abs=1e-3)


@given(cost=costs, tokens=st.integers(1, 20000), prefix=st.integers(0, 100000), step=st.integers(1, 4096))
def test_prefill_seconds_is_the_sum_of_its_steps(cost: StepCost, tokens: int, prefix: int, step: int) -> None:
    total, done = 0.0, 0
    while done < tokens:
        chunk = min(step, tokens - done)
        total += cost.seconds((0, 0), [(chunk, prefix + done)])
        done += chunk
        if done // step > 50:
            return
    assert cost.prefill_seconds(tokens, prefix, step) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_impossible_costs_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="token"):
        StepCost(token=value)


def test_the_fit_finds_what_the_steps_were_made_with() -> None:
    model = CostModel(StepCost())
    for decodes, chunks in steps(400):
        model.observe(decodes, chunks, TRUE.seconds(decodes, chunks))
    for decodes, chunks in steps(50, seed=2):
        assert model.cost.seconds(decodes, chunks) == pytest.approx(TRUE.seconds(decodes, chunks), rel=0.05)
    assert model.error < 0.1


def test_noise_and_stalls_move_the_fit_little() -> None:
    model, draw = CostModel(StepCost(token=1e-3)), random.Random(3)
    for decodes, chunks in steps(600):
        noise = draw.lognormvariate(0, 0.15) * (50 if draw.random() < 0.03 else 1)
        model.observe(decodes, chunks, TRUE.seconds(decodes, chunks) * noise)
    ratios = [model.cost.seconds(*step) / TRUE.seconds(*step) for step in steps(50, seed=4)]
    assert min(ratios) > 0.7 and max(ratios) < 1.4


def test_one_stall_of_a_minute_is_forgotten_at_once() -> None:
    model = CostModel(StepCost())
    for decodes, chunks in steps(200):
        model.observe(decodes, chunks, TRUE.seconds(decodes, chunks))
    before = model.cost.seconds((4, 4000), [(512, 4096)])
    model.observe((1, 100), [], 60.0)
    for decodes, chunks in steps(16, seed=6):
        model.observe(decodes, chunks, TRUE.seconds(decodes, chunks))
    assert model.cost.seconds((4, 4000), [(512, 4096)]) == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    model = CostModel(StepCost())
    for decodes, chunks in steps(300):
        model.observe(decodes, chunks, TRUE.seconds(decodes, chunks))
    for decodes, chunks in steps(600, seed=7):
        model.observe(decodes, chunks, factor * TRUE.seconds(decodes, chunks))
    ratios = [model.cost.seconds(*step) / TRUE.seconds(*step) for step in steps(50, seed=8)]
    assert sum(ratios) / len(ratios) == pytest.approx(factor, rel=0.35)


def test_what_no_step_has_shown_stays_as_the_prior_says() -> None:
    model = CostModel(StepCost(launch=0.01, token=7e-4, pair=3e-8))
    for _ in range(100):
        model.observe((1, 500), [], 0.02)
    assert (model.cost.token, model.cost.pair) == (pytest.approx(7e-4), pytest.approx(3e-8))
    assert model.cost.seconds((1, 500)) == pytest.approx(0.02, rel=0.02)


def test_times_that_cannot_be_are_ignored() -> None:
    model = CostModel(TRUE)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.observe((1, 1), [], seconds)
    assert model.observations == 0 and model.cost == TRUE


@given(data=st.lists(st.tuples(st.integers(0, 64), st.integers(0, 10**6), st.floats(1e-6, 100)), max_size=40))
def test_nothing_that_is_measured_makes_a_cost_negative_or_endless(data: list[tuple[int, int, float]]) -> None:
    model = CostModel(StepCost(token=1e-3))
    for rows, context, seconds in data:
        model.observe((rows, context), [(1 + context % 2048, context)], seconds)
    assert model.cost.seconds((64, 10**7), [(2048, 10**6)]) >= 0  # StepCost refuses what is negative or no number


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.5, 6.0])
def test_short_prompts_do_not_say_what_a_book_costs(slower: float) -> None:
    """On a machine of another speed than at the start, measured with noise."""
    prior, rng = StepCost(9e-3, 9e-3, 1e-6, 0.0, 1.7e-3, 2e-7), random.Random(0)
    model = CostModel(prior)
    for _ in range(8):
        tokens = rng.randint(8, 14)
        work = ((0, 0), [(tokens, 0)])
        model.observe(*work, prior.seconds(*work) * slower * rng.uniform(0.9, 1.1))
        for i in range(20):
            work = ((1, tokens + i), [])
            model.observe(*work, prior.seconds(*work) * slower * rng.uniform(0.9, 1.1))
    short, book = ((1, 20), []), ((0, 0), [(2048, 4096)])
    assert model.cost.seconds(*short) == pytest.approx(prior.seconds(*short) * slower, rel=0.1)
    assert prior.seconds(*book) / 2.5 < model.cost.seconds(*book) < prior.seconds(*book) * 2.5
