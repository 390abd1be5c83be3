"""The rules of the prefix cache one by one: what is reused, what is evicted first, who waits, what a failure leaves."""

from collections.abc import Iterable

import pytest
from kv_contents import ROWS_ONLY, WITH_RINGS, Contents, digests

import longread.kv.chain
from longread.kv.cache import KVCache
from longread.kv.lease import Lease, Match
from longread.spec.errors import CapacityError
from longread.spec.state import PAGE_TOKENS, StateGroup

ROOT = b"root".ljust(16, b"\0")


def make(groups: tuple[StateGroup, ...], pages: int = 32, slots: int = 4, snapshots: int = 32, caching: bool = True):
    store = Contents(groups, pages, slots, snapshots)
    return KVCache(groups, ROOT, pages, slots, snapshots, store, enable_prefix_caching=caching), store


def compute(cache: KVCache, store: Contents, lease: Lease, tokens: Iterable[int]) -> None:
    """One step of ``tokens``, without any snapshot."""
    tokens = list(tokens)
    cache.reserve(lease, lease.position + len(tokens))
    store.compute(lease.pages, lease.slot, [*lease.tokens, *tokens], lease.position, lease.saves)
    cache.commit(lease, tokens)


def prefill(cache: KVCache, store: Contents, lease: Lease, prompt: list[int]) -> None:
    """The rest of the prompt in one step, with the landing points of the policy."""
    cache.prepare(lease, len(prompt), len(prompt) - lease.position)
    cache.check()
    compute(cache, store, lease, prompt[lease.position :])
    cache.check()


def read(cache: KVCache, store: Contents, prompt: list[int]) -> None:
    """Prefill and close; nothing is published for the turn's end."""
    lease = cache.open(prompt)
    cache.count_lookup(lease)
    prefill(cache, store, lease, prompt)
    cache.close(lease)
    cache.check()


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("groups", [ROWS_ONLY, WITH_RINGS])
@pytest.mark.parametrize("length", [256, 257, 300, 512, 513, 1000, 1025])
def test_the_same_prompt_again_costs_one_token(groups, length):
    cache, store = make(groups)
    prompt = tokens(length)
    read(cache, store, prompt)
    lease = cache.open(prompt)
    assert cache.prefix_queries == length, "opening alone is no look-up: it may fail, or be a resume"
    cache.count_lookup(lease)
    assert lease.cached_tokens == length - 1
    assert not store.differences(lease.pages, lease.tokens, digests(lease.tokens))
    prefill(cache, store, lease, prompt)
    assert (cache.prefix_queries, cache.prefix_hits) == (2 * length, length - 1)


