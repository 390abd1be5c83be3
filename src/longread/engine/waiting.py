"""Requests that wait, in the order in which they are looked at: by class, fairly among owners, first come first served.

Knows entries and what their owners have been given; must not know slots, pages or the cache.

Fair among owners. Each owner of a class has a line, and a line a count of what it was given: prompt tokens when they
are admitted, ``OUTPUT_WEIGHT`` times the output tokens when they have been produced. The line that was given least
comes first. A line that was idle starts at the count of whoever was served last (start-time fair queueing, Goyal et
al. 1996; the counters are those of "Fairness in Serving Large Language Models", Sheng et al., OSDI 2024), so nobody
saves up a claim.

Bounded. A line's head that has been passed by ``bypass`` admissions, times its class's factor, comes before everybody
else until it is admitted.
"""

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from longread.engine.policy import BYPASS_FACTORS, LEVELS, level_of
from longread.engine.sequence import Timeline
from longread.kv.chain import TokenChain
from longread.kv.transfer import Transfer
from longread.spec.engine import RequestClass, WaitReason

OUTPUT_WEIGHT = 2  # an output token keeps a slot for a whole step
KEPT_LINES = 1024  # of owners who have nothing waiting, until the oldest counts mean nothing any more


class Entry:
    """A timeline in the schedule. ``arrival`` orders entries and never changes. ``chain`` keeps the hashes of a waiting
    timeline's pages, which it is looked up by in each step. ``transfer``: the load that it waits for, ``since`` when;
    ``starter``: whether it is its own; ``loads``: how many of its own it had. ``work``: prompt tokens that were not
    cached when it was first admitted; ``yielded``: tokens that passed it while it read them. ``reason`` and ``detail``:
    why it was not admitted when it was last looked at. ``granted``: its tokens in the last step.
    """

    def __init__(self, timeline: Timeline, arrival: int, request_class: RequestClass = "interactive", owner: str = ""):
        self.timeline = timeline
        self.arrival = arrival
        self.request_class = request_class
        self.owner = owner
        self.level = level_of(request_class, 0)
        self.running = False
        self.preemptions = 0
        self.chain: TokenChain | None = None
        self.transfer: Transfer | None = None
        self.since = 0.0
        self.starter = False
        self.loads = 0
        self.work = 0
        self.yielded = 0
        self.charged = timeline.prompt_length
        self.admitted_at = 0.0
        self.granted = 0
        self.reason: WaitReason = "turn"
        self.detail = ""
        self._lacked: tuple[int, int] | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Who gives way to whom: the higher one."""
        return self.level, self.arrival

    def preempted(self) -> None:
        """It lost its slot and its pages."""
        self.running = False
        self.preemptions += 1
        self.level = level_of(self.request_class, self.preemptions)
        self.loads = 0
        self.granted = 0
        self.waits("turn", "it was preempted and waits to go on")

    def waits(self, reason: WaitReason, detail: str) -> None:
        """Remember why it was not admitted."""
        self.reason, self.detail = reason, detail

    def missed(self, available: int, running: int) -> None:
        """Remember that ``available`` pages beside ``running`` sequences were not enough."""
        self._lacked = (available, running)

    def hopeless(self, available: int, running: int) -> bool:
        """Whether nothing has been given back since admission failed; a retry would cost look-ups and page copies."""
        return self._lacked is not None and available <= self._lacked[0] and running >= self._lacked[1]


@dataclass(slots=True, eq=False)
class _Line:
    """One owner's waiting entries of one level. ``head_since``: admissions there had been when its head came to the
    front; ``given``: tokens, weighted.
    """

    level: int
    entries: dict[Entry, None] = field(default_factory=dict)  # in order of arrival; found and removed at once
    head_since: int = 0
    given: int = 0

    @property
    def head(self) -> Entry | None:
        return next(iter(self.entries), None)


class WaitingLines:
    """All waiting entries. Adding and removing cost the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], _Line] = {}
        self._resumed: list[tuple[int, Entry]] = []  # preempted ones by arrival, with the admissions at that time
        self._clock = [0] * len(LEVELS)  # of each level: the count of the line that was served last
        self._admissions = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        """Behind all others of its owner; a preempted one before all that never ran."""
        self._count += 1
        if entry.preemptions:
            insort(self._resumed, (self._admissions, entry), key=lambda pair: pair[1].arrival)
            return
        line = self._line(entry)
        if not line.entries:
            line.head_since = self._admissions
            line.given = max(line.given, self._clock[line.level])
        line.entries[entry] = None

    def remove(self, entry: Entry) -> None:
        """It ended, or was admitted."""
        self._count -= 1
        if entry.preemptions:
            self._resumed = [pair for pair in self._resumed if pair[1] is not entry]
            return
        line = self._line(entry)
        if line.head is entry:
            line.head_since = self._admissions
        del line.entries[entry]

    def admit(self, entry: Entry, tokens: int) -> None:
        """Take out an entry that was given a slot and ``tokens`` to compute."""
        self._admissions += 1
        self.remove(entry)
        line = self._line(entry)
        if not entry.preemptions:
            self._clock[line.level] = max(self._clock[line.level], line.given)
            line.given += max(tokens, 1)

    def charge(self, entry: Entry) -> None:
        """Count the output tokens that were not counted yet."""
        length = len(entry.timeline.tokens)
        if length > entry.charged:
            self._line(entry).given += OUTPUT_WEIGHT * (length - entry.charged)
            entry.charged = length

    def overdue(self, entry: Entry, bypass: int) -> bool:
        """Whether nobody may be admitted before it any more."""
        limit = bypass * BYPASS_FACTORS[entry.level]
        if entry.preemptions:
            return any(other is entry and self._admissions - since >= limit for since, other in self._resumed)
        line = self._line(entry)
        return line.head is entry and self._admissions - line.head_since >= limit

    def order(self, most: int, bypass: int) -> list[Entry]:
        """The first ``most`` in the order in which they may be admitted."""
        heap: list[tuple[tuple[int, int, int, int], Entry, Iterator[Entry], int]] = []
        for since, entry in self._resumed:
            late = self._admissions - since >= bypass * BYPASS_FACTORS[entry.level]
            key = (0, since, 0, entry.arrival) if late else (1, entry.level, -1, entry.arrival)
            heap.append((key, entry, iter(()), 0))
        for line in self._lines.values():
            rest = iter(line.entries)
            head = next(rest, None)
            if head is None:
                continue
            late = self._admissions - line.head_since >= bypass * BYPASS_FACTORS[line.level]
            key = (0, line.head_since, 0, head.arrival) if late else (1, line.level, line.given, head.arrival)
            heap.append((key, head, rest, line.given))
        heapq.heapify(heap)  # by the key alone: no two entries arrived together
        found: list[Entry] = []
        while heap and len(found) < most:
            _, entry, rest, given = heapq.heappop(heap)
            found.append(entry)
            follower = next(rest, None)
            if follower is not None:  # as if the one before it had been admitted
                given += max(entry.timeline.prompt_length, 1)
                heapq.heappush(heap, ((1, entry.level, given, follower.arrival), follower, rest, given))
        return found

    def _line(self, entry: Entry) -> _Line:
        key = (LEVELS.index(entry.request_class), entry.owner)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) > KEPT_LINES:
                self._forget()
            line = self._lines[key] = _Line(key[0])
        return line

    def _forget(self) -> None:
        """Drop the lines of owners who wait for nothing and whose count would not be looked at when they come back."""
        for key, line in list(self._lines.items()):
            if not line.entries and line.given <= self._clock[line.level]:
                del self._lines[key]
