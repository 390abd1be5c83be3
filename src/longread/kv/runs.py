"""Free page numbers, kept as maximal runs so that a sequence gets neighbours where it can.

Knows numbers only; who holds a page and why is the pool's. Readers use a contiguous run of pages as one view of the
storage, so every break in a sequence's page list costs a gather.
"""

import heapq


class FreeRuns:
    """The free numbers out of 0 .. count-1. Each operation is O(log runs), amortised; the order is deterministic."""

    def __init__(self, count: int):
        self._end: dict[int, int] = {}  # start of a run -> one behind its last number
        self._start: dict[int, int] = {}  # the reverse, so that a freed number finds its left neighbour
        self._longest: list[tuple[int, int]] = []  # heap of (-length, start); entries of changed runs are stale
        self._count = 0
        if count:
            self._put(0, count)

    def __len__(self) -> int:
        return self._count

    def runs(self) -> list[tuple[int, int]]:
        """(start, end) of every run, in order; for the audit."""
        return sorted(self._end.items())

    def add(self, number: int) -> None:
        """Give one number back; it joins the runs on both sides."""
        start, end = number, number + 1
        if number in self._start:
            start = self._start[number]
            self._cut(start)
        if end in self._end:
            right = end
            end = self._end[right]
            self._cut(right)
        self._put(start, end)

    def take(self, wanted: int, after: int | None, room: int) -> list[int]:
        """``wanted`` numbers (there must be as many): those behind ``after`` while they are free, then the longest
        runs.

        ``room`` is how many the taker expects to want in all, this call included. A new place is chosen in the middle
        of a long run, not at its start: the number before a run usually belongs to a sequence that still grows into
        it.
        """
        taken: list[int] = []
        while len(taken) < wanted:
            missing = wanted - len(taken)
            start = -1 if after is None else after + 1
            if start not in self._end:
                start = self._place(max(room - len(taken), missing))
            part = self._take_from(start, missing)
            taken.extend(part)
            after = part[-1]
        return taken

    def _place(self, room: int) -> int:
        """Start of a new stretch, cutting the longest run in two where both halves stay useful."""
        while True:
            length, start = self._longest[0]
            if self._end.get(start, start) - start == -length:
                break
            heapq.heappop(self._longest)
        end = self._end[start]
        spare = end - start - room
        if start == 0 or spare < max(room, 2):
            return start
        self._cut(start)
        middle = start + spare // 2
        self._put(start, middle)
        self._put(middle, end)
        return middle

    def _take_from(self, start: int, limit: int) -> range:
        end = self._end[start]
        self._cut(start)
        stop = min(start + limit, end)
        if stop < end:
            self._put(stop, end)
        return range(start, stop)

    def _put(self, start: int, end: int) -> None:
        self._end[start] = end
        self._start[end] = start
        self._count += end - start
        heapq.heappush(self._longest, (start - end, start))
        if len(self._longest) > 64 + 4 * len(self._end):
            self._longest = [(s - e, s) for s, e in self._end.items()]
            heapq.heapify(self._longest)

    def _cut(self, start: int) -> None:
        end = self._end.pop(start)
        del self._start[end]
        self._count -= end - start
