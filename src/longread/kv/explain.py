"""Why a prompt reused what it did, and no more: a report made once a request, when it is admitted.

Knows the index, the tiers and what was evicted; changes nothing.
"""

from dataclasses import dataclass

from longread.kv.cache import KVCache
from longread.kv.chain import TokenChain, common_tokens
from longread.kv.policy import WAIT_GAIN
from longread.kv.records import CONTENT_ROOT, chain_key
from longread.kv.tiers import Source, Tiers
from longread.kv.transfer import Fault, Move, Tier, Transfer
from longread.spec.reuse import Excerpt, MissReason, Reuse
from longread.spec.state import PAGE_TOKENS

FAR = 4  # times as much known text lost as new text, and as many pages: then the missing snapshot is the reason
EXCERPT_BEFORE = 24  # tokens of common text shown before a difference
EXCERPT_AFTER = 24


@dataclass(frozen=True, slots=True)
class _Extent:
    """``known``: tokens of the prompt that some tier has seen, in order. ``beside``: the run that shares most with what
    follows the last whole page, from ``start``.
    """

    known: int
    start: int
    beside: bytes


def explain(
    cache: KVCache, tiers: Tiers | None, chain: TokenChain, cached_tokens: int, transfers: list[Transfer]
) -> Reuse:
    """``cached_tokens`` of ``chain`` were reused; ``transfers`` brought some of them for this request."""
    device, host, disk = _by_tier(chain, cached_tokens, transfers)
    total = len(chain)
    if not cache.enable_prefix_caching:
        note = "prefix caching is off (enable_prefix_caching)"
        return Reuse(total, recomputed_tokens=total, reason="caching off", note=note)
    reason, at, note, excerpt = _reason(cache, tiers, chain, cached_tokens, transfers)
    return Reuse(total, device, host, disk, total - cached_tokens, reason, at, note, excerpt)


