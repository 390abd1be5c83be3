"""The landing points of ring models: another question about a text that was read lands within a page of the text's end,
wherever page ends fall.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kv_contents import WITH_RINGS, Contents

from longread.kv.cache import KVCache
from longread.kv.policy import LAST_PAGE_ENDS, landing_points, promised_point
from longread.spec.state import PAGE_TOKENS

ROOT = b"root".ljust(16, b"\0")
INTERVAL = 32768
LONGEST = (LAST_PAGE_ENDS - 1) * PAGE_TOKENS + 2  # of what follows the shared text: more, and no bound is promised


def points(prompt: int) -> list[int]:
    return landing_points(prompt, 0, prompt, INTERVAL, rings=True)


def again(shared: int, first: int, second: int) -> int:
    """Tokens of the shared text that the second prompt computes again, after the first has been read."""
    most = min(shared, shared + second - 1)
    return shared - max((point for point in points(shared + first) if point <= most), default=0)


@pytest.mark.parametrize("after", range(PAGE_TOKENS))
def test_a_second_question_reads_less_than_a_page_of_the_text_again(after: int) -> None:
    """The text ends ``after`` tokens behind a page end; every length of question from 1 to 300, and the longest."""
    for shared in (after, 16 * PAGE_TOKENS + after):
        for first in (*range(1, 301), LONGEST):
            assert again(shared, first, second=40) < PAGE_TOKENS, (shared, first)
        assert shared < PAGE_TOKENS or again(shared, 0, second=40) == 1  # a document that was read by itself


def test_the_bound_ends_where_it_says() -> None:
    shared = 17 * PAGE_TOKENS - 1
    assert again(shared, LONGEST, 40) < PAGE_TOKENS
    assert again(shared, LONGEST + 1, 40) >= PAGE_TOKENS


@given(st.integers(PAGE_TOKENS, 200_000))
def test_a_prompt_has_few_points_and_the_last_is_one_token_before_its_end(length: int) -> None:
    found = points(length)
    assert found == sorted(set(found)) and found[-1] == length - 1
    assert len(found) <= 1 + LAST_PAGE_ENDS + length // INTERVAL
    assert all(point % PAGE_TOKENS == 0 for point in found[:-1])


@given(st.integers(1, 9000), st.integers(0, 300), st.integers(1, 300), st.integers(0, 9300))
def test_what_is_promised_to_a_waiting_question_is_where_it_would_land(
    shared: int, first: int, second: int, position: int
) -> None:
    limit = min(shared, shared + second - 1)
    promised = promised_point(shared + first, position, limit, INTERVAL, rings=True)
    assert promised in {0, *points(shared + first)}
    if position < shared - again(shared, first, second):
        assert promised == shared - again(shared, first, second)
    else:
        assert not promised


def read(cache: KVCache, store: Contents, prompt: list[int], chunk: int) -> int:
    """As an engine does, in steps of ``chunk`` tokens. Returns how many tokens were reused."""
    lease = cache.open(prompt)
    while lease.position < len(prompt):
        tokens = prompt[lease.position : lease.position + chunk]
        cache.reserve(lease, lease.position + len(tokens))
        cache.prepare(lease, len(prompt), len(tokens))
        store.compute(lease.pages, lease.slot, [*lease.tokens, *tokens], lease.position, lease.saves)
        cache.commit(lease, tokens)
    cache.close(lease)
    return lease.cached_tokens


@given(st.integers(256, 3000), st.integers(LONGEST, 1500), st.integers(100, 2000))
@example(2047, 1000, 256)
def test_what_two_prompts_had_in_common_is_landed_on_by_the_third(shared: int, after: int, chunk: int) -> None:
    """Whatever follows it: the second reads the text again from the start, the third less than a page of it."""
    store = Contents(WITH_RINGS, 64, 2, 32)
    cache = KVCache(WITH_RINGS, ROOT, 64, 2, 32, store)
    text, end = list(range(shared)), shared // PAGE_TOKENS * PAGE_TOKENS
    reused = [read(cache, store, text + [70000 + number] * after, chunk) for number in range(4)]
    assert reused[1] <= max(shared + after - LONGEST, 0) and reused[2:] == [end, end]
    cache.check()


def test_a_fork_within_a_page_of_a_landing_point_takes_no_row() -> None:
    store = Contents(WITH_RINGS, 64, 2, 32)
    cache = KVCache(WITH_RINGS, ROOT, 64, 2, 32, store)
    text = list(range(1000))
    read(cache, store, [*text, *[70000] * 40], 256)
    held = cache.snapshots_held
    lease = cache.open([*text, *[80000] * 900])
    assert lease.cached_tokens == 768 and lease.forks_at == 0
    cache.close(lease)
    assert cache.snapshots_held == held


@given(st.integers(300, 1500), st.integers(1, 300), st.integers(1, 300), st.integers(100, 2000))
@example(1023, 300, 1, 2000)
@example(1024, 1, 300, 256)
@example(1279, 258, 40, 700)
def test_the_cache_lands_where_the_policy_says(shared: int, first: int, second: int, chunk: int) -> None:
    store = Contents(WITH_RINGS, 12, 2, 12)
    cache = KVCache(WITH_RINGS, ROOT, 12, 2, 12, store)
    text = list(range(shared))
    prompt = text + [70000] * first
    read(cache, store, prompt, chunk)
    assert shared - cache.match(text + [80000] * second).cached_tokens == again(shared, first, second) < PAGE_TOKENS
    cache.check()
