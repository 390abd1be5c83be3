"""The order of who waits, against one that is made anew each time; and that it stays cheap where many wait."""

import gc
import sys
from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from longread.engine.policy import BYPASS_FACTORS, LEVELS
from longread.engine.sequence import Timeline
from longread.engine.waiting import KEPT_LINES, OUTPUT_WEIGHT, Entry, WaitingLines
from longread.spec.engine import RequestClass

BYPASS = 2


class Plain:
    """What the module promises, said without any data structure but lists."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], list[Entry]] = {}
        self.given: dict[tuple[int, str], int] = {}
        self.since: dict[tuple[int, str], int] = {}
        self.resumed: dict[Entry, int] = {}
        self.clock = [0] * len(LEVELS)
        self.admissions = 0

    def key(self, entry: Entry) -> tuple[int, str]:
        key = (LEVELS.index(entry.request_class), entry.owner)
        self.lines.setdefault(key, [])
        self.given.setdefault(key, 0)
        return key

    def add(self, entry: Entry) -> None:
        if entry.preemptions:
            self.resumed[entry] = self.admissions
            return
        key = self.key(entry)
        if not self.lines[key]:
            self.since[key] = self.admissions
            self.given[key] = max(self.given[key], self.clock[key[0]])
        self.lines[key].append(entry)

    def remove(self, entry: Entry) -> None:
        if entry.preemptions:
            del self.resumed[entry]
            return
        key = self.key(entry)
        if self.lines[key][0] is entry:
            self.since[key] = self.admissions
        self.lines[key].remove(entry)

    def admit(self, entry: Entry, tokens: int) -> None:
        self.admissions += 1
        self.remove(entry)
        if not entry.preemptions:
            key = self.key(entry)
            self.clock[key[0]] = max(self.clock[key[0]], self.given[key])
            self.given[key] += tokens

    def late(self, level: int, since: int) -> bool:
        return self.admissions - since >= BYPASS * BYPASS_FACTORS[level]

    def order(self) -> list[Entry]:
        heads: list[tuple[tuple[int, int, int, int], Entry, list[Entry], int]] = []
        for entry, since in self.resumed.items():
            late = self.late(entry.level, since)
            key = (0, since, 0, entry.arrival) if late else (1, entry.level, -1, entry.arrival)
            heads.append((key, entry, [], 0))
        for (level, owner), line in self.lines.items():
            if line:
                since, given = self.since[level, owner], self.given[level, owner]
                late = self.late(level, since)
                key = (0, since, 0, line[0].arrival) if late else (1, level, given, line[0].arrival)
                heads.append((key, line[0], line[1:], given))
        found = []
        while heads:
            first = min(heads, key=lambda head: head[0])
            heads.remove(first)
            _, entry, rest, given = first
            found.append(entry)
            if rest:
                given += entry.timeline.prompt_length
                heads.append(((1, entry.level, given, rest[0].arrival), rest[0], rest[1:], given))
        return found


@given(data=st.data())
def test_the_order_is_the_one_that_is_promised(data: st.DataObject) -> None:
    lines, plain = WaitingLines(), Plain()
    waiting: list[Entry] = []
    running: list[Entry] = []
    arrivals = 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["add", "add", "add", "admit", "admit", "cancel", "preempt", "charge"]))
        if what == "add":
            request_class: RequestClass = data.draw(st.sampled_from(LEVELS))
            timeline = Timeline(f"r{arrivals}", [1] * data.draw(st.integers(1, 9)))
            entry = Entry(timeline, arrivals, request_class, data.draw(st.sampled_from("abc")))
            arrivals += 1
            waiting.append(entry)
            for each in (lines, plain):
                each.add(entry)
        elif what in ("admit", "cancel") and waiting:
            entry = data.draw(st.sampled_from(waiting if what == "cancel" else lines.order(3, BYPASS)))
            waiting.remove(entry)
            if what == "cancel":
                lines.remove(entry)
                plain.remove(entry)
                continue
            if lines.overdue(entry, BYPASS):
                entry.level = 0  # as the schedule does with who has given way often enough
            tokens = data.draw(st.integers(1, 9))
            running.append(entry)
            for each in (lines, plain):
                each.admit(entry, tokens)
        elif what in ("preempt", "charge") and running:
            entry = data.draw(st.sampled_from(running))
            entry.timeline.tokens.append(1)
            plain.given[plain.key(entry)] += OUTPUT_WEIGHT
            lines.charge(entry)
            if what == "preempt":
                running.remove(entry)
                entry.preempted()
                waiting.append(entry)
                for each in (lines, plain):
                    each.add(entry)
        order = plain.order()
        assert lines.order(len(waiting), BYPASS) == order
        assert lines.order(2, BYPASS) == order[:2] and len(lines) == len(waiting)
        for since, entry in [(plain.resumed[e], e) for e in plain.resumed]:
            assert lines.overdue(entry, BYPASS) == plain.late(entry.level, since)


def calls(of: Callable[[], object]) -> int:
    """Calls of Python functions and of built-in ones: what a machine's pace cannot change."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        of()
    finally:
        sys.setprofile(None)
    return count


def filled(owners: int) -> WaitingLines:
    lines = WaitingLines()
    for i in range(owners):
        lines.add(Entry(Timeline(f"r{i}", [1]), i, "interactive", f"owner {i}"))
    return lines


def test_many_owners_cost_no_more_than_few() -> None:
    few, many = filled(100), filled(3 * KEPT_LINES)
    late = Entry(Timeline("late", [1]), 10**6, "interactive", "another")
    looks: tuple[Callable[[WaitingLines], object], ...] = (
        lambda lines: lines.order(64, 10**6),
        lambda lines: lines.admit(lines.order(1, 1)[0], 5),
        lambda lines: lines.add(late),
        lambda lines: lines.order(64, 0),  # all are overdue
        lambda lines: lines.overdue(late, 64),
        lambda lines: lines.remove(late),
    )
    for look in looks:
        assert calls(partial(look, many)) <= 1.1 * calls(partial(look, few)) + 2


def test_the_garbage_collector_visits_no_token_of_who_waits() -> None:
    tokens = Timeline("r", range(10_000, 20_000)).tokens
    assert list(tokens) == list(range(10_000, 20_000))
    assert not any(isinstance(each, int) for each in gc.get_referents(tokens))
