"""Documents over the disk store, as ``spec.documents`` asks for them.

Knows how a document's fields are the store's. Must not know how the store keeps them, nor who asks.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo
from longread.spec.documents import Document, document_id, landing_key
from longread.spec.errors import StoreError

KEPT_CHARACTERS = 32 * 2**20  # of the texts that were asked for lately: unpacking one takes as long as encoding it


class DiskShelf:
    """The documents of a store that was opened for one model, other models' included: their texts are as good. Safe
    from any thread; belongs off an event loop.
    """

    def __init__(self, store: DiskStore):
        """Raises StoreError for a store that was opened without a model."""
        if store.layout is None:
            raise StoreError(f"{store.path}: the store was opened without a model, so no document can be entered")
        self._store = store
        self._root = store.layout.root
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, document_id: str) -> Document | None:
        found = self._store.document(document_id, content=False, any_model=True)
        return self._looked_at(found) if found is not None else None

    def text(self, document_id: str) -> str | None:
        if self._store.document(document_id, content=False, any_model=True) is None:
            return None
        with self._lock:
            text = self._texts.get(document_id)
        if text is None:  # an id stands for one text for ever, so what is kept is right as long as there is a document
            found = self._store.document(document_id, any_model=True)
            text = found.text if found is not None else None
        if text is not None:
            self._store.use_document(document_id)
            self._keep(document_id, text)
        return text

    def _keep(self, document_id: str, text: str) -> None:
        with self._lock:
            self._texts[document_id] = text
            self._texts.move_to_end(document_id)
            while len(self._texts) > 1 and sum(map(len, self._texts.values())) > KEPT_CHARACTERS:
                self._texts.popitem(last=False)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether all of a prefix is on the disk, so that it can be landed on behind its last token, or it is too short
        to be worth a record. Raises StoreError also where the folder was removed: what is written to its open files
        is lost.
        """
        if not self._store.path.is_dir():
            raise StoreError(f"{self._store.path}: the folder was removed while it was in use; restart the server")
        layout = self._store.layout
        assert layout is not None
        key = landing_key(self._root, tokens)
        return self._store.document_state(DocumentInfo("", "", "", len(tokens), 0, key, root=layout.root)).whole

    def add(self, text: str, *, name: str, tokens: Sequence[int], pinned: bool) -> Document:
        key = landing_key(self._root, tokens)
        info = DocumentInfo(
            id=document_id(key),
            name=name,
            label="",
            tokens=len(tokens),
            text_bytes=len(text.encode()),
            tail=key,
            pinned=pinned,
            token_ids=array("i", tokens).tobytes(),
            text=text,
        )
        self._store.write([], document=info)
        entered = self._store.document(info.id, content=False)
        if entered is None:  # removed by another process in between
            raise StoreError(f"{self._store.path}: document {info.id} was removed while it was entered")
        return self._looked_at(entered)

    def list(self) -> list[Document]:
        listed, whole = self._store.documents(), self._store.whole_documents()
        return [_shown(info, (info.id, info.root) in whole) for info in listed]

    def remove(self, document_id: str) -> bool:
        return self._store.remove(document_id, any_model=True)

    def _looked_at(self, info: DocumentInfo) -> Document:
        return _shown(info, self._store.document_state(info).whole)


class LateShelf:
    """A shelf that comes when the model has been loaded; until then, and if its store could not be opened, each call
    raises StoreError.
    """

    def __init__(self, path: Path):
        self._path = path
        self._store: DiskStore | None = None
        self._shelf: DiskShelf | None = None

    @property
    def attached(self) -> bool:
        """Whether it has come."""
        return self._shelf is not None

    def close(self) -> None:
        """Close its store, if it came."""
        if self._store is not None:
            self._store.close()

    def attach(self, store: DiskStore | None) -> None:
        """From any thread; None: the store could not be opened."""
        self._store = store
        self._shelf = DiskShelf(store) if store is not None else None

    def get(self, document_id: str) -> Document | None:
        return self._there().get(document_id)

    def text(self, document_id: str) -> str | None:
        return self._there().text(document_id)

    def holds(self, tokens: Sequence[int]) -> bool:
        return self._there().holds(tokens)

    def add(self, text: str, *, name: str, tokens: Sequence[int], pinned: bool) -> Document:
        return self._there().add(text, name=name, tokens=tokens, pinned=pinned)

    def list(self) -> list[Document]:
        return self._there().list()

    def remove(self, document_id: str) -> bool:
        return self._there().remove(document_id)

    def _there(self) -> DiskShelf:
        if self._shelf is None:
            raise StoreError(f"{self._path}: the store is not open: the model is loading, or opening it failed")
        return self._shelf


def _shown(info: DocumentInfo, whole: bool) -> Document:
    return Document(
        id=info.id,
        name=info.name,
        model=info.label,
        size=info.text_bytes,
        tokens=info.tokens,
        created=info.created,
        last_used=info.used,
        pinned=info.pinned,
        whole=whole,
    )
