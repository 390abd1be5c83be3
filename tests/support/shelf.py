"""A shelf in memory, for tests of the server's document routes."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from longread.spec.documents import Document, document_id, landing_key
from longread.spec.errors import StoreFullError


class MemoryShelf:
    """``full``: adding fails, as on a full disk. ``broken``: nothing works. ``damaged``: texts are gone. ``written``:
    what was read has reached the disk.
    """

    def __init__(self, root: bytes = b"", model: str = "fake float32"):
        self.root, self.model = root, model
        self.full = self.broken = self.damaged = False
        self.written = True
        self.threads: set[str] = set()
        self._kept: dict[str, tuple[Document, str]] = {}

    def _enter(self) -> None:
        self.threads.add(threading.current_thread().name)
        if self.broken:
            raise StoreFullError("/secret/path: broken")

    def get(self, document_id: str) -> Document | None:
        self._enter()
        found = self._kept.get(document_id)
        return found[0] if found is not None else None

    def text(self, document_id: str) -> str | None:
        self._enter()
        found = self._kept.get(document_id)
        return found[1] if found is not None and not self.damaged else None

    def holds(self, tokens: Sequence[int]) -> bool:
        self._enter()
        return self.written

    def add(self, text: str, *, name: str, tokens: Sequence[int], pinned: bool) -> Document:
        self._enter()
        if self.full:
            raise StoreFullError("/secret/path: the disk is full")
        key, now = document_id(landing_key(self.root, tokens)), time.time()
        document = Document(key, name, self.model, len(text.encode()), len(tokens), now, now, pinned)
        if key in self._kept:
            old = self._kept[key][0]
            document = replace(old, name=name, pinned=old.pinned or pinned, last_used=now)
        self._kept[key] = document, text
        return document

    def list(self) -> list[Document]:
        self._enter()
        return sorted((document for document, _ in self._kept.values()), key=lambda each: -each.created)

    def remove(self, document_id: str) -> bool:
        self._enter()
        return self._kept.pop(document_id, None) is not None
