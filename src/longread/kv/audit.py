"""The audit of a prefix cache: recomputes from leases and entries what the pools believe, and yields every difference.

Reads everything, changes nothing. O(pages + published tokens).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from longread.kv.index import Entry, PrefixIndex
from longread.kv.lease import Lease, Load
from longread.kv.pool import PagePool
from longread.kv.snapshots import SnapshotPool
from longread.spec.state import PAGE_TOKENS, page_hash

Leases = Mapping[int, Lease]


def pages(pool: PagePool, index: PrefixIndex, leases: Leases, loads: Sequence[Load]) -> Iterator[str]:
    """Free + held + cached = all, without overlap; references are the leases' and loads'; kept pages are the published
    ones.
    """
    references = Counter(page for lease in leases.values() for page in lease.pages)
    references.update(page for load in loads for page in load.pages)
    runs = pool.free.runs()
    free = {page for start, end in runs for page in range(start, end)}
    if len(free) != len(pool.free) or any(left[1] >= right[0] for left, right in pairwise(runs)):
        yield f"free runs overlap, touch, or miscount: {runs}, counted {len(pool.free)}"
    if len(pool.free) + len(references) + len(pool.cached) != pool.count or pool.held != len(references):
        yield f"free {len(pool.free)} + held {pool.held} + cached {len(pool.cached)}: {pool.count} pages"
    if stray := (free | set(references) | set(pool.cached) | set(index.on_page)) - set(range(pool.count)):
        yield f"pages {sorted(stray)} do not exist"
    for page in range(pool.count):
        held, cached, published = references[page], page in pool.cached, page in index.on_page
        if pool.references[page] != held:
            yield f"page {page}: {pool.references[page]} references, {held} leases"
        if (held > 0) + cached + (page in free) != 1:
            yield f"page {page}: held {held}, cached {cached}, free {page in free}"
        if (cached and not published) or (published and page in free):
            yield f"page {page}: published {published}, cached {cached}, free {page in free}"


def loads(pool: PagePool, index: PrefixIndex, loading: Sequence[Load]) -> Iterator[str]:
    """A page that is being filled is nobody else's and publishes nothing."""
    for load in loading:
        for page in load.pages[load.shared :]:
            if pool.references[page] != 1 or page in index.on_page:
                yield f"page {page} is being loaded: {pool.references[page]} holders, on index {page in index.on_page}"


def slots(free: list[int], count: int, leases: Leases) -> Iterator[str]:
    """Free + held = all; each lease knows its own slot."""
    if sorted([*free, *leases]) != list(range(count)):
        yield f"slots free {free} + held {sorted(leases)} are not 0 .. {count - 1}"
    for slot, lease in leases.items():
        if lease.slot != slot or lease.closed:
            yield f"lease of slot {slot} says slot {lease.slot}, closed {lease.closed}"


def reading(known: Iterable[Lease], leases: Leases) -> Iterator[str]:
    """Every open lease that is still in front of its prompt's end is known as such once, and no closed one is."""
    listed = list(known)
    if any(leases.get(lease.slot) is not lease for lease in listed):
        yield "a closed lease counts as one that computes its prompt"
    times = Counter(lease.slot for lease in listed)
    for slot, lease in leases.items():
        if lease.position < len(lease.prompt) and times[slot] != 1:
            yield f"slot {slot} computes its prompt, and whoever waits for that would find it {times[slot]} times"


def positions(pool: PagePool, leases: Leases, caching: bool) -> Iterator[str]:
    """Each lease's pages cover its tokens; the ones it may still write to have no other holder."""
    for slot, lease in leases.items():
        whole = lease.position // PAGE_TOKENS
        if lease.position > len(lease.pages) * PAGE_TOKENS or len(set(lease.pages)) != len(lease.pages):
            yield f"slot {slot}: {lease.position} tokens on pages {lease.pages}"
        if caching and len(lease.hashes) != whole:
            yield f"slot {slot}: {len(lease.hashes)} hashes for {whole} full pages"
        for page in lease.pages[whole:]:
            if pool.references[page] != 1:
                yield f"slot {slot}: page {page} is written to and has {pool.references[page]} holders"


