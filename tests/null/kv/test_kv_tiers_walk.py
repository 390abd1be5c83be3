"""Random walks over all tiers: the cache's own walk with a small host arena, a disk, restarts, and loads in flight.

Beside what ``kv_walk`` proves (the audit, and that every row and ring holds its own prefix): whatever is
found was once published; what has reached the disk is found again, whatever was evicted; a record in any tier holds
exactly what its key says; and a load disturbs nobody.
"""

from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from kv_contents import ROWS_ONLY, WITH_RINGS, Contents, digests
from kv_late_contents import LateContents
from kv_layered_contents import LayeredContents
from kv_walk import CHUNKS, DOCUMENTS, LENGTHS, ROOT, Walk
from memory_disk import MemoryDisk

from longread.kv import persist
from longread.kv.cache import KVCache
from longread.kv.host import HostArena
from longread.kv.lease import Lease
from longread.kv.naive import NaiveCache
from longread.kv.policy import WAIT_GAIN
from longread.kv.records import Kind
from longread.kv.tiers import Tiers
from longread.kv.transfer import Transfer
from longread.spec.errors import CapacityError
from longread.spec.state import PAGE_TOKENS

WAIT = 20.0


class TierWalk(Walk):
    groups = ROWS_ONLY
    stored: type[Contents] = Contents

    @initialize(
        pages=st.sampled_from([4, 6, 9, 60]),
        slots=st.integers(1, 3),
        snapshots=st.sampled_from([0, 2, 5]),
        host=st.sampled_from([0, 2, 5, 40]),
        interval=st.sampled_from([256, 512, 32768]),
    )
    def begin(self, pages: int, slots: int, snapshots: int, host: int, interval: int) -> None:  # type: ignore[override]
        self.sizes = (pages, slots, snapshots, host, interval)
        self.ever = NaiveCache(any(group.kind == "ring" for group in self.groups))  # forgets nothing
        self.kept = NaiveCache(self.ever.rings)  # is on the disk
        self.disk = MemoryDisk()
        self._start()
        for document in DOCUMENTS:
            self._open(document[: min(1100, pages * PAGE_TOKENS - 30)])
            while self._prefill(self.leases[-1], 600, publish=True):
                pass
            self._end(self.leases[-1], finish=True)
            self.write()

    def _start(self) -> None:
        pages, slots, snapshots, host, interval = self.sizes
        self.store = self.stored(self.groups, pages, slots, snapshots)
        self.cache = KVCache(self.groups, ROOT, pages, slots, snapshots, self.store)
        self.naive = NaiveCache(self.cache.has_rings)
        self.disk = MemoryDisk(records=self.disk.records)
        self.arena = HostArena(
            self.store.page_bytes,
            self.store.ring_bytes,
            host * self.store.page_bytes,
            self.store.allocate_host if isinstance(self.store, LateContents) else None,
        )
        self.tiers = Tiers(self.cache, self.store, self.arena, self.disk, interval)
        self.transfers: list[Transfer] = []
        self.errors = 0

    @precondition(lambda self: not self.transfers)
    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        """Another process on the same disk; a killed one loses what was not written yet."""
        if not killed:
            self.write()
        self.tiers.close(0.0 if killed else WAIT)
        self.leases, self.wanted, self.rolled, self.landed = [], {}, {}, []
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "tiers"):
            self.disk.gate.set()
            self.tiers.close()
            assert not self.cache.loads
            self.cache.check()

    @precondition(lambda self: not self.transfers)
    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        """A prompt that waits for its load, and is opened at once."""
        prompt = self._prompt(data)
        found, before = self.tiers.find(self.cache.chain(prompt)), self.cache.match(prompt).cached_tokens
        try:
            self.tiers.promote(self.cache.chain(prompt))
        except CapacityError:
            return
        after = self.cache.match(prompt).cached_tokens
        assert after == (found.tokens if found is not None else before)
        self._open(prompt)

    @rule(data=st.data())
    def start_load(self, data: st.DataObject) -> None:
        """The loader stands still meanwhile, so that everything else happens in between."""
        found = self.tiers.find(self.cache.chain(self._prompt(data)))
        if found is None or self.tiers.coming(found) is not None:
            return
        self.disk.gate.clear()
        try:
            self.transfers.append(self.tiers.start(found))
        except CapacityError:
            return

    @precondition(lambda self: self.transfers)
    @rule(cancel=st.booleans())
    def end_loads(self, cancel: bool) -> None:
        if cancel:
            self.tiers.cancel(self.transfers[-1])
        self.disk.gate.set()
        while not all(transfer.closed for transfer in self.transfers):
            self.tiers.wait(WAIT)
            self.tiers.collect()
        assert cancel or all(transfer.broken is None for transfer in self.transfers)
        self.transfers = []

    @rule(works=st.booleans())
    def lag(self, works: bool) -> None:
        """Whether the portions for the disk are copied after each step, or much later."""
        self.works = works

    @rule()
    def write(self) -> None:
        """Everything that is due goes to the disk; it stays there, whatever the cache forgets."""
        skipped, errors = self.tiers.skipped, self.errors
        assert self.tiers.flush(WAIT)
        self.errors = self.tiers.errors
        if self.tiers.skipped == skipped and self.errors == errors:
            for prefix in self.landed:
                self.kept.publish(prefix)
        self.landed = []

    @rule(full=st.booleans())
    def disk_is_full(self, full: bool) -> None:
        """What is refused meanwhile may come later, or never."""
        self.disk.fail = {"write"} if full else set()

    @precondition(lambda self: self.disk.records and not self.transfers)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A record on the disk goes bad: it and what needs it is a miss, nothing else changes."""
        assert self.tiers.flush(WAIT)
        self.landed = []
        ref = data.draw(st.sampled_from(sorted(self.disk.records)))
        self.disk.damaged.add(ref)
        self.kept = NaiveCache(self.cache.has_rings)
        prompt = self._prompt(data)
        try:
            self.tiers.promote(self.cache.chain(prompt))
        except CapacityError:
            return
        if ref in self.disk.damaged:  # was not needed
            del self.disk.records[ref]
            self.disk.damaged.discard(ref)

    @precondition(lambda self: len(self.leases) == 1 and not self.transfers)
    @rule()
    def fill_the_pool(self) -> None:
        self.cache.reserve(self.leases[0], self.cache.pool.count * PAGE_TOKENS)
        assert self.cache.pages_held == self.cache.pool.count

    @rule(doc=st.integers(0, 1), length=LENGTHS)
    def ask(self, doc: int, length: int) -> None:
        self.asked = [*self.asked[-4:], DOCUMENTS[doc][:length]]

    def _prompt(self, data: st.DataObject) -> list[int]:
        base = data.draw(st.sampled_from([*self.asked, *(document[:1200] for document in DOCUMENTS)]))
        return base + [90000] * data.draw(st.sampled_from([0, 1, 40]))

    def __init__(self) -> None:
        super().__init__()
        self.landed: list[tuple[int, ...]] = []
        self.works = True

    def _published(self, here: tuple[int, ...], lease: Lease, rolling: bool) -> None:
        super()._published(here, lease, rolling)
        self.ever.publish(here)
        if not rolling and len(here) >= PAGE_TOKENS:
            self.landed.append(here)

    def _step(self, lease: Lease, tokens: list[int]) -> bool:
        done = super()._step(lease, tokens)
        if done and not self.cache.has_rings:
            self.ever.publish(lease.tokens)
        if self.works:
            self.tiers.work()
        return done

    @invariant()
    def tiers_audit(self) -> None:
        if hasattr(self, "tiers"):
            self.tiers.check()

    @invariant()
    def hits_are_the_naive_ones(self) -> None:
        if not hasattr(self, "tiers"):
            return
        for prompt in self.asked:
            chain = self.cache.chain(prompt)
            found, here = self.tiers.find(chain), self.cache.match(chain).cached_tokens
            tokens = max(found.tokens if found is not None else 0, here)
            assert tokens <= self.ever.match(prompt)
            if not self.cache.has_rings or self.cache.snapshots.count:
                assert tokens > self.kept.match(prompt) - WAIT_GAIN

    @invariant()
    def records_hold_their_own_state(self) -> None:
        """What lies in the arena or on the disk under a key was computed from exactly that prefix."""
        if not hasattr(self, "tiers"):
            return
        for prompt in self.asked:
            chain, known = self.cache.chain(prompt), digests(prompt)
            for page in range(len(prompt) // PAGE_TOKENS):
                key = chain.page_hash(page)
                for kind in get_args(Kind):
                    payload = self._payload(kind, key)
                    if payload is None:
                        continue
                    stop = (page + 1) * PAGE_TOKENS
                    want = [known[stop]] if kind == "ring" else self._rows(known, page)
                    assert payload.cast("q").tolist() == want

    def _rows(self, known: list[int], page: int) -> list[int]:
        low = page * PAGE_TOKENS
        return [known[low + row] for grain in self.store.grains for row in range(grain, PAGE_TOKENS + 1, grain)]

    def _payload(self, kind: Kind, key: bytes) -> memoryview | None:
        if self.arena.get(kind, key) is not None:
            view = self.arena.hold(kind, key)
            self.arena.release(kind, key)
            return self.store.promised(view) if isinstance(self.store, LateContents) else view
        record = self.disk.records.get((kind, key))
        return memoryview(record.payload) if record is not None else None


class RingTierWalk(TierWalk):
    groups = WITH_RINGS


class LateRingTierWalk(RingTierWalk):
    stored = LateContents


class LayeredTierWalk(TierWalk):
    """Loads that are published before they are there."""

    stored = LayeredContents
    restart = None  # type: ignore[assignment]  # which leaves nothing in the arena

    @initialize(pages=st.sampled_from([6, 9, 14]), slots=st.integers(1, 3), interval=st.sampled_from([256, 32768]))
    def begin(self, pages: int, slots: int, interval: int) -> None:  # type: ignore[override]
        """Little on the device, everything in the arena."""
        TierWalk.begin(self, pages, slots, 5, 60, interval)

    @precondition(lambda self: not self.transfers)
    @rule(data=st.data(), length=CHUNKS, more=st.sampled_from([0, 1, 2, 40]), away=st.booleans())
    def come_back(self, data: st.DataObject, length: int, more: int, away: bool) -> None:
        """A prompt whose pages may be on their way still when it is computed; ``away``: all that can be is evicted."""
        if away and self._open([92000]):
            held = len(self.leases[-1].pages) + self.cache.pages_free + self.cache.pages_cached
            self._reserve(self.leases[-1], held * PAGE_TOKENS)
            self._close(self.leases[-1])
        prompt = [*self._prompt(data), *[91000] * more]
        with suppress(CapacityError):
            self.tiers.promote(self.cache.chain(prompt))
        if self._open(prompt):
            self._prefill(self.leases[-1], length, publish=True)

    @rule(count=st.integers(1, 12))
    def the_link_goes_on(self, count: int) -> None:
        link = self.store.link  # type: ignore[attr-defined]
        link.go(link.done + count)


class LayeredRingTierWalk(LayeredTierWalk):
    groups = WITH_RINGS


@pytest.mark.null
@pytest.mark.parametrize("walk", [TierWalk, RingTierWalk, LateRingTierWalk, LayeredTierWalk, LayeredRingTierWalk])
def test_random_walk_over_tiers(walk: type[TierWalk], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied for the disk depends on the steps alone: not on the clock, nor on how full its memory is."""
    monkeypatch.setattr(persist, "SHARE", 0.0)
    monkeypatch.setattr(persist, "QUEUE_BYTES", 2**22)
    before = LayeredContents.loads
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=settings.default.max_examples * 2 // 3,
            stateful_step_count=30,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            deadline=None,
        ),
    )
    assert LayeredContents.loads > before + 3 or walk is not LayeredTierWalk  # with rings there are a few, or none
