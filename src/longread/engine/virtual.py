"""The engine's loop on a virtual clock: the real schedule over the real books of the cache, computing nothing.

Knows timelines, the scheduler and the cache's bookkeeping. Must not know tensors, sampling, text, or where a step's
duration comes from (``Cost``). What it leaves out: slower tiers, sessions, failures, and the time of the schedule
itself.

Steps in which everybody decodes and nobody can come or go are taken together (``_repeats``): the schedule would decide
the same each time, so only their sum is booked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from longread.engine.scheduler import Schedule, Scheduler
from longread.engine.sequence import Grant, Timeline
from longread.kv.cache import KVCache
from longread.spec.config import Slo
from longread.spec.cost import CostModel
from longread.spec.state import PAGE_TOKENS, HashedTokens, StateGroup, hash_pages, pages_for
from longread.spec.step_target import StepTarget

ROOT = bytes(16)
# With requests waiting, their turn may come for a reason that only the schedule knows: it is asked that often.
REPEATS_WITH_QUEUE = 8
OUTPUT_IDS = 1 << 30  # sampled tokens are ids from here on, one a request: no prompt continues with them


class Cost(Protocol):
    """How long a step takes."""

    def seconds(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]] = ()) -> float:
        """``decodes``: (sequences that decode, tokens of their contexts together). ``chunks``: (new tokens, tokens
        before them) of each prompt's part. ``spec.cost.StepCost`` is one.
        """
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine is given. ``snapshots``: rows of saved rings, 0 for a model without. ``context``: tokens of the
    longest request, output included. ``slo``, ``step_target``: what the schedule keeps its steps within.
    """

    pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    snapshots: int
    snapshot_interval: int
    context: int
    rings: bool = True
    slo: Slo | None = None
    step_target: StepTarget | None = None


@dataclass(slots=True, eq=False)
class Run:
    """One request's life in virtual seconds; below 0 where it never got there, ``error`` where it was not served.

    ``kind``: what it is counted as. ``number``: its place among all. ``admitted``: first given a slot.
    ``prefill_started``: when the first step with a part of it began. ``cached``: tokens reused at the first admission.
    ``computed``: prompt tokens computed, those that a preemption lost twice. ``reached``: how far its state ever came,
    and ``lost``: preemptions since it last came further. ``longest_gap``: between two of its tokens.
    """

    key: str
    kind: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    number: int = 0
    priority: int = 0
    owner: str = ""
    admitted: float = -1.0
    prefill_started: float = -1.0
    first_token: float = -1.0
    last_token: float = -1.0
    finished: float = -1.0
    cached: int = 0
    computed: int = 0
    chunks: int = 0
    outputs: int = 0
    preemptions: int = 0
    lost: int = 0
    reached: int = 0
    longest_gap: float = 0.0
    error: str | None = None

    @property
    def queue(self) -> float:
        return self.prefill_started - self.arrived

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived

    @property
    def e2e(self) -> float:
        return self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None for a single token."""
        return (self.finished - self.first_token) / (self.outputs - 1) if self.outputs > 1 else None


@dataclass(slots=True)
class Totals:
    """``steps`` of the model and ``decisions`` of the schedule; ``busy`` seconds, the longest step, and tokens."""

    steps: int = 0
    decisions: int = 0
    busy: float = 0.0
    longest_step: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: dict[str, list[tuple[float, int]]] = field(default_factory=dict)  # by kind: seconds between tokens, how often


class NoContent:
    """A ``StateStore`` where nothing is stored."""

    def reset_slot(self, slot: int) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...
    def save_snapshot(self, slot: int, snapshot: int) -> None: ...
    def load_snapshot(self, snapshot: int, slot: int) -> None: ...
    def copy_slot(self, source: int, target: int) -> None: ...
    def taken(self, pages: Sequence[int]) -> None: ...


def groups(rings: bool) -> tuple[StateGroup, ...]:
    """The smallest groups that have a model's kinds: the books depend on kinds, not on widths."""
    rows = StateGroup("rows", "rows", (0,), 1)
    return (rows, StateGroup("ring", "ring", (0,), 1, ring_rows=1)) if rings else (rows,)


def hashed(blocks: Sequence[tuple[int, int]]) -> tuple[list[int], HashedTokens]:
    """A prompt of ``blocks``, (id, tokens) each, every token of a block having the block's id.

    Made of whole blocks, so that a million tokens take milliseconds, and the list shares its numbers.
    """
    tokens: list[int] = []
    for number, length in blocks:
        tokens.extend([number] * length)
    data = b"".join(number.to_bytes(4, "little") * length for number, length in blocks)
    least, most = min(n for n, _ in blocks), max(n for n, _ in blocks)
    return tokens, HashedTokens(ROOT, data, hash_pages(ROOT, data), least, most)


