"""Under what a warm claim would be true: suffix, hits, tiers and links, memory, snapshots, the CPU's part."""

from longread.plan.claims.claim import Claim
from longread.plan.claims.limits import (
    generous,
    largest_suffix,
    ring_rebuild_tokens,
    suffix_seconds,
    usual_cache,
)
from longread.plan.claims.plans import capacity_at
from longread.plan.claims.words import many, seconds, size, tokens
from longread.plan.communication import host_rate
from longread.plan.deployment import Deployment
from longread.plan.floor import cached_bytes
from longread.plan.frontend import RATES
from longread.plan.shards import cache_share
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

_JSON_IDS = 0.169 / 524288  # s a token id in a JSON list; a body of text parses ten times faster (2 cores)


def warm_conditions(
    claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment], requests: int
) -> list[str]:
    """Each with its figures; what the claim already grants is not asked again."""
    assert claim.ttft is not None and claim.isl is not None
    lines = [*_suffix(claim, spec, hardware, requests), *_memory(claim, spec, hardware, plans)]
    lines += _tiers(claim, spec, hardware, requests)
    lines += _snapshot(spec, hardware, claim.isl, claim.ttft)
    lines += _front_end(claim)
    if claim.streams > 1 and requests == 1 and claim.together is None:
        lines.append("arrivals are spread: the others wait or decode while one suffix is read")
    return lines


def _suffix(claim: Claim, spec: ModelSpec, hardware: Hardware, requests: int) -> list[str]:
    assert claim.ttft is not None and claim.isl is not None
    fits = largest_suffix(spec, generous(hardware), claim.isl, claim.ttft / requests)
    each = f" each, {requests} at once" if requests > 1 else ""
    if claim.new_tokens is not None:
        return []
    ratio = 1 - max(fits, 1) / claim.isl
    shown = f"{ratio:.4%}" if ratio > 0.99 else f"{ratio:.1%}"
    line = (
        f"at most {tokens(fits)} new tokens{each} (50 % of the peak: {tokens(fits / 2)}): a hit ratio of {shown} or "
        "more; loads and the CPU's part take from the same budget"
    )
    return [line]


def _memory(claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment]) -> list[str]:
    isl = claim.isl
    assert isl is not None
    one = cached_bytes(spec, usual_cache(spec, hardware, claim.cache), isl)
    lines = [f"the exact prefix is resident: {size(one)} a context"]
    if claim.streams == 1:
        return lines
    copied = max((capacity_at(d, isl).sessions for d in plans if _replicates(d)), default=None)
    split = max((capacity_at(d, isl).sessions for d in plans if not _replicates(d)), default=None)
    shown = ", ".join(
        f"{value:,.1f} where the cache is {how}"
        for how, value in (("copied to every card (TP)", copied), ("sharded (DP or CP)", split))
        if value is not None
    )
    total = f"{claim.streams} distinct contexts are {size(claim.streams * one)}"
    most = max(copied or 0.0, split or 0.0)
    if most >= claim.streams:
        only = "" if (copied or 0.0) >= claim.streams else " only if sharded"
        lines.append(f"{total}: they fit the cards{only} (resident: {shown}); one shared document fits anywhere")
    else:
        lines.append(
            f"the {claim.streams} are about one shared document (or few): {total}, which the cards do not hold "
            f"(resident: {shown or 'none'})"
        )
    return lines


def _replicates(d: Deployment) -> bool:
    s = d.strategy
    return s.tp * s.cp > s.dp * cache_share(d)


def _tiers(claim: Claim, spec: ModelSpec, hardware: Hardware, requests: int) -> list[str]:
    """Loads from host memory over one link and all links, and from disk where its rate is known."""
    rate, isl, ttft = host_rate(hardware.card), claim.isl, claim.ttft
    assert isl is not None and ttft is not None
    if rate is None or claim.tier == "device":
        return []
    one, links = cached_bytes(spec, usual_cache(spec, hardware, claim.cache), isl), hardware.total_gpus
    budget = max(ttft - suffix_seconds(spec, generous(hardware), 1, isl) * requests, 0.0)
    line = (
        f"from pinned host memory ({rate / 1e9:.3g} GB/s a link): {seconds(one / rate)} over one link, "
        f"{seconds(one / rate / links)} over {links}"
    )
    needed = -(-one // (budget * rate)) if budget else float("inf")
    line += f"; it takes {many(needed, 'link')} or more" if needed <= links else f"; {links} links are not enough"
    lines = [line]
    if claim.streams > 1 and claim.shared is not True:
        lines.append(
            f"{claim.streams} distinct contexts from host at once: {seconds(claim.streams * one / rate / links)} over "
            f"{links} links"
        )
    disk = hardware.disk_read.value if hardware.disk_read is not None else 28e9
    known = "" if hardware.disk_read is not None else " (four NVMe; yours is not known)"
    lines.append(f"from disk at {disk / 1e9:.3g} GB/s{known}: {seconds(one / disk)}")
    return lines


def _snapshot(spec: ModelSpec, hardware: Hardware, isl: int, ttft: float) -> list[str]:
    again = ring_rebuild_tokens(spec)
    if not again or again >= isl:
        return []
    cost = suffix_seconds(spec, generous(hardware), again, isl)
    over = "over the budget by itself" if cost > ttft else f"{cost / ttft:.0%} of the budget"
    line = (
        "windows and compressor state were saved at the end of the hit: rebuilding them exactly takes "
        f"{again:,} tokens = {seconds(cost)} at 100 % of the peak, {over}"
    )
    return [line]


def _front_end(claim: Claim) -> list[str]:
    isl, ttft = claim.isl, claim.ttft
    assert isl is not None and ttft is not None
    if claim.ids:
        return []
    slow, fast = RATES["vllm"].tokenise * isl, RATES["longread"].tokenise * isl
    if slow < 0.02 * ttft:
        return []
    lists = _JSON_IDS * isl
    line = (
        f"the text is not tokenised anew by a usual tokenizer ({seconds(slow)} on two cores; a fast exact one "
        f"{seconds(fast)}), or the clock starts behind it, or token ids come in (not as a JSON list: {seconds(lists)})"
    )
    return [line]
