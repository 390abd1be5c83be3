"""A storage on a device fills the arena late: what goes on to the disk from there is whole all the same."""

from array import array

from kv_contents import ROWS_ONLY, digests
from kv_late_contents import LateContents
from memory_disk import MemoryDisk

from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.tiers import Tiers
from longread.spec.state import PAGE_TOKENS

PAGES = 8


def read(cache: KVCache, store: LateContents, prompt: list[int]) -> list[bytes]:
    lease = cache.open(prompt)
    tokens = prompt[lease.position :]
    cache.reserve(lease, len(prompt))
    cache.prepare(lease, len(prompt), len(tokens))
    store.compute(lease.pages, lease.slot, prompt, lease.position, lease.saves)
    cache.commit(lease, tokens)
    hashes = list(lease.hashes)
    cache.close(lease)
    return hashes


def test_pages_that_are_evicted_before_their_turn_reach_the_disk_whole() -> None:
    store, disk = LateContents(ROWS_ONLY, PAGES, 1, 0), MemoryDisk()
    cache = KVCache(ROWS_ONLY, bytes(16), PAGES, 1, 0, store)
    arena = HostArena(store.page_bytes, 0, 4 * PAGES * store.page_bytes, store.allocate_host)
    tiers = Tiers(cache, store, arena, disk, interval=PAGE_TOKENS)
    first = list(range(4 * PAGE_TOKENS))
    keys = read(cache, store, first)
    read(cache, store, list(range(5000, 5000 + PAGES * PAGE_TOKENS - 1)))  # pushes the first out of the device
    assert all(arena.get("page", key) is not None and cache.index.get(key) is None for key in keys)
    assert tiers.flush(20)
    known = digests(first)
    for page, key in enumerate(keys):
        content = array("q", bytes(disk.records["page", key].payload)).tolist()
        assert content == known[page * PAGE_TOKENS + 1 : (page + 1) * PAGE_TOKENS + 1]
    tiers.close()
