"""The prefix cache over a page pool: what a prompt can reuse, who holds which page, what is kept and what is evicted.

Knows pages, slots, snapshot rows and token identity; moves content only through ``StateStore``. It must not know
tensors, requests or the schedule. Everything runs on the engine's thread.

Full pages are published as they are committed; partial pages are published as *tails* by ``snapshot``. The page of a
tail stays its lease's own and goes on being written behind the published rows: rows of closed windows below a
position never change, and whoever reuses a tail copies the page.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import lcm

from longread.kv import audit
from longread.kv.chain import TokenChain, encode
from longread.kv.evicted import EvictedKeys
from longread.kv.index import Entry, PrefixIndex
from longread.kv.landing import Landing, find_landing
from longread.kv.lease import Lease, Load, Match, StateStore, TierHooks
from longread.kv.policy import SNAPSHOT_INTERVAL, WAIT_GAIN, landing_points
from longread.kv.pool import PagePool
from longread.kv.promises import Promise, Promises
from longread.kv.snapshots import SnapshotPool
from longread.spec.errors import CapacityError
from longread.spec.state import PAGE_TOKENS, HashedTokens, StateGroup, page_hash, pages_for, salted_root

EVICT_AHEAD = 64  # pages; a prompt that will need them anyway gets neighbours instead of single pages


class KVCache:
    """Pages, slots and snapshots of one model's state groups. ``root`` is ``cache_root`` of the model and format.

    Methods that raise CapacityError leave everything as it was. ``enable_prefix_caching=False``: nothing is published.
    """

    def __init__(
        self,
        groups: tuple[StateGroup, ...],
        root: bytes,
        num_pages: int,
        num_slots: int,
        num_snapshots: int,
        store: StateStore,
        enable_prefix_caching: bool = True,
    ):
        self.has_rings = any(g.kind == "ring" for g in groups)
        self.enable_prefix_caching = enable_prefix_caching
        # Without rings a partial page may be cut anywhere that splits no row.
        self.grain = lcm(*(g.tokens_per_row for g in groups if g.kind == "rows"))
        self._store = store
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(root)
        self.snapshots: SnapshotPool[Entry] = SnapshotPool(num_snapshots)
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.num_slots = num_slots
        self.leases: dict[int, Lease] = {}  # by slot
        self._promises = Promises()  # of them, whose prompts are not computed yet
        self.loads: list[Load] = []  # pages on their way from slower tiers
        self.tiers: TierHooks | None = None  # set once by whoever keeps them
        self.evicted = EvictedKeys()
        self.prefix_queries = 0  # tokens of the prompts that ``count_lookup`` was told of
        self.prefix_hits = 0  # tokens of them that were reused
        self.pages_evicted = 0
        self.snapshots_evicted = 0

    @property
    def pages_free(self) -> int:
        return len(self.pool.free)

    @property
    def pages_cached(self) -> int:
        return len(self.pool.cached)

    @property
    def pages_held(self) -> int:
        return self.pool.held

    @property
    def snapshots_held(self) -> int:
        return len(self.snapshots.owners)

    def chain(
        self, tokens: Sequence[int] | TokenChain, hashed: HashedTokens | None = None, salt: str | None = None
    ) -> TokenChain:
        """Convert a prompt once; ``match``, ``pending`` and ``open`` then hash no page of it twice.

        ``hashed``: what the caller has converted and hashed of it already, used where it fits (``HashedTokens.fits``).
        ``salt``: the chain meets those of the same salt only.
        """
        if isinstance(tokens, TokenChain):
            return tokens
        return TokenChain(salted_root(self.index.root.key, salt), tokens, hashed)

    def match(self, tokens: Sequence[int] | TokenChain) -> Match:
        """What ``open`` would reuse now, at most len(tokens) - 1 tokens. Changes nothing, counts nothing."""
        landing = self._find(self.chain(tokens), partial=True)
        return Match(landing.tokens, landing.last.depth)

    def pending(self, tokens: Sequence[int] | TokenChain, interval: int = SNAPSHOT_INTERVAL) -> bool:
        """Whether a running sequence is about to publish more of this prompt than ``match`` finds now.

        True only while an open lease is still in front of that point of its own prompt, so waiting ends with the lease.
        """
        return self.promised(tokens, interval) is not None

    def promised(self, tokens: Sequence[int] | TokenChain, interval: int = SNAPSHOT_INTERVAL) -> Promise | None:
        """What ``pending`` waits for, None: nothing."""
        if not self.enable_prefix_caching or (self.has_rings and not self.snapshots.count):
            return None
        chain = self.chain(tokens)
        promise = self._promises.best(chain, interval, self.has_rings)
        worth = promise is not None and promise.tokens - self.match(chain).cached_tokens >= WAIT_GAIN
        return promise if worth else None

    def _find(self, chain: TokenChain, partial: bool) -> Landing:
        return find_landing(self.index, chain, rings=self.has_rings, grain=self.grain, partial=partial)

    def open(self, tokens: Sequence[int] | TokenChain) -> Lease:
        """Start a sequence: take a slot, share or copy what is cached of its prompt, load or reset the ring state.

        The whole pages are shared; a partial page is copied, since the sequence goes on writing to it. Raises
        CapacityError if no slot is free; want of a page for the copy only makes the landing earlier.
        """
        chain = self.chain(tokens)
        if not self.free_slots:
            raise CapacityError(f"all {self.num_slots} slots are in use")
        landing = self._find(chain, partial=True)
        if landing.partial is not None and not self._can_copy(landing):
            landing = self._find(chain, partial=False)
        with ExitStack() as undo:
            lease = self._new_lease(chain)
            undo.callback(self._abandon, lease)
            whole = landing.whole()
            for entry in whole:
                self._hold(lease, entry.page)
            if landing.at is None or landing.at.snapshot is None:
                self._store.reset_slot(lease.slot)
            else:  # before the copy, whose page may be won by evicting
                with self.snapshots.pinned(landing.at.snapshot):
                    self.snapshots.touch(landing.at.snapshot)
                    self._store.load_snapshot(landing.at.snapshot, lease.slot)
            if landing.partial is not None:
                self._copy_partial(lease, landing.partial.page)
            undo.pop_all()
        lease.cached_tokens = landing.tokens
        lease.forks_at = landing.known if landing.known - landing.tokens >= PAGE_TOKENS else 0
        lease.tokens.frombytes(chain.run(0, landing.tokens))
        lease.hashes = [entry.key for entry in whole]
        lease.copied = landing.partial.key if landing.partial is not None else b""
        return lease

    def count_lookup(self, lease: Lease) -> None:
        """Count the prompt that ``lease`` was opened with in ``prefix_queries`` and ``prefix_hits``.

        The caller does so once a prompt: a retry or a resume after preemption finds mostly its own pages.
        """
        if self.enable_prefix_caching:
            self.prefix_queries += len(lease.prompt)
            self.prefix_hits += lease.cached_tokens

    def reserve(self, lease: Lease, tokens_total: int) -> None:
        """Give the lease pages for positions < ``tokens_total``, evicting what was used least recently.

        Raises CapacityError if even that is not enough.
        """
        missing = pages_for(tokens_total) - len(lease.pages)
        if missing <= 0:
            return
        if missing > self.pool.available:
            raise CapacityError(
                f"{missing} pages wanted, {self.pool.available} of {self.pool.count} are free or cached: "
                "close a sequence first"
            )
        room = max(missing, pages_for(len(lease.prompt)) - len(lease.pages))
        lease.pages.extend(self._take(missing, lease.pages[-1] if lease.pages else None, room))

    def prepare(self, lease: Lease, prompt_length: int, length: int, interval: int = SNAPSHOT_INTERVAL) -> None:
        """Note where the lease can be landed on within its next ``length`` tokens: ``commit`` will publish that.

        The ring state inside a step is gone when the step is over, so whoever computes it saves that to the rows of
        ``lease.saves``. Where rows run out the deepest points have theirs, as if each had evicted the one before.
        """
        self._give_back_saves(lease)
        if not self.enable_prefix_caching or (self.has_rings and not self.snapshots.count):
            return
        stop = lease.position + length
        points = landing_points(prompt_length, lease.position, stop, interval, self.has_rings)
        if lease.position < lease.forks_at <= stop:
            points = sorted({*points, lease.forks_at})
        lease.landings = points
        for point in reversed(lease.landings):
            row = self._snapshot_row() if point < stop else None
            if row is not None:
                lease.saves[point] = row

    def commit(self, lease: Lease, new_tokens: Sequence[int]) -> None:
        """Record that the state of the lease's next tokens has been computed; publish the pages that they fill, and the
        landing points among them that ``prepare`` has noted.

        Where a page of the same identity is published already, others go on using that one and this lease its own.
        """
        start, done = lease.position, 0
        for length in [point - start for point in lease.landings if point - start <= len(new_tokens)]:
            self._commit(lease, new_tokens[done:length])
            self.snapshot(lease, inside=length < len(new_tokens))
            done = length
        if done < len(new_tokens):
            self._commit(lease, new_tokens[done:])
        self._give_back_saves(lease)

    def _commit(self, lease: Lease, new_tokens: Sequence[int]) -> None:
        start, stop = lease.position, lease.position + len(new_tokens)
        if stop > len(lease.pages) * PAGE_TOKENS:
            raise AssertionError(f"{stop} tokens computed, but pages reserved for {len(lease.pages) * PAGE_TOKENS}")
        run = encode(new_tokens)
        asked = lease.prompt.run(start, stop)
        if not run.startswith(asked):
            raise AssertionError(f"tokens at {start} differ from the prompt that the lease was opened with")
        lease.tokens.frombytes(run)
        if asked and stop >= len(lease.prompt):
            self._promises.discard(lease)
        while self.enable_prefix_caching and (len(lease.hashes) + 1) * PAGE_TOKENS <= stop:
            self._hash_next(lease)
            self._publish(lease, len(lease.hashes))
        if self.tiers is not None and self.enable_prefix_caching:
            self.tiers.advanced(lease, start)

    def snapshot(self, lease: Lease, *, rolling: bool = False, inside: bool = False) -> bool:
        """Publish the lease's position as a landing point: its partial page, and for ring models the ring state.

        ``rolling``: it replaces the lease's previous rolling one. ``inside``: the slot is ahead of the position, whose
        ring state is in ``lease.saves`` or lost. False: nothing could be published (no row, caching off, no token).
        """
        if not self.enable_prefix_caching or not lease.tokens or (self.has_rings and not self.snapshots.count):
            return False
        whole, length = divmod(lease.position, PAGE_TOKENS)
        self._publish(lease, whole)
        parent = self.index.entries[lease.hashes[whole - 1]] if whole else self.index.base(lease.prompt.root)
        tokens = lease.tokens[whole * PAGE_TOKENS :]
        key = page_hash(parent.key, tokens) if length else parent.key
        if self.has_rings:
            if not self._publish_snapshot(lease, key, parent, encode(tokens), rolling, inside):
                return False
        elif length and not self.index.extends(parent, encode(tokens)):
            self._add(key, parent, encode(tokens), lease.pages[whole])
        if self.tiers is not None and not rolling:
            # Without rings a longer sibling may stand for this point.
            self.tiers.landed(lease, self.index.get(key) or self.index.covering(parent, encode(tokens)) or parent)
        return True

    def _publish_snapshot(
        self, lease: Lease, key: bytes, parent: Entry, run: bytes, rolling: bool, inside: bool
    ) -> bool:
        """Keep the ring state under ``key``: the page that ends here, or a new tail of ``run`` after ``parent``."""
        entry = self.index.get(key)
        if entry is not None and entry.snapshot is not None:
            self.snapshots.touch(entry.snapshot)
            if not rolling:
                entry.rolling_of = None  # from now on it stays, also if its lease moves on
            elif entry is not lease.rolling:
                self._drop_rolling(lease)
            return True
        if rolling:
            self._drop_rolling(lease)
        row = lease.saves.pop(lease.position, None) if inside else self._save_slot(lease.slot)
        if row is None:
            return False
        entry = entry or self._add(key, parent, run, lease.pages[parent.depth])
        entry.snapshot = row
        self.snapshots.attach(row, entry)
        if rolling:
            entry.rolling_of, lease.rolling = lease, entry
        return True

    def fork(self, lease: Lease) -> Lease:
        """A second sequence with the same past: shares the full pages, copies the partial page and the slot.

        Raises CapacityError if there is no slot, or no page for the copy.
        """
        if not self.free_slots:
            raise CapacityError(f"all {self.num_slots} slots are in use")
        whole, length = divmod(lease.position, PAGE_TOKENS)
        if length and not self.pool.available:
            raise CapacityError(f"no page for the copy: all {self.pool.count} are held")
        with ExitStack() as undo:
            child = self._new_lease(lease.prompt)
            undo.callback(self._abandon, child)
            for page in lease.pages[:whole]:
                self._hold(child, page)
            if length:
                self._copy_partial(child, lease.pages[whole])
            self._store.copy_slot(lease.slot, child.slot)
            undo.pop_all()
        child.tokens = lease.tokens[:]
        child.hashes = list(lease.hashes)
        child.cached_tokens = lease.cached_tokens
        return child

    def close(self, lease: Lease) -> None:
        """End a sequence (finished, cancelled, failed or preempted): published pages become cached, the others free."""
        if self.leases.get(lease.slot) is not lease:
            raise AssertionError(f"lease of slot {lease.slot} is not open")
        if lease.rolling is not None and lease.rolling.rolling_of is lease:
            lease.rolling.rolling_of = None
        lease.rolling = None
        self._abandon(lease)

    def begin_load(self, chain: TokenChain, shared: int, wanted: int, ring: bool) -> Load:
        """Reserve what a load from a slower tier needs: the first ``shared`` pages of ``chain``, which are published
        and are held so that the chain does not break meanwhile, ``wanted`` pages to fill, and with ``ring`` a snapshot
        row. Raises CapacityError.
        """
        entries = [self.index.entries[chain.page_hash(page)] for page in range(shared)]
        if wanted > self.pool.available - sum(entry.page in self.pool.cached for entry in entries):
            raise CapacityError(f"{wanted} pages wanted for a load, {self.pool.available} are free or cached")
        row = self._snapshot_row() if ring else None
        if ring and row is None:
            raise CapacityError(f"all {self.snapshots.count} snapshot rows are in use")
        load = Load(chain, shared, [entry.page for entry in entries], row)
        for page in load.pages:
            self.pool.hold(page)
        if wanted:
            room = max(wanted, pages_for(len(chain)) - shared)
            load.pages.extend(self._take(wanted, load.pages[-1] if shared else None, room))
        self.loads.append(load)
        return load

    def end_load(self, load: Load, whole: int, tail: tuple[bytes, bytes] | None, ring: bool) -> None:
        """Publish what a load brought, exactly like what was computed, and give the rest back.

        ``whole``: so many pages of the chain are there, the shared ones included. ``tail``: key and run of what the
        next page holds. ``ring``: the row holds the ring state behind the last of them. What somebody else has
        published meanwhile stays as it is, and the loaded copy goes.
        """
        at = self.index.base(load.chain.root)
        for page in range(whole):
            key, run = load.chain.page_hash(page), load.chain.run(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            at = self.index.get(key) or self._add(key, at, run, load.pages[page])
        if tail is not None and self.has_rings <= ring:  # a tail of a ring model is nothing without its snapshot
            at = self.index.get(tail[0]) or self._add(tail[0], at, tail[1], load.pages[whole])
        if load.row is not None:
            if ring and at.parent is not None and at.snapshot is None:
                at.snapshot = load.row
                self.snapshots.attach(load.row, at)
            else:
                self.snapshots.release(load.row)
        self.loads.remove(load)
        for page in reversed(load.pages):
            self._release(page)

    def check(self) -> None:
        """Audit everything, O(pages + published tokens). Raises AssertionError that lists each difference."""
        rings, caching = self.has_rings, self.enable_prefix_caching
        differences = [
            *audit.pages(self.pool, self.index, self.leases, self.loads),
            *audit.loads(self.pool, self.index, self.loads),
            *audit.slots(self.free_slots, self.num_slots, self.leases),
            *audit.reading(self._promises, self.leases),
            *audit.positions(self.pool, self.leases, caching),
            *audit.tree(self.index, rings, caching),
            *audit.shared_pages(self.index, self.leases),
            *audit.snapshots(self.snapshots, self.index, self.leases, self.loads),
        ]
        if differences:
            raise AssertionError("prefix cache audit:\n" + "\n".join(differences))

    def _new_lease(self, prompt: TokenChain) -> Lease:
        lease = Lease(self.free_slots.pop(), prompt)
        self.leases[lease.slot] = lease
        self._promises.add(lease)
        return lease

    def _hold(self, lease: Lease, page: int) -> None:
        self.pool.hold(page)
        lease.pages.append(page)

    def _abandon(self, lease: Lease) -> None:
        """Drop references and slot. Deepest page first, so that it is also the first to be evicted."""
        for page in reversed(lease.pages):
            self._release(page)
        self._give_back_saves(lease)
        lease.pages = []
        lease.closed = True
        self._promises.discard(lease)
        del self.leases[lease.slot]
        self.free_slots.append(lease.slot)

    def _release(self, page: int) -> None:
        self.pool.release(page, keep=page in self.index.on_page)
        self._offer(page)

    def _offer(self, page: int) -> None:
        if page >= 0 and self.index.is_leaf(page):
            self.pool.offer(page)

    def _can_copy(self, landing: Landing) -> bool:
        """Whether a page is left for the copy once the pages that the landing needs are held."""
        needed = {entry.page for entry in landing.whole()}
        if landing.partial is not None:
            needed.add(landing.partial.page)
        return self.pool.available > sum(page in self.pool.cached for page in needed)

    def _copy_partial(self, lease: Lease, source: int) -> None:
        """Append a private copy of ``source``, which must not be evicted to make room for it."""
        self.pool.hold(source)
        try:
            last = lease.pages[-1] if lease.pages else None
            room = max(1, pages_for(len(lease.prompt)) - len(lease.pages))
            target = self._take(1, last, room)[0]
            lease.pages.append(target)
            self._store.copy_page(source, target)
        finally:
            self._release(source)

    def _take(self, wanted: int, after: int | None, room: int) -> list[int]:
        """Pages for one lease, evicting where needed; the caller has checked that there are enough."""
        if len(self.pool.free) < wanted:
            ahead = min(max(wanted, min(room, EVICT_AHEAD)), self.pool.available)
            with self._losing():
                while len(self.pool.free) < ahead:
                    self._evict_page()
        pages = self.pool.take(wanted, after, room)
        self._store.taken(pages)
        return pages

    def _evict_page(self) -> None:
        page = self.pool.oldest(self.index.is_leaf)
        if page is None:
            # Every cached page has published children, at last on held pages: a lease computed its own copy of a
            # published prefix and went on. The deepest goes; what hangs on it is unpublished, until its lease
            # republishes it.
            page = max(self.pool.cached, key=lambda p: (self.index.on_page[p][0].depth, p))
        for entry in list(self.index.on_page[page]):
            for each in self.index.subtree(entry):
                self._lose(each)
                self._remove(each)
        self.pages_evicted += 1

    def _lose(self, entry: Entry, page: bool = True) -> None:
        """Content is about to be evicted: the slower tiers may keep it, and a later miss can say so."""
        self.evicted.add(entry, page)
        if self.tiers is not None:
            self.tiers.evicting(entry, page)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """What is lost in here may be overwritten behind it."""
        try:
            yield
        finally:
            if self.tiers is not None:
                self.tiers.evicted()

    def _remove(self, entry: Entry) -> None:
        """Unpublish one entry; its page becomes free if nothing else keeps it."""
        if entry.snapshot is not None:
            self.snapshots.release(entry.snapshot)
        entry.snapshot = entry.rolling_of = None
        if self.index.remove(entry):
            self._free_if_cached(entry.page)
        if entry.parent is not None:
            self._offer(entry.parent.page)

    def _free_if_cached(self, page: int) -> None:
        if page in self.pool.cached:
            self.pool.discard(page)

    def _hash_next(self, lease: Lease) -> None:
        page = len(lease.hashes)
        stop = (page + 1) * PAGE_TOKENS
        if stop <= len(lease.prompt):
            lease.hashes.append(lease.prompt.page_hash(page))
            return
        parent = lease.hashes[-1] if page else lease.prompt.root
        lease.hashes.append(page_hash(parent, lease.tokens[stop - PAGE_TOKENS : stop]))

    def _publish(self, lease: Lease, pages: int) -> None:
        """See that the lease's first ``pages`` full pages are in the index; normally only the last is missing."""
        known = pages
        while known and self.index.get(lease.hashes[known - 1]) is None:
            known -= 1
        parent = (self.index.get(lease.hashes[known - 1]) if known else None) or self.index.base(lease.prompt.root)
        for page in range(known, pages):
            start, stop = page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS
            # A commit has seen that the tokens are the prompt's, whose bytes are there already.
            run = lease.prompt.run(start, stop) if stop <= len(lease.prompt) else encode(lease.tokens[start:stop])
            parent = self._add(lease.hashes[page], parent, run, lease.pages[page])

    def _add(self, key: bytes, parent: Entry, run: bytes, page: int) -> Entry:
        entry, bare = self.index.add(key, parent, run, page)
        for each in bare:
            self._free_if_cached(each)
        if not self.has_rings:  # the longest tail of a lineage serves all shorter ones
            for shorter in list(self.index.prefixes(parent, run)):
                self._remove(shorter)
        return entry

    def _drop_rolling(self, lease: Lease) -> None:
        previous, lease.rolling = lease.rolling, None
        if previous is not None and previous.rolling_of is lease:
            self._drop_snapshot(previous)

    def _snapshot_row(self) -> int | None:
        row = self.snapshots.acquire()
        if row is None:
            victim = self.snapshots.oldest()
            if victim is not None:
                self.snapshots_evicted += 1
                with self._losing():
                    self._lose(victim, page=not victim.full)
                self._drop_snapshot(victim)
                row = self.snapshots.acquire()
        return row

    def _save_slot(self, slot: int) -> int | None:
        row = self._snapshot_row()
        if row is None:
            return None
        with ExitStack() as undo:
            undo.callback(self.snapshots.release, row)
            self._store.save_snapshot(slot, row)
            undo.pop_all()
        return row

    def _give_back_saves(self, lease: Lease) -> None:
        for row in lease.saves.values():
            self.snapshots.release(row)
        lease.saves.clear()
        lease.landings = ()

    def _drop_snapshot(self, entry: Entry) -> None:
        """A full page stays without its snapshot; a tail of a ring model is nothing without it."""
        if entry.full:
            if entry.snapshot is not None:
                self.snapshots.release(entry.snapshot)
            entry.snapshot = entry.rolling_of = None
        else:
            self._remove(entry)
