"""The page pool: which page is free, held by running sequences, or cached, and which cached page goes first.

Knows page numbers, reference counts and the order of last use. It does not know what a page contains: the cache says
whether a released page is worth keeping, and which cached pages may be evicted (nothing published depends on them).
"""

import heapq
from collections.abc import Callable

from longread.kv.runs import FreeRuns


class PagePool:
    """``count`` pages; each is free, held (references > 0) or cached (no reference, kept for later prompts)."""

    def __init__(self, count: int):
        self.count = count
        self.references = [0] * count
        self.free = FreeRuns(count)
        self.cached: dict[int, int] = {}  # page -> stamp of its last release
        self._clock = 0
        self._candidates: list[tuple[int, int]] = []  # heap of (stamp, page); stale where the page's stamp has changed

    @property
    def held(self) -> int:
        return self.count - len(self.free) - len(self.cached)

    @property
    def available(self) -> int:
        """Pages that a sequence can still get: every cached page can be evicted."""
        return len(self.free) + len(self.cached)

    def take(self, wanted: int, after: int | None, room: int) -> list[int]:
        """``wanted`` free pages, each held once (there must be as many free); see ``FreeRuns.take``."""
        pages = self.free.take(wanted, after, room)
        for page in pages:
            self.references[page] = 1
        return pages

    def hold(self, page: int) -> None:
        """One more reference to a held or cached page."""
        if not self.references[page]:
            del self.cached[page]
        self.references[page] += 1

    def release(self, page: int, keep: bool) -> None:
        """One reference less; the last one makes the page cached (``keep``) or free."""
        self.references[page] -= 1
        if self.references[page]:
            return
        if keep:
            self._clock += 1
            self.cached[page] = self._clock
        else:
            self.free.add(page)

    def discard(self, page: int) -> None:
        """A cached page becomes free."""
        del self.cached[page]
        self.free.add(page)

    def offer(self, page: int) -> None:
        """Say that a page may have become evictable; ignored unless it is cached."""
        stamp = self.cached.get(page)
        if stamp is None:
            return
        heapq.heappush(self._candidates, (stamp, page))
        if len(self._candidates) > 64 + 2 * self.count:
            self._candidates = sorted({c for c in self._candidates if self.cached.get(c[1]) == c[0]})

    def oldest(self, evictable: Callable[[int], bool]) -> int | None:
        """The offered page that was released first among those still cached and evictable; None if there is none."""
        while self._candidates:
            stamp, page = self._candidates[0]
            if self.cached.get(page) == stamp and evictable(page):
                return page
            heapq.heappop(self._candidates)
        return None
