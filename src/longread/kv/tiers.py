"""The tiers below the device: finds deeper landing points than the device has, and moves pages and rings up and down.

Knows the cache's books, the host arena, the disk's interface and the I/O threads. Must not know requests, the schedule
or tensors. Everything here runs on the engine's thread; what the I/O threads do is in ``kv.transfer``.

A landing point can be used if each of its pages from the root, and for ring models its ring, is in some tier. Eviction
moves content from the device to the host arena; the disk gets it at landing points (``kv.persist``). Up it goes by a
``Transfer``: pages are reserved, filled by the loader, and published like computed ones; those that come from pinned
memory are published as they begin to be filled (``kv.arrivals``). Identities are chained hashes over root and tokens,
so whatever is found under a key is that prefix's state in this format, or fails its checksum.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from longread.kv.arrivals import Arrival
from longread.kv.cache import KVCache
from longread.kv.chain import ID_BYTES, TokenChain, common_tokens
from longread.kv.host import HostArena
from longread.kv.index import Entry
from longread.kv.lease import Lease, Load, RecordStore
from longread.kv.persist import Persister
from longread.kv.policy import WAIT_GAIN
from longread.kv.records import Kind, Known
from longread.kv.transfer import Disk, IOThreads, Move, Tier, Transfer
from longread.spec.errors import StoreError
from longread.spec.state import PAGE_TOKENS

log = logging.getLogger(__name__)

LOOKUP_BATCH = 64  # pages asked for at first; doubled while they are there, so a miss costs one query
LOOKUP_LIMIT = 1024
LANDING_BATCH = 4  # page ends asked for a ring or a tail at first, doubled too: most prompts land on one of the last
LOAD_TRIES = 4  # after a broken record the next landing point is tried; this often, then the rest is computed


class Source(NamedTuple):
    """A record and where it is. (A tuple, as that is.)"""

    known: Known
    tier: Tier


@dataclass(slots=True)
class Found:
    """Where a prompt could land if more was loaded: ``shared`` pages of the device, then ``pages``, then ``tail``, with
    the ring from ``ring`` (None: without rings, or on the device). ``tokens`` from the root.
    """

    chain: TokenChain
    shared: int
    tokens: int
    pages: list[Source] = field(default_factory=list)
    tail: Source | None = None
    ring: Source | None = None

    @property
    def sources(self) -> list[Source]:
        return [*self.pages, *(each for each in (self.tail, self.ring) if each is not None)]


class Tiers:
    """``disk`` None: host only. The arena may have no slots. ``close`` when done."""

    def __init__(
        self, cache: KVCache, records: RecordStore, host: HostArena, disk: Disk | None = None, interval: int = 32768
    ):
        self.host = host
        self.disk = disk
        self._cache = cache
        self._records = records
        self._threads = IOThreads(records, disk)
        self._persister = Persister(cache, records, self._threads, host, disk, interval) if disk is not None else None
        self._transfers: list[Transfer] = []
        self._coming: dict[tuple[Kind, bytes], Transfer] = {}
        self._arriving: list[tuple[Transfer, Arrival]] = []  # published, and still read from the arena
        self._leaving: list[tuple[int, memoryview, int]] = []  # pages with their records and tokens: read together
        self._open = True
        cache.tiers = self

    # What the engine calls.

    @property
    def busy(self) -> bool:
        """Whether ``work`` or ``collect`` has something to do, now or soon."""
        pending = self._persister is not None and self._persister.pending
        return self._open and bool(self._transfers or self._arriving or pending)

    @property
    def errors(self) -> int:
        return self._threads.errors

    @property
    def corrupt(self) -> int:
        return self.disk.corrupt if self.disk is not None else 0

    @property
    def skipped(self) -> int:
        return self._persister.skipped if self._persister is not None else 0

    @property
    def written_bytes(self) -> int:
        return self._persister.written_bytes if self._persister is not None else 0

    def work(self) -> None:
        """A bounded portion of what is to be copied for the disk."""
        if self._persister is not None:
            self._persister.work()

    def wait(self, seconds: float) -> None:
        """Until an I/O thread has finished something, at most ``seconds``; at once if nothing is to be waited for."""
        blocked = self._persister is not None and self._persister.blocked
        if (self._transfers or self._arriving or blocked) and not any(transfer.done for transfer in self._transfers):
            self._threads.signal.wait(seconds)
        self._threads.signal.clear()

    def find(self, chain: TokenChain) -> Found | None:
        """The deepest landing point over all tiers, if it is worth a load; None if the device's own is as good."""
        cache = self._cache
        if not self._open or not cache.enable_prefix_caching or (cache.has_rings and not cache.snapshots.count):
            return None
        most, floor = len(chain) - 1, cache.match(chain).cached_tokens
        if most - floor < WAIT_GAIN:
            return None
        shared, pages = self.pages_of(chain, most)
        found = (self._ring_landing if cache.has_rings else self._open_landing)(chain, shared, pages, floor)
        return found if found is not None and found.tokens - floor >= WAIT_GAIN else None

    def pages_of(self, chain: TokenChain, most: int) -> tuple[int, list[Source]]:
        """How many pages of the chain the device has, and where those behind them are, up to the first that nobody
        has.
        """
        count = max(most, 0) // PAGE_TOKENS
        shared = self._cache.index.deepest(chain, count).depth
        sources: list[Source] = []
        at, batch = shared, LOOKUP_BATCH
        while at < count:
            keys = chain.page_hashes(at, min(at + batch, count))
            here = self.host.find("page", keys)
            on_disk = self._present("page", [key for key, known in zip(keys, here, strict=True) if known is None])
            parents = [chain.page_hash(at - 1) if at else chain.root, *keys[:-1]]
            for depth, (key, parent, known) in enumerate(zip(keys, parents, here, strict=True), at + 1):
                if known is not None:
                    sources.append(Source(known, "host"))
                elif key in on_disk:  # its run is the chain's, and a book's are megabytes to copy
                    sources.append(Source(Known("page", key, parent, depth, b"", False), "disk"))
                else:
                    return shared, sources
            at, batch = at + batch, min(batch * 2, LOOKUP_LIMIT)
        return shared, sources

    def after(self, parent: bytes, ahead: bytes) -> list[Source]:
        """Pages and tails that hang on ``parent`` in the slower tiers, among them those whose runs share most with
        ``ahead``; what both have comes from the host.
        """
        found = {known.key: Source(known, "host") for known in self.host.children(parent)}
        for known in self._nearest(parent, ahead):
            found.setdefault(known.key, Source(known, "disk"))
        return list(found.values())

    def coming(self, found: Found) -> Transfer | None:
        """A transfer in flight that already brings part of this: wait for it instead of loading the same twice."""
        for source in found.sources:
            transfer = self._coming.get((source.known.kind, source.known.key))
            if transfer is not None:
                return transfer
        return None

    def start(self, found: Found) -> Transfer:
        """Reserve pages and hand the load to the loader. Raises CapacityError, and then nothing is held."""
        data: dict[tuple[Kind, bytes], memoryview] = {}
        load: Load | None = None
        try:
            # Held first: winning pages evicts others, which move into the arena and may push these out. From the
            # deepest on, so that the root is used last: without it the others cannot be reached.
            for source in reversed(found.sources):
                if source.tier == "host":
                    ref = (source.known.kind, source.known.key)
                    data[ref] = self.host.hold(*ref)
            wanted = len(found.pages) + (found.tail is not None)
            load = self._cache.begin_load(found.chain, found.shared, wanted, found.ring is not None)
        finally:
            for ref in data if load is None else ():
                self.host.release(*ref)
        targets = load.pages[found.shared :] + ([load.row] if load.row is not None else [])
        moves = [
            Move(source.known, source.tier, target, data.get((source.known.kind, source.known.key)))
            for source, target in zip(found.sources, targets, strict=True)
        ]
        transfer = Transfer(load, moves, found.tail.known if found.tail is not None else None, found.tokens)
        self._transfers.append(transfer)
        for move in moves:
            self._coming[move.known.kind, move.known.key] = transfer
        self._threads.load(transfer)
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Nobody wants it any more: it stops behind what it moves together; what is whole is published all the same,
        and what was begun layer by layer comes whole.
        """
        transfer.cancelled = True

    def cancel_all(self) -> bool:
        """Cancel every load in flight and take back what they hold, waiting for what each moves together: a room of a
        disk's records, or ``pages_at_once``. False: there was none.
        """
        if not self._transfers:
            return False
        for transfer in self._transfers:
            transfer.cancelled = True
        while self._transfers:
            self.wait(1.0)
            self.collect()
        return True

    def collect(self) -> None:
        """Publish what the loader has finished, and let go of what was read."""
        for transfer in [each for each in self._transfers if each.done]:
            self._close(transfer)
        self._let_arrived_go()

    def promote(self, chain: TokenChain) -> None:
        """``find``, load and publish in one go, for a caller that has nothing else to do meanwhile."""
        for _ in range(LOAD_TRIES):
            found = self.find(chain)
            if found is None:
                return
            coming = self.coming(found)
            transfer = coming or self.start(found)
            while not transfer.closed:
                self.wait(1.0)
                self.collect()
            if coming is None and transfer.broken is None and not transfer.cancelled:
                return

    def used(self, lease: Lease) -> None:
        """Tell the disk what a sequence that was just opened reuses, so that it is not collected as unused."""
        keys = [*lease.hashes, lease.copied] if lease.copied else lease.hashes
        if self._persister is not None and keys:
            self._persister.touch(keys)

    def flush(self, seconds: float) -> bool:
        """Write everything that is due. False: not done in time."""
        end = time.monotonic() + seconds
        while self._persister is not None and self._persister.pending:
            if time.monotonic() > end:
                return False
            self._persister.work()
            if self._persister.blocked:
                self._threads.signal.wait(0.01)
                self._threads.signal.clear()
        return True

    def close(self, seconds: float = 30.0) -> None:
        """Stop loads, finish writes for at most ``seconds``, end the threads. Idempotent."""
        if not self._open:
            return
        self._open = False
        for transfer in self._transfers:
            transfer.cancelled = True
        if self._persister is not None:
            self._persister.try_all_again()
        done = self.flush(seconds)
        ended = self._threads.stop(finish_writes=done)
        if self.disk is not None and ended:
            self.disk.close()
        if self._transfers or self._arriving:
            self._records.finish()  # the arena may be gone behind this
        self.collect()
        self._cache.tiers = None

    def check(self) -> None:
        """Audit the tiers' own books. Raises AssertionError that lists each difference."""
        wrong = self.host.differences()
        if [transfer.load for transfer in self._transfers] != self._cache.loads:
            wrong.append(f"{len(self._transfers)} transfers for {len(self._cache.loads)} loads")
        if self._leaving:
            wrong.append(f"{len(self._leaving)} pages were evicted and never read")
        if wrong:
            raise AssertionError("tiers audit:\n" + "\n".join(wrong))

    # What the cache calls (TierHooks).

    def evicting(self, entry: Entry, page: bool) -> None:
        """Content leaves the device: into the arena, unless a longer run on the same page says it as well."""
        assert entry.parent is not None
        self._let_arrived_go()
        kind: Kind = "page" if entry.full else "tail"
        if page and not self._covered(entry):
            known = Known(kind, entry.key, entry.parent.key, entry.depth, entry.run, entry.snapshot is not None)
            room = self.host.put(known)
            if room is not None:
                self._leaving.append((entry.page, room, entry.length))
        if entry.snapshot is not None:
            known = Known("ring", entry.key, entry.parent.key, entry.depth, b"", True)
            room = self.host.put(known)
            if room is not None:
                self._records.read_ring(entry.snapshot, room)

    def evicted(self) -> None:
        if self._leaving:
            pages, records, tokens = zip(*self._leaving, strict=True)
            self._leaving.clear()
            self._records.read_pages(pages, records, tokens)

    def landed(self, lease: Lease, entry: Entry) -> None:
        if self._persister is not None:
            self._persister.landed(lease, entry)

    def advanced(self, lease: Lease, start: int) -> None:
        if self._persister is not None:
            self._persister.advanced(lease, start)

    # Looking things up.

    def _ring_landing(self, chain: TokenChain, shared: int, pages: list[Source], floor: int) -> Found | None:
        """Deepest first: a tail that the prompt goes on from, then the ring at a page end; not where even the longest
        tail is worth no load.
        """
        most, batch = len(chain) - 1, LANDING_BATCH
        depth, last = shared + len(pages), max((floor + WAIT_GAIN) // PAGE_TOKENS - 1, -1)
        while depth > last:
            low = max(depth - batch, last)
            ahead = {
                chain.page_hash(at - 1) if at else chain.root: chain.run(
                    at * PAGE_TOKENS, min(most, (at + 1) * PAGE_TOKENS)
                )
                for at in range(depth, low, -1)
            }
            rings, tails = self._present("ring", list(ahead)), self._tails(ahead)
            for at, parent in zip(range(depth, low, -1), ahead, strict=True):
                tail, ring = self._tail(parent, ahead[parent], tails.get(parent, []))
                if ring is None and at:
                    ring = self._ring(parent, chain.page_hash(at - 2) if at > 1 else chain.root, at, rings)
                if ring is not None:
                    tokens = at * PAGE_TOKENS + (len(tail.known.run) // ID_BYTES if tail is not None else 0)
                    return Found(chain, min(shared, at), tokens, pages[: max(at - shared, 0)], tail, ring)
            depth, batch = low, min(batch * 2, LOOKUP_BATCH)
        return None

    def _tail(self, parent: bytes, ahead: bytes, on_disk: list[Known]) -> tuple[Source | None, Source | None]:
        """The longest tail whose ring is there, too, and that ``ahead`` begins with, and that ring. ``on_disk``: such
        of the disk.
        """
        tails = {known.key: Source(known, "disk") for known in on_disk}
        for known in self.host.children(parent):
            if known.kind == "tail" and ahead.startswith(known.run):
                tails[known.key] = Source(known, "host")
        for tail in sorted(tails.values(), key=lambda each: -len(each.known.run)):
            key, depth = tail.known.key, tail.known.depth
            ring = self._ring(key, parent, depth, self._present("ring", [key]))
            if ring is not None:
                return tail, ring
        return None, None

    def _open_landing(self, chain: TokenChain, shared: int, pages: list[Source], floor: int) -> Found | None:
        """Without rings every row can be landed on: all pages, then the run that shares most with what follows."""
        whole = shared + len(pages)
        found = Found(chain, shared, whole * PAGE_TOKENS, pages)
        start = whole * PAGE_TOKENS
        ahead = chain.run(start, min(len(chain) - 1, start + PAGE_TOKENS))
        best = max(floor - start, 0)
        for source in self.after(chain.page_hash(whole - 1) if whole else chain.root, ahead):
            common = common_tokens(source.known.run, ahead) // self._cache.grain * self._cache.grain
            if common > best:
                best, found.tail = common, source
        if found.tail is not None:
            found.tokens = start + best
        return found

    def _ring(self, key: bytes, parent: bytes, depth: int, on_disk: set[bytes]) -> Source | None:
        """The ring behind the page or tail of that identity."""
        known = self.host.get("ring", key)
        if known is not None:
            return Source(known, "host")
        return Source(Known("ring", key, parent, depth, b"", True), "disk") if key in on_disk else None

    def _present(self, kind: Kind, keys: Sequence[bytes]) -> set[bytes]:
        """Which of these the disk has."""
        if self.disk is None or not keys:
            return set()
        try:
            return self.disk.present(kind, keys)
        except StoreError as error:
            self._threads.note_error("a look-up", error)
            return set()

    def _nearest(self, parent: bytes, ahead: bytes) -> list[Known]:
        if self.disk is None:
            return []
        try:
            return self.disk.nearest(parent, ahead)
        except StoreError as error:
            self._threads.note_error("a look-up", error)
            return []

    def _tails(self, ahead: Mapping[bytes, bytes]) -> Mapping[bytes, list[Known]]:
        """Of each parent that has some: tails on the disk that can be landed on."""
        if self.disk is None:
            return {}
        try:
            return self.disk.tails(ahead)
        except StoreError as error:
            self._threads.note_error("a look-up", error)
            return {}

    def other_roots(self, content_key: bytes) -> list[str]:
        """Labels of other models and formats that have read the same text."""
        if self.disk is None:
            return []
        try:
            return self.disk.other_roots(content_key)
        except StoreError as error:
            self._threads.note_error("a look-up", error)
            return []

    def _covered(self, entry: Entry) -> bool:
        others = self._cache.index.on_page.get(entry.page, ())
        return not self._cache.has_rings and any(
            len(other.run) > len(entry.run) and other.run.startswith(entry.run) for other in others
        )

    def _close(self, transfer: Transfer) -> None:
        """Straighten the books of a load that the loader has left."""
        load, moved = transfer.load, transfer.moved
        pages = len(load.pages) - load.shared - (transfer.tail is not None)
        tail = None
        if transfer.tail is not None and moved > pages:
            tail = (transfer.tail.key, transfer.tail.run)
        if transfer.arrival is not None:
            self._records.arrivals.begun(transfer.arrival, load.pages[load.shared :][:pages])
            self._arriving.append((transfer, transfer.arrival))
        self._cache.end_load(load, load.shared + min(moved, pages), tail, moved == len(transfer.moves))
        for move in transfer.moves:
            del self._coming[move.known.kind, move.known.key]
        if transfer.arrival is None:
            self._let_go(transfer)
        self._transfers.remove(transfer)
        transfer.ended = time.monotonic()
        transfer.closed = True

    def _let_arrived_go(self) -> None:
        for transfer, arrival in [each for each in self._arriving if each[1].over()] if self._arriving else ():
            self._arriving.remove((transfer, arrival))
            self._let_go(transfer)
            log.debug("%d records in %.1f ms, layer by layer", len(transfer.moves), 1e3 * arrival.seconds())

    def _let_go(self, transfer: Transfer) -> None:
        """Nothing is read from the arena for it any more."""
        for move in transfer.moves:
            if move.data is not None:
                self.host.release(move.known.kind, move.known.key)
