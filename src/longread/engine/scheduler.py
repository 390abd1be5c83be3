"""Which tokens of which sequence the next step computes: continuous batching with chunked prefill.

A pure policy over timelines and the cache's bookkeeping; knows no tensors, sampling or events. ``policy`` shares out a
step, ``waiting`` says who comes next; this puts both to the pages and slots that there are.

Budget. A step computes at most ``max_num_batched_tokens`` tokens. Every decoding sequence gets its one token first;
``policy`` shares what is left among the prompts, as much of it as the step's target time allows. The budget holds a
token for each sequence (``plan.resolve`` refuses any other).

Admission. In ``waiting``'s order, while slots and pages last; a prompt's pages are reserved whole, so that two books
that do not fit together are not started together. A request that has to wait for pages may be passed by later, smaller
ones, and one of a lower class by those of a higher one, at most ``BYPASS_LIMIT`` times its class's factor. A prompt
whose prefix is being computed by a running sequence waits for that. Long prompts leave some slots to short ones
(``slots``).

Loading. Where a slower tier has more of a prompt than the device, its pages are loaded first: the request keeps its
place and counts for its slot and its pages, while everything else goes on. When the load ends it is admitted like any
other, with what arrived.

Preemption. When a running sequence needs a page and there is none, the latest arrival of the lowest class gives its
pages back (they stay cached while nobody needs them) and waits again. A waiting request of a higher class takes slot
and pages in the same way where that is enough for it. Whoever was preempted counts as one class higher from then on.
So nobody is preempted for a higher class more than twice, and in the highest one the oldest is never preempted for a
younger one; a request that does not fit the pool alone is refused before it gets here; so the oldest always finishes,
and then the next one does.

Broken steps. One request may be why a step broke, and nobody knows which. So all that were in it lose what it left and
are computed again, each in steps of its own until it is past that place; meanwhile the others wait and nobody is
admitted. Whoever breaks a step alone is found, and the others go on.
"""

import time
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from longread.engine import policy
from longread.engine.reading import LUMP, Reading
from longread.engine.rows import DecodeRows
from longread.engine.sequence import Grant, Timeline
from longread.engine.slots import LATELY, most_long
from longread.engine.standing import Outlook, standing
from longread.engine.waiting import Entry, WaitingLines
from longread.kv.cache import KVCache
from longread.kv.chain import TokenChain
from longread.kv.lease import Lease
from longread.kv.tiers import LOAD_TRIES, Tiers
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import Standing, class_of
from longread.spec.errors import CapacityError
from longread.spec.state import PAGE_TOKENS, pages_for
from longread.spec.step_target import LEAST_TOKENS, StepTarget, bounds, current_target, slice_seconds

BYPASS_LIMIT = 64
ADMISSION_WINDOW = 64  # waiting requests looked at in vain in one step: a long queue costs the running ones nothing
ADMISSION_BATCH = 8  # more of them than there are free slots are put in order at a time
HOLD_RATE = 0.1  # weight of the newest ended request in the mean time that one keeps its slot


