"""Many ask about the book that one reads: they wait for it, and waiting costs a step nothing."""

import pytest

from longread.engine.scheduler import Scheduler
from longread.engine.sequence import Timeline
from longread.engine.virtual import ROOT, NoContent, groups, hashed
from longread.kv.cache import KVCache
from longread.kv.chain import TokenChain

BOOK, FOLLOWERS, BUDGET = 65_536, 48, 4096


def test_whoever_waits_for_a_book_is_not_looked_up_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, hashes = [], []
    promised, page_hash = KVCache.promised, TokenChain.page_hash
    monkeypatch.setattr(KVCache, "promised", lambda *given: asked.append(1) or promised(*given))
    monkeypatch.setattr(TokenChain, "page_hash", lambda *given: hashes.append(1) or page_hash(*given))
    cache = KVCache(groups(True), ROOT, 2 * BOOK // 256 + 4 * FOLLOWERS, 64, 512, NoContent())
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=BUDGET, snapshot_interval=32_768)
    timelines = []
    for number in range(FOLLOWERS + 1):
        tokens, known = hashed([(7, BOOK), (100 + number, 200)])
        timelines.append(Timeline(str(number), tokens, known))
        scheduler.add(timelines[-1])
    first, steps = timelines[0], 0
    while not first.computed >= BOOK:
        asked.clear()
        hashes.clear()
        plan = scheduler.schedule()
        if steps:
            assert not asked and len(hashes) < FOLLOWERS
        assert [grant.timeline for grant in plan.grants] == [first]
        assert scheduler.explain(timelines[-1], 0.0).reason == "prefix"
        for grant in plan.grants:
            grant.timeline.advance(cache, grant.length)
        steps += 1
    hashes.clear()
    plan = scheduler.schedule()
    assert len(plan.admitted) == FOLLOWERS
    assert len(hashes) < FOLLOWERS * FOLLOWERS * 12  # a few pages of each that reads, and not all of the book's
    assert all(timeline.computed >= BOOK - 256 for timeline in timelines)
    scheduler.check()
    cache.check()


def test_whoever_waits_for_one_that_ends_is_looked_up_again() -> None:
    cache = KVCache(groups(True), ROOT, 1024, 4, 64, NoContent())
    scheduler = Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=BUDGET, snapshot_interval=32_768)
    reader, follower = (Timeline(str(n), *hashed([(7, BOOK), (100 + n, 200)])) for n in range(2))
    for timeline in (reader, follower):
        scheduler.add(timeline)
    assert [grant.timeline for grant in scheduler.schedule().grants] == [reader]
    reader.advance(cache, BUDGET)
    scheduler.remove(reader, keep_tail=False)
    assert [grant.timeline for grant in scheduler.schedule().grants] == [follower]
    scheduler.check()
    cache.check()
