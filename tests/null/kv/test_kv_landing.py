"""Where a prompt lands and what two prompts have in common, found at a few places: as if every page were looked at."""

from hypothesis import given
from hypothesis import strategies as st
from kv_contents import ROWS_ONLY, Contents

from longread.kv.cache import KVCache
from longread.kv.chain import TokenChain, leading
from longread.spec.state import PAGE_TOKENS

ROOT = bytes(16)
BOOK = [i * 7 % 30_011 for i in range(40 * PAGE_TOKENS)]


@given(count=st.integers(0, 5000), true=st.integers(0, 6000))
def test_the_first_false_one_is_found_without_asking_far_behind_it(count: int, true: int) -> None:
    asked: list[int] = []

    def holds(page: int) -> bool:
        asked.append(page)
        return page < true

    assert leading(count, holds) == min(count, true)
    assert len(asked) <= 2 * 13 * 13 and all(page <= 2 * min(count, true) for page in asked)


@given(shared=st.integers(0, len(BOOK)), mine=st.integers(0, 700), theirs=st.integers(0, 700))
def test_what_two_chains_have_in_common_is_counted_to_the_token(shared: int, mine: int, theirs: int) -> None:
    a = TokenChain(ROOT, BOOK[:shared] + [40_000] * mine)
    b = TokenChain(ROOT, BOOK[:shared] + [50_000] * theirs)
    assert a.common(b) == b.common(a) == shared


@given(read=st.integers(1, len(BOOK)), shared=st.integers(0, len(BOOK)), rest=st.integers(1, 600))
def test_a_prompt_lands_where_a_walk_over_its_pages_ends(read: int, shared: int, rest: int) -> None:
    cache = KVCache(ROWS_ONLY, ROOT, 48, 1, 0, Contents(ROWS_ONLY, 48, 1, 0))
    lease = cache.open(BOOK[:read])
    cache.reserve(lease, read)
    cache.commit(lease, BOOK[:read])
    prompt = BOOK[:shared] + [60_000] * rest
    chain, walked = cache.chain(prompt), 0
    while walked < (len(prompt) - 1) // PAGE_TOKENS and cache.index.get(chain.page_hash(walked)) is not None:
        walked += 1
    assert cache.match(prompt).full_pages == walked == min(read, shared, len(prompt) - 1) // PAGE_TOKENS
    again = cache._find(chain, partial=False)
    assert [entry.depth for entry in again.whole()] == list(range(1, walked + 1))
