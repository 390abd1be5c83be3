"""The snapshot pool: rows that each hold the whole ring state of one position of one token sequence.

Knows row numbers, the order of last use, and an opaque owner a row. Losing a row makes a later prompt miss, no more.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class SnapshotPool(Generic[Owner]):
    """``count`` rows; each is free, held by an owner, or doomed (given up while pinned, free at the unpin)."""

    def __init__(self, count: int):
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.owners: OrderedDict[int, Owner] = OrderedDict()  # least recently used first
        self.doomed: set[int] = set()
        self._pins: dict[int, int] = {}

    def acquire(self) -> int | None:
        """A free row, which the caller attaches or gives back; None if all are in use."""
        return self.free.pop() if self.free else None

    def attach(self, row: int, owner: Owner) -> None:
        self.owners[row] = owner

    def touch(self, row: int) -> None:
        self.owners.move_to_end(row)

    def oldest(self) -> Owner | None:
        """Owner of the least recently used row that nobody is loading; None if there is none."""
        return next((owner for row, owner in self.owners.items() if row not in self._pins), None)

    def release(self, row: int) -> None:
        """The row's content is given up (also for a row that was acquired and never attached)."""
        self.owners.pop(row, None)
        if row in self._pins:
            self.doomed.add(row)
        else:
            self.free.append(row)

    @contextmanager
    def pinned(self, row: int) -> Iterator[None]:
        """While inside, the row is not reused: a release is carried out at the end."""
        self._pins[row] = self._pins.get(row, 0) + 1
        try:
            yield
        finally:
            self._pins[row] -= 1
            if not self._pins[row]:
                del self._pins[row]
                if row in self.doomed:
                    self.doomed.remove(row)
                    self.free.append(row)
