"""The host tier: records that were evicted from the device, in one arena of main memory, least recently used out first.

Knows keys, slots and the order of use; not tensors, disks or who needs a record. Everything but the bytes of a held
record belongs to the engine's thread; a held record's slot is neither reused nor changed until it is released.

The arena has slots of two sizes, one for pages and tails and one for rings, so that a record is one contiguous stretch
(one transfer on a GPU) and nothing fragments.
"""

import mmap
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from longread.kv.records import KINDS, Kind, Known

RING_SHARE = 4  # at most a quarter of the arena goes to rings
Ref = tuple[Kind, bytes]


class _Slots:
    """Equal stretches of one buffer: which are free, and who has the others, least recently used first."""

    def __init__(self, buffer: memoryview, size: int):
        self.size = size
        self.count = len(buffer) // size if size else 0
        self._buffer = buffer
        self.free = list(range(self.count - 1, -1, -1))
        self.used: OrderedDict[Ref, int] = OrderedDict()

    def view(self, slot: int) -> memoryview:
        return self._buffer[slot * self.size : (slot + 1) * self.size]


class HostArena:
    """``size`` bytes at most; 0 keeps nothing. ``allocate`` gives the memory (pinned, where the device wants that)."""

    def __init__(
        self, page_bytes: int, ring_bytes: int, size: int, allocate: Callable[[int], memoryview] | None = None
    ):
        rings = size // RING_SHARE // ring_bytes if ring_bytes else 0
        pages = (size - rings * ring_bytes) // page_bytes if page_bytes else 0
        self.nbytes = pages * page_bytes + rings * ring_bytes
        self.allocate = allocate or _lazy_memory  # also for others whose records come and go as the arena's do
        memory = self.allocate(self.nbytes)
        self._pages = _Slots(memory[: pages * page_bytes], page_bytes)
        self._rings = _Slots(memory[pages * page_bytes : self.nbytes], ring_bytes)
        self._known: dict[Kind, dict[bytes, Known]] = {kind: {} for kind in KINDS}
        self._children: dict[bytes, set[Ref]] = {}
        self._holds: Counter[Ref] = Counter()
        self.dropped: Callable[[Known], None] | None = None  # told of each record that falls off

    @property
    def used_bytes(self) -> int:
        return len(self._pages.used) * self._pages.size + len(self._rings.used) * self._rings.size

    def get(self, kind: Kind, key: bytes) -> Known | None:
        return self._known[kind].get(key)

    def find(self, kind: Kind, keys: Sequence[bytes]) -> list[Known | None]:
        """``get`` for many keys at once, in their order."""
        return list(map(self._known[kind].get, keys))

    def children(self, parent: bytes) -> list[Known]:
        """Pages and tails that hang on ``parent``."""
        return [self._known[kind][key] for kind, key in self._children.get(parent, ())]

    def put(self, known: Known) -> memoryview | None:
        """Room for a new record, which the caller fills before anybody reads it; None if it is there (then it is
        touched), or if all slots are held or there are none.
        """
        ref = (known.kind, known.key)
        slots = self._slots(known.kind)
        if ref in slots.used:
            slots.used.move_to_end(ref)
            return None
        if not slots.free:
            oldest = next((each for each in slots.used if each not in self._holds), None)
            if oldest is None:
                return None
            self.drop(*oldest)
        slots.used[ref] = slots.free.pop()
        self._known[known.kind][known.key] = known
        if known.kind != "ring":
            self._children.setdefault(known.parent, set()).add(ref)
        return slots.view(slots.used[ref])

    def hold(self, kind: Kind, key: bytes) -> memoryview:
        """The bytes of a record that is there, kept as they are until ``release``; counts as a use."""
        ref = (kind, key)
        slots = self._slots(kind)
        self._holds[ref] += 1
        slots.used.move_to_end(ref)
        return slots.view(slots.used[ref])

    def copy(self, kind: Kind, key: bytes, into: memoryview) -> None:
        """The bytes of a record that is there; no use of it."""
        slots = self._slots(kind)
        into[:] = slots.view(slots.used[kind, key])

    def release(self, kind: Kind, key: bytes) -> None:
        ref = (kind, key)
        self._holds[ref] -= 1
        if not self._holds[ref]:
            del self._holds[ref]

    def drop(self, kind: Kind, key: bytes) -> None:
        """Forget a record that nobody holds."""
        ref = (kind, key)
        slots = self._slots(kind)
        known = self._known[kind].pop(key)
        slots.free.append(slots.used.pop(ref))
        if kind != "ring":
            siblings = self._children[known.parent]
            siblings.remove(ref)
            if not siblings:
                del self._children[known.parent]
        if self.dropped is not None:
            self.dropped(known)

    def differences(self) -> list[str]:
        """What the books get wrong about themselves; empty if nothing. For the audit."""
        wrong = []
        for name, slots in (("page", self._pages), ("ring", self._rings)):
            if sorted([*slots.free, *slots.used.values()]) != list(range(slots.count)):
                wrong.append(f"host {name} slots: {len(slots.free)} free, {len(slots.used)} used of {slots.count}")
        refs = {(kind, key) for kind, known in self._known.items() for key in known}
        if refs != {*self._pages.used, *self._rings.used}:
            wrong.append("host records and slots disagree")
        listed = {ref for refs in self._children.values() for ref in refs}
        if listed != {ref for ref in refs if ref[0] != "ring"} or not set(self._holds) <= refs:
            wrong.append("host children or holds name records that are not there")
        return wrong

    def _slots(self, kind: Kind) -> _Slots:
        return self._rings if kind == "ring" else self._pages


def _lazy_memory(size: int) -> memoryview:
    """Anonymous memory: what is never used is never resident."""
    return memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")