@dataclass(slots=True)
class Schedule:
    """One step's decisions. ``failed`` holds timelines that can never get their pages, with the reason. ``decodes``
    (rows, tokens of their contexts) and ``chunks`` (tokens, tokens before them) are its work as ``StepCost`` counts it.
    """

    grants: list[Grant] = field(default_factory=list)
    admitted: list[Timeline] = field(default_factory=list)
    preempted: list[Timeline] = field(default_factory=list)
    failed: list[tuple[Timeline, str]] = field(default_factory=list)
    decodes: tuple[int, int] = (0, 0)
    chunks: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Owns the waiting and the running entries. ``snapshot_interval``: tokens between snapshots inside a long prompt.

    ``slo``: a step beside decodes takes at most its ``tpot``, and any its ``step`` or, where there is none, about the
    ``step_target``'s seconds, as far as ``cost`` can tell; ``cost`` is whoever drives the schedule's to set, None:
    steps are as large as the budget. ``predicts``: whether times may be told by it, too. ``clock``: seconds, for what
    is told of waiting.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        snapshot_interval: int,
        tiers: Tiers | None = None,
        slo: Slo | None = None,
        step_target: StepTarget | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        assert max_num_batched_tokens >= max_num_seqs  # else decodes alone could exceed the budget
        self._cache = cache
        self._tiers = tiers
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._interval = snapshot_interval
        self._slo = slo or Slo()
        self._step_target = step_target or StepTarget(None, "")
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._waiting = WaitingLines()
        self._running: list[Entry] = []  # by rank
        self._reading = Reading()  # each of the running ones is here
        self._rows = DecodeRows()  # or here
        self._served: list[tuple[Entry, int]] = []  # of the reading ones: who got how many tokens in the last step
        self._loading: list[Entry] = []  # of the waiting ones: wait for a load
        self._alone: dict[Entry, int] = {}  # to be computed alone until so many tokens have their state
        self._arrivals = 0
        self._short_arrival = -LATELY - 1  # the newest arrival whose prompt one step can read
        self._long = 0  # running ones whose prompt was none
        self._steps = 0
        self._hold: float | None = None  # mean seconds that a request keeps its slot
        self.cost: StepCost | None = None
        self.predicts = True
        self.preemptions = 0
        self.underway: Collection[Timeline] = ()  # a chunk of theirs is still being computed: not to be touched

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

    def add(self, timeline: Timeline, priority: int = 0, owner: str = "") -> None:
        """Queue a timeline behind all others of its class and owner."""
        entry = Entry(timeline, self._arrivals, class_of(priority), owner)
        if timeline.prompt_length <= self._budget:
            self._short_arrival = self._arrivals
        self._arrivals += 1
        self._entries[timeline.key] = entry
        self._waiting.add(entry)

    def remove(self, timeline: Timeline, keep_tail: bool) -> None:
        """Forget a timeline in any state and release what it holds."""
        entry = self._entries.pop(timeline.key)
        self._alone.pop(entry, None)
        self._waiting.charge(entry)
        if entry.running:
            self._running.remove(entry)
            self._unfile(entry)
            self._long -= entry.long
            held = self._clock() - entry.admitted_at
            self._hold = held if self._hold is None else self._hold + HOLD_RATE * (held - self._hold)
        else:
            self._waiting.remove(entry)
        if entry in self._loading:
            self._loading.remove(entry)
            if self._tiers is not None and entry.transfer not in [other.transfer for other in self._loading]:
                assert entry.transfer is not None
                self._tiers.cancel(entry.transfer)
        timeline.release(self._cache, keep_tail)

    def preempt_latest(self) -> Timeline | None:
        """Take slot and pages from the lowest class's latest arrival that runs and is not ``underway``; it waits again.
        None: nobody does.
        """
        latest = next((each for each in reversed(self._running) if each.timeline not in self.underway), None)
        return self._preempt(latest) if latest is not None else None

    def retry_alone(self, grants: Sequence[Grant]) -> None:
        """The step of these broke; see the module's text."""
        for grant in grants:
            entry = self._entries[grant.timeline.key]
            self._alone[entry] = grant.timeline.computed + grant.length
            self._preempt(entry, keep_tail=False)
            entry.waits("turn", "a step that it was in broke, and it is tried again alone")

    def _preempt(self, entry: Entry, keep_tail: bool = True) -> Timeline:
        self._running.remove(entry)
        self._unfile(entry)
        self._long -= entry.long
        # The tail is kept so that the resume costs little; under pressure the cache evicts it like any other page.
        entry.timeline.release(self._cache, keep_tail)
        self._waiting.charge(entry)
        entry.preempted()
        self.preemptions += 1
        self._waiting.add(entry)
        return entry.timeline

    def drop_loads(self) -> bool:
        """Give up all loads in flight, waiting until their pages are back; False: there were none."""
        return self._tiers is not None and self._tiers.cancel_all()

    def explain(self, timeline: Timeline, waited: float) -> Standing:
        """Where a timeline stands and why; ``waited``: seconds since it was submitted."""
        entry = self._entries[timeline.key]
        ahead = []
        if not entry.running:
            order = self._waiting.order(len(self._waiting), BYPASS_LIMIT)
            ahead = order[: order.index(entry)]
        rows = sum(each.timeline.remaining == 1 for each in self._running)
        outlook = Outlook(
            self.cost if self.predicts else None,
            self._budget,
            self._max_num_seqs,
            self._running,
            len(self._waiting),
            self._hold,
            current_target(self._slo, self._step_target, self.cost, rows),
        )
        return standing(entry, ahead, outlook, waited)

    def check(self) -> None:
        """Audit of what is kept from step to step; raises AssertionError."""
        self._reading.check()
        reading = [entry for entry in self._running if entry.filed]
        rows = [entry for entry in self._running if not entry.filed]
        self._rows.check(rows)
        if len(reading) != self._reading.count or self._running != sorted(self._running, key=lambda e: e.rank):
            raise AssertionError(f"{self._reading.count} prompts are kept, of {len(reading)}, or ranks are mixed up")
        if self._long != sum(entry.long for entry in self._running):
            raise AssertionError(f"{self._long} long prompts are counted")

    def schedule(self) -> Schedule:
        """Decide the next step. Pages and snapshot rows of every grant are reserved when this returns."""
        plan = Schedule()
        self._steps += 1
        if self._tiers is not None:
            self._tiers.collect()
        for entry, _ in self._served:
            if entry.filed and self._reading.advanced(entry):
                self._rows.add(entry)
        self._reserve_running(plan)
        alone = self._next_alone(plan) if self._alone and not plan.preempted else None
        if alone is not None:
            self._share_out(plan, alone)
            return plan
        if not plan.preempted and not self._alone:  # else the pool is full: admitting would only move the same pages
            self._admit(plan)
        self._share_out(plan)
        return plan

    def schedule_rows(self) -> Schedule | None:
        """A token for each decoding sequence, while the last schedule's chunks are still being computed: nobody comes,
        and nobody gives way. None: nobody decodes, or somebody would have to give pages back.
        """
        if self._alone:
            return None
        for entry in self._rows.short():
            timeline = entry.timeline
            assert timeline.lease is not None
            try:
                self._cache.reserve(timeline.lease, len(timeline.tokens))
            except CapacityError:
                return None
            self._rows.reserved(entry)
        plan = Schedule(grants=self._rows.grants.copy(), decodes=(len(self._rows), self._rows.context()))
        for entry in self._rows.unread():
            self._prepare(entry.timeline, 1)
        return plan if plan.grants else None

    def goes_on(self, grants: Sequence[Grant]) -> bool:
        """Whether the next step is ``grants`` once more, rows that have got their tokens, whatever else is booked of
        their last step: nobody comes or goes, and nothing is to be reserved, published or kept before it.
        """
        level = self._waiting.first_level
        quiet = not (self._alone or self._loading or self._cache.loads or self._reading.count)
        comes = level is not None and (self._gives_way(level) or not (self._full or self._stuck))
        return quiet and not comes and self._rows.go_on(grants)

    def slice_seconds(self, longest: float) -> float:
        """How long a chunk may keep rows waiting between two steps of theirs."""
        return slice_seconds(self._slo, longest, self.cost, (len(self._rows), self._rows.context()))

    def _next_alone(self, plan: Schedule) -> Entry | None:
        """Who is computed alone now; it holds what it needs. None: nobody, or it cannot start before others end."""
        self._end_loads()
        for passed in [each for each, end in self._alone.items() if each.timeline.computed >= end]:
            del self._alone[passed]
        entry = next(iter(self._alone), None)
        if entry is None or entry.running:
            return entry
        if entry.transfer is None and not self._full and self._start(entry, self._chain(entry)) is None:
            if entry.running:
                plan.admitted.append(entry.timeline)
                return entry
        elif not self._running and not self._loading:  # nothing will be given back: the usual way says so
            self._alone.clear()
        return None

    def _reserve_running(self, plan: Schedule) -> None:
        """Cover the tokens of every running sequence with pages, by rank, preempting from the other end."""
        for entry in self._rows.short():  # who reads a prompt has the pages of all of it
            timeline = entry.timeline
            while timeline.lease is not None and len(timeline.tokens) > len(timeline.lease.pages) * PAGE_TOKENS:
                try:
                    self._cache.reserve(timeline.lease, len(timeline.tokens))
                except CapacityError as error:
                    self._give_pages(plan, timeline, error)
                else:
                    self._rows.reserved(entry)

    def _give_pages(self, plan: Schedule, timeline: Timeline, error: CapacityError) -> None:
        """Have pages given back for a running timeline; it may itself be the one that gives way, or fail."""
        for other in self._loading:  # their pages come back when the loader has seen it
            if self._tiers is not None and other.transfer is not None:
                self._tiers.cancel(other.transfer)
        if len(self._running) == 1 and not self._cache.loads:
            self.remove(timeline, keep_tail=False)
            plan.failed.append((timeline, f"no page is left beside open sessions: {error}"))
            return
        plan.preempted.append(self._preempt(self._running[-1]))

    def _admit(self, plan: Schedule) -> None:
        """Start waiting requests; see the module's text."""
        self._end_loads()
        looked: set[Entry] = set()
        passed: list[Entry] = []  # lack pages; whoever is admitted from here on passes them
        tried = 0  # and not admitted
        while not plan.preempted:  # else they would be looked at, who have just given way
            if self._full and not self._gives_way(0):
                return
            free = self._max_num_seqs - len(self._running)
            most = min(free + ADMISSION_BATCH, ADMISSION_WINDOW) + len(looked)
            order = self._waiting.order(most, BYPASS_LIMIT, ready=self._long_enough)
            more = [entry for entry in order if entry not in looked]
            if not more:
                return
            for entry in more:
                if entry.transfer is None:
                    if self._full and not self._gives_way(entry.level):
                        entry.waits("slots", f"all {self._max_num_seqs} slots are taken")
                        return
                    if self._look_at(plan, entry, passed):
                        return
                    tried += not entry.running
                    if tried == ADMISSION_WINDOW:
                        return
                looked.add(entry)

    def _look_at(self, plan: Schedule, entry: Entry, passed: list[Entry]) -> bool:
        """Admit one entry, if that can be. True: nobody else may be admitted in this step."""
        if self._long_enough and not self._gives_way(entry.level) and self._is_long(entry):
            self._waiting.put_off(entry)
            entry.waits(
                "slots",
                f"prompts of more than {self._budget:,} tokens hold {self._long} of {self._max_num_seqs} slots; "
                "the rest is kept for shorter ones",
            )
            return False
        if not self._try(plan, entry):
            passed.append(entry)
            return self._waiting.overdue(entry, BYPASS_LIMIT)
        if not entry.running:
            return False
        plan.admitted.append(entry.timeline)
        return any(self._waiting.overdue(other, BYPASS_LIMIT) for other in passed)

    def _try(self, plan: Schedule, entry: Entry) -> bool:
        """Start one entry, or its load. False: it lacks pages."""
        if self._hopeless(entry) and not self._gives_way(entry.level):
            return False  # before its prefix is looked for: its pages would be missing all the same
        if entry.promise is not None and entry.promise.stands:
            return True
        chain = self._chain(entry)
        entry.promise = self._cache.promised(chain, self._interval) if self._running else None
        if entry.promise is not None:
            self._inherit(entry, entry.promise.lease)
            entry.waits("prefix", "a running request computes what its prompt begins with; it will reuse that")
            return True
        self._make_way(plan, entry, chain)
        if self._full:
            entry.waits("pages", "its class may take a slot from a lower one, but not enough pages would come with it")
            return False
        if self._hopeless(entry):
            return False
        reason = self._start(entry, chain)
        if reason is None:
            return True
        entry.waits("pages", str(reason))
        if self._running or self._cache.loads:
            return False
        # Nothing will ever be given back but by sessions, which the caller owns: waiting would be for ever.
        self.remove(entry.timeline, keep_tail=False)
        plan.failed.append((entry.timeline, f"no room beside open sessions: {reason}"))
        return True

    def _inherit(self, entry: Entry, lease: Lease) -> None:
        """Who computes what an entry waits for does so at the entry's level: else it would wait for a lower class."""
        for other in self._running:
            if other.timeline.lease is lease and other.level > entry.level:
                self._unfile(other)
                other.level = entry.level
                self._file(other)
                self._running.sort(key=lambda e: e.rank)
                return

    def _hopeless(self, entry: Entry) -> bool:
        return bool(self._running) and entry.hopeless(self._available(), len(self._running))

    @property
    def _stuck(self) -> bool:
        """Whether all whom a schedule would look at lacked pages, of which none were given back since."""
        first = self._waiting.order(ADMISSION_WINDOW, BYPASS_LIMIT, ready=self._long_enough)
        return all(map(self._hopeless, first))

    @property
    def _full(self) -> bool:
        return len(self._running) + len(self._loading) >= self._max_num_seqs

    @property
    def _long_enough(self) -> bool:
        """Whether long prompts hold all slots that they may."""
        return self._long >= most_long(self._max_num_seqs, self._arrivals - self._short_arrival)

    def _is_long(self, entry: Entry) -> bool:
        """Whether one step cannot read it, and nobody is about to publish what it begins with."""
        chain = self._chain(entry)
        missing = len(chain) - self._cache.match(chain).cached_tokens
        return missing > self._budget and self._cache.promised(chain, self._interval) is None

    def _gives_way(self, level: int) -> bool:
        """Whether anybody runs at a lower class than ``level`` (a higher number)."""
        return bool(self._running) and self._running[-1].level > level

    def _make_way(self, plan: Schedule, entry: Entry, chain: TokenChain) -> None:
        """Preempt lower classes for the slot and the pages that an entry lacks, if that is enough, else nobody."""
        if not self._gives_way(entry.level):
            return
        wanted = pages_for(len(chain)) - self._cache.match(chain).full_pages
        running, available = len(self._running), self._available()
        slots = self._max_num_seqs - running - len(self._loading)
        victims: list[Entry] = []
        lower = (each for each in reversed(self._running) if each.started != self._steps)
        while slots <= 0 or wanted + running > available:
            victim = next(lower, None)
            if victim is None or victim.level <= entry.level:
                return
            assert victim.timeline.lease is not None
            victims.append(victim)
            slots, running = slots + 1, running - 1
            available += len(victim.timeline.lease.pages)  # at most: others may share some
        plan.preempted.extend(self._preempt(victim) for victim in victims)

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
        self._enter(entry, lease, len(chain) - lease.cached_tokens)
        return None

    def _enter(self, entry: Entry, lease: Lease, tokens: int) -> None:
        """An entry runs from now on and has ``tokens`` to compute."""
        if not entry.preemptions:  # a resume finds its own pages, which says nothing of the prompts' common prefixes
            self._cache.count_lookup(lease)
            entry.work = tokens
        if self._waiting.overdue(entry, BYPASS_LIMIT):  # it has given way often enough
            entry.level = 0
        self._waiting.admit(entry, tokens)
        entry.timeline.lease = lease
        entry.chain = None
        entry.running = True
        entry.admitted_at = self._clock()
        entry.started = self._steps
        entry.long = tokens > self._budget
        self._long += entry.long
        if not entry.long:
            self._short_arrival = max(self._short_arrival, entry.arrival)
        self._file(entry)
        insort(self._running, entry, key=lambda e: e.rank)

    def _file(self, entry: Entry) -> None:
        if entry.timeline.remaining > 1:
            self._reading.add(entry)
        else:
            self._rows.add(entry)

    def _unfile(self, entry: Entry) -> None:
        if entry.filed:
            self._reading.discard(entry)
        else:
            self._rows.discard(entry)

    def _available(self) -> int:
        """Pages that could be handed out now, beside what loading prompts will need for their rest."""
        rest = sum(
            max(pages_for(len(entry.timeline.tokens)) - len(entry.transfer.load.pages), 0)
            for entry in self._loading
            if entry.transfer is not None
        )
        return self._cache.pages_free + self._cache.pages_cached - rest

    def _share_out(self, plan: Schedule, alone: Entry | None = None) -> None:
        """Give every one of the running sequences its tokens, decodes first; or ``alone``, and nobody else."""
        if alone is None:
            plan.grants = self._rows.grants.copy()
            plan.decodes = (len(plan.grants), self._rows.context())
        elif not alone.filed:
            plan.grants = [Grant(alone.timeline, 1)]
            plan.decodes = (1, len(alone.timeline.tokens))
        for entry in self._rows.unread():
            if alone is None or entry is alone:
                self._prepare(entry.timeline, 1)
        within = bounds(self._slo, self._step_target.seconds, self.cost, plan.decodes[0])
        limit = self._budget - plan.decodes[0]
        most, lumps = self._room(limit, plan.decodes, within.most)
        lone = [alone] if alone is not None and alone.filed else []
        prompts = self._reading.candidates(most, lumps) if alone is None else lone
        demands = [self._reading.demand(entry) for entry in prompts]
        lengths = policy.fit(limit, demands, plan.decodes, self.cost, within, self._steps)
        plan.chunks = policy.chunks(demands, lengths)
        for entry, _ in self._served:
            entry.granted = 0 if entry.filed else entry.granted
        self._served = [(entry, length) for entry, length in zip(prompts, lengths, strict=True) if length]
        self._reading.deal(self._served, policy.passed(sum(lengths), 0, self.cost))
        for entry, length in self._served:
            self._prepare(entry.timeline, length)
            plan.grants.append(Grant(entry.timeline, length))

    def _prepare(self, timeline: Timeline, length: int) -> None:
        """Landing points are planned by the tokens that the lease was opened with."""
        assert timeline.lease is not None
        self._cache.prepare(timeline.lease, len(timeline.lease.prompt), length, self._interval)

    def _room(self, limit: int, decodes: tuple[int, int], longest: float | None) -> tuple[int, int]:
        """At most so many prompt tokens, and about so many lumps of them, fit into a step of ``longest`` seconds."""
        cost = self.cost
        lumps = limit // LUMP
        if cost is not None and longest is not None and cost.token > 0:
            seconds = max(longest - cost.decode_seconds(*decodes), 2 * cost.chunk + cost.launch)
            limit = min(limit, max(int(seconds / cost.token), LEAST_TOKENS))
            lumps = min(lumps, int(seconds / (cost.chunk + LUMP * cost.token)))
        return limit, lumps
