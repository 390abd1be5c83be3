"""Page identities of prompts, made where tokens are made, so that the engine's thread hashes nothing.

Knows ids as bytes and the pages of spec; not texts, requests or caches. Hashing 512K tokens takes milliseconds; what a
prompt shares with one of the last ones is compared instead, which takes a tenth of that.
"""

import threading

import numpy as np

from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages

_PAGE_BYTES = 4 * PAGE_TOKENS
_SHORT = 64 * _PAGE_BYTES  # sooner hashed than found
KEPT_PROMPTS = 16
KEPT_BYTES = 32 * 1024 * 1024


class PageHasher:
    """Remembers the last ``KEPT_PROMPTS`` long prompts within ``KEPT_BYTES``. Thread-safe."""

    def __init__(self) -> None:
        self._kept: list[HashedTokens] = []  # newest last
        self._lock = threading.Lock()

    def hash(self, root: bytes, data: bytes) -> HashedTokens:
        """``data``: at least one id, as int32 bytes in the order of ``array("i")``."""
        ids = np.frombuffer(data, np.intc)
        least, most = int(ids.min()), int(ids.max())
        if len(data) < _SHORT:
            return HashedTokens(root, data, hash_pages(root, data), least, most)
        with self._lock:
            kept = [other for other in self._kept if other.root == root]
        known: tuple[bytes, ...] = ()
        for other in reversed(kept):
            if len(known) * _PAGE_BYTES + _PAGE_BYTES > len(data):
                break
            pages = shared_pages(other.data, data)
            if pages > len(known):
                known = other.hashes[:pages]
        made = HashedTokens(root, data, hash_pages(root, data, known), least, most)
        self._keep(made)
        return made

    def _keep(self, made: HashedTokens) -> None:
        """Beginnings of the new one are of no more use."""
        with self._lock:
            kept = [other for other in self._kept if not (other.root == made.root and made.data.startswith(other.data))]
            kept = [*kept, made][-KEPT_PROMPTS:]
            while sum(len(other.data) for other in kept) > KEPT_BYTES:
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