class VirtualEngine:
    """``now``: the virtual clock in seconds, which a caller may move forward while nothing is live.

    ``learnt``: what the schedule knows of a step's ``cost``; it goes on learning from the steps, as an engine does.
    """

    def __init__(self, limits: Limits, cost: Cost, learnt: CostModel):
        self.limits = limits
        self.now = 0.0
        self.totals = Totals()
        self.cache = KVCache(
            groups(limits.rings), ROOT, limits.pages, limits.max_num_seqs, limits.snapshots, NoContent()
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            snapshot_interval=limits.snapshot_interval,
            slo=limits.slo,
            step_target=limits.step_target,
            clock=lambda: self.now,
        )
        self.scheduler.cost = learnt.cost
        self._cost, self._learnt = cost, learnt
        self._live: dict[str, tuple[Run, Timeline]] = {}

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def runs(self) -> list[Run]:
        """Of the requests that have not ended."""
        return [run for run, _ in self._live.values()]

    def submit(self, run: Run, blocks: Sequence[tuple[int, int]]) -> bool:
        """Queue a request whose prompt is ``blocks`` (see ``hashed``). False: it can never be served; it has ended."""
        whole = run.prompt_tokens + run.output_tokens
        if whole > self.limits.context or pages_for(whole) > self.limits.pages:
            room = min(self.limits.context, self.limits.pages * PAGE_TOKENS)
            run.error = f"{whole:,} tokens, and {room:,} are the most that one request can have here"
            return False
        tokens, known = hashed(blocks)
        timeline = Timeline(run.key, tokens, known)
        self._live[run.key] = (run, timeline)
        self.scheduler.add(timeline, run.priority, run.owner)
        return True

    def step(self, until: float = inf) -> list[Run]:
        """Decide and book a step, or several equal ones up to about ``until``; returns who has ended.

        Where nothing is granted the clock stands still; with nobody failed that is for ever, unless somebody arrives.
        """
        plan = self.scheduler.schedule()
        self.totals.decisions += 1
        ended = self._note(plan)
        if plan.grants:
            ended += self._book(plan, until)
        return ended

    def _note(self, plan: Schedule) -> list[Run]:
        ended = []
        for timeline in plan.admitted:
            run, _ = self._live[timeline.key]
            assert timeline.lease is not None
            if run.admitted < 0:
                run.admitted, run.cached = self.now, timeline.lease.cached_tokens
                run.reached = run.cached
        for timeline in plan.preempted:
            run, _ = self._live[timeline.key]
            run.preemptions += 1
            run.lost += 1
        for timeline, reason in plan.failed:
            run, _ = self._live.pop(timeline.key)
            run.error = reason
            ended.append(run)
        return ended

    def _book(self, plan: Schedule, until: float) -> list[Run]:
        rows, context = plan.decodes
        one = self._cost.seconds(plan.decodes, plan.chunks)
        self._learnt.observe(plan.decodes, plan.chunks, one)
        self.scheduler.cost = self._learnt.cost
        count = self._repeats(plan, until, one)
        if count > 1:  # contexts grow evenly: the middle step is the mean one
            one = self._cost.seconds((rows, context + rows * (count - 1) // 2))
        start, self.now = self.now, self.now + one * count
        self.totals.steps += count
        self.totals.busy += one * count
        self.totals.longest_step = max(self.totals.longest_step, one)
        ended = []
        for grant in plan.grants:
            run, _ = self._live[grant.timeline.key]
            if self._advance(run, grant, start, one, count):
                ended.append(run)
        return ended

    def _repeats(self, plan: Schedule, until: float, one: float) -> int:
        """How many steps like this one follow each other: nobody else comes, ends, or needs a page."""
        if (
            plan.chunks
            or plan.admitted
            or plan.preempted
            or plan.failed
            or len(plan.grants) < self.scheduler.num_running
        ):
            return 1
        most = REPEATS_WITH_QUEUE if self.scheduler.num_waiting else PAGE_TOKENS
        if until < inf:
            most = min(most, max(int((until - self.now) / one), 1))
        for grant in plan.grants:
            run, timeline = self._live[grant.timeline.key]
            if not timeline.decoding:
                return 1
            most = min(most, run.output_tokens - run.outputs, PAGE_TOKENS - timeline.computed % PAGE_TOKENS)
        return most

    def _advance(self, run: Run, grant: Grant, start: float, one: float, count: int) -> bool:
        """Book ``count`` equal steps of a grant from ``start`` on. True: the request has ended by it."""
        timeline = grant.timeline
        decoding = timeline.decoding
        if count > 1:
            timeline.tokens.extend([OUTPUT_IDS + run.number] * (count - 1))
        if run.prefill_started < 0:
            run.prefill_started = start
        timeline.advance(self.cache, grant.length + count - 1)
        if not decoding:
            run.computed += grant.length
            run.chunks += 1
            self.totals.prompt_tokens += grant.length
        if timeline.computed > run.reached:
            run.reached, run.lost = timeline.computed, 0
        if timeline.remaining:
            return False
        self._sampled(run, start, one, count)
        if run.outputs >= run.output_tokens:
            run.finished = self.now
            self.scheduler.remove(timeline, keep_tail=True)
            del self._live[run.key]
            return True
        timeline.tokens.append(OUTPUT_IDS + run.number)
        return False

    def _sampled(self, run: Run, start: float, one: float, count: int) -> None:
        """``count`` tokens came, the first at the end of the step that began at ``start``."""
        if run.first_token >= 0:
            gaps = self.totals.gaps.setdefault(run.kind, [])
            first = start + one - run.last_token
            gaps.append((first, 1))
            if count > 1:
                gaps.append((one, count - 1))
            run.longest_gap = max(run.longest_gap, first)
        else:
            run.first_token = start + one
        run.last_token = self.now
        run.outputs += count
        self.totals.output_tokens += count


def alone(limits: Limits, cost: Cost, prompt: int, output: int, cached: int = 0) -> tuple[float, float]:
    """TTFT and E2E in seconds of a request that has the engine to itself, of which ``cached`` tokens are reused.

    The chunks that the schedule grants to a lone prompt: as large as the budget allows.
    """
    at, first = cached, 0.0
    while at < prompt:
        stop = min(prompt, at + limits.max_num_batched_tokens)
        last = prompt - at == 1  # the schedule counts it among the rows that decode
        first += cost.seconds((1, stop)) if last else cost.seconds((0, 0), ((stop - at, at),))
        at = stop
    rest = output - 1
    whole = first + rest * cost.seconds((1, prompt + (rest + 1) // 2)) if rest else first
    return first, whole
