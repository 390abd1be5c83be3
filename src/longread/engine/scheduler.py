"""Which tokens of which sequence the next step computes: continuous batching with chunked prefill.

A pure policy over timelines and the cache's bookkeeping; knows no tensors, sampling or events.

Budget. A step computes at most ``max_num_batched_tokens`` tokens. Every decoding sequence gets its one token first.
What is left goes to the prompts: half of it to the prompt that arrived first, the rest to the others, shortest
remainder first, and what they do not need back to the first. So a short prompt usually passes in one step beside a
book, a book progresses by at least half of the prefill budget once it is the oldest, and every prompt becomes the
oldest in the end. The budget holds a token for each sequence (``plan.resolve`` refuses any other).

Admission. First come, first served, while slots and pages last; a prompt's pages are reserved whole, so that two books
that do not fit together are not started together. A request that has to wait for pages may be passed by later, smaller
ones, at most ``BYPASS_LIMIT`` times. A prompt whose prefix is being computed by a running sequence waits for that.

Loading. Where a slower tier has more of a prompt than the device, its pages are loaded first: the request keeps its
place and counts for its slot and its pages, while everything else goes on. When the load ends it is admitted like any
other, with what arrived.

Preemption. When a running sequence needs a page and there is none, the latest arrival gives its pages back (they stay
cached while nobody needs them) and waits again. The oldest is never preempted for a younger one, and a request that
does not fit the pool alone is refused before it gets here; so the oldest always finishes, and then the next one does.
"""

import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from longread.engine.sequence import Timeline
from longread.kv.cache import KVCache
from longread.kv.chain import TokenChain
from longread.kv.tiers import LOAD_TRIES, Tiers
from longread.kv.transfer import Transfer
from longread.spec.errors import CapacityError
from longread.spec.state import pages_for

BYPASS_LIMIT = 64
ADMISSION_WINDOW = 64  # waiting requests looked at in one step, so that a long queue costs the running ones nothing


class Entry:
    """A timeline in the queue. ``arrival`` orders entries and never changes; ``bypassed`` counts later arrivals that
    were admitted while this one lacked pages. ``chain`` keeps the hashes of a waiting timeline's pages, which it is
    looked up by in each step. ``transfer``: the load that it waits for, ``since`` when; ``starter``: whether it is its
    own; ``loads``: how many of its own it had.
    """

    def __init__(self, timeline: Timeline, arrival: int):
        self.timeline = timeline
        self.arrival = arrival
        self.bypassed = 0
        self.preemptions = 0
        self.chain: TokenChain | None = None
        self.transfer: Transfer | None = None
        self.since = 0.0
        self.starter = False
        self.loads = 0
        self._lacked: tuple[int, int] | None = None

    def missed(self, available: int, running: int) -> None:
        """Remember that ``available`` pages beside ``running`` sequences were not enough."""
        self._lacked = (available, running)

    def hopeless(self, available: int, running: int) -> bool:
        """Whether nothing has been given back since admission failed; a retry would cost look-ups and page copies."""
        return self._lacked is not None and available <= self._lacked[0] and running >= self._lacked[1]


@dataclass(frozen=True, slots=True)
class Grant:
    """``length`` tokens of one timeline in this step. ``cut``: the chunk ends where the cache wants a snapshot."""

    timeline: Timeline
    length: int
    cut: bool


@dataclass(slots=True)
class Schedule:
    """One step's decisions. ``failed`` holds timelines that can never get their pages, with the reason."""

    grants: list[Grant] = field(default_factory=list)
    admitted: list[Timeline] = field(default_factory=list)
    preempted: list[Timeline] = field(default_factory=list)
    failed: list[tuple[Timeline, str]] = field(default_factory=list)


