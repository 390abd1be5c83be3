"""A storage on a device fills the arena late: what goes on to the disk from there is whole all the same."""

import threading
from array import array
from collections.abc import Sequence
from typing import cast

import pytest
from kv_contents import ROWS_ONLY, WITH_RINGS, digests
from kv_late_contents import LateContents
from memory_disk import MemoryDisk

from longread.kv import persist
from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.records import Record
from longread.kv.tiers import Tiers
from longread.spec.state import PAGE_TOKENS, StateGroup

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


def same_pages(cache: KVCache, store: LateContents, disk: MemoryDisk, keys: Sequence[bytes]) -> None:
    """What the disk has is what lies on the device."""
    page = bytearray(store.page_bytes)
    for key in keys:
        store.read_page(cache.index.entries[key].page, memoryview(page), PAGE_TOKENS)
        assert disk.records["page", key].payload == page


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


def test_a_portion_is_sent_only_once_it_is_whole() -> None:
    """Copies off a device are whole behind ``settle``: pages that are on the device, and rings."""
    store, disk = LateContents(WITH_RINGS, PAGES, 1, 4), MemoryDisk()
    cache = KVCache(WITH_RINGS, bytes(16), PAGES, 1, 4, store)
    arena = HostArena(store.page_bytes, store.ring_bytes, 0, store.allocate_host)
    tiers = Tiers(cache, store, arena, disk)
    prompt = list(range(3 * PAGE_TOKENS + 7))
    keys = read(cache, store, prompt)
    tiers.work()
    assert not disk.records  # they are still on their way
    assert tiers.flush(20)
    same_pages(cache, store, disk, keys)
    ring = bytearray(store.ring_bytes)
    rings = [record for (kind, _), record in disk.records.items() if kind == "ring"]
    assert rings
    for record in rings:
        store.read_ring(cast(int, cache.index.entries[record.key].snapshot), memoryview(ring))
        assert record.payload == ring
    tiers.close()


@pytest.mark.parametrize("groups", [ROWS_ONLY, WITH_RINGS])
def test_memory_that_is_used_again_is_not_written_over_too_early(
    groups: Sequence[StateGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for three records or so, and a disk that is slower than whoever copies."""
    store, disk = LateContents(groups, 20, 1, 8), MemoryDisk()
    monkeypatch.setattr(persist, "QUEUE_BYTES", 4 * (store.page_bytes + store.ring_bytes))
    monkeypatch.setattr(persist, "PORTION_BYTES", store.page_bytes)
    monkeypatch.setattr(persist, "WRITE_BYTES", 2 * store.page_bytes)
    write, slow = disk.write, threading.Event()

    def late(records: Sequence[Record]) -> int:
        slow.wait(0.002)
        return write(records)

    disk.write = late  # type: ignore[method-assign]
    cache = KVCache(groups, bytes(16), 20, 1, 8, store)
    tiers = Tiers(cache, store, HostArena(store.page_bytes, store.ring_bytes, 0, store.allocate_host), disk, 256)
    prompt = list(range(17 * PAGE_TOKENS + 1))
    keys = read(cache, store, prompt)
    for _ in range(60):
        tiers.work()
    assert tiers.flush(20)
    same_pages(cache, store, disk, keys)
    assert max(map(len, disk.writes)) <= 3
    tiers.close()
