"""The parts of texts that were encoded lately, with their ids: a document that comes again is looked up.

Knows texts and ids as bytes; not how either is made. Equal is equal: parts are compared whole, a hash only finds them.
"""

import threading
from collections import OrderedDict

_ENTRY_BYTES = 300  # of Python's own: a key, a text, a bytes object and their place in the table


class SeenParts:
    """Least recently used parts go first once all together exceed ``max_bytes``. Thread-safe."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._parts: OrderedDict[tuple[bool, str], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.held = 0  # bytes

    def take(self, keys: list[tuple[bool, str]]) -> list[bytes | None]:
        """Ids of each part, None where it is not known."""
        with self._lock:
            found = [self._parts.get(key) for key in keys]
            for key, ids in zip(keys, found, strict=True):
                if ids is not None:
                    self._parts.move_to_end(key)
        return found

    def add(self, key: tuple[bool, str], ids: bytes) -> None:
        """Keep a part, unless it alone is more than all may be."""
        size = _size(key, ids)
        if size > self._max_bytes:
            return
        with self._lock:
            if key in self._parts:
                return
            self._parts[key] = ids
            self.held += size
            while self.held > self._max_bytes:
                self.held -= _size(*self._parts.popitem(last=False))


def _size(key: tuple[bool, str], ids: bytes) -> int:
    """Characters count with the four bytes that the widest has, so that nothing is larger than it seems."""
    return _ENTRY_BYTES + len(key[1]) * (1 if key[1].isascii() else 4) + len(ids)
