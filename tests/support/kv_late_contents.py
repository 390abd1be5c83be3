"""Contents of a storage on a device: a record of the arena is filled late, at ``settle`` or behind a ``fence``."""

import threading
from collections.abc import Sequence

import numpy as np
from kv_contents import Contents

from longread.spec.state import StateGroup


class LateContents(Contents):
    """What is read of a place is what lay there when it was asked for, as a gather in the model's order has it."""

    def __init__(self, groups: Sequence[StateGroup], num_pages: int, num_slots: int, num_snapshots: int):
        super().__init__(groups, num_pages, num_slots, num_snapshots)
        self.pages_at_once = 3
        self._memory: list[bytearray] = []
        self._lock = threading.Lock()
        self._late: list[tuple[memoryview, bytes]] = []
        self._done = 0  # of all late records so far

    def allocate_host(self, size: int) -> memoryview:
        self._memory.append(bytearray(b"\x81" * size))
        return memoryview(self._memory[-1])

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        content = bytearray(self.page_bytes)
        super().read_page(page, memoryview(content), tokens)
        self._leave(into, content)

    def read_ring(self, snapshot: int, into: memoryview) -> None:
        content = bytearray(self.ring_bytes)
        super().read_ring(snapshot, memoryview(content))
        self._leave(into, content)

    def settle(self) -> None:
        with self._lock:
            self._finish(self._done + len(self._late))

    def fence(self) -> object:
        with self._lock:
            return self._done + len(self._late)

    def after(self, fence: object) -> None:
        assert isinstance(fence, int)
        with self._lock:
            self._finish(fence)

    def promised(self, view: memoryview) -> memoryview:
        """What a record of the arena holds or will hold, changing nothing."""
        with self._lock:
            for into, content in reversed(self._late):
                if _address(into) == _address(view):
                    return memoryview(content)
        return view

    def _leave(self, into: memoryview, content: bytearray) -> None:
        if any(into.obj is each for each in self._memory):
            with self._lock:
                self._late.append((into, bytes(content)))
        else:
            into[:] = content

    def _finish(self, count: int) -> None:
        while self._done < count:
            into, content = self._late.pop(0)
            into[:] = content
            self._done += 1


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])
