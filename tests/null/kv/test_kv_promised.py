"""Who computes what a prompt begins with: found by the prompt's first tokens, as if every lease were looked at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_contents import ROWS_ONLY, WITH_RINGS, Contents

from longread.kv.cache import KVCache
from longread.kv.chain import common_tokens
from longread.kv.lease import Lease
from longread.kv.policy import WAIT_GAIN, promised_point

INTERVAL = 1024
DOCUMENT = [7 * i % 50_000 for i in range(1500)]


def by_looking_at_all(cache: KVCache, tokens: list[int]) -> int:
    """The furthest point that any open lease will still publish of ``tokens``, 0 for none worth waiting for."""
    chain, promised = cache.chain(tokens), 0
    for lease in cache.leases.values():
        if lease.position < len(lease.prompt):
            limit = common_tokens(lease.prompt.data, chain.data)
            limit = min(limit, len(chain) - 1) if cache.has_rings else limit
            point = promised_point(len(lease.prompt), lease.position, limit, INTERVAL, cache.has_rings)
            promised = max(promised, min(point, len(chain) - 1))
    worth = promised >= WAIT_GAIN and promised - cache.match(chain).cached_tokens >= WAIT_GAIN
    return promised if worth else 0


prompts = st.tuples(st.integers(0, 1500), st.integers(0, 40), st.integers(0, 3)).map(
    lambda drawn: DOCUMENT[: drawn[0]] + [60_000 + drawn[2]] * drawn[1] or [1]
)


@given(
    opened=st.lists(st.tuples(prompts, st.integers(0, 1600), st.booleans()), max_size=8),
    asked=st.lists(prompts, min_size=1, max_size=4),
    rings=st.booleans(),
)
def test_the_index_of_those_who_read_finds_what_a_search_of_all_finds(
    opened: list[tuple[list[int], int, bool]], asked: list[list[int]], rings: bool
) -> None:
    groups = WITH_RINGS if rings else ROWS_ONLY
    cache = KVCache(groups, bytes(16), 80, 10, 20, Contents(groups, 80, 10, 20))
    leases: list[Lease] = []
    for prompt, computed, forked in opened:
        lease = cache.open(prompt)
        rest = prompt[lease.position : lease.position + computed]
        cache.reserve(lease, lease.position + len(rest))
        cache.commit(lease, rest)
        leases.append(lease)
        if forked and cache.free_slots:
            leases.append(cache.fork(lease))
        if len(leases) > 6:
            cache.close(leases.pop(0))
        cache.check()
        for tokens in [*asked, prompt]:
            best, wanted = cache.promised(tokens, INTERVAL), by_looking_at_all(cache, tokens)
            assert (best.tokens if best is not None else 0) == wanted
            assert best is None or (best.stands and cache.leases[best.lease.slot] is best.lease)
    for lease in leases:
        cache.close(lease)
    cache.check()
    assert all(cache.promised(tokens, INTERVAL) is None for tokens in asked)


def test_the_audit_sees_a_reader_that_nobody_would_find() -> None:
    cache = KVCache(ROWS_ONLY, bytes(16), 8, 2, 0, Contents(ROWS_ONLY, 8, 2, 0))
    lease = cache.open(DOCUMENT[:300])
    cache.check()
    cache._promises.discard(lease)
    with pytest.raises(AssertionError, match="would find it 0 times"):
        cache.check()
    cache._promises.add(lease)
    cache.check()
    cache._promises.add(Lease(1, lease.prompt))
    with pytest.raises(AssertionError, match="a closed lease counts as one"):
        cache.check()
