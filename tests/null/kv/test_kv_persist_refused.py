"""Landing points that the disk refuses for a while: they are written once it takes them again, and a restart finds
them.
"""

from collections.abc import Sequence

import pytest
from kv_contents import ROWS_ONLY, WITH_RINGS, Contents
from memory_disk import MemoryDisk

from longread.kv import persist
from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.tiers import Tiers
from longread.spec.state import PAGE_TOKENS, StateGroup

ROOT = b"root".ljust(16, b"\0")
INTERVAL = 512
TEXT = list(range(1400))


class Process:
    """A cache with tiers over a disk that outlives it."""

    def __init__(self, groups: Sequence[StateGroup], disk: MemoryDisk, pages: int = 200):
        self.disk = MemoryDisk(records=disk.records)
        self.store = Contents(groups, pages, 2, 40)
        self.cache = KVCache(groups, ROOT, pages, 2, 40, self.store)
        self.tiers = Tiers(
            self.cache, self.store, HostArena(self.store.page_bytes, self.store.ring_bytes, 0), self.disk
        )
        self.tiers._persister._interval = INTERVAL  # type: ignore[union-attr]

    def read(self, prompt: list[int]) -> int:
        """As an engine does. Returns how many tokens were reused."""
        self.tiers.promote(self.cache.chain(prompt))
        lease = self.cache.open(prompt)
        self.tiers.used(lease)
        while lease.position < len(prompt):
            tokens = prompt[lease.position :]
            self.cache.reserve(lease, len(prompt))
            self.cache.prepare(lease, len(prompt), len(tokens))
            self.store.compute(lease.pages, lease.slot, [*lease.tokens, *tokens], lease.position, lease.saves)
            self.cache.commit(lease, tokens)
        self.cache.snapshot(lease)
        self.cache.close(lease)
        assert self.tiers.flush(20)
        return lease.cached_tokens

    @property
    def refused(self) -> int:
        return len(self.tiers._persister._refused)  # type: ignore[union-attr]

    def dies(self) -> None:
        """Without the last try that closing makes."""
        self.disk.fail = {"write"}
        self.tiers.close()


def after_a_restart(groups: Sequence[StateGroup], disk: MemoryDisk, prompt: list[int]) -> int:
    process = Process(groups, disk)
    found = process.read(prompt)
    process.dies()
    keys = {record.key for record in disk.records.values()} | {ROOT}
    assert all(record.parent in keys for record in disk.records.values()), "something hangs on nothing"
    return found


@pytest.fixture(params=[ROWS_ONLY, WITH_RINGS], ids=["rows", "rings"])
def groups(request: pytest.FixtureRequest) -> Sequence[StateGroup]:
    return request.param  # type: ignore[no-any-return]


def test_what_was_refused_is_written_after_the_next_write_that_is_not(groups: Sequence[StateGroup]) -> None:
    disk = MemoryDisk()
    process = Process(groups, disk)
    process.disk.fail = {"write"}
    process.read(TEXT)
    assert process.refused and not disk.records and not process.tiers.skipped
    process.disk.fail = set()
    process.read([90000 + token for token in range(300)])
    assert not process.refused
    process.dies()
    assert after_a_restart(groups, disk, [*TEXT, 5]) >= len(TEXT) - 1


def test_what_was_refused_is_written_when_its_chain_is_used_again(groups: Sequence[StateGroup]) -> None:
    """Used without anything new to be written."""
    disk = MemoryDisk()
    process = Process(groups, disk)
    process.disk.fail = {"write"}
    process.read(TEXT)
    for _ in range(2 * persist.TRIES):  # still full: one try a use, and nothing is forgotten
        errors, refused = process.tiers.errors, process.refused
        process.read(TEXT)
        assert 0 < process.tiers.errors - errors <= refused == process.refused
    process.disk.fail = set()
    assert process.read(TEXT) >= len(TEXT) - PAGE_TOKENS
    process.dies()
    assert after_a_restart(groups, disk, [*TEXT, 5]) >= len(TEXT) - 1


def test_closing_tries_once_more(groups: Sequence[StateGroup]) -> None:
    disk = MemoryDisk()
    process = Process(groups, disk)
    process.disk.fail = {"write"}
    process.read(TEXT)
    process.disk.fail = set()
    process.tiers.close()
    assert after_a_restart(groups, disk, [*TEXT, 5]) >= len(TEXT) - 1


def test_it_is_bounded(groups: Sequence[StateGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, and no sequence stays in memory for it."""
    monkeypatch.setattr(persist, "QUEUE_LANDINGS", 3)
    process = Process(groups, MemoryDisk())
    process.disk.fail = {"write"}
    for number in range(6):
        process.read([number, *TEXT[:600]])
    persister = process.tiers._persister
    assert persister is not None
    assert process.refused == 3 and process.tiers.skipped >= 3
    assert all(each.lease is None for each in persister._refused.values())
    process.dies()


def test_what_is_lost_by_then_is_skipped(groups: Sequence[StateGroup]) -> None:
    """A few pages only: reading something else evicts it. Nothing is written behind a gap."""
    disk = MemoryDisk()
    process = Process(groups, disk, pages=9)
    process.disk.fail = {"write"}
    process.read(TEXT)
    process.read([7, *TEXT])
    process.disk.fail = set()
    process.read([8, *TEXT[:300]])
    process.read([9, *TEXT[:300]])
    assert process.tiers.skipped
    process.dies()
    assert after_a_restart(groups, disk, [9, *TEXT[:300], 5]) >= 300


def test_two_that_do_not_both_fit_do_not_take_turns_for_ever(groups: Sequence[StateGroup]) -> None:
    """A disk of some records: each write beyond them is refused, and a smaller one evicts what lies there."""
    process = Process(groups, MemoryDisk())
    disk, attempts = process.disk, []
    write = disk.write

    def small(records: list) -> int:  # type: ignore[type-arg]
        attempts.append(len(records))
        if len(records) > 2:
            disk.records.clear()
            disk.fail = {"write"}
        try:
            return write(records)
        finally:
            disk.fail = set()

    disk.write = small  # type: ignore[method-assign,assignment]
    for number in range(4):
        process.read([number, *TEXT])
    assert len(attempts) < 200
    process.dies()