def tree(index: PrefixIndex, rings: bool, caching: bool) -> Iterator[str]:
    """Each entry is found by its identity, hangs on a published full page, and can be landed on."""
    roots = [index.root, *index.salted.values()]
    reachable = [entry for root in roots for entry in index.subtree(root)]
    if len(reachable) - len(roots) != len(index.entries):
        yield f"{len(index.entries)} entries, {len(reachable) - len(roots)} of them reachable"
    if any(not root.children or index.salted[key] is not root for key, root in index.salted.items()):
        yield "a salted root is kept that nothing hangs on"
    if not caching and index.entries:
        yield f"{len(index.entries)} entries although prefix caching is off"
    for entry in reachable:
        runs = [child.run for child in entry.children]
        if runs != sorted(set(runs)):
            yield f"children of the entry at {entry.end} are out of order"
        if entry.parent is not None:
            yield from _entry(index, entry, entry.parent, rings)


def _entry(index: PrefixIndex, entry: Entry, parent: Entry, rings: bool) -> Iterator[str]:
    tokens = memoryview(entry.run).cast("i").tolist()
    if index.entries.get(entry.key) is not entry or page_hash(parent.key, tokens) != entry.key:
        yield f"entry at {entry.end} on page {entry.page} has another identity"
    if not entry.full and (entry.children or not 0 < entry.length < PAGE_TOKENS):
        yield f"tail at {entry.end}: {entry.length} tokens, {len(entry.children)} children"
    if not entry.full and rings and entry.snapshot is None:
        yield f"tail at {entry.end} has no snapshot"
    if not rings and entry.snapshot is not None:
        yield f"entry at {entry.end} has a snapshot of nothing"


def shared_pages(index: PrefixIndex, leases: Leases) -> Iterator[str]:
    """Entries on one page are one lineage; what a lease's page publishes is what the lease has there."""
    listed = [(page, entry) for page, entries in index.on_page.items() for entry in entries]
    if len(listed) != len(index.entries) or any(entry.page != page for page, entry in listed):
        yield "entries are listed on another page than theirs, on several, or on none"
    for page, entries in index.on_page.items():
        lineage = sorted(entries, key=lambda entry: len(entry.run))
        for shorter, longer in pairwise(lineage):
            same_place = shorter.parent is longer.parent and shorter.run != longer.run
            if not (same_place and longer.run.startswith(shorter.run)):
                yield f"page {page}: the entries at {shorter.end} and {longer.end} are not one lineage"
    for slot, lease in leases.items():
        for at, page in enumerate(lease.pages):
            for entry in index.on_page.get(page, ()):
                own = lease.tokens[at * PAGE_TOKENS : at * PAGE_TOKENS + entry.length]
                if entry.depth != at + 1 or entry.run != own.tobytes():
                    yield f"slot {slot}: page {page} publishes other tokens than the lease has there"


def snapshots(pool: SnapshotPool[Entry], index: PrefixIndex, leases: Leases, loading: Sequence[Load]) -> Iterator[str]:
    """Free + held + being filled = all; entry and row know each other; a rolling snapshot is known to its lease."""
    filling = [load.row for load in loading if load.row is not None]
    filling += [row for lease in leases.values() for row in lease.saves.values()]
    rows = sorted([*pool.free, *pool.owners, *pool.doomed, *filling])
    if rows != list(range(pool.count)):
        yield f"snapshots free + held are {rows}, not 0 .. {pool.count - 1}"
    owned = {entry.snapshot: entry for entry in index.entries.values() if entry.snapshot is not None}
    if owned != dict(pool.owners):
        yield f"snapshot rows of entries are {sorted(owned)}, of the pool {sorted(pool.owners)}"
    for entry in owned.values():
        if entry.rolling_of is not None and not any(
            lease is entry.rolling_of and lease.rolling is entry for lease in leases.values()
        ):
            yield f"snapshot at {entry.end} is the rolling one of a lease that does not know it"
