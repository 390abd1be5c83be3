"""Who is asked for a step's prompt tokens: few, in lumps, all in turn, and never fewer than want what there is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_bench import Bench, numbers

from longread.engine import policy
from longread.engine.policy import LEVELS, PATIENCE
from longread.engine.reading import LUMP, Reading
from longread.engine.sequence import Timeline
from longread.engine.waiting import Entry
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import RequestClass

COST = StepCost(launch=0.001, decode=1e-4, chunk=2e-4, token=1e-4)


def entry(arrival: int, tokens: int, owner: str = "", request_class: RequestClass = "interactive") -> Entry:
    made = Entry(Timeline(f"r{arrival}", [1] * tokens), arrival, request_class, owner)
    made.work = tokens
    return made


@st.composite
def prompts(draw: st.DrawFn) -> list[Entry]:
    lengths = st.one_of(st.integers(2, 80), st.integers(2, 5000))
    return [
        entry(i, draw(lengths), draw(st.sampled_from("abcdefgh")), draw(st.sampled_from(LEVELS)))
        for i in range(draw(st.integers(1, 40)))
    ]


@given(made=prompts(), most=st.integers(1, 6000), lumps=st.integers(0, 90), steps=st.integers(1, 4))
def test_whatever_a_step_can_hold_is_wanted_by_somebody_who_is_asked(
    made: list[Entry], most: int, lumps: int, steps: int
) -> None:
    reading = Reading()
    for each in made:
        reading.add(each)
    for turn in range(steps):
        left = [each for each in made if each.filed]
        asked = reading.candidates(most, lumps)
        assert len(set(asked)) == len(asked) and asked == sorted(asked, key=lambda each: each.rank)
        demands = [reading.demand(each) for each in asked]
        assert sum(policy.split(most, demands, turn)) == min(most, sum(each.filed for each in left))
        # A step may turn out smaller than that.
        lengths = policy.split(most - most // 3, demands, turn)
        served = [(each, length) for each, length in zip(asked, lengths, strict=True) if length]
        reading.deal(served, sum(lengths))
        for each, length in served:
            each.timeline.tokens = each.timeline.tokens[length:]
            reading.advanced(each)
        reading.check()


def test_nothing_passes_who_has_a_step_to_himself_however_small_it_is() -> None:
    reading, book = Reading(), entry(0, 4000)
    reading.add(book)
    for _ in range(500):
        reading.deal([(book, 1)], 40)  # starting such a step is worth forty of its tokens
    assert reading.demand(book).patient
    chat = entry(1, 1000)
    reading.add(chat)
    reading.deal([(book, 1), (chat, 400)], 401)
    assert reading.demand(book).patient, "400 of 4,000 have passed it, an eighth may"
    reading.deal([(book, 1), (chat, 400)], 401)
    assert not reading.demand(book).patient


def stepping(bench: Bench, steps: int) -> tuple[Counter[str], list[int]]:
    """Prompt tokens of each request, and the sizes of all chunks."""
    got: Counter[str] = Counter()
    sizes = []
    for _ in range(steps):
        for grant in bench.step().grants:
            if grant.timeline.key != "decodes":
                got[grant.timeline.key] += grant.length
                sizes.append(grant.length)
    return got, sizes


def busy(owners: int, tpot: float, tokens: int = 4000) -> Bench:
    """A decoding request and a prompt each of so many owners, under a target."""
    bench = Bench(pages=2000, seqs=64, budget=2048, slo=Slo(tpot=tpot))
    bench.scheduler.cost = COST
    bench.add("decodes", numbers(3, 0), output=10**6)
    bench.step()
    for i in range(owners):
        bench.add(f"r{i}", numbers(tokens, 1 + i), output=1, owner=f"owner {i}")
    return bench


@pytest.mark.parametrize(("owners", "tpot"), [(5, 0.010), (24, 0.025), (40, 0.012)])
def test_small_steps_are_dealt_in_lumps_and_everybody_gets_as_much(owners: int, tpot: float) -> None:
    bench = busy(owners, tpot)
    got, sizes = stepping(bench, 10 * owners)
    assert sum(size >= LUMP // 2 for size in sizes) >= 0.9 * len(sizes)
    assert sum(got.values()) / len(sizes) >= 0.7 * LUMP, "a step that has them for nobody else deals 1 or 2 tokens each"
    mean = sum(got.values()) / owners
    assert all(abs(got[f"r{i}"] - mean) <= 3 * LUMP for i in range(owners)), got


def test_in_a_small_step_the_oldest_of_an_owner_and_its_shorter_ones_take_turns() -> None:
    bench = busy(1, 0.010)
    for i in range(3):
        bench.add(f"later{i}", numbers(3000 + i, 50 + i), output=1, owner="owner 0")
    got, sizes = stepping(bench, 40)
    assert min(sizes) >= LUMP // 2
    assert got["r0"] == pytest.approx(sum(got.values()) / 2, abs=2 * LUMP)


def test_a_short_prompt_does_not_wait_behind_the_turns_of_patient_books() -> None:
    bench = busy(40, 0.012, tokens=12_000)
    stepping(bench, 10)
    bench.add("short", numbers(60, 999), output=1, owner="somebody else")
    stepping(bench, 3)
    assert "short" in bench.done


def test_patient_books_get_turns_of_their_own() -> None:
    reading = Reading()
    books = [entry(i, 50_000, f"book {i}") for i in range(20)]
    shorts = [entry(100 + i, 400, f"short {i}") for i in range(20)]
    for each in (*books, *shorts):
        reading.add(each)
    got: Counter[bool] = Counter()
    for turn in range(20):
        asked = reading.candidates(4 * LUMP, 4)
        assert sum(each in books for each in asked) == 1 and len(asked) == 5
        lengths = policy.split(4 * LUMP, [reading.demand(each) for each in asked], turn)
        reading.deal(list(zip(asked, lengths, strict=True)), sum(lengths))
        for each, length in zip(asked, lengths, strict=True):
            got[each in books] += length
    assert 0 < got[True] <= got[False] / PATIENCE