def split_budget(budget: int, demands: Sequence[tuple[int, int]]) -> list[int]:
    """Share ``budget`` tokens among prompts in order of arrival; returns one length each (0: not in this step).

    ``demands``: (tokens wanted in this step, tokens remaining in all) of each prompt; the first wants at most the
    second, since a chunk may have to end early at a snapshot point.
    """
    lengths = [0] * len(demands)
    if not demands or budget <= 0:
        return lengths
    lengths[0] = min(demands[0][0], -(-budget // 2))
    left = budget - lengths[0]
    for i in sorted(range(1, len(demands)), key=lambda i: (demands[i][1], i)):
        lengths[i] = min(demands[i][0], left)
        left -= lengths[i]
    lengths[0] += min(demands[0][0] - lengths[0], left)
    return lengths


class Scheduler:
    """Owns the waiting and the running list. ``snapshot_interval``: tokens between snapshots inside a long prompt."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        snapshot_interval: int,
        tiers: Tiers | None = None,
    ):
        assert max_num_batched_tokens >= max_num_seqs  # else decodes alone could exceed the budget
        self._cache = cache
        self._tiers = tiers
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._interval = snapshot_interval
        self._entries: dict[str, Entry] = {}
        self._waiting: list[Entry] = []
        self._running: list[Entry] = []
        self._loading: list[Entry] = []  # of the waiting ones: wait for a load
        self._arrivals = 0
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def preemptions_of(self, timeline: Timeline) -> int:
        return self._entries[timeline.key].preemptions

    def add(self, timeline: Timeline) -> None:
        """Queue a timeline behind all others."""
        entry = Entry(timeline, self._arrivals)
        self._arrivals += 1
        self._entries[timeline.key] = entry
        self._waiting.append(entry)

    def remove(self, timeline: Timeline, keep_tail: bool) -> None:
        """Forget a timeline in any state and release what it holds."""
        entry = self._entries.pop(timeline.key)
        (self._running if entry in self._running else self._waiting).remove(entry)
        if entry in self._loading:
            self._loading.remove(entry)
            if self._tiers is not None and entry.transfer not in [other.transfer for other in self._loading]:
                assert entry.transfer is not None
                self._tiers.cancel(entry.transfer)
        timeline.release(self._cache, keep_tail)

    def preempt_latest(self) -> Timeline | None:
        """Take slot and pages from the latest arrival that runs; it waits again in its old place. None: nobody does."""
        if not self._running:
            return None
        entry = max(self._running, key=lambda e: e.arrival)
        self._running.remove(entry)
        # The tail is kept so that the resume costs little; under pressure the cache evicts it like any other page.
        entry.timeline.release(self._cache, keep_tail=True)
        entry.preemptions += 1
        entry.loads = 0
        self.preemptions += 1
        insort(self._waiting, entry, key=lambda e: e.arrival)
        return entry.timeline

    def drop_loads(self) -> bool:
        """Give up all loads in flight, waiting until their pages are back; False: there were none."""
        return self._tiers is not None and self._tiers.cancel_all()

    def schedule(self) -> Schedule:
        """Decide the next step. Pages of every grant are reserved when this returns."""
        plan = Schedule()
        if self._tiers is not None:
            self._tiers.collect()
        self._reserve_running(plan)
        if not plan.preempted:  # else the pool is full: admitting now would only move the same pages about
            self._admit(plan)
        for entry, length in self._lengths():
            if length:
                plan.grants.append(self._grant(entry.timeline, length))
        return plan

    def _reserve_running(self, plan: Schedule) -> None:
        """Cover the tokens of every running sequence with pages, oldest first, preempting from the other end."""
        for entry in sorted(self._running, key=lambda e: e.arrival):
            while entry in self._running:
                assert entry.timeline.lease is not None
                try:
                    self._cache.reserve(entry.timeline.lease, len(entry.timeline.tokens))
                    break
                except CapacityError as error:
                    for other in self._loading:  # their pages come back when the loader has seen it
                        if self._tiers is not None and other.transfer is not None:
                            self._tiers.cancel(other.transfer)
                    if len(self._running) == 1 and not self._cache.loads:
                        self.remove(entry.timeline, keep_tail=False)
                        plan.failed.append((entry.timeline, f"no page is left beside open sessions: {error}"))
                        break
                    victim = self.preempt_latest()
                    assert victim is not None
                    plan.preempted.append(victim)

    def _admit(self, plan: Schedule) -> None:
        """Start waiting requests; see the module's text."""
        passed: list[Entry] = []  # lack pages; whoever is admitted from here on passes them
        self._end_loads()
        for entry in self._waiting[: max(ADMISSION_WINDOW, self._max_num_seqs)]:
            if entry.transfer is not None:
                continue
            if len(self._running) + len(self._loading) >= self._max_num_seqs:
                break
            chain = self._chain(entry)
            if self._running and self._cache.pending(chain, self._interval):
                continue
            reason = self._start(entry, chain)
            if entry.transfer is not None:
                continue
            if reason is None:
                plan.admitted.append(entry.timeline)
                for other in passed:
                    other.bypassed += 1
                if any(other.bypassed >= BYPASS_LIMIT for other in passed):
                    break
            elif not self._running and not self._cache.loads:
                # Nothing will ever be given back but by sessions, which the caller owns: waiting would be for ever.
                self.remove(entry.timeline, keep_tail=False)
                plan.failed.append((entry.timeline, f"no room beside open sessions: {reason}"))
            elif entry.bypassed >= BYPASS_LIMIT:
                break
            else:
                passed.append(entry)

    def _chain(self, entry: Entry) -> TokenChain:
        if entry.chain is None:
            start = time.monotonic()
            entry.chain = self._cache.chain(entry.timeline.tokens, entry.timeline.hashed, entry.timeline.salt)
            self._cache.match(entry.chain)  # hashes its pages
            self._looked_up(entry, start)
        return entry.chain

    def _looked_up(self, entry: Entry, start: float) -> None:
        if not entry.preemptions:
            admission = entry.timeline.admission
            admission.looked_up = time.monotonic()
            admission.lookup += admission.looked_up - start

    def _end_loads(self) -> None:
        """Take note of the loads that have ended; who waited for them can be admitted."""
        for entry in [each for each in self._loading if each.transfer is not None and each.transfer.closed]:
            assert entry.transfer is not None
            if not entry.preemptions:
                entry.timeline.admission.add(entry.transfer, entry.since)
            # Somebody else's load need not bring all that there is of this prompt: it is looked up again.
            if entry.starter and entry.transfer.broken is None and not entry.transfer.cancelled:
                entry.loads = LOAD_TRIES  # what it brought may be evicted before a slot is free; then it is computed
            entry.transfer = None
            self._loading.remove(entry)

    def _load(self, entry: Entry, chain: TokenChain) -> None:
        """See whether a slower tier has more of the prompt, and start to load that; raises CapacityError."""
        if self._tiers is None or entry.loads >= LOAD_TRIES:
            return
        start = time.monotonic()
        found = self._tiers.find(chain)
        self._looked_up(entry, start)
        if found is None:
            return
        entry.since = time.monotonic()
        coming = self._tiers.coming(found)
        entry.transfer = coming or self._tiers.start(found)
        entry.starter = coming is None
        entry.loads += entry.starter  # others' loads need no limit: each brings something, or its record is dropped
        self._loading.append(entry)

    def _start(self, entry: Entry, chain: TokenChain) -> CapacityError | None:
        """Take a slot and all pages of the known tokens. One page a running sequence is left free, so that the newcomer
        is not preempted by the others' next page.
        """
        running = len(self._running)
        available = self._available()
        if running and entry.hopeless(available, running):
            return CapacityError("nothing was given back since the last try")
        wanted = pages_for(len(chain)) - self._cache.match(chain).full_pages
        if wanted + running > available:  # certain without taking anything
            entry.missed(available, running)
            return CapacityError(f"{wanted} pages wanted beside {running} running sequences, {available} available")
        lease = None
        try:
            self._load(entry, chain)
            if entry.transfer is not None:
                return None
            lease = self._cache.open(chain)
            self._cache.reserve(lease, len(chain))
            if self._available() < running:
                raise CapacityError(f"{self._available()} pages would be left for {running} running sequences")
        except CapacityError as error:
            if lease is not None:
                self._cache.close(lease)
            entry.missed(available, running)
            return error
        if not entry.preemptions:  # a resume finds its own pages, which says nothing of the prompts' common prefixes
            self._cache.count_lookup(lease)
        entry.timeline.lease = lease
        entry.chain = None
        self._waiting.remove(entry)
        self._running.append(entry)
        return None

    def _available(self) -> int:
        """Pages that could be handed out now, beside what loading prompts will need for their rest."""
        rest = sum(
            max(pages_for(len(entry.timeline.tokens)) - len(entry.transfer.load.pages), 0)
            for entry in self._loading
            if entry.transfer is not None
        )
        return self._cache.pages_free + self._cache.pages_cached - rest

    def _lengths(self) -> list[tuple[Entry, int]]:
        """How many tokens each running sequence gets, decodes first."""
        decodes = [e for e in self._running if e.timeline.remaining == 1]
        prompts = sorted((e for e in self._running if e.timeline.remaining > 1), key=lambda e: e.arrival)
        demands = [(self._next_stop(e.timeline) - e.timeline.computed, e.timeline.remaining) for e in prompts]
        lengths = split_budget(self._budget - len(decodes), demands)
        return [(entry, 1) for entry in decodes] + list(zip(prompts, lengths, strict=True))

    def _cut(self, timeline: Timeline) -> int | None:
        """Where the cache wants a snapshot next; it plans by the tokens that the lease was opened with."""
        assert timeline.lease is not None
        planned = len(timeline.lease.prompt)
        if timeline.computed >= planned:
            return None
        return self._cache.next_snapshot_point(planned, timeline.computed, self._interval)

    def _next_stop(self, timeline: Timeline) -> int:
        """Where a chunk that starts now must end at the latest."""
        cut = self._cut(timeline)
        return len(timeline.tokens) if cut is None else min(cut, len(timeline.tokens))

    def _grant(self, timeline: Timeline, length: int) -> Grant:
        return Grant(timeline, length, self._cut(timeline) == timeline.computed + length)
