"""Memory for copies on their way to the disk: stretches taken one behind the other, and given back in that order.

Knows bytes only. It is taken once and used again: new memory is slow to touch, and a device reaches only what was
made known to it.
"""

from collections import deque


class Outbox:
    """A ring of ``memory``. Not thread-safe."""

    def __init__(self, memory: memoryview):
        self._memory = memory
        self._taken: deque[tuple[int, int]] = deque()  # start and end of each stretch, the oldest first
        self._next = 0

    def fits(self, size: int) -> bool:
        """Whether ``size`` bytes can be taken in one piece; always, while nothing is taken and there are as many."""
        return self._place(size) is not None

    def take(self, size: int) -> memoryview:
        """A stretch that ``fits``."""
        start = self._place(size)
        if start is None:
            raise AssertionError(f"{size} bytes taken of an outbox that has no room for them")
        self._next = start + size
        self._taken.append((start, self._next))
        return self._memory[start : self._next]

    def give_back(self, count: int) -> None:
        """The oldest ``count`` stretches; what is in them may be overwritten."""
        for _ in range(count):
            self._taken.popleft()

    def _place(self, size: int) -> int | None:
        if not self._taken:
            return 0 if size <= len(self._memory) else None
        first = self._taken[0][0]
        if self._next <= first:  # round once: free is what lies between
            return self._next if self._next + size <= first else None
        if self._next + size <= len(self._memory):
            return self._next
        return 0 if size <= first else None
