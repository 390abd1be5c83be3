"""What the cache hands to the engine (a lease, a match) and what it needs from storage.

Knows only the shape of these; the rules are the cache's.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from longread.kv.arrivals import Arrival, Arrivals
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

    def taken(self, pages: Sequence[int]) -> None:
        """These pages belong to somebody else from now on: what is still on its way to them comes first."""
        ...


class RecordStore(Protocol):
    """Moves content between the storage and records (kv/records.py); implemented over tensors.

    ``write_*``, ``layered``, ``finish`` and ``after`` may be called on another thread, for pages and
    rows that are reserved for it. A storage on a device moves records behind the caller's back; ``settle``, ``fence``
    and ``after`` say how far. Memory that a ``HostArena`` got from it it reaches by itself: there a record that was
    read is whole only after ``settle``, or for writes that come ``after`` a later ``fence``. Any other memory is done
    with on return.
    """

    page_bytes: int
    ring_bytes: int
    pages_at_once: int  # how many pages it likes to be given together
    arrivals: Arrivals  # pages that are published while they are on their way

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        """All rows groups of the rows that ``tokens`` tokens fill, zeros behind; ``into`` has ``page_bytes``."""
        ...

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview], tokens: Sequence[int]) -> None:
        """Several, in this order: of two that go to the same memory the second one stays."""
        ...

    def write_page(self, page: int, data: memoryview) -> None:
        """The reverse, whole."""
        ...

    def write_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        """Several; whole on return."""
        ...

    def rooms(self) -> Sequence[memoryview]:
        """Memory that records of a disk are best read to on their way here, each room for the longest; none: any."""
        ...

    def layered(self, pages: Sequence[int], data: Sequence[memoryview]) -> Callable[[], Arrival] | None:
        """What begins to write these pages layer by layer, and may return long before they are whole: they may be
        published then if ``arrivals`` is told, and ``data`` must stay as it is until the arrival is over. None: these
        are waited for.
        """
        ...

    def finish(self) -> None:
        """Wait until every page that was begun is whole."""
        ...

    def read_ring(self, snapshot: int, into: memoryview) -> None:
        """A row of the snapshot pool; ``into`` has ``ring_bytes``."""
        ...

    def write_ring(self, snapshot: int, data: memoryview) -> None:
        """The reverse."""
        ...

    def settle(self) -> None:
        """Wait until what was read is in its memory."""
        ...

    def fence(self) -> object:
        """A point in the storage's work: all that the thread which runs the model has asked of it so far."""
        ...

    def after(self, fence: object) -> None:
        """What this thread writes from now on comes after ``fence``."""
        ...


class TierHooks(Protocol):
    """What the cache tells the slower tiers, on the engine's thread. None of it may raise."""

    def evicting(self, entry: Entry, page: bool) -> None:
        """The content of a published entry is about to be lost: its page (or, not ``page``, only its ring)."""
        ...

    def evicted(self) -> None:
        """What was said to be lost so far may be overwritten from now on."""
        ...

    def landed(self, lease: "Lease", entry: Entry) -> None:
        """A landing point was published that is meant to stay."""
        ...

    def advanced(self, lease: "Lease", start: int) -> None:
        """The lease's tokens from ``start`` on were committed and their pages published."""
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
    ``stored``: how many of its full pages have been handed to the disk or found there. ``copied``: key of the entry
    whose partial page it began with, b"" for none. ``landings``: the landing points in the step that is being
    computed, ascending; ``saves``: the snapshot rows of those that lie inside it, by position. ``forks_at``: the last
    page end that another prompt had in common with this one, where it could not be landed on; 0: none. It will be one,
    for the next prompt that has as much in common.
    """

    slot: int
    prompt: TokenChain
    pages: list[int] = field(default_factory=list)
    tokens: "array[int]" = field(default_factory=lambda: array("i"))  # a book as objects takes ten times as much
    cached_tokens: int = 0
    closed: bool = False
    hashes: list[bytes] = field(default_factory=list)
    rolling: Entry | None = None
    stored: int = 0
    copied: bytes = b""
    landings: Sequence[int] = ()
    saves: dict[int, int] = field(default_factory=dict)
    forks_at: int = 0

    @property
    def position(self) -> int:
        """Tokens computed so far, which is the position of the next one."""
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class Load:
    """Pages and a snapshot row that are being filled from a slower tier; nobody else reads or writes them.

    ``pages``: first the ``shared`` published ones that the chain begins with (held, so that they stay), then those that
    were taken for records. ``row``: for the ring behind the last of them, None: none is loaded.
    """

    chain: TokenChain
    shared: int
    pages: list[int] = field(default_factory=list)
    row: int | None = None
