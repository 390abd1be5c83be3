"""Sharing out a step: nothing idle, nobody beyond its wants, classes and owners by their shares, within the target."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.engine import policy
from longread.engine.policy import (
    LEVELS,
    PATIENCE,
    WEIGHTS,
    Demand,
    chunks,
    fit,
    hold_back,
    level_of,
    passed,
    share,
    split,
)
from longread.spec.cost import StepCost
from longread.spec.step_target import LEAST_TOKENS, Bounds, least_seconds

WANTS = st.lists(st.tuples(st.integers(0, 900), st.sampled_from([1, 4, 8, 16])), max_size=9)
COST = StepCost(launch=0.010, decode=0.001, context=1e-7, chunk=2e-4, token=2e-4, pair=5e-9)


@st.composite
def demands(draw: st.DrawFn, most: int = 12) -> list[Demand]:
    made = []
    for _ in range(draw(st.integers(0, most))):
        want = draw(st.integers(1, 3000))
        made.append(
            Demand(
                want,
                want + draw(st.sampled_from([0, 0, 1, 100_000])),
                draw(st.sampled_from([0, 256, 100_000])),
                draw(st.integers(0, 2)),
                draw(st.sampled_from(["", "a", "b", "c"])),
                draw(st.booleans()),
            )
        )
    return made


@given(amount=st.integers(0, 3000), parties=WANTS, turn=st.integers(0, 100))
def test_a_share_is_all_there_is_and_never_more_than_is_wanted(
    amount: int, parties: list[tuple[int, int]], turn: int
) -> None:
    wants, weights = [want for want, _ in parties], [weight for _, weight in parties]
    given_ = share(amount, wants, weights, turn)
    assert all(0 <= got <= want for got, want in zip(given_, wants, strict=True))
    assert sum(given_) == min(amount, sum(wants))
    wanting = [i for i, want in enumerate(wants) if want]
    if amount >= len(wanting):
        assert all(given_[i] >= 1 for i in wanting)
    # Weighted max-min: who lacks something got as much a weight as anybody, but for the whole tokens.
    for i in wanting:
        if given_[i] < wants[i]:
            for j in wanting:
                assert Fraction(given_[i] + 2, weights[i]) >= Fraction(given_[j] - 2, weights[j])


@given(count=st.integers(1, 9), amount=st.integers(1, 8), weights=st.data())
def test_where_there_are_fewer_tokens_than_parties_they_go_around(
    count: int, amount: int, weights: st.DataObject
) -> None:
    heavy = [weights.draw(st.sampled_from(WEIGHTS)) for _ in range(count)]
    got = [0] * count
    for turn in range(count):
        got = [sum(pair) for pair in zip(got, share(amount, [5] * count, heavy, turn), strict=True)]
    assert min(got) >= 1


@given(budget=st.integers(0, 5000), wishes=demands(), turn=st.integers(0, 9))
def test_a_split_uses_the_budget_and_gives_nobody_too_much(budget: int, wishes: list[Demand], turn: int) -> None:
    lengths = split(budget, wishes, turn)
    assert all(0 <= n <= wish.want for n, wish in zip(lengths, wishes, strict=True))
    assert sum(lengths) == min(budget, sum(wish.want for wish in wishes))


@given(wishes=demands(), turn=st.integers(0, 9))
def test_every_class_and_owner_gets_its_share_of_a_step(wishes: list[Demand], turn: int) -> None:
    budget = 2048
    lengths = split(budget, wishes, turn)
    for level in {wish.level for wish in wishes}:
        mine = [i for i, wish in enumerate(wishes) if wish.level == level]
        got, wanted = sum(lengths[i] for i in mine), sum(wishes[i].want for i in mine)
        claim = budget * WEIGHTS[level] // sum(WEIGHTS)
        assert got >= min(wanted, claim - 3)
        owners = {wishes[i].owner for i in mine}
        for owner in owners:
            his = [i for i in mine if wishes[i].owner == owner]
            part = max(1, got // (PATIENCE * len(owners)) - 1)  # one that is patient takes an eighth of its part
            if got >= len(owners):
                assert sum(lengths[i] for i in his) >= min(sum(wishes[i].want for i in his), part)
            # The oldest prompt of each: what makes it certain that all are read in the end.
            assert lengths[his[0]] >= min(wishes[his[0]].want, sum(lengths[i] for i in his) // PATIENCE)


def test_classes_get_what_their_weights_say() -> None:
    busy = [Demand(10_000, 10_000, level=level) for level in range(len(LEVELS))]
    lengths = split(2100, busy)
    assert lengths == pytest.approx([1600, 400, 100], abs=2)
    assert split(2100, busy[1:]) == pytest.approx([1680, 420], abs=2)


def test_an_owner_with_many_prompts_gets_no_more_than_one_with_few() -> None:
    many = [Demand(5000, 5000, owner="many") for _ in range(9)]
    lengths = split(1000, [*many, Demand(5000, 5000, owner="few")])
    assert lengths[-1] == 500 and sum(lengths[:-1]) == 500


@pytest.mark.parametrize("owners", [("", ""), ("a", "b")])
def test_a_patient_book_lets_a_short_prompt_pass_whoever_owns_it(owners: tuple[str, str]) -> None:
    book, short = (Demand(9000, 100_000, owner=owners[0], patient=True), Demand(3000, 3000, owner=owners[1]))
    first, second = split(900, [book, short])
    assert second >= 900 - 900 // PATIENCE - 20 and first >= 900 // (PATIENCE + 1) - 1
    assert split(900, [Demand(9000, 100_000, owner=owners[0]), short]) == [450, 450]


def test_books_of_about_one_length_share_evenly() -> None:
    books = [Demand(9000, 100_000, owner=name, patient=True) for name in "ab"]
    assert split(1000, books) == [500, 500]


@given(
    limit=st.integers(1, 4096),
    wishes=demands(),
    rows=st.integers(0, 64),
    target=st.floats(0.001, 2.0),
    stretch=st.sampled_from([1, 2]),
    turn=st.integers(0, 9),
)
def test_a_step_stays_within_its_target_or_is_as_small_as_it_may_be(
    limit: int, wishes: list[Demand], rows: int, target: float, stretch: int, turn: int
) -> None:
    decodes = (rows, rows * 1000)
    lengths = fit(limit, wishes, decodes, COST, Bounds(target, stretch * target), turn)
    held_back, held = hold_back(wishes, COST)
    assert all(0 <= n <= wish.want for n, wish in zip(lengths, held_back, strict=True))
    total, wanted = sum(lengths), sum(wish.want for wish in held_back)
    assert min(limit, wanted, LEAST_TOKENS) <= total <= limit
    seconds = COST.seconds(decodes, chunks(wishes, lengths))
    least = max(target, least_seconds(COST, decodes))
    if total > LEAST_TOKENS and seconds > least:
        assert seconds <= stretch * target, "longer than its target, and than it may ever be"
        assert all(i in held or n == wishes[i].remaining for i, n in enumerate(lengths)), "and somebody waits on"
    if COST.seconds(decodes, chunks(wishes, split(limit, held_back, turn))) <= target:
        assert total == min(limit, wanted)


@given(wishes=demands(), target=st.floats(0.03, 0.5))
def test_a_target_is_used_and_not_only_kept(wishes: list[Demand], target: float) -> None:
    decodes = (4, 4000)
    lengths = fit(100_000, wishes, decodes, COST, Bounds(target, target))
    total = sum(lengths)
    held_back, _ = hold_back(wishes, COST)
    more = split(total + total // 8 + 2, held_back)
    if sum(more) > total > LEAST_TOKENS:
        assert COST.seconds(decodes, chunks(wishes, more)) > target


def test_without_a_cost_or_a_target_a_step_is_as_large_as_its_limit() -> None:
    wishes, tight = [Demand(5000, 5000)], Bounds(0.001, 0.001)
    assert fit(2048, wishes, (1, 10)) == fit(2048, wishes, (1, 10), COST) == [2048]
    assert fit(2048, wishes, (1, 10), COST, Bounds()) == fit(2048, wishes, (1, 10), None, tight) == [2048]


def test_a_step_without_room_carries_what_costs_as_much_as_starting_it() -> None:
    """However deep the prompt is: where a token looks back at a book, fewer are worth a step."""
    tight = Bounds(0.001, 0.001)
    (near,) = fit(2048, [Demand(5000, 5000)], (1, 10), COST, tight)
    assert near == pytest.approx((COST.launch + COST.chunk) / COST.token, rel=0.1)
    deep = StepCost(launch=0.010, decode=0.001, chunk=2e-4, token=2e-4, pair=1e-8)
    assert fit(2048, [Demand(5000, 5000, 90_000)], (1, 10), deep, tight) == [LEAST_TOKENS]


BOOK = Demand(9000, 100_000, 30_000, patient=True)


def test_a_step_that_brings_a_first_token_is_not_filled_with_a_book() -> None:
    within = Bounds(0.1, 0.2)
    assert fit(2048, [BOOK], (0, 0), COST, within)[0] > 200
    book, chat = fit(2048, [BOOK, Demand(120, 120)], (0, 0), COST, within)
    assert chat == 120
    alone, both = COST.seconds((0, 0), [(120, 0)]), COST.seconds((0, 0), chunks([BOOK, Demand(120, 120)], [book, chat]))
    assert alone * 1.1 < both <= alone * PATIENCE / (PATIENCE - 1)
    batch = Demand(9000, 100_000, 30_000, level=1, patient=True)
    assert fit(2048, [batch, Demand(120, 120)], (0, 0), COST, within) == [book, chat]
    tired = Demand(9000, 100_000, 30_000)
    assert fit(2048, [tired, Demand(120, 120)], (0, 0), COST, within)[0] > 100
    assert fit(2048, [BOOK, Demand(120, 120, level=1)], (0, 0), COST, within)[0] > 100, (
        "a lower class holds nobody back"
    )


def test_books_together_take_no_more_than_one() -> None:
    lengths = fit(2048, [BOOK, BOOK, BOOK, Demand(210, 210)], (0, 0), COST, Bounds(0.1, 0.2))
    together = COST.seconds((0, 0), chunks([BOOK, BOOK, BOOK, Demand(210, 210)], lengths))
    assert lengths[3] == 210 and min(lengths) > 0
    assert together <= COST.seconds((0, 0), [(210, 0)]) * PATIENCE / (PATIENCE - 1)


def test_a_part_that_would_mostly_start_is_left_out() -> None:
    dear = replace(COST, chunk=0.007)
    assert fit(2048, [BOOK, Demand(60, 60)], (0, 0), dear, Bounds(0.1, 0.2)) == [0, 60]


def test_a_short_prompt_is_not_cut_in_two_where_nothing_is_promised() -> None:
    chat = Demand(300, 300)  # 0.07 s, and the step's own target is 0.05
    assert fit(2048, [chat], (0, 0), COST, Bounds(0.05, 0.1)) == [300]
    assert fit(2048, [BOOK, chat], (0, 0), COST, Bounds(0.05, 0.1))[1] == 300
    assert fit(2048, [chat], (1, 100), COST, Bounds(0.05, 0.05))[0] < 200, "others' tokens are promised every 0.05 s"
    assert fit(2048, [Demand(900, 900)], (0, 0), COST, Bounds(0.05, 0.1))[0] < 200, "two targets do not hold it"


def test_whoever_is_held_back_becomes_impatient_by_starts_of_steps_too() -> None:
    assert passed(5, 1, COST) == int((COST.launch + COST.chunk) / COST.token) - 1
    assert passed(900, 100, COST) == 800
    assert passed(5, 1, None) == passed(5, 1, StepCost(launch=1.0)) == 4
    assert passed(5, 1, StepCost(launch=1.0, token=1e-9)) == policy.MOST_WORTH - 1


def test_a_preempted_request_rises_until_only_its_arrival_counts() -> None:
    assert [level_of("ingest", n) for n in range(4)] == [2, 1, 0, 0]
    assert [level_of("batch", n) for n in range(3)] == [1, 0, 0]
    assert level_of("interactive", 5) == 0
    assert len(policy.WEIGHTS) == len(policy.BYPASS_FACTORS) == len(LEVELS)
