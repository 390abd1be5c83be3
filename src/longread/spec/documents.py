"""What a stored document is, and who keeps them: the protocol between the server's routes, the CLI and the store.

Knows names, token ids and identities. A document's id is made of the identity of its last position, so that the same
text, read again by the same model under the same chat encoding, is the same document. Its text may be asked for
whatever the model: another one reads it anew.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longread.spec.state import PAGE_TOKENS, hash_pages, page_hash

MAX_NAME = 200  # characters


def landing_key(root: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of the position behind ``tokens`` under a cache root: its page's where it is a page end, else its
    tail's.
    """
    hashes = hash_pages(root, array("i", tokens).tobytes())
    parent = hashes[-1] if hashes else root
    rest = tokens[len(hashes) * PAGE_TOKENS :]
    return page_hash(parent, rest) if rest else parent


def document_id(key: bytes) -> str:
    """The id of the document whose prefix ends at ``key``: read again by the same model, it has the same id."""
    return f"doc-{key.hex()[:24]}"


@dataclass(frozen=True, slots=True)
class Document:
    """One stored document. ``size``: bytes of its text; ``tokens``: of the prompt prefix that was read. ``model`` is
    the label of the model and cache format that it was read with. Times are seconds since the epoch. ``whole``: all of
    its state is kept; if not, what is missing is computed again by the next request that names it.
    """

    id: str
    name: str
    model: str
    size: int
    tokens: int
    created: float
    last_used: float
    pinned: bool
    whole: bool = True


class DocumentShelf(Protocol):
    """Keeps documents. Every method may be called from any thread and may touch a disk: not from an event loop. Each
    raises StoreError where that cannot be read or written.
    """

    def get(self, document_id: str) -> Document | None:
        """What is known of a document without its text; None where there is none of that id."""
        ...

    def text(self, document_id: str) -> str | None:
        """Its text, exactly as it was given; None where there is none, or where it is damaged."""
        ...

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether the state behind a prompt prefix is kept, so that it would outlive the process now; also True where
        the prefix is too short to be worth keeping.
        """
        ...

    def add(self, text: str, *, name: str, tokens: Sequence[int], pinned: bool) -> Document:
        """Enter a document whose prompt prefix ``tokens`` is held. Entering it again renames it and can pin it;
        it never unpins.
        """
        ...

    def list(self) -> Sequence[Document]:
        """All of them, the newest first."""
        ...

    def remove(self, document_id: str) -> bool:
        """Forget a document, and what of its state no other document has; False where there is none of that id."""
        ...
