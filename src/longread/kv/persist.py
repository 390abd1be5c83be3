"""Writes landing points to the disk: the pages that it lacks, then the tail and the ring behind them.

Knows the cache's index, the host arena and a bounded queue to the writing thread. Must not know what a disk is, nor
tensors.

A landing point is noted when it is published and copied in portions between steps. Pages are not held for it: what has
been evicted before its turn is taken from the arena or skipped, and so is a landing point when too many wait. Pages go
in the order of the chain and the ring goes last, so a landing point on the disk is whole, or not there.

A copy of what lies on a device is whole only behind ``settle``, so a portion is sent when the next one is due: by then
nobody has to wait for it.

A landing point that the disk refused (it is full...) waits aside, with those behind it, until another write shows that
there is room, its chain is used again, or the store is closed. What has left device and arena by then is skipped.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from longread.kv.cache import KVCache
from longread.kv.chain import ID_BYTES, encode
from longread.kv.host import HostArena
from longread.kv.index import Entry
from longread.kv.lease import Lease, RecordStore
from longread.kv.outbox import Outbox
from longread.kv.records import Kind, Record
from longread.kv.transfer import Disk, IOThreads, Write
from longread.spec.errors import StoreError
from longread.spec.state import PAGE_TOKENS, page_hash

PORTION_BYTES = 8 * 2**20  # copied at once, and between two steps at least: half a millisecond of a device's...
SHARE = 0.1  # ...and more while that takes no more than so much of the time between two calls...
MOST_SECONDS = 0.01  # ...and no longer than this
WRITE_BYTES = 32 * 2**20  # that go to the disk together at most, if a record is not larger
QUEUE_BYTES = 256 * 2**20  # of main memory for what goes to the disk and comes from it...
READ_SHARE = 4  # ...of which a quarter is for the latter
QUEUE_LANDINGS = 64  # that wait to be copied, and of those that were refused
TRIES = 4  # as room comes free; else two that do not both fit would take turns for ever. A use is always worth one
LOOKUPS = 512  # pages asked for between two steps


@dataclass(slots=True, eq=False)
class _Landing:
    """``keys``: full pages from number ``first`` on, behind ``before``; ``at``: the landing point itself, ``run`` after
    ``parent``. ``next``: how far it is; ``there``: which of the keys up to number ``looked`` the disk has. ``lease``
    None: it was ``refused`` (that often) and must not keep a sequence's tokens in memory.
    """

    lease: Lease | None
    root: bytes
    first: int
    before: bytes
    keys: list[bytes]
    at: bytes
    parent: bytes
    run: bytes
    next: int = 0
    looked: int = 0
    there: set[bytes] = field(default_factory=set)
    refused: int = 0


class Persister:
    """``interval``: tokens between landing points of a model without rings, whose prompts are not cut anywhere."""

    def __init__(
        self, cache: KVCache, records: RecordStore, threads: IOThreads, host: HostArena, disk: Disk, interval: int
    ):
        self.skipped = 0
        self.written_bytes = 0
        self._cache = cache
        self._records = records
        self._threads = threads
        self._host = host
        self._disk = disk
        self._interval = interval
        self._landings: deque[_Landing] = deque()
        self._refused: dict[bytes, _Landing] = {}
        self._queued: set[tuple[Kind, bytes]] = set()
        self._sent = 0  # writes in flight
        self._origin: dict[Write, _Landing] = {}
        self._open: tuple[Write, _Landing] | None = None  # the one that is being copied, of the first landing point
        self._ready: list[tuple[Write, _Landing]] = []  # copied, and to be sent once they are settled
        self._settled = False  # in this call of ``work``, which nobody else's copies begin in
        self._left = time.monotonic()  # when ``work`` was done last
        self._record_bytes = records.page_bytes + records.ring_bytes
        size = max(QUEUE_BYTES - QUEUE_BYTES // READ_SHARE, self._record_bytes)
        self._outbox = Outbox(host.allocate(size))
        self._reads: list[tuple[int, memoryview, int]] = []  # pages, their payloads and tokens: read together

    @property
    def pending(self) -> bool:
        """Whether ``work`` has something to do, now or soon: copies that are written are let go of there."""
        return bool(self._landings or self._sent or self._open or self._ready)

    @property
    def blocked(self) -> bool:
        """Whether ``work`` would have to wait for the disk."""
        if not self.pending or self._threads.finished or self._ready or self._due:
            return False
        return not (self._landings and self._outbox.fits(self._record_bytes))

    def landed(self, lease: Lease, entry: Entry) -> None:
        """A landing point was published. Below one page it is computed faster than it is worth a write."""
        whole = lease.position // PAGE_TOKENS
        if not whole:
            return
        if len(self._landings) >= QUEUE_LANDINGS:
            self.skipped += 1
            return
        first = min(lease.stored, whole)
        assert entry.parent is not None
        key, run = entry.key, entry.run
        rest = lease.tokens[whole * PAGE_TOKENS :]
        if (
            entry.depth > whole and len(rest) < entry.length
        ):  # a longer run stands for it on the device; a document has its own key
            key, run = page_hash(entry.parent.key, rest), encode(rest)
        root, keys = lease.prompt.root, lease.hashes[first:whole]
        before = lease.hashes[first - 1] if first else root
        self._landings.append(_Landing(lease, root, first, before, keys, key, entry.parent.key, run))
        lease.stored = whole

    def advanced(self, lease: Lease, start: int) -> None:
        """Tokens were committed: without rings each page end can be landed on, and some are kept."""
        if not self._cache.has_rings and lease.position // self._interval > start // self._interval:
            self.landed(lease, self._cache.index.entries[lease.hashes[-1]])

    def touch(self, keys: Sequence[bytes]) -> None:
        """A chain is used again: what the disk lacks of it is tried once more."""
        if self._refused:
            used = set(keys)
            self._try_again([each for each in self._refused.values() if each.at in used or each.parent in used])
        self._send(Write([], 0, tuple(keys)))

    def try_all_again(self) -> None:
        """Whatever was refused."""
        self._try_again(list(self._refused.values()))

    def work(self) -> None:
        """Take back what was written, send what the last call has copied, and copy the next portion if there is room.
        How much is PORTION_BYTES' matter: a step that runs on a device waits for none of it.
        """
        self._drain()
        self._settled = False
        self._hand_over()
        began = time.monotonic()
        until = began + min(SHARE * (began - self._left), MOST_SECONDS)
        while self._copy_portion() and time.monotonic() < until:
            pass
        self._left = time.monotonic()

    @property
    def _due(self) -> bool:
        """Whether the open write should go: the disk has nothing to do, or it is large enough, or its landing point
        was taken out of the queue.
        """
        if self._open is None:
            return False
        write, landing = self._open
        return not self._sent or write.size >= WRITE_BYTES or landing is not next(iter(self._landings), None)

    def _hand_over(self) -> None:
        """Send what was copied before now, and so is whole without much of a wait."""
        if self._due:
            self._shut()
        if not self._ready:
            return
        self._settle()
        for write, landing in self._ready:
            self._origin[write] = landing
            self._send(write)
        self._ready.clear()

    def _shut(self) -> None:
        """Nothing more is added to the open write."""
        if self._open is not None and self._open[0].stretches:
            self._ready.append(self._open)
        self._open = None

    def _settle(self) -> None:
        if not self._settled:
            self._records.settle()
            self._settled = True

    def _copy_portion(self) -> bool:
        """Of the first landing point. False: none is left, or there is no room."""
        if not self._landings:
            return False
        landing = self._landings[0]
        if self._open is None or self._open[1] is not landing:
            self._shut()
            self._open = Write([], 0), landing
        write, before = self._open[0], (self._open[0].size, landing.next)
        write.failed = True  # until all of it is filled: torn by an interrupt it must not be written as if it were
        try:
            ended = self._copy(landing, write, min(write.size + PORTION_BYTES, WRITE_BYTES))
            self._read()
            write.failed = False
        finally:
            if write.failed:
                self._reads.clear()
                self._shut()
        if ended:
            self._landings.popleft()
            self._shut()
        elif (write.size, landing.next) == before:
            if not write.records or not self._outbox.fits(self._record_bytes):
                return False
            self._shut()  # full: the next record goes into another
        return True

    def _copy(self, landing: _Landing, write: Write, limit: int) -> bool:
        """Copies until ``write`` has ``limit`` bytes, or one record, and whether the landing point is through."""
        if landing.lease is None and landing.before != landing.root and not self._has("page", landing.before):
            self._set_aside(landing)  # what it stands on was refused again, or is lost
            return True
        if landing.next == landing.looked:
            landing.looked = min(landing.next + LOOKUPS, len(landing.keys))
            landing.there = self._there("page", landing.keys[landing.next : landing.looked])
        size = self._records.page_bytes
        for key in landing.keys[landing.next : landing.looked]:
            if key not in landing.there and ("page", key) not in self._queued:
                if (write.records and write.size + size > limit) or not self._outbox.fits(size):
                    return False
                record = self._full_page(write, key)
                if record is None:  # evicted before its turn: nothing behind it can be reached on the disk
                    self._give_up(landing)
                    return True
                self._add(write, record)
            landing.next += 1
        if landing.next < len(landing.keys) or not self._outbox.fits(self._record_bytes):
            return False
        self._add_landing(write, landing)
        return True

    def _add_landing(self, write: Write, landing: _Landing) -> None:
        entry = self._landing_entry(landing)
        if entry is None or (self._cache.has_rings and entry.snapshot is None):
            self.skipped += 1
            return
        tokens = len(landing.run) // ID_BYTES
        kind: Kind = "page" if tokens == PAGE_TOKENS else "tail"
        if landing.at not in landing.keys[-1:] and not self._has(kind, landing.at):
            payload = self._page(write, entry, tokens)
            self._add(write, Record(kind, landing.at, landing.parent, entry.depth, landing.run, payload))
        if entry.snapshot is not None and not self._has("ring", entry.key):
            payload = self._take(write, self._records.ring_bytes)
            self._records.read_ring(entry.snapshot, payload)
            self._add(write, Record("ring", entry.key, landing.parent, entry.depth, b"", payload))

    def _landing_entry(self, landing: _Landing) -> Entry | None:
        """The entry that was published, or one whose page has its rows: without rings, that of any longer run."""
        index = self._cache.index
        entry = index.get(landing.at)
        if entry is None and not self._cache.has_rings:
            parent = index.base(landing.root) if landing.parent == landing.root else index.get(landing.parent)
            entry = index.covering(parent, landing.run) if parent is not None else None
        return entry

    def _full_page(self, write: Write, key: bytes) -> Record | None:
        """From the device, or from the arena if it has moved there."""
        entry, known = self._cache.index.get(key), self._host.get("page", key)
        if entry is not None and entry.parent is not None:
            return Record("page", key, entry.parent.key, entry.depth, entry.run, self._page(write, entry, PAGE_TOKENS))
        if known is not None:
            self._settle()
            payload = self._take(write, self._records.page_bytes)
            self._host.copy("page", key, payload)
            return Record("page", key, known.parent, known.depth, known.run, payload)
        return None

    def _page(self, write: Write, entry: Entry, tokens: int) -> memoryview:
        """Filled by the next ``_read``: a device is asked once a portion, not once a page."""
        payload = self._take(write, self._records.page_bytes)
        self._reads.append((entry.page, payload, tokens))
        return payload

    def _take(self, write: Write, size: int) -> memoryview:
        """Memory that comes back with ``write``, also where nothing is added for it."""
        payload = self._outbox.take(size)
        write.stretches += 1
        return payload

    def _read(self) -> None:
        if self._reads:
            pages, payloads, tokens = zip(*self._reads, strict=True)
            self._reads.clear()
            self._records.read_pages(pages, payloads, tokens)

    def _add(self, write: Write, record: Record) -> None:
        write.records.append(record)
        write.size += len(record.payload)
        self._queued.add((record.kind, record.key))

    def _give_up(self, landing: _Landing) -> None:
        """Neither this landing point nor what waits behind the gap; the lease's next one begins at the gap again."""
        self.skipped += 1 + len(self._cut(landing, landing.first + landing.next))

    def _cut(self, landing: _Landing, gap: int) -> list[_Landing]:
        """Take out what waits behind a gap in a landing point's chain, and have its lease begin there again."""
        lease = landing.lease
        if lease is None:
            return []
        lease.stored = min(lease.stored, gap)
        behind = [each for each in self._landings if each is not landing and each.lease is lease and each.first > gap]
        for each in behind:
            self._landings.remove(each)
        return behind

    def _refuse(self, landing: _Landing) -> None:
        """The disk did not take it: nothing more of it is copied now, nor of what is behind it."""
        behind = self._cut(landing, landing.first)
        if landing in self._landings:
            self._landings.remove(landing)
        landing.refused += 1
        for each in (landing, *behind):
            self._set_aside(each)

    def _set_aside(self, landing: _Landing) -> None:
        """The oldest is given up when they are too many."""
        landing.lease, landing.next, landing.looked = None, 0, 0
        earlier = self._refused.pop(landing.at, landing)
        self._refused[landing.at] = min(landing, earlier, key=lambda each: each.first)
        if len(self._refused) > QUEUE_LANDINGS:
            del self._refused[next(iter(self._refused))]
            self.skipped += 1

    def _try_again(self, landings: Sequence[_Landing]) -> None:
        for each in landings[: max(QUEUE_LANDINGS - len(self._landings), 0)]:
            del self._refused[each.at]
            self._landings.append(each)

    def _has(self, kind: Kind, key: bytes) -> bool:
        return (kind, key) in self._queued or bool(self._there(kind, [key]))

    def _there(self, kind: Kind, keys: Sequence[bytes]) -> set[bytes]:
        try:
            return self._disk.present(kind, keys) if keys else set()
        except StoreError as error:
            self._threads.note_error("a look-up", error)
            return set()

    def _send(self, write: Write) -> None:
        self._sent += 1
        self._threads.write(write)

    def _drain(self) -> None:
        while self._threads.finished:
            write = self._threads.finished.popleft()
            self._sent -= 1
            self._threads.queued_bytes -= write.size
            self.written_bytes += write.written
            self._outbox.give_back(write.stretches)
            landing = self._origin.pop(write, None)
            self._queued.difference_update((record.kind, record.key) for record in write.records)
            if write.failed and landing is not None:
                self._refuse(landing)
            elif write.written and self._refused:
                self._try_again([each for each in self._refused.values() if each.refused < TRIES])
