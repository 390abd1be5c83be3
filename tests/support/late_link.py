"""A link on which nothing moves until somebody waits for it, or the test lets it go on. At last it does by itself."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from longread.kv.arrivals import Arrival

PATIENCE = 300


class LateLink:
    """Works in order, those up to ``done`` carried out; marks say how far to go. ``late``: how often somebody waited
    for what was still to be done.
    """

    def __init__(self, marks: int):
        self.works: list[Callable[[], None]] = []
        self.done = 0
        self.late = 0
        self._marks = [0] * marks
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        with self._lock:
            self.works.append(work)

    def mark(self, mark: int) -> None:
        self._marks[mark] = len(self.works)

    def wait(self, mark: int) -> None:
        self.late += self.done < self._marks[mark]
        self.go(self._marks[mark])

    def begin(self) -> Callable[[], Arrival]:
        return lambda: _OnLink(self, len(self.works))

    def finish(self) -> None:
        self.go(len(self.works))

    def go(self, count: int) -> None:
        """Carry out all up to that number."""
        with self._lock:
            for work in self.works[self.done : count]:
                work()
            self.done = max(self.done, min(count, len(self.works)))

    def pending(self) -> list[Callable[[], None]]:
        with self._lock:
            return self.works[self.done :]


@dataclass(eq=False)
class _OnLink:
    link: LateLink
    end: int
    asked: int = 0

    def over(self) -> bool:
        self.asked += 1
        if self.asked > PATIENCE:  # an engine that has nothing else to do asks for ever
            self.link.finish()
        return self.link.done >= self.end

    def seconds(self) -> float:
        assert self.over()
        return 0.0
