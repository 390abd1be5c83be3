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
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from longread.engine.policy import BYPASS_FACTORS, LEVELS, level_of
from longread.engine.sequence import Timeline
from longread.kv.chain import TokenChain
from longread.kv.promises import Promise
from longread.kv.transfer import Transfer
from longread.spec.engine import RequestClass, WaitReason

OUTPUT_WEIGHT = 2  # an output token keeps a slot for a whole step
KEPT_LINES = 1024  # of owners who have nothing waiting, until the oldest counts mean nothing any more


class Entry:
    """A timeline in the schedule. ``arrival`` orders entries and never changes. ``chain`` keeps the hashes of a waiting
    timeline's pages, which it is looked up by. ``promise``: of a running sequence that it waits for. ``transfer``: the
    load that it waits for, ``since`` when; ``starter``: whether it is its own; ``loads``: how many of its own it had.
    ``work``: prompt tokens that were not cached when it was first admitted; ``yielded``: tokens that passed it while it
    read them. ``reason`` and ``detail``: why it was not admitted when it was last looked at. ``granted``: its tokens in
    the last step. ``filed`` and ``passed`` are ``Reading``'s. ``started``: the step that it was admitted in. ``long``:
    one step cannot read what was not cached of it when that was last looked at.
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
        self.promise: Promise | None = None
        self.transfer: Transfer | None = None
        self.since = 0.0
        self.starter = False
        self.loads = 0
        self.work = 0
        self.yielded = 0
        self.charged = timeline.prompt_length
        self.admitted_at = 0.0
        self.granted = 0
        self.filed = 0
        self.passed = 0
        self.started = 0
        self.long = False
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
    """One owner's waiting entries of one level, or one preempted entry. ``head_since``: admissions there had been when
    its head came to the front; ``given``: tokens, weighted. ``turn`` and ``since`` are what it is filed under while it
    has entries: (level, given, arrival of the head) and (head_since, arrival of the head).
    """

    level: int
    entries: dict[Entry, None] = field(default_factory=dict)  # in order of arrival; found and removed at once
    ready: dict[Entry, None] = field(default_factory=dict)  # of them, who have not been put off
    head_since: int = 0
    given: int = 0
    turn: tuple[int, int, int] = (0, 0, 0)
    since: tuple[int, int] = (0, 0)

    @property
    def head(self) -> Entry | None:
        return next(iter(self.entries), None)


class WaitingLines:
    """All waiting entries. Adding, removing and looking at the first few cost next to nothing more where many wait:
    the lines stay sorted, by turn and by how long each head has been passed.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], _Line] = {}
        self._resumed: dict[Entry, _Line] = {}  # preempted ones, before all of their level that never ran
        self._turns: list[tuple[tuple[int, int, int], _Line]] = []
        self._passed: list[list[tuple[tuple[int, int], _Line]]] = [[] for _ in LEVELS]
        self._most_lines = KEPT_LINES
        self._clock = [0] * len(LEVELS)  # of each level: the count of the line that was served last
        self._admissions = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def first_level(self) -> int | None:
        """The highest level that anybody waits at; None: nobody does."""
        return self._turns[0][1].level if self._turns else None

    def add(self, entry: Entry) -> None:
        """Behind all others of its owner; a preempted one before all that never ran."""
        self._count += 1
        if entry.preemptions:
            line = self._resumed[entry] = _Line(entry.level, {entry: None}, {entry: None}, self._admissions, -1)
            self._file(line)
            return
        line = self._line(entry)
        line.entries[entry] = line.ready[entry] = None
        if len(line.entries) == 1:
            line.head_since = self._admissions
            line.given = max(line.given, self._clock[line.level])
            self._file(line)

    def remove(self, entry: Entry) -> None:
        """It ended, or was admitted."""
        self._count -= 1
        line = self._resumed.pop(entry, None) or self._line(entry)
        line.ready.pop(entry, None)
        if line.head is not entry:
            del line.entries[entry]
            return
        self._unfile(line)
        del line.entries[entry]
        line.head_since = self._admissions
        self._file(line)

    def admit(self, entry: Entry, tokens: int) -> None:
        """Take out an entry that was given a slot and ``tokens`` to compute."""
        self._admissions += 1
        self.remove(entry)
        if not entry.preemptions:
            line = self._line(entry)
            self._clock[line.level] = max(self._clock[line.level], line.given)
            self._give(line, max(tokens, 1))

    def put_off(self, entry: Entry) -> None:
        """Leave it out of ``order`` where that is for those who are ready; its place stays its own."""
        (self._resumed.get(entry) or self._line(entry)).ready.pop(entry, None)

    def charge(self, entry: Entry) -> None:
        """Count the output tokens that were not counted yet."""
        length = len(entry.timeline.tokens)
        if length > entry.charged:
            self._give(self._line(entry), OUTPUT_WEIGHT * (length - entry.charged))
            entry.charged = length

    def overdue(self, entry: Entry, bypass: int) -> bool:
        """Whether nobody may be admitted before it any more."""
        line = self._resumed.get(entry) or self._line(entry)
        return line.head is entry and self._admissions - line.head_since >= bypass * BYPASS_FACTORS[line.level]

    def order(self, most: int, bypass: int, *, ready: bool = False) -> list[Entry]:
        """The first ``most`` in the order in which they may be admitted. ``ready``: of those who were not put off."""
        return list(islice(self._ordered(bypass, ready), most))

    def _ordered(self, bypass: int, ready: bool) -> Iterator[Entry]:
        """A line begins when its turn comes; each entry behind its head comes as if those before it were admitted."""
        begun: list[tuple[tuple[int, int, int], Entry, Iterator[Entry]]] = []  # a heap: no two arrived together

        def push(level: int, given: int, rest: Iterator[Entry]) -> None:
            entry = next(rest, None)
            if entry is not None:
                heapq.heappush(begun, ((level, given, entry.arrival), entry, rest))

        def pop() -> Entry:
            (level, given, _), entry, rest = heapq.heappop(begun)
            push(level, given + max(entry.timeline.prompt_length, 1), rest)
            return entry

        first: set[_Line] = set()
        for _, line in heapq.merge(*(self._overdue(level, bypass) for level in range(len(LEVELS)))):
            rest = iter(line.ready if ready else line.entries)
            head = next(rest, None)
            if head is not line.head or head is None:
                continue  # whoever is overdue is put off
            first.add(line)
            yield head
            push(line.level, line.given + max(head.timeline.prompt_length, 1), rest)
        for turn, line in self._turns:
            while begun and begun[0][0] < turn:
                yield pop()
            if line not in first:
                push(line.level, line.given, iter(line.ready if ready else line.entries))
        while begun:
            yield pop()

    def _overdue(self, level: int, bypass: int) -> Iterator[tuple[tuple[int, int], _Line]]:
        """The lines whose heads nobody may pass any more."""
        last = self._admissions - bypass * BYPASS_FACTORS[level]
        for since, line in self._passed[level]:
            if since[0] > last:
                break
            yield since, line

    def _give(self, line: _Line, tokens: int) -> None:
        self._unfile(line)
        line.given += tokens
        self._file(line)

    def _file(self, line: _Line) -> None:
        head = line.head
        if head is not None:
            line.turn, line.since = (line.level, line.given, head.arrival), (line.head_since, head.arrival)
            insort(self._turns, (line.turn, line))
            insort(self._passed[line.level], (line.since, line))

    def _unfile(self, line: _Line) -> None:
        if line.entries:
            del self._turns[bisect_left(self._turns, (line.turn, line))]
            passed = self._passed[line.level]
            del passed[bisect_left(passed, (line.since, line))]

    def _line(self, entry: Entry) -> _Line:
        key = (LEVELS.index(entry.request_class), entry.owner)
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) > self._most_lines:
                self._forget()
            line = self._lines[key] = _Line(key[0])
        return line

    def _forget(self) -> None:
        """Drop the lines of owners who wait for nothing and whose count would not be looked at when they come back."""
        for key, line in list(self._lines.items()):
            if not line.entries and line.given <= self._clock[line.level]:
                del self._lines[key]
        self._most_lines = max(KEPT_LINES, 2 * len(self._lines))  # the next time when as many have come again
