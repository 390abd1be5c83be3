"""The parts below the cache: free runs, page pool, snapshot pool, token chains, index look-ups, and the cut policy."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.kv.chain import TokenChain, common_tokens, encode
from longread.kv.index import PrefixIndex
from longread.kv.naive import NaiveCache
from longread.kv.policy import landing_points, promised_point
from longread.kv.pool import PagePool
from longread.kv.runs import FreeRuns
from longread.kv.snapshots import SnapshotPool
from longread.spec.state import HashedTokens, hash_pages, page_hash

EVERY = settings(database=None)
WORDS = st.lists(st.integers(0, 2), max_size=8)


@EVERY
@given(count=st.integers(0, 40), ops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40), st.integers(0, 30))))
def test_free_runs_hand_out_each_number_once(count, ops):
    """Against a plain set: a positive first number takes that many, zero gives one back."""
    runs, free, taken = FreeRuns(count), set(range(count)), []
    for wanted, pick, room in ops:
        if not wanted and taken:
            number = taken.pop(pick % len(taken))
            runs.add(number)
            free.add(number)
        elif wanted <= len(free):
            part = runs.take(wanted, taken[-1] if taken else None, room)
            assert len(part) == wanted == len(set(part) & free)
            free -= set(part)
            taken += part
        assert len(runs) == len(free)
        spans = runs.runs()
        assert {n for start, end in spans for n in range(start, end)} == free
        assert all(left[1] < right[0] for left, right in pairwise(spans))


def test_free_runs_continue_where_the_taker_is():
    runs = FreeRuns(100)
    assert runs.take(3, None, 10) == [0, 1, 2]
    other = runs.take(2, None, 10)  # not right behind the first, which goes on
    assert other[0] > 10
    assert runs.take(4, 2, 7) == [3, 4, 5, 6]
    assert runs.take(2, other[-1], 2) == [other[-1] + 1, other[-1] + 2]


def test_free_runs_take_the_longest_when_none_is_long_enough():
    runs = FreeRuns(20)
    runs.take(20, None, 20)
    for number in (1, 2, 5, 6, 7, 8, 12, 13, 14):
        runs.add(number)
    assert runs.take(8, 19, 8) == [5, 6, 7, 8, 12, 13, 14, 1]


def test_free_runs_forget_stale_lengths():
    runs = FreeRuns(10)
    for _ in range(1000):
        runs.add(runs.take(1, None, 1)[0])
    assert len(runs._longest) <= 64 + 4 + 2


def test_pool_states_and_order_of_release():
    pool = PagePool(4)
    pages = pool.take(4, None, 4)
    pool.hold(pages[0])
    for page in pages:
        pool.release(page, keep=page != 3)
        pool.offer(page)
    assert (pool.held, sorted(pool.cached), len(pool.free)) == (1, [1, 2], 1)
    assert pool.oldest(lambda page: True) == 1
    assert pool.oldest(lambda page: page != 1) == 2
    pool.offer(1)
    pool.hold(2)
    pool.discard(1)
    assert pool.oldest(lambda page: True) is None
    assert (pool.available, pool.held) == (2, 2)


def test_pool_goes_by_the_last_release():
    pool = PagePool(2)
    for page in pool.take(2, None, 2):
        pool.release(page, keep=True)
        pool.offer(page)
    pool.hold(0)
    pool.release(0, keep=True)
    pool.offer(0)
    assert pool.oldest(lambda page: True) == 1


def test_pool_candidates_do_not_pile_up():
    pool = PagePool(2)
    page = pool.take(1, None, 1)[0]
    for _ in range(1000):
        pool.release(page, keep=True)
        pool.offer(page)
        pool.hold(page)
    assert len(pool._candidates) <= 64 + 2 * 2 + 1


def test_a_pinned_snapshot_is_neither_a_victim_nor_reused():
    pool: SnapshotPool[str] = SnapshotPool(2)
    for owner in ("old", "young"):
        row = pool.acquire()
        assert row is not None
        pool.attach(row, owner)
    assert pool.acquire() is None
    with pool.pinned(0), pool.pinned(0):
        assert pool.oldest() == "young"
        pool.release(0)
        assert pool.acquire() is None
        assert pool.doomed == {0}
    assert (pool.acquire(), pool.doomed) == (0, set())
    pool.release(0)
    pool.release(1)
    assert (sorted(pool.free), pool.oldest()) == ([0, 1], None)


def test_chain_hashes_are_the_spec_s():
    tokens = list(range(700))
    chain = TokenChain(b"r" * 16, tokens)
    first = page_hash(b"r" * 16, tokens[:256])
    assert chain.page_hash(1) == page_hash(first, tokens[256:512])
    assert chain.page_hash(0) == first
    assert chain.run(10, 12) == encode([10, 11])
    assert len(chain) == 700


def test_chain_takes_the_hashes_it_is_given_where_they_fit(monkeypatch):
    root, prompt = b"r" * 16, list(range(700))
    data = encode(prompt)
    hashed = HashedTokens(root, data, hash_pages(root, data), 0, 699)
    alone = TokenChain(root, [*prompt, *range(600)])
    expected = [alone.page_hash(page) for page in range(5)]
    foreign = TokenChain(b"q" * 16, prompt, hashed)
    assert foreign.page_hash(0) != expected[0] == TokenChain(root, prompt).page_hash(0)
    for tokens, pages in ((prompt, 2), ([*prompt, *range(600)], 5)):  # a resume: the prompt and what came after it
        chain = TokenChain(root, tokens, hashed)
        assert (chain.data, chain.ids.tolist(), len(chain)) == (encode(tokens), tokens, len(tokens))
        assert [chain.page_hash(page) for page in range(pages)] == expected[:pages]
    monkeypatch.setattr("longread.kv.chain.page_hash", None)
    assert TokenChain(root, prompt, hashed).page_hash(1) == expected[1]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_chain_refuses_what_is_not_32_bits(token):
    with pytest.raises(OverflowError):
        TokenChain(b"", [token])


@EVERY
@given(same=st.integers(0, 3000), a=st.integers(0, 600), b=st.integers(0, 600))
def test_common_tokens(same, a, b):
    left = list(range(same)) + [-1] * a
    right = list(range(same)) + [-2] * b
    assert common_tokens(encode(left), encode(right)) == same


@EVERY
@given(runs=st.lists(WORDS.filter(bool), unique_by=tuple, min_size=1), query=WORDS)
def test_index_look_ups_against_plain_search(runs, query):
    index = PrefixIndex(b"root")
    for page, run in enumerate(runs):
        index.add(page_hash(b"root", run), index.root, encode(run), page)

    def common(run: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(run, query, strict=False)) if x != y), min(len(run), len(query)))

    found, most = index.closest(index.root, encode(query))
    assert most == max(map(common, runs))
    assert (found is None) == (most == 0)
    proper = sorted((len(run) for run in runs if len(run) < len(query) and run == query[: len(run)]), reverse=True)
    assert [entry.length for entry in index.prefixes(index.root, encode(query))] == proper
    assert index.extends(index.root, encode(query)) == any(run[: len(query)] == query for run in runs)
    for entry in list(index.entries.values()):
        longest = max(index.on_page[entry.page], key=lambda each: each.length)
        assert longest.run.startswith(entry.run)
        index.remove(entry)
    assert not index.on_page
    assert not index.root.children


def test_one_lineage_shares_a_page_where_that_frees_another():
    index = PrefixIndex(b"root")
    middle, bare = index.add(b"a", index.root, encode([1, 2]), 0)
    assert (middle.page, bare) == (0, [])
    longer, bare = index.add(b"b", index.root, encode([1, 2, 3]), 1)
    assert (longer.page, middle.page, bare) == (1, 1, [0])
    shorter, bare = index.add(b"c", index.root, encode([1]), 2)
    assert (shorter.page, bare) == (1, [])
    index.add(b"d", index.root, encode([1, 2, 4]), 3)  # another continuation: page 1 is needed anyway
    assert (middle.page, shorter.page, sorted(index.on_page)) == (1, 1, [1, 3])


def test_an_entry_with_children_is_not_removed():
    index = PrefixIndex(b"root")
    parent, _ = index.add(b"a", index.root, encode(range(256)), 0)
    index.add(b"b", parent, encode([1]), 1)
    with pytest.raises(AssertionError, match="1 children"):
        index.remove(parent)


def points(prompt: int, rings: bool, interval: int = 32768) -> list[int]:
    found = landing_points(prompt, 0, prompt, interval, rings)
    for cut in (1, 255, 256, 1279, 1280, prompt - 1):  # a prompt that takes two steps has no other points
        parts = landing_points(prompt, 0, cut, interval, rings) + landing_points(prompt, cut, prompt, interval, rings)
        assert parts == found or cut > prompt
    return found


def test_where_prompts_can_be_landed_on():
    assert points(255, rings=True) == []
    assert points(256, rings=True) == [255]
    assert points(257, rings=True) == [256]
    assert points(258, rings=True) == [256, 257]
    assert points(2000, rings=True) == [1280, 1536, 1792, 1999]
    assert points(100_000, rings=True) == [32768, 65536, 98304, 99328, 99584, 99840, 99999]
    assert points(3000, rings=True, interval=1000) == [1000, 2000, 2304, 2560, 2816, 2999]
    assert points(2000, rings=False) == [2000]
    assert points(1, rings=False) == [1]


def test_what_a_running_prompt_still_promises():
    assert promised_point(2000, 0, 2000, 32768, rings=True) == 1999
    assert promised_point(2000, 0, 1500, 32768, rings=True) == 1280
    assert promised_point(2000, 0, 1600, 32768, rings=True) == 1536
    assert promised_point(2000, 1280, 1500, 32768, rings=True) == 0
    assert promised_point(2000, 0, 1500, 32768, rings=False) == 1280
    assert promised_point(2000, 1280, 1500, 32768, rings=False) == 0
    assert promised_point(2000, 1999, 3000, 32768, rings=False) == 2000


def test_the_naive_cache_answers_by_comparing():
    rows = NaiveCache(rings=False, grain=4, page_tokens=8)
    rows.publish(range(14))
    assert [rows.match([*range(n), 99]) for n in (0, 3, 4, 8, 11, 13, 14)] == [0, 0, 4, 8, 8, 12, 12]
    rings = NaiveCache(rings=True)
    rings.publish(range(14))
    rings.publish(range(5))
    assert [rings.match(list(range(n))) for n in (0, 5, 6, 14, 15)] == [0, 0, 5, 5, 14]
    rings.forget(range(5))
    assert rings.match(list(range(6))) == 0
