"""The schedule: budget, fairness, admission, preemption. No model: computing is committing."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_bench import Bench, numbers

from longread.engine import scheduler as scheduling
from longread.engine.batch import gather
from longread.engine.policy import split_budget
from longread.engine.sequence import Admission
from longread.kv.chain import TokenChain
from longread.kv.lease import Load
from longread.kv.transfer import Transfer
from longread.spec.state import PAGE_TOKENS


@given(
    budget=st.integers(0, 600),
    demands=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=8),
)
def test_split_uses_the_budget_and_feeds_the_oldest(budget: int, demands: list[tuple[int, int]]) -> None:
    wanted = [(want, want + more) for want, more in demands]
    lengths = split_budget(budget, wanted)
    assert len(lengths) == len(wanted)
    assert all(0 <= n <= want for n, (want, _) in zip(lengths, wanted, strict=True))
    assert sum(lengths) == min(budget, sum(want for want, _ in wanted))
    if wanted and budget:
        assert lengths[0] >= min(wanted[0][0], -(-budget // 2))


def test_short_prompts_pass_in_one_step_beside_a_book() -> None:
    bench = Bench(budget=64, pages=64)
    book = bench.add("book", numbers(8000, 1))
    bench.step()
    for i in range(3):
        bench.add(f"short{i}", numbers(10, 2 + i), output=1)
    before = book.computed
    bench.step()
    assert bench.done == ["short0", "short1", "short2"]
    assert book.computed - before == 64 - 30


def test_a_book_is_not_starved_by_a_stream_of_short_prompts() -> None:
    bench = Bench(budget=64, pages=64, seqs=16)
    bench.add("book", numbers(3200, 1), output=1)
    for step in range(110):
        if "book" not in bench.live:
            break
        for i in range(2):
            bench.add(f"s{step}.{i}", numbers(31, 1000 + 2 * step + i), output=1)
        bench.step()
    assert "book" in bench.done, "half of the budget must have read it in 100 steps"


def test_short_prompts_are_not_starved_by_books() -> None:
    bench = Bench(budget=64, pages=128)
    for i in range(3):
        bench.add(f"book{i}", numbers(6000, i))
    bench.step()
    bench.add("short", numbers(20, 9), output=1)
    bench.step()
    assert bench.done == ["short"]


def test_a_prompt_waits_for_the_one_that_computes_its_prefix() -> None:
    bench = Bench(budget=300)
    prompt = numbers(1000, 1)
    first, second = bench.add("a", prompt), bench.add("b", [*prompt, 3])
    bench.step()
    assert first.lease is not None
    assert second.lease is None
    bench.run()
    assert bench.cache.prefix_hits >= 768


def test_latest_arrival_is_preempted_and_the_oldest_goes_on() -> None:
    bench = Bench(pages=4, budget=1024, caching=False)
    first = bench.add("first", numbers(500, 1), output=400)
    bench.add("second", numbers(200, 2), output=200)
    preempted: list[str] = []
    for _ in range(2000):
        if not bench.live:
            break
        preempted += [t.key for t in bench.step().preempted]
        assert "first" not in bench.live or first.lease is not None
    assert set(preempted) == {"second"}
    assert sorted(bench.done) == ["first", "second"]


def test_a_large_request_is_passed_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "BYPASS_LIMIT", 3)
    bench = Bench(pages=8, budget=2048, seqs=4)
    bench.add("holder", numbers(1000, 1), output=250)
    bench.step()
    large = bench.add("large", numbers(1500, 2))
    for i in range(8):
        bench.add(f"small{i}", numbers(20, 10 + i), output=2)
    bench.run()
    order = bench.done
    assert order.index("small2") < order.index("holder") < order.index("large")
    assert [k for k in order[: order.index("holder")] if k.startswith("small")] == ["small0", "small1", "small2"]
    assert large.lease is None


def test_what_open_leases_keep_from_a_lone_request_fails_it() -> None:
    bench = Bench(pages=4)
    held = bench.cache.open(numbers(700, 1))
    bench.cache.reserve(held, 700)
    bench.add("r", numbers(600, 2))
    bench.step()
    assert bench.failed == ["r"]
    bench.cache.close(held)
    bench.cache.check()


def test_as_many_sequences_as_tokens_of_budget_all_decode_in_each_step() -> None:
    bench = Bench(budget=3, seqs=3)
    for i in range(5):
        bench.add(f"r{i}", numbers(5 + i, i), output=5)
    full = 0
    while bench.live:
        full += [g.length for g in bench.step().grants] == [1, 1, 1]
    assert sorted(bench.done) == [f"r{i}" for i in range(5)]
    assert full >= 4


@pytest.mark.parametrize("rings", [True, False])
def test_a_prompt_takes_one_step_where_the_budget_allows(rings: bool) -> None:
    """And can be landed on at each of its landing points all the same."""
    bench = Bench(budget=8192, rings=rings)
    timeline = bench.add("r", numbers(8000, 1), output=2)
    assert [grant.length for grant in bench.step().grants] == [8000] and timeline.remaining == 1
    for shared in (7424, 7680, 7936, 7999) if rings else (256, 3000, 7936, 7999):
        assert bench.cache.match([*timeline.tokens[:shared], 99]).cached_tokens == shared
    assert [grant.length for grant in bench.step().grants] == [1]


def test_prompts_of_one_step_are_landed_on_each() -> None:
    bench = Bench(budget=2048, rings=True)
    timelines = [bench.add(f"r{i}", numbers(600, 10 + i), output=9) for i in range(2)]
    assert [grant.length for grant in bench.step().grants] == [600, 600]
    assert bench.cache.snapshots_held == 6
    for timeline in timelines:
        for shared in (256, 512, 599):
            assert bench.cache.match([*timeline.tokens[:shared], 99]).cached_tokens == shared


def test_where_snapshot_rows_run_out_a_step_keeps_each_prompts_deepest_points() -> None:
    bench = Bench(budget=4096, rings=True)  # 8 rows
    timelines = [bench.add(f"r{i}", numbers(1000, 10 + i), output=9) for i in range(3)]
    assert [grant.length for grant in bench.step().grants] == [1000] * 3
    found = [bench.cache.match([*timeline.tokens[:1000], 99]).cached_tokens for timeline in timelines]
    assert found == [999, 999, 0]
    bench.run()


@given(data=st.data(), rings=st.booleans())
def test_every_request_finishes_on_a_small_pool(data: st.DataObject, rings: bool) -> None:
    pages = data.draw(st.integers(3, 8))
    seqs = data.draw(st.integers(1, 5))
    budget = max(seqs, data.draw(st.sampled_from([1, 7, 64, 300])))
    bench = Bench(pages=pages, seqs=seqs, budget=budget, rings=rings)
    count = data.draw(st.integers(1, 10))
    for i in range(count):
        length = data.draw(st.integers(1, pages * PAGE_TOKENS - 40))
        if bench.budget < 7:
            length = min(length, 60)
        bench.add(f"r{i}", numbers(length, data.draw(st.integers(0, 2))), output=data.draw(st.integers(1, 40)))
        if data.draw(st.booleans()):
            bench.step()
    bench.run()
    assert sorted(bench.done) == sorted(f"r{i}" for i in range(count))
    assert bench.cache.pages_held == 0


def test_gather_lays_segments_end_to_end_and_samples_complete_ones() -> None:
    bench = Bench(budget=64)
    short, book = bench.add("short", [5, 6, 7]), bench.add("book", numbers(200, 1))
    plan = bench.scheduler.schedule()
    batch = gather(plan.grants, slots=8)
    assert len(batch.token_ids) == 64 == len(batch.positions)
    offset = 0
    for segment, grant in zip(batch.segments, plan.grants, strict=True):
        assert segment.offset == offset
        assert grant.timeline.lease is not None
        assert segment.slot == grant.timeline.lease.slot
        assert list(batch.token_ids[offset : offset + segment.length]) == list(grant.timeline.tokens[: segment.length])
        assert list(batch.positions[offset : offset + segment.length]) == list(range(segment.length))
        assert len(segment.pages) * PAGE_TOKENS >= segment.end
        offset = segment.offset + segment.length
    assert batch.sampling == (short,)
    assert batch.token_ids[batch.logit_rows[0]] == 7
    assert book.computed == 0


def test_the_hosts_share_of_a_load_from_disk_is_never_below_zero() -> None:
    draw, load = random.Random(3), Load(TokenChain([1], bytes(16)), 0)
    for _ in range(500):
        admission, disk, host = Admission(), draw.random(), draw.choice([0.0, 1e-17])
        transfer = Transfer(load, [], None, 0, seconds={"disk": disk, "host": host}, ended=5 + draw.random())
        admission.add(transfer, 5.0)
        assert math.copysign(1.0, admission.load_host) == 1.0
        assert admission.load_host + admission.load_disk == pytest.approx(transfer.ended - 5.0)