def test_rows_are_reused_up_to_the_first_different_token():
    cache, store = make(ROWS_ONLY)
    read(cache, store, tokens(1000))
    for common in (1, 255, 256, 257, 700, 999):
        assert cache.match([*tokens(common), 77777, 77778]) == Match(common, common // 256)


def test_rows_of_several_tokens_are_not_split():
    cache, store = make((StateGroup("csa", "rows", (0,), 4, tokens_per_row=4), *ROWS_ONLY))
    read(cache, store, tokens(300))
    assert cache.match([*tokens(299), 77777]).cached_tokens == 296


def test_ring_models_land_on_snapshots_only():
    cache, store = make(WITH_RINGS)
    read(cache, store, tokens(2000))  # published: 1999, 1792, 1536 and 1280
    assert cache.match([*tokens(1999), 77777]).cached_tokens == 1999
    assert cache.match([*tokens(1998), 77777]).cached_tokens == 1792
    assert cache.match([*tokens(1791), 77777]).cached_tokens == 1536
    assert cache.match([*tokens(1535), 77777]).cached_tokens == 1280
    assert cache.match([*tokens(1279), 77777]).cached_tokens == 0


def test_a_turn_that_ended_inside_a_page_is_continued():
    cache, store = make(WITH_RINGS)
    prompt = tokens(600)
    lease = cache.open(prompt)
    prefill(cache, store, lease, prompt)
    compute(cache, store, lease, tokens(50, 9000))
    cache.snapshot(lease)
    cache.close(lease)
    follow = [*prompt, *tokens(50, 9000), *tokens(400, 20000)]
    lease = cache.open(follow)
    assert lease.cached_tokens == 650
    prefill(cache, store, lease, follow)


def test_a_short_prompt_after_a_long_one_finds_a_fresh_ring():
    cache, store = make(WITH_RINGS, slots=1)
    read(cache, store, tokens(1000))
    lease = cache.open([5, 6])
    assert lease.cached_tokens == 0
    compute(cache, store, lease, [5, 6])  # the store refuses a ring that is not the state at 0


@pytest.mark.parametrize("groups", [ROWS_ONLY, WITH_RINGS])
def test_a_tail_outlives_its_writer_going_on_in_the_same_page(groups):
    """Two sequences continue one tail differently, the first while it is still the tail's writer."""
    cache, store = make(groups)
    prompt = tokens(300)
    first = cache.open(prompt)
    prefill(cache, store, first, prompt)
    compute(cache, store, first, tokens(20, 9000))
    second = cache.open([*prompt, 5])
    assert second.cached_tokens >= 299
    compute(cache, store, second, [*prompt, 5][second.position :])
    compute(cache, store, first, tokens(500, 9020))
    for lease in (first, second):
        assert not store.differences(lease.pages, lease.tokens, digests(lease.tokens))
    cache.check()


def test_two_leases_computing_the_same_page_publish_it_once():
    cache, store = make(ROWS_ONLY)
    leases = [cache.open(tokens(512)) for _ in range(2)]
    for lease in leases:
        compute(cache, store, lease, tokens(512))
    cache.check()
    assert not set(leases[0].pages) & set(leases[1].pages)
    cache.close(leases[1])
    assert cache.pages_free == 30
    cache.close(leases[0])
    assert (cache.pages_cached, cache.match(tokens(600)).cached_tokens) == (2, 512)


def test_one_lineage_of_turns_occupies_one_tail_page():
    cache, store = make(WITH_RINGS)
    talk = tokens(260)
    for turn in range(5):
        read(cache, store, talk)
        talk = [*talk, *tokens(20, 1000 * turn + 5000)]
    assert cache.pages_cached == 2


def test_caching_off_keeps_nothing():
    cache, store = make(WITH_RINGS, caching=False)
    prompt = tokens(1000)
    lease = cache.open(prompt)
    compute(cache, store, lease, prompt)
    assert not cache.snapshot(lease)
    assert not cache.pending(prompt)
    cache.close(lease)
    cache.check()
    assert (cache.pages_free, cache.match(prompt).cached_tokens, cache.prefix_queries) == (32, 0, 0)


def test_the_least_recently_used_go_first_and_children_before_parents():
    cache, store = make(ROWS_ONLY, pages=8)
    old, young = tokens(769), tokens(769, 5000)
    read(cache, store, old)  # 3 full pages and a tail of one token
    read(cache, store, young)
    lease = cache.open(tokens(10, 90000))
    for pages, left in ((1, 768), (2, 512), (3, 256), (4, 0)):
        cache.reserve(lease, pages * 256)
        cache.check()
        assert (cache.match([*old, 1]).cached_tokens, cache.match([*young, 1]).cached_tokens) == (left, 769)
    cache.reserve(lease, 5 * 256)
    assert cache.match([*young, 1]).cached_tokens == 768


def test_use_makes_young_again():
    cache, store = make(ROWS_ONLY, pages=8)
    first, second = tokens(769), tokens(769, 5000)
    read(cache, store, first)
    read(cache, store, second)
    cache.close(cache.open([*first, 1]))
    lease = cache.open([1])
    cache.reserve(lease, 4 * 256)
    assert (cache.match([*first, 1]).cached_tokens, cache.match([*second, 1]).cached_tokens) == (769, 0)


def test_an_evicted_page_takes_its_snapshots_and_tails_with_it():
    cache, store = make(WITH_RINGS, pages=8)
    prompt = tokens(1000)
    read(cache, store, prompt)
    assert cache.snapshots_held == 4
    lease = cache.open([1])
    cache.reserve(lease, 5 * 256)
    assert (cache.snapshots_held, cache.match(prompt).cached_tokens) == (3, 768)
    cache.reserve(lease, 8 * 256)
    assert (cache.snapshots_held, cache.match(prompt).cached_tokens, cache.pages_cached) == (0, 0, 0)
    cache.check()


def test_snapshots_are_evicted_by_use():
    cache, store = make(WITH_RINGS, snapshots=8)
    first, second = tokens(1000), tokens(1000, 5000)
    read(cache, store, first)
    read(cache, store, second)
    cache.close(cache.open(first))  # 999 of the first is young again
    read(cache, store, tokens(1000, 9000))
    assert cache.snapshots_evicted == 4
    assert (cache.match(first).cached_tokens, cache.match(second).cached_tokens) == (999, 999)
    assert cache.match(first[:999]).cached_tokens == 0
    cache.check()


def test_a_sequence_alone_gets_every_page_even_under_published_children():
    """It computed its own copy of a published prefix: the cached originals are parents of its own pages."""
    cache, store = make(ROWS_ONLY, pages=8, slots=2)
    prompt = tokens(512)
    other, lease = cache.open(prompt), cache.open(prompt)
    for each in (other, lease):
        compute(cache, store, each, prompt)
    compute(cache, store, lease, tokens(300, 5000))
    cache.close(other)
    assert (cache.pages_cached, cache.pages_held, cache.pages_free) == (2, 4, 2)
    cache.reserve(lease, cache.pool.count * PAGE_TOKENS)
    cache.check()
    assert cache.match([*prompt, 1]).cached_tokens == 0
    compute(cache, store, lease, tokens(212, 5300))  # the next full page publishes its own chain again
    cache.check()
    assert cache.match([*lease.tokens, 1]).cached_tokens == 1024


def test_a_full_pool_lands_earlier_instead_of_evicting_what_it_lands_on():
    cache, store = make(ROWS_ONLY, pages=3)
    prompt = tokens(700)
    read(cache, store, prompt)
    assert (cache.pages_free, cache.match(prompt).cached_tokens) == (0, 699)
    lease = cache.open(prompt)  # two pages, the tail's page and a copy of it would be four
    assert lease.cached_tokens == 512
    prefill(cache, store, lease, prompt)


def test_a_rolling_snapshot_replaces_only_its_own():
    cache, store = make(WITH_RINGS)
    lease = cache.open([1])
    compute(cache, store, lease, [1])
    for page in range(1, 4):
        compute(cache, store, lease, tokens(256 - (page == 1), 1000 * page))
        assert cache.snapshot(lease, rolling=True)
        cache.check()
        assert cache.snapshots_held == 1
    assert cache.match([*lease.tokens, 1]).cached_tokens == 768
    assert cache.match([*lease.tokens[:600], 1]).cached_tokens == 0


def test_a_rolling_snapshot_that_is_asked_for_again_stays():
    cache, store = make(WITH_RINGS)
    lease = cache.open([1])
    compute(cache, store, lease, [1, *tokens(255, 1000)])
    cache.snapshot(lease, rolling=True)
    cache.snapshot(lease)
    compute(cache, store, lease, tokens(256, 2000))
    cache.snapshot(lease, rolling=True)
    cache.check()
    assert cache.snapshots_held == 2
    assert cache.match([*lease.tokens[:300], 1]).cached_tokens == 256


def test_a_rolling_snapshot_on_another_lease_s_leaves_that_alone():
    cache, store = make(WITH_RINGS, slots=2)
    prompt = [1, *tokens(255, 1000)]
    leases = [cache.open([1]) for _ in range(2)]
    for lease in leases:
        compute(cache, store, lease, prompt)
        cache.snapshot(lease, rolling=True)
    compute(cache, store, leases[1], tokens(256, 2000))
    cache.snapshot(leases[1], rolling=True)
    cache.check()
    assert cache.snapshots_held == 2
    assert cache.match([*prompt, 5]).cached_tokens == 256


def test_a_prompt_waits_while_its_next_page_is_being_computed():
    cache, store = make(ROWS_ONLY)
    prompt = tokens(1000)
    assert not cache.pending(prompt)
    lease = cache.open(prompt)
    assert cache.pending(prompt)
    assert cache.pending(cache.chain([*prompt[:600], *tokens(50, 7000)]))
    assert not cache.pending([*prompt[:200], *tokens(50, 7000)])  # shares no full page
    compute(cache, store, lease, prompt[:600])
    assert not cache.pending([*prompt[:600], *tokens(50, 7000)])  # what it shares is there
    assert cache.pending(prompt)
    compute(cache, store, lease, prompt[600:])
    assert not cache.pending(prompt)


def test_a_ring_prompt_waits_only_for_a_point_that_will_be_published():
    cache, store = make(WITH_RINGS)
    prompt = tokens(2000)
    lease = cache.open(prompt)
    assert cache.pending(prompt)
    assert cache.pending([*prompt[:1280], 1])
    assert not cache.pending([*prompt[:1279], 1])
    compute(cache, store, lease, prompt[:1280])
    assert not cache.pending([*prompt[:1280], 1])  # passed without a snapshot: nothing to wait for
    compute(cache, store, lease, prompt[1280:1999])
    assert not cache.pending(prompt)


@pytest.mark.parametrize("groups", [ROWS_ONLY, WITH_RINGS])
def test_nobody_waits_for_a_closed_lease(groups):
    cache, _ = make(groups)
    lease = cache.open(tokens(1000))
    cache.close(lease)
    assert not cache.pending(tokens(1000))


def test_nobody_waits_for_snapshots_that_cannot_be():
    cache, _ = make(WITH_RINGS, snapshots=0)
    cache.open(tokens(1000))
    assert not cache.pending(tokens(1000))


@pytest.mark.parametrize("failing", ["load_snapshot", "copy_page"])
def test_a_failing_copy_leaves_no_lease_behind(failing):
    cache, store = make(WITH_RINGS)
    read(cache, store, tokens(1000))
    before = (cache.pages_free, cache.pages_cached, cache.prefix_queries, cache.match(tokens(1000)))
    store.fail = failing
    with pytest.raises(OSError, match=failing):
        cache.open(tokens(1000))
    cache.check()
    assert (cache.pages_free, cache.pages_cached, cache.prefix_queries, cache.match(tokens(1000))) == before
    assert (cache.pages_held, len(cache.free_slots)) == (0, 4)


@pytest.mark.parametrize("failing", ["copy_slot", "copy_page"])
def test_a_failing_fork_leaves_no_lease_behind(failing):
    cache, store = make(WITH_RINGS)
    lease = cache.open(tokens(300))
    compute(cache, store, lease, tokens(300))
    store.fail = failing
    with pytest.raises(OSError, match=failing):
        cache.fork(lease)
    cache.check()
    assert (cache.pages_held, len(cache.free_slots)) == (2, 3)


def test_a_failing_save_publishes_nothing():
    cache, store = make(WITH_RINGS)
    lease = cache.open(tokens(300))
    compute(cache, store, lease, tokens(299))
    store.fail = "save_snapshot"
    with pytest.raises(OSError, match="save_snapshot"):
        cache.snapshot(lease)
    cache.check()
    assert (cache.snapshots_held, cache.match(tokens(300)).cached_tokens) == (0, 0)


def test_capacity_errors_name_what_is_short():
    cache, store = make(ROWS_ONLY, pages=4, slots=2)
    lease = cache.open(tokens(600))
    with pytest.raises(CapacityError, match="5 pages wanted, 4 of 4"):
        cache.reserve(lease, 1025)
    compute(cache, store, lease, tokens(600))
    cache.reserve(lease, cache.pool.count * PAGE_TOKENS)
    with pytest.raises(CapacityError, match="no page for the copy"):
        cache.fork(lease)
    cache.open([1])
    with pytest.raises(CapacityError, match="all 2 slots"):
        cache.open([1])
    with pytest.raises(CapacityError, match="all 2 slots"):
        cache.fork(lease)
    cache.check()


def test_misuse_is_loud():
    cache, _ = make(ROWS_ONLY)
    lease = cache.open(tokens(10))
    with pytest.raises(AssertionError, match="pages reserved for 0"):
        cache.commit(lease, tokens(10))
    cache.reserve(lease, 10)
    with pytest.raises(AssertionError, match="differ from the prompt"):
        cache.commit(lease, tokens(10, 1))
    cache.close(lease)
    with pytest.raises(AssertionError, match="not open"):
        cache.close(lease)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache: cache.pool.free.add(0), "page 0"),
        (lambda cache: cache.pool.references.__setitem__(1, 2), "page 1: 2 references, 1 leases"),
        (lambda cache: cache.free_slots.append(0), "slots free"),
        (lambda cache: cache.snapshots.free.append(0), "snapshots free"),
        (lambda cache: cache.leases[0].hashes.pop(), "hashes for 3 full pages"),
        (lambda cache: cache.leases[0].tokens.__setitem__(300, 7), "publishes other tokens"),
        (lambda cache: cache.index.entries.popitem(), "reachable"),
        (lambda cache: setattr(next(iter(cache.index.entries.values())), "page", 9), "another page than theirs"),
        (lambda cache: next(iter(cache.index.entries.values())).children.clear(), "reachable"),
    ],
)
def test_the_audit_finds(damage, message):
    cache, store = make(WITH_RINGS)
    lease = cache.open(tokens(1000))
    prefill(cache, store, lease, tokens(1000))
    damage(cache)
    with pytest.raises(AssertionError, match=message):
        cache.check()


def test_a_long_prompt_is_hashed_once(monkeypatch):
    """512K tokens are 2,048 pages; match, waiting, opening and committing together hash each page once."""
    hashed = []
    real = longread.kv.chain.page_hash
    monkeypatch.setattr(longread.kv.chain, "page_hash", lambda *args: hashed.append(1) or real(*args))

    class Nothing:
        def __getattr__(self, name):
            return lambda *args: None

    cache = KVCache(WITH_RINGS, ROOT, 2100, 2, 8, Nothing())
    prompt = tuple(range(2048 * 256))
    chain = cache.chain(prompt)
    lease = cache.open(chain)
    cache.reserve(lease, len(prompt))
    assert lease.pages == list(range(2048))
    cache.commit(lease, prompt[:-1])
    cache.snapshot(lease)
    assert cache.match(chain).cached_tokens == len(prompt) - 1
    assert len(hashed) == 2047
