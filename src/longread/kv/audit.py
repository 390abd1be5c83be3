"""The audit of a prefix cache: recomputes from leases and entries what the pools believe, and lists every difference.

Reads everything, changes nothing. O(pages + published tokens).
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from longread.kv.chain import ID_BYTES
from longread.kv.index import Entry
from longread.spec.state import PAGE_TOKENS, page_hash

if TYPE_CHECKING:
    from longread.kv.cache import KVCache


def audit(cache: "KVCache") -> list[str]:
    """Differences between what is and what must be, as sentences; empty when all is well."""
    return [*_pages(cache), *_leases(cache), *_tree(cache), *_shared_pages(cache), *_snapshots(cache)]


def _pages(cache: "KVCache") -> Iterator[str]:
    """Free + held + cached = all, without overlap; references are the leases'; kept pages are the published ones."""
    pool = cache.pool
    references = Counter(page for lease in cache.leases.values() for page in lease.pages)
    runs = pool.free.runs()
    free = {page for start, end in runs for page in range(start, end)}
    if len(free) != len(pool.free) or any(a[1] >= b[0] for a, b in zip(runs, runs[1:], strict=False)):
        yield f"free runs overlap, touch, or miscount: {runs}, counted {len(pool.free)}"
    if len(pool.free) + pool.held + len(pool.cached) != pool.count or not free <= set(range(pool.count)):
        yield f"free {len(pool.free)} + held {pool.held} + cached {len(pool.cached)} is not {pool.count}"
    for page in range(pool.count):
        held, cached, published = references[page], page in pool.cached, page in cache.index.on_page
        if pool.references[page] != held:
            yield f"page {page}: {pool.references[page]} references, {held} leases"
        if (held > 0) + cached + (page in free) != 1:
            yield f"page {page}: held {held}, cached {cached}, free {page in free}"
        if (cached and not published) or (published and page in free):
            yield f"page {page}: published {published}, cached {cached}, free {page in free}"


def _leases(cache: "KVCache") -> Iterator[str]:
    slots = sorted([*cache.free_slots, *cache.leases])
    if slots != list(range(cache.num_slots)):
        yield f"slots free + held are {slots}, not 0 .. {cache.num_slots - 1}"
    for slot, lease in cache.leases.items():
        whole = lease.position // PAGE_TOKENS
        if lease.slot != slot or lease.closed:
            yield f"lease of slot {slot} says slot {lease.slot}, closed {lease.closed}"
        if lease.position > len(lease.pages) * PAGE_TOKENS or len(set(lease.pages)) != len(lease.pages):
            yield f"slot {slot}: {lease.position} tokens on pages {lease.pages}"
        if cache.enable_prefix_caching and len(lease.hashes) != whole:
            yield f"slot {slot}: {len(lease.hashes)} hashes for {whole} full pages"
        for page in lease.pages[whole:]:
            if cache.pool.references[page] != 1:
                yield f"slot {slot}: page {page} is still written to and has {cache.pool.references[page]} holders"


def _tree(cache: "KVCache") -> Iterator[str]:
    """Each entry is found by its identity, hangs on a published full page, and is listed where it should be."""
    index = cache.index
    below = index.subtree(index.root)
    if len(below) - 1 != len(index.entries):
        yield f"{len(index.entries)} entries, {len(below) - 1} of them reachable"
    for entry in below:
        runs = [child.run for child in entry.children]
        if runs != sorted(set(runs)):
            yield f"children of the entry at {entry.end} are out of order"
        if entry.parent is None:
            continue
        ids = memoryview(entry.run).cast("i")
        if index.entries.get(entry.key) is not entry or page_hash(entry.parent.key, ids.tolist()) != entry.key:
            yield f"entry at {entry.end} on page {entry.page} has another identity"
        if entry not in index.on_page.get(entry.page, ()):
            yield f"entry at {entry.end} is not listed on its page {entry.page}"
        if not entry.full and (entry.children or not 0 < entry.length < PAGE_TOKENS):
            yield f"tail at {entry.end}: {entry.length} tokens, {len(entry.children)} children"
        if not entry.full and cache.has_rings and entry.snapshot is None:
            yield f"tail at {entry.end} has no snapshot"
    if not cache.enable_prefix_caching and index.entries:
        yield f"{len(index.entries)} entries although prefix caching is off"


def _shared_pages(cache: "KVCache") -> Iterator[str]:
    """Entries on one page are one lineage; a lease's published rows are where its own tokens say."""
    if sum(map(len, cache.index.on_page.values())) != len(cache.index.entries):
        yield "entries are listed on more than one page, or on none"
    for page, entries in cache.index.on_page.items():
        lineage = sorted(entries, key=lambda entry: len(entry.run))
        for shorter, longer in zip(lineage, lineage[1:], strict=False):
            if (
                shorter.parent is not longer.parent
                or not longer.run.startswith(shorter.run)
                or shorter.run == longer.run
            ):
                yield f"page {page} carries entries that are not prefixes of one another, at {shorter.end} and {longer.end}"
    for lease in cache.leases.values():
        for at, page in enumerate(lease.pages):
            for entry in cache.index.on_page.get(page, ()):
                own = lease.tokens[at * PAGE_TOKENS : at * PAGE_TOKENS + len(entry.run) // ID_BYTES]
                if entry.depth != at + 1 or memoryview(entry.run).cast("i").tolist() != own:
                    yield f"slot {lease.slot}: page {page} publishes other tokens than the lease has there"


def _snapshots(cache: "KVCache") -> Iterator[str]:
    pool = cache.snapshots
    rows = sorted([*pool.free, *pool.owners, *pool.doomed])
    if rows != list(range(pool.count)):
        yield f"snapshots free + held are {rows}, not 0 .. {pool.count - 1}"
    owned: dict[int | None, Entry] = {e.snapshot: e for e in cache.index.entries.values() if e.snapshot is not None}
    if owned != dict(pool.owners):
        yield f"snapshots owned by entries are {sorted(map(str, owned))}, by the pool {sorted(pool.owners)}"
    for entry in owned.values():
        lease = entry.rolling_of
        if lease is not None and not any(lease is each and each.rolling is entry for each in cache.leases.values()):
            yield f"snapshot at {entry.end} is the rolling one of a lease that does not know it"
