"""Page identities of prompts, made where tokens are made, so that the engine's thread hashes nothing.

Knows ids as bytes and the pages of spec; not texts, requests or caches. Hashing 512K tokens takes milliseconds; what a
prompt shares with one of the last ones is compared instead, which takes a tenth of that, and its numbers are the same
Python objects, whose making would take longer still.
"""

import threading

import numpy as np

from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages

_PAGE_BYTES = 4 * PAGE_TOKENS
_SHORT = 64 * _PAGE_BYTES  # sooner hashed than found
_KEPT_PER_ID = 10  # of the bytes of an id: itself, a number object, and its place in the tuple
KEPT_PROMPTS = 16
KEPT_BYTES = 128 * 1024 * 1024


class PageHasher:
    """Remembers the last ``KEPT_PROMPTS`` long prompts within ``KEPT_BYTES``. Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[tuple[HashedTokens, tuple[int, ...]]] = []  # newest last
        self._lock = threading.Lock()

    def hash(self, root: bytes, data: bytes) -> tuple[HashedTokens, tuple[int, ...]]:
        """What the engine is given of at least one id, as int32 bytes in the order of ``array("i")``; and the ids."""
        values = np.frombuffer(data, np.intc)
        least, most = int(values.min()), int(values.max())
        if len(data) < _SHORT:
            return HashedTokens(root, data, hash_pages(root, data), least, most), tuple(values.tolist())
        known, same = self._closest(root, data)
        pages = len(known)
        made = HashedTokens(root, data, hash_pages(root, data, known), least, most)
        ids = same[: pages * PAGE_TOKENS] + tuple(values[pages * PAGE_TOKENS :].tolist())
        self._keep(made, ids)
        return made, ids

    def _closest(self, root: bytes, data: bytes) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """The hashes of the pages that ``data`` shares with the kept prompt that it shares most with, and its ids."""
        with self._lock:
            kept = self._kept
        most, best = 0, None
        for other in reversed(kept):
            if most == len(data) // _PAGE_BYTES:
                break
            pages = shared_pages(other[0].data, data) if other[0].root == root else 0
            if pages > most:
                most, best = pages, other
        return (best[0].hashes[:most], best[1]) if best is not None else ((), ())

    def _keep(self, made: HashedTokens, ids: tuple[int, ...]) -> None:
        """Beginnings of the new one are of no more use."""
        with self._lock:
            kept = [
                other for other in self._kept if other[0].root != made.root or not made.data.startswith(other[0].data)
            ]
            kept = [*kept, (made, ids)][-KEPT_PROMPTS:]
            while sum(len(hashed.data) * _KEPT_PER_ID for hashed, _ in kept) > KEPT_BYTES:
                kept.pop(0)
            self._kept = kept


def shared_pages(a: bytes, b: bytes) -> int:
    """Full pages that both begin with; the first page is looked at alone, since most prompts differ there."""
    low, high = 0, min(len(a), len(b)) // _PAGE_BYTES
    middle = min(1, high)
    while low < high:
        if a[low * _PAGE_BYTES : middle * _PAGE_BYTES] == b[low * _PAGE_BYTES : middle * _PAGE_BYTES]:
            low, middle = middle, high if low == 0 else (middle + high + 1) // 2
        else:
            high = middle - 1
            middle = (low + high + 1) // 2
    return low
