"""What one cached run of tokens looks like outside the device: pages, tails and rings as bytes under their identity.

Knows identities, token runs and byte counts. Must not know where records are kept, nor what the bytes mean.

A *page* is 256 tokens of all rows groups; a *tail* the partial page of a landing point (payload as long as a page's);
a *ring* the ring state behind a landing point and bears the key of its page or tail. Keys are chained hashes from the
cache root (spec/state.py), so records of another model, weights, rope or cache format never share one.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["page", "tail", "ring"]
KINDS: tuple[Kind, ...] = ("page", "tail", "ring")
Verdict = Literal["whole", "absent", "corrupt"]  # of a record that was to be read
KEY_BYTES = 16
ID_BYTES = 4  # token ids are little-endian int32
# Where the chain over token ids alone begins: the same text has the same content keys under every model and format.
CONTENT_ROOT = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Layout:
    """What one cache's records look like: ``root`` is its cache_root; ``ring_bytes`` 0 means a model without rings."""

    root: bytes
    label: str
    dtype: str
    page_bytes: int
    ring_bytes: int

    def payload_bytes(self, kind: Kind) -> int:
        return self.ring_bytes if kind == "ring" else self.page_bytes


@dataclass(frozen=True, slots=True)
class Record:
    """One record with its bytes. ``run``: ids of the page or tail as little-endian int32; empty for a ring.

    ``parent`` is the key of the page before (the root for the first), ``depth`` the number of pages from the root,
    this one included; a ring repeats those of its page or tail.
    """

    kind: Kind
    key: bytes
    parent: bytes
    depth: int
    run: bytes
    payload: bytes | bytearray | memoryview


class Known(NamedTuple):
    """A record that is there, without its bytes. ``has_ring``: so is the ring behind its last token. Of a page that was
    looked up for a prompt's chain ``run`` and ``has_ring`` are left out. (A tuple: a look-up makes one a page.)
    """

    kind: Kind
    key: bytes
    parent: bytes
    depth: int
    run: bytes
    has_ring: bool


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A text that was read on purpose and can be named, under one model and format. Times are seconds since 1970.

    ``tail`` is the key of its last landing point, ``text_bytes`` the size of the source text. Lists of documents leave
    ``token_ids`` (little-endian int32) and ``text`` out. Identity is ``id`` and ``root``; ``root`` b"" and ``label``
    "" stand for those of the store's own layout.
    """

    id: str
    name: str
    label: str
    tokens: int
    text_bytes: int
    tail: bytes
    pinned: bool = False
    created: float = 0.0
    used: float = 0.0
    token_ids: bytes = b""
    text: str | None = None
    root: bytes = b""


def chain_key(parent: bytes, run: bytes) -> bytes:
    """Identity of a run after ``parent``: spec.state.page_hash over ids that are bytes already.

    With CONTENT_ROOT as the first parent it is the content key, which is independent of model and format.
    """
    return hashlib.blake2b(parent + run, digest_size=KEY_BYTES).digest()
