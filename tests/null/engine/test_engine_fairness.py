"""Classes, owners and preemption over real books: who comes first, who gives way, and that everybody ends."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_bench import Bench, numbers

from longread.engine import scheduler as scheduling
from longread.engine.policy import BYPASS_FACTORS
from longread.engine.standing import Outlook, standing
from longread.engine.waiting import Entry
from longread.kv.chain import TokenChain
from longread.kv.lease import Load
from longread.kv.transfer import Transfer
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.state import PAGE_TOKENS
from longread.spec.step_target import LEAST_TOKENS

BATCH, INGEST = 1, 100


def test_a_higher_class_is_admitted_first() -> None:
    bench = Bench(seqs=1)
    bench.add("running", numbers(10, 1), output=3)
    bench.step()
    for i, priority in enumerate((INGEST, BATCH, 0)):
        bench.add(f"p{priority}", numbers(10, 10 + i), output=1, priority=priority)
    bench.run()
    assert bench.done == ["running", "p0", "p1", "p100"]


def test_a_higher_class_takes_a_slot_from_a_lower_one_which_goes_on_behind_it() -> None:
    bench = Bench(seqs=2, budget=128)
    for i in range(2):
        bench.add(f"batch{i}", numbers(600, i), output=60, priority=BATCH)
    for _ in range(12):
        bench.step()
    urgent = bench.add("urgent", numbers(50, 9), output=2)
    plan = bench.step()
    assert [t.key for t in plan.preempted] == ["batch1"] and urgent.lease is not None
    kept = bench.live["batch1"].tokens
    bench.run()
    assert bench.done[0] == "urgent" and sorted(bench.done) == ["batch0", "batch1", "urgent"]
    assert bench.cache.prefix_hits == 0  # a resume is not counted as a hit, though it found its own pages
    assert len(kept) >= 600


def test_a_lower_class_keeps_what_would_not_be_enough() -> None:
    bench = Bench(pages=8, seqs=4, budget=2048)
    bench.add("mine", numbers(1200, 1), output=200)  # five pages
    bench.add("batch", numbers(300, 2), output=150, priority=BATCH)  # two
    bench.step()
    bench.add("large", numbers(1500, 3), output=2)  # six, and the batch request has not enough of them
    assert not bench.step().preempted
    assert bench.waiting("large").reason == "pages"
    bench.run()
    assert bench.scheduler.preemptions == 0


def test_a_book_of_a_lower_class_gives_its_pages_to_a_higher_one() -> None:
    bench = Bench(pages=8, seqs=4, budget=256)
    book = bench.add("book", numbers(1700, 1), output=4, priority=INGEST)
    for _ in range(3):
        bench.step()
    before = book.computed
    bench.add("short", numbers(400, 2), output=2)
    plan = bench.step()
    assert [t.key for t in plan.preempted] == ["book"] and before > 0
    bench.run()
    assert bench.done == ["short", "book"]


def test_nobody_is_preempted_more_than_twice_for_a_higher_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "BYPASS_LIMIT", 1)
    bench = Bench(seqs=1, budget=256)
    book = bench.add("ingest", numbers(3000, 1), output=2, priority=INGEST)
    bench.step()
    preempted = 0
    for i in range(200):
        if "ingest" not in bench.live:
            break
        bench.add(f"chat{i}", numbers(20, 10 + i), output=2)
        bench.add(f"batch{i}", numbers(20, 1000 + i), output=2, priority=BATCH)
        preempted += book.key in [t.key for t in bench.step().preempted]
    assert 1 <= preempted <= 2 and "ingest" in bench.done


def test_a_lower_class_is_passed_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "BYPASS_LIMIT", 3)
    for priority, factor in ((BATCH, BYPASS_FACTORS[1]), (INGEST, BYPASS_FACTORS[2])):
        bench = Bench(seqs=1)
        bench.add("chat", numbers(5, 1), output=2)
        bench.step()
        bench.add("late", numbers(10, 2), output=1, priority=priority)
        for i in range(100):
            bench.add(f"chat{i}", numbers(5, 10 + i), output=2)
        bench.run()
        assert bench.done.index("late") == 1 + 3 * factor


def test_one_owner_with_many_requests_does_not_hold_another_up() -> None:
    bench = Bench(seqs=2, budget=64)
    for i in range(60):
        bench.add(f"many{i}", numbers(40, i), output=4, owner="many")
    for _ in range(10):
        bench.step()
    served = len(bench.done)
    for i in range(3):
        bench.add(f"few{i}", numbers(40, 100 + i), output=4, owner="few")
    bench.run()
    places = [bench.done.index(f"few{i}") for i in range(3)]
    # The two that run and at most one of theirs for each of its own.
    assert places[-1] <= served + 2 + 2 * 3


def test_an_owner_who_was_away_has_saved_nothing_up() -> None:
    bench = Bench(seqs=1, budget=64)
    bench.add("early", numbers(5, 1), output=1, owner="away")
    for i in range(30):
        bench.add(f"steady{i}", numbers(40, 10 + i), output=2, owner="steady")
    while len(bench.done) < 20:
        bench.step()
    for i in range(10):
        bench.add(f"back{i}", numbers(40, 100 + i), output=2, owner="away")
    start = len(bench.done)
    bench.run()
    soon = Counter(key.rstrip("0123456789") for key in bench.done[start : start + 10])
    assert soon["steady"] >= 4 and soon["back"] >= 4


def test_output_counts_against_its_owner() -> None:
    bench = Bench(seqs=1, budget=64)
    for name, output in (("long", 60), ("brief", 1)):
        for i in range(6):
            bench.add(f"{name}{i}", numbers(20, hash_of(name) + i), output=output, owner=name)
    bench.run()
    assert bench.done.index("brief5") < bench.done.index("long2")


def hash_of(name: str) -> int:
    return 1000 * len(name)


def test_who_computes_a_wanted_prefix_does_so_at_the_class_of_who_wants_it() -> None:
    bench = Bench(budget=64, pages=64)
    prompt = numbers(2000, 1)
    reading = bench.add("reading", prompt, priority=INGEST)
    bench.step()
    bench.add("other", numbers(6000, 2))
    bench.add("asks", [*prompt, 7])
    bench.step()
    before = reading.computed
    for _ in range(4):
        bench.step()
    assert bench.waiting("asks").reason == "prefix"
    assert reading.computed - before > 4 * 64 // 4, (
        "a seventeenth would be its own class's share beside the other prompt"
    )


@given(data=st.data(), rings=st.booleans())
def test_everybody_ends_whatever_class_and_owner(data: st.DataObject, rings: bool) -> None:
    """Starvation-freedom: requests of all classes and owners come at random while others run; each ends, within a bound
    of what there is to compute, and whoever is preempted comes further each time but for a few.
    """
    pages, seqs = data.draw(st.integers(3, 10)), data.draw(st.integers(1, 5))
    budget = max(seqs, data.draw(st.sampled_from([7, 64, 300])))
    bench = Bench(pages=pages, seqs=seqs, budget=budget, rings=rings)
    count = data.draw(st.integers(2, 14))
    fruitless: Counter[str] = Counter()
    reached: dict[str, int] = {}
    work = 0
    for i in range(count):
        length = data.draw(st.integers(1, pages * PAGE_TOKENS - 40))
        if budget < 64:
            length = min(length, 200)
        output = data.draw(st.integers(1, 40))
        priority, owner = data.draw(st.sampled_from([0, 0, 1, 50, 100])), data.draw(st.sampled_from(["", "a", "b"]))
        bench.add(f"r{i}", numbers(length, data.draw(st.integers(0, 3))), output, priority, owner)
        work += length // budget + output + 2
        for _ in range(data.draw(st.integers(0, 3))):
            watch(bench, reached, fruitless)
    steps = 0
    while bench.live:
        watch(bench, reached, fruitless)
        steps += 1
        assert steps < 20 * work + 100, f"still alive: {sorted(bench.live)}"
    assert sorted(bench.done) == sorted(f"r{i}" for i in range(count))
    assert bench.cache.pages_held == 0
    assert max(fruitless.values(), default=0) <= count + 2


def watch(bench: Bench, reached: dict[str, int], fruitless: Counter[str]) -> None:
    """A step; counts the preemptions of each request since it came further than ever before."""
    for key in [t.key for t in bench.step().preempted]:
        fruitless[key] += 1
    for key, timeline in bench.live.items():
        if timeline.computed > reached.get(key, 0):
            reached[key] = timeline.computed
            fruitless[key] = 0


@settings(max_examples=4)
@given(seed=st.integers(0, 1000))
def test_no_class_waits_for_ever_under_a_stream_that_fills_the_machine(seed: int) -> None:
    """Twice of what can be served arrives in each class; still each class ends requests all the time."""
    draw = random.Random(seed)
    bench = Bench(pages=64, seqs=3, budget=64)
    ended_at: dict[int, list[int]] = {0: [], BATCH: [], INGEST: []}
    seen = 0
    for step in range(600):
        if step % 2 == 0:
            priority = draw.choice([0, 0, 0, BATCH, INGEST])
            bench.add(f"{priority}.{step}", numbers(draw.randrange(5, 60), step), 6, priority, draw.choice("ab"))
        bench.step()
        for key in bench.done[seen:]:
            ended_at[int(key.split(".")[0])].append(step)
        seen = len(bench.done)
    assert ended_at[0] and ended_at[BATCH], "the lower class is served beside the higher one"
    waits = [b - a for a, b in zip(ended_at[0], ended_at[0][1:], strict=False)]
    assert max(waits) < 60


def test_steps_stay_within_the_target_once_the_cost_is_known() -> None:
    cost = StepCost(launch=0.002, decode=0.001, context=1e-7, token=1e-4, pair=1e-9)
    bench = Bench(pages=64, budget=2048, slo=Slo(tpot=0.030))
    bench.scheduler.cost = cost
    bench.add("chat", numbers(20, 1), output=40)
    bench.step()
    book = bench.add("book", numbers(15000, 2), output=1)
    before, seen = 0, []
    while "chat" in bench.live:
        plan = bench.step()
        if plan.decodes[0] and plan.chunks:
            seen.append(sum(n for n, _ in plan.chunks))
            assert cost.seconds(plan.decodes, plan.chunks) <= 0.030
            assert book.computed > before
            before = book.computed
    assert seen and min(seen[:-1]) > LEAST_TOKENS, "the target is used"
    assert max(seen) < 300
    plan = bench.step()
    assert sum(n for n, _ in plan.chunks) > 300, "nobody decodes: nothing to keep it short for"


def test_a_ttft_target_bounds_steps_that_nobody_decodes_in() -> None:
    cost = StepCost(launch=0.002, token=5e-4)
    bench = Bench(pages=64, budget=2048, slo=Slo(ttft=1.0))
    bench.scheduler.cost = cost
    bench.add("book", numbers(8000, 2), output=1)
    plan = bench.step()
    assert 0.2 < cost.seconds(plan.decodes, plan.chunks) <= 0.25


def test_each_state_is_explained() -> None:
    bench = Bench(pages=8, seqs=2, budget=64)
    bench.scheduler.cost = StepCost(launch=0.01, decode=0.001, token=1e-3)
    prompt = numbers(900, 1)
    bench.add("book", prompt, output=2)
    assert bench.waiting("book").reason == "turn" and bench.waiting("book").position == 0
    bench.step()
    bench.add("large", numbers(1500, 2))
    bench.add("same", [*prompt, 1])
    bench.step()
    told = {key: bench.waiting(key) for key in ("book", "large", "same")}
    assert (told["book"].phase, told["book"].reason) == ("prefill", "step")
    assert told["book"].computed_tokens == 128 and "128 of 900" in told["book"].detail
    assert told["book"].first_token_in == pytest.approx(0.01 * 13 + 0.772, rel=0.2)
    assert told["large"].reason == "pages" and "available" in told["large"].detail
    assert told["same"].reason == "prefix" and told["same"].position == 1
    assert told["same"].first_token_in < told["same"].starts_in + 0.1  # type: ignore[operator]
    assert told["same"].starts_in is not None and told["same"].starts_in > told["large"].starts_in > 0  # type: ignore[operator]
    bench.add("chat", numbers(10, 3), output=50)
    bench.step()
    bench.step()
    bench.add("third", numbers(10, 4))
    bench.step()
    assert bench.waiting("chat").phase == "decode"
    assert bench.waiting("third").reason == "slots" and "2 slots" in bench.waiting("third").detail
    assert bench.waiting("third").num_running == 2


def test_a_load_is_explained_and_so_is_a_preemption() -> None:
    bench = Bench(seqs=2)
    timeline = bench.add("stored", numbers(600, 1))
    load = Load(TokenChain(timeline.tokens, bytes(16)), 0, pages=[3, 4])
    entry = Entry(timeline, 0)
    entry.transfer = Transfer(load, [], None, 0)
    told = standing(entry, [], Outlook(None, 64, 2, [], 1, None), 2.5)
    assert (told.phase, told.reason, told.waited, told.starts_in) == ("loading", "load", 2.5, None)
    assert told.detail.startswith("2 pages")
    bench.step()
    bench.scheduler.preempt_latest()
    assert "preempted" in bench.waiting("stored").detail and bench.waiting("stored").preemptions == 1


def test_a_start_is_predicted_from_what_is_ahead_and_how_long_slots_are_held() -> None:
    bench = Bench(seqs=1, budget=64)
    bench.scheduler.cost = StepCost(token=0.01)
    for i in range(4):
        bench.add(f"r{i}", numbers(50, i), output=30)
    bench.step()
    assert bench.waiting("r2").starts_in == pytest.approx(0.5), (
        "one prompt is ahead; how long a slot is held is not known"
    )
    while "r0" in bench.live:
        bench.step()
    bench.step()
    # r1 runs, r2 is ahead: two slots of thirty steps, a second each on this clock, have to be given back.
    assert bench.waiting("r3").starts_in == pytest.approx(2 * 30, rel=0.1)