def _by_tier(chain: TokenChain, cached_tokens: int, transfers: list[Transfer]) -> tuple[int, int, int]:
    """Tokens by where their page came from; a partial page counts like the record that it was copied from."""
    origin: dict[bytes, Tier] = {}
    tail: Tier | None = None
    for transfer in transfers:
        moved = transfer.moves[: transfer.moved]
        origin.update((move.known.key, move.source) for move in moved if move.known.kind != "ring")
        if transfer.tail is not None and transfer.tokens == cached_tokens:
            key = transfer.tail.key
            tail = next((move.source for move in moved if move.known.key == key and move.known.kind != "ring"), tail)
    counts = {"device": 0, "host": 0, "disk": 0}
    if not origin:
        return cached_tokens, 0, 0
    for key in chain.page_hashes(0, cached_tokens // PAGE_TOKENS):
        counts[origin.get(key, "device")] += PAGE_TOKENS
    counts[tail or "device"] += cached_tokens % PAGE_TOKENS
    return counts["device"], counts["host"], counts["disk"]


def _reason(
    cache: KVCache, tiers: Tiers | None, chain: TokenChain, cached: int, transfers: list[Transfer]
) -> tuple[MissReason, int | None, str, Excerpt | None]:
    total = len(chain)
    if total - 1 - cached < (1 if cache.has_rings else cache.grain):
        return "complete", None, "everything but the last tokens was reused", None
    failed = next((transfer for transfer in transfers if transfer.broken is not None), None)
    if failed is not None and failed.broken is not None:
        return _broken(failed.broken, failed.fault)
    extent = _extent(cache, tiers, chain)
    known = max(extent.known, cached)
    whole = extent.start // PAGE_TOKENS
    # A prompt that is known to its end differs from nothing, whatever went on behind it.
    apart = known < total and known == extent.known and extent.start + len(extent.beside) // 4 > known >= WAIT_GAIN
    lost, new = known - cached, total - known
    # Behind a difference a short way back to the last snapshot is what the policy allows for, not the reason.
    if lost > (max(FAR * new, FAR * PAGE_TOKENS) if apart else new):
        return _short_landing(cache, chain, cached, known)
    if apart:
        note = f"the text differs from what was read before at token {known}"
        return "differs", known, note + _distance(cached, known), _excerpt(chain, extent)
    if known == extent.known and cache.evicted.after(chain, whole):
        note = f"what follows token {extent.start} was read before and has been evicted"
        return "evicted", known, note + _distance(cached, known), None
    unsalted = chain.root == cache.index.root.key  # what a salt keeps apart is not looked for elsewhere either
    others = _elsewhere(tiers, chain) if known < PAGE_TOKENS and unsalted else []
    if others:
        note = f"the text was read under {', '.join(others)}, whose cache has another format"
        return "other model or format", known, note, None
    if cached:
        note = f"the last {new} tokens are new: nothing that was read before goes on after token {known}"
        return "new text", known, note + _distance(cached, known), None
    note = f"nothing was read before that goes on after token {known}" if known else "nothing was read before"
    return "never seen", known, note + _distance(cached, known), None


def _broken(move: Move, fault: Fault) -> tuple[MissReason, int, str, None]:
    """A load that ended early, at one of its records."""
    at = (move.known.depth - 1) * PAGE_TOKENS
    what = f"the stored {move.known.kind} of tokens {at} to {at + PAGE_TOKENS}"
    if fault == "corrupt":
        return "corrupt record", at, f"{what} was damaged; it was dropped and computed again", None
    if fault == "absent":
        return "evicted", at, f"{what} was evicted between its look-up and its load", None
    return "store failed", at, f"{what} could not be read: the store failed (see the server's log)", None


def _short_landing(
    cache: KVCache, chain: TokenChain, cached: int, known: int
) -> tuple[MissReason, int | None, str, Excerpt | None]:
    """The text is known further than the prompt could land."""
    pages = range(cached // PAGE_TOKENS, known // PAGE_TOKENS)
    gone = [page for page in pages if cache.evicted.ring(chain.page_hash(page))]
    if gone:
        at = (gone[-1] + 1) * PAGE_TOKENS
        note = f"{known} tokens are known, but the snapshot at {at} was evicted; landed at {cached}"
        return "evicted", at, note, None
    return "no snapshot", known, f"{known} tokens are known, but the last snapshot among them is at {cached}", None


def _distance(cached: int, known: int) -> str:
    return f"; {known - cached} known tokens before it had no snapshot to land on" if known > cached else ""


def _extent(cache: KVCache, tiers: Tiers | None, chain: TokenChain) -> _Extent:
    """How far the prompt is known, whatever can be landed on."""
    index, sources = cache.index, list[Source]()
    if tiers is not None:
        shared, sources = tiers.pages_of(chain, len(chain))
    else:
        shared = index.deepest(chain, len(chain) // PAGE_TOKENS).depth
    whole = shared + len(sources)
    start = whole * PAGE_TOKENS
    ahead = chain.run(start, min(len(chain), start + PAGE_TOKENS))
    parent = chain.page_hash(whole - 1) if whole else chain.root
    entry = index.get(parent) if whole else index.base(chain.root)
    beside, most = b"", -1
    closest = index.closest(entry, ahead)[0] if entry is not None else None
    runs = [] if closest is None else [closest.run]
    runs += [source.known.run for source in tiers.after(parent, ahead)] if tiers is not None else []
    for run in runs:
        common = common_tokens(run, ahead)
        if (common, len(run)) > (most, len(beside)):
            beside, most = run, common
    return _Extent(start + max(most, 0), start, beside)


def _excerpt(chain: TokenChain, extent: _Extent) -> Excerpt:
    """Both texts around the difference, as far back as the run goes (a page at most)."""
    first = max(extent.known - EXCERPT_BEFORE, extent.start)
    asked = chain.ids[first : extent.known + EXCERPT_AFTER]
    beside = memoryview(extent.beside).cast("i")[first - extent.start :]
    return Excerpt(first, tuple(asked), tuple(beside[: extent.known - first + EXCERPT_AFTER]))


def _elsewhere(tiers: Tiers | None, chain: TokenChain) -> list[str]:
    if tiers is None or len(chain) < PAGE_TOKENS:
        return []
    return tiers.other_roots(chain_key(CONTENT_ROOT, chain.run(0, PAGE_TOKENS)))
