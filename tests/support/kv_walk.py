"""A random walk of the prefix cache against the naive cache, with contents, for the tests that run and extend it.

Every step: the audit is clean; every row and ring of every lease, and of everything published, holds what was
computed from exactly that token prefix; no prompt finds more than the naive cache, nor less while nothing was
evicted.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_contents import FRESH, ROWS_ONLY, Contents, digests

from longread.kv.cache import KVCache
from longread.kv.lease import Lease
from longread.kv.naive import NaiveCache
from longread.spec.errors import CapacityError
from longread.spec.state import PAGE_TOKENS, pages_for

ROOT = b"root".ljust(16, b"\0")
LENGTHS = st.one_of(
    st.integers(1, 1300),
    st.sampled_from([1, 2, 255, 256, 257, 258, 511, 512, 513, 514, 767, 768, 769, 770, 1024, 1025, 1280]),
)
CHUNKS = st.sampled_from([1, 3, 100, 256, 300, 1400])
DOCUMENTS = [[(doc * 7919 + i * 31 + i // 97) % 50000 for i in range(1400)] for doc in range(2)]


def state(cache: KVCache) -> tuple:
    """Everything that a refused call must leave as it was."""
    return (
        cache.pool.free.runs(),
        dict(cache.pool.cached),
        list(cache.pool.references),
        sorted(cache.index.entries),
        sorted(cache.free_slots),
        list(cache.snapshots.owners),
        [(lease.slot, list(lease.pages), lease.position) for lease in cache.leases.values()],
        (cache.prefix_queries, cache.prefix_hits, cache.pages_evicted, cache.snapshots_evicted),
    )


class Walk(RuleBasedStateMachine):
    groups = ROWS_ONLY

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Lease] = []
        self.wanted: dict[int, list[int]] = {}  # id(lease) -> its whole prompt
        self.rolled: dict[int, tuple[int, ...]] = {}  # id(lease) -> prefix of its rolling snapshot
        self.asked: list[list[int]] = [document[:700] for document in DOCUMENTS]

    @initialize(
        pages=st.sampled_from([4, 6, 9, 60]), slots=st.integers(1, 3), snapshots=st.sampled_from([0, 2, 5, 200])
    )
    def begin(self, pages: int, slots: int, snapshots: int) -> None:
        self.store = Contents(self.groups, pages, slots, snapshots)
        self.cache = KVCache(self.groups, ROOT, pages, slots, snapshots, self.store)
        self.naive = NaiveCache(self.cache.has_rings)

    def _open(self, prompt: list[int]) -> bool:
        self.asked = [*self.asked[-4:], prompt]
        match = self.cache.match(prompt)
        before = state(self.cache)
        try:
            lease = self.cache.open(prompt)
        except CapacityError:
            assert not self.cache.free_slots
            assert state(self.cache) == before
            return False
        assert list(lease.tokens) == prompt[: lease.cached_tokens]
        assert (
            lease.cached_tokens <= match.cached_tokens
        )  # less only where no page was left for the partial page's copy
        if self.cache.pages_free + self.cache.pages_cached:
            assert lease.cached_tokens >= match.full_pages * PAGE_TOKENS or self.cache.has_rings
        if self.cache.pages_evicted == before[-1][2] and self.cache.pages_free:
            assert lease.cached_tokens == match.cached_tokens
        if not lease.cached_tokens:
            assert self.store.slots[lease.slot] == FRESH
        self.leases.append(lease)
        self.wanted[id(lease)] = prompt
        return True

    @rule(doc=st.integers(0, 1), length=LENGTHS)
    def open_document(self, doc: int, length: int) -> None:
        self._open(DOCUMENTS[doc][:length])

    @rule(data=st.data(), tail=st.integers(0, 300), mark=st.integers(0, 3))
    def open_variation(self, data: st.DataObject, tail: int, mark: int) -> None:
        """An earlier prompt or turn, cut anywhere and continued differently (or asked again)."""
        base = data.draw(st.sampled_from(self.asked))
        cut = data.draw(st.one_of(st.just(len(base)), st.integers(0, len(base))))
        prompt = base[:cut] + [60000 + mark * 1000 + i for i in range(tail)]
        self._open(prompt[:1400] or [1])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), length=CHUNKS, chunks=st.integers(1, 3))
    def prefill(self, data: st.DataObject, length: int, chunks: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        for _ in range(chunks):
            self._prefill(lease, length, publish=True)

    @rule(doc=st.integers(0, 1), length=LENGTHS, mark=st.integers(0, 20), publish=st.booleans(), finish=st.booleans())
    def read_whole(self, doc: int, length: int, mark: int, publish: bool, finish: bool) -> None:
        """A prompt of one document and one question, opened, computed and ended at once; snapshots may be left out."""
        if not self._open(DOCUMENTS[doc][:length] + [60000 + mark] * 20):
            return
        lease = self.leases[-1]
        while self._prefill(lease, 600, publish):
            pass
        self._end(lease, finish)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), count=st.sampled_from([1, 2, 60, 260]), mark=st.integers(0, 1))
    def decode(self, data: st.DataObject, count: int, mark: int) -> None:
        """Output tokens, with a rolling snapshot at each page end."""
        lease = data.draw(st.sampled_from(self.leases))
        if lease.position < len(self.wanted[id(lease)]):
            return
        for _ in range(count):
            if not self._step(lease, [70000 + mark]):
                return
            if lease.position % PAGE_TOKENS == 0:
                self._snapshot(lease, rolling=True)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), rolling=st.booleans())
    def snapshot_anywhere(self, data: st.DataObject, rolling: bool) -> None:
        self._snapshot(data.draw(st.sampled_from(self.leases)), rolling)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data: st.DataObject, finish: bool) -> None:
        """Finish (the turn's end is published) or abort."""
        lease = data.draw(st.sampled_from(self.leases))
        self._end(lease, finish)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        prompt = self.wanted[id(lease)]
        again = prompt if lease.position < len(prompt) else [*lease.tokens, 80000]
        self._close(lease)
        self._open(again)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        before = state(self.cache)
        try:
            child = self.cache.fork(lease)
        except CapacityError:
            assert state(self.cache) == before
            return
        assert child.tokens == lease.tokens
        self.leases.append(child)
        self.wanted[id(child)] = self.wanted[id(lease)]

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), more=st.integers(1, 600))
    def fail_a_step(self, data: st.DataObject, more: int) -> None:
        """A step that reserved and wrote, and was never committed; its sequence is closed or tried again."""
        lease = data.draw(st.sampled_from(self.leases))
        if self._reserve(lease, lease.position + more):
            self.cache.prepare(lease, len(self.wanted[id(lease)]), more, interval=700)
            self.store.spoil(lease.pages, lease.position, lease.saves.values())

    @precondition(lambda self: len(self.leases) == 1)
    @rule()
    def fill_the_pool(self) -> None:
        """A sequence alone can have every page, whatever is cached."""
        self.cache.reserve(self.leases[0], self.cache.pool.count * PAGE_TOKENS)
        assert self.cache.pages_held == self.cache.pool.count

    def _prefill(self, lease: Lease, length: int, publish: bool) -> bool:
        """One chunk, with the policy's landing points inside it. False: the prompt is done, or there was no room."""
        prompt = self.wanted[id(lease)]
        tokens = prompt[lease.position : lease.position + length]
        if not tokens or not self._reserve(lease, lease.position + len(tokens)):
            return False
        self.cache.prepare(lease, len(prompt) if publish else 0, len(tokens), interval=700)
        points, rows = lease.landings, set(lease.saves)
        assert self._step(lease, tokens)
        for point in points:
            published = self.cache.match([*lease.tokens[:point], -1]).cached_tokens == point
            # Else the row is another's: one that evicted it, or whose step or load has not ended.
            saving = any(other.saves for other in self.leases)
            full = len(rows) == self.cache.snapshots.count and point not in rows  # deeper ones of this step have all
            assert published or self.cache.snapshots_evicted or self.cache.loads or saving or full
            if published:
                self._published(tuple(lease.tokens[:point]), lease, rolling=False)
        return True

    def _end(self, lease: Lease, finish: bool) -> None:
        if finish:
            self._snapshot(lease, rolling=False)
            self.asked = [*self.asked[-4:], list(lease.tokens) or [1]]
        self._close(lease)

    def _reserve(self, lease: Lease, total: int) -> bool:
        before = state(self.cache)
        missing = pages_for(total) - len(lease.pages)
        possible = missing <= self.cache.pages_free + self.cache.pages_cached
        try:
            self.cache.reserve(lease, total)
        except CapacityError:
            assert not possible
            assert state(self.cache) == before
            return False
        assert possible
        return True

    def _step(self, lease: Lease, tokens: list[int]) -> bool:
        if not self._reserve(lease, lease.position + len(tokens)):
            return False
        self.store.compute(lease.pages, lease.slot, [*lease.tokens, *tokens], lease.position, lease.saves)
        first = lease.position // PAGE_TOKENS + 1
        self.cache.commit(lease, tokens)
        if not self.cache.has_rings:
            for page in range(first, lease.position // PAGE_TOKENS + 1):
                self.naive.publish(lease.tokens[: page * PAGE_TOKENS])
        return True

    def _snapshot(self, lease: Lease, rolling: bool) -> bool:
        here = tuple(lease.tokens)
        done = self.cache.snapshot(lease, rolling=rolling)
        if not done:
            assert not here or not self.cache.snapshots.owners  # no row at all, or loads have them
            return False
        self._published(here, lease, rolling)
        return True

    def _published(self, here: tuple[int, ...], lease: Lease, rolling: bool) -> None:
        if not self.cache.has_rings:
            self.naive.publish(here)
            return
        known = here in self.naive.prefixes
        owner = next((key for key, prefix in self.rolled.items() if prefix == here), None)
        if rolling and owner != id(lease):
            previous = self.rolled.pop(id(lease), None)
            if previous is not None:
                self.naive.forget(previous)
            if not known:
                self.rolled[id(lease)] = here
        elif not rolling and owner is not None:
            del self.rolled[owner]
        self.naive.publish(here)

    def _close(self, lease: Lease) -> None:
        self.cache.close(lease)
        self.leases.remove(lease)
        self.rolled.pop(id(lease), None)

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.cache.pages_free + self.cache.pages_held + self.cache.pages_cached == self.cache.pool.count

    @invariant()
    def leases_hold_their_own_state(self) -> None:
        for lease in self.leases:
            known = digests(lease.tokens)
            assert not self.store.differences(lease.pages, lease.tokens, known)
            if self.cache.has_rings:
                assert self.store.slots[lease.slot] == known[lease.position]

    @invariant()
    def published_state_is_what_it_says(self) -> None:
        """Follows every chain of the index: proves every hit that any prompt could have from here."""
        waiting = [(self.cache.index.root, [])] if hasattr(self, "cache") else []
        while waiting:
            entry, tokens = waiting.pop()
            tokens = tokens + memoryview(entry.run).cast("i").tolist()
            if entry.parent is not None:
                known = digests(tokens)
                assert not self.store.differences([entry.page], tokens, known, first=entry.depth - 1)
                if entry.snapshot is not None:
                    assert self.store.saved[entry.snapshot] == known[-1]
            waiting += [(child, tokens) for child in entry.children]

    @invariant()
    def hits_are_the_naive_ones(self) -> None:
        if not hasattr(self, "cache"):
            return
        lossless = not self.cache.pages_evicted and not self.cache.snapshots_evicted
        for prompt in self.asked:
            found, most = self.cache.match(prompt).cached_tokens, self.naive.match(prompt)
            assert found == most if lossless else found <= most
