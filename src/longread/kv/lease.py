"""What the cache hands to the engine (a lease, a match) and what it needs from storage.

Knows only the shape of these; the rules are the cache's.
"""

from dataclasses import dataclass, field
from typing import Protocol

from longread.kv.chain import TokenChain
from longread.kv.index import Entry


class StateStore(Protocol):
    """Moves content; implemented over tensors, and by a model of the contents in tests."""

    def reset_slot(self, slot: int) -> None:
        """Fill every ring group of the slot with the group's ``fill``."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy all rows groups, all layers."""
        ...

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        """Copy all ring groups of a slot into a row of the snapshot pool."""
        ...

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        """The reverse."""
        ...

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all ring groups from slot to slot."""
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """What a prompt would reuse now: ``cached_tokens`` in all, of them ``full_pages`` whole pages shared in place."""

    cached_tokens: int
    full_pages: int


@dataclass(slots=True, eq=False)
class Lease:
    """One running sequence's hold on the cache: a slot for life, and its pages.

    ``tokens``: all whose state has been computed, reused ones included. ``pages``: what they and the reserved
    positions lie on; read it fresh each step. ``cached_tokens``: how many were reused when it was opened. ``closed``:
    it must not be used again. ``hashes``: identity of each full page. ``rolling``: where its rolling snapshot is.
    """

    slot: int
    prompt: TokenChain
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    closed: bool = False
    hashes: list[bytes] = field(default_factory=list)
    rolling: Entry | None = None

    @property
    def position(self) -> int:
        """Tokens computed so far, which is the position of the next one."""
        return len(self.tokens)
