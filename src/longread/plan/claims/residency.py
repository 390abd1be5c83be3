"""Claims of what fits: the weights, one context of the claimed length, and as many at once as are claimed."""

from collections.abc import Iterable

from longread.plan.claims.claim import Claim, Finding, Outcome
from longread.plan.claims.limits import (
    sessions_most,
    smallest_cache,
    usable_total,
    usual_cache,
    weights_least,
    weights_native,
)
from longread.plan.claims.plans import Planned, as_released, candidates, capacity_at, held_at_most, no_plan, squeezed
from longread.plan.claims.words import size
from longread.plan.deployment import Deployment
from longread.plan.estimate import Estimate
from longread.plan.floor import cached_bytes
from longread.plan.published_memory import against
from longread.plan.shards import cache_share
from longread.plan.space import other_checkpoint
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

MEMORY = "memory"
_USUAL = 1024  # tokens of a context where the claim says nothing


def judge_memory(claim: Claim, spec: ModelSpec, hardware: Hardware) -> Finding:
    """Whether the claimed contexts can be resident at once. ``floor``: the most that could, everything sharded."""
    context = (claim.isl or _USUAL) + (claim.osl or 0)
    wanted = claim.streams
    limit = sessions_most(spec, hardware, context, claim.cache)
    plans = candidates(claim, spec, hardware, context)
    held = held_at_most(plans, context)
    outcome, reasons, conditions = _outcome(claim, spec, hardware, plans, context, limit)
    predicted = None
    if held is not None:
        count = held[1].sessions
        predicted = Estimate(count * 0.9, count, count * 1.05, "interpolated", "planner's memory formula")
    return Finding(
        MEMORY,
        MEMORY,
        outcome,
        float(wanted),
        f"x {context:,} tokens",
        limit,
        predicted,
        tuple(reasons),
        tuple(_arithmetic(claim, spec, hardware, context, limit)),
        tuple(conditions),
        Planned(held[0], Estimate(0, 0, 0, "arithmetic")).label if held else "",
    )


def _outcome(
    claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment], context: int, limit: float
) -> tuple[Outcome, list[str], list[str]]:
    least, form = weights_least(spec, hardware)
    room, wanted = usable_total(hardware), claim.streams
    if least >= room:
        four = "4-bit experts" if form == "int4" else "its published weights"
        reason = f"the weights take {size(least)} with {four}; {hardware.label} has {size(room)}"
        return "impossible", [reason], []
    if limit < 1:
        one = cached_bytes(spec, smallest_cache(spec, claim.cache), context)
        return "impossible", [f"one context takes {size(one)}; {size(room - least)} are left beside the weights"], []
    held = held_at_most(plans, context)
    if held is None:
        return (
            "only if",
            [no_plan(claim, spec, hardware)],
            ["the claimant's split and weights fit"],
        )
    return _held(claim, spec, hardware, plans, held, context, limit, wanted)


def _held(
    claim: Claim,
    spec: ModelSpec,
    hardware: Hardware,
    plans: list[Deployment],
    held: tuple[Deployment, object],
    context: int,
    limit: float,
    wanted: int,
) -> tuple[Outcome, list[str], list[str]]:
    d, most = held[0], capacity_at(held[0], context).sessions
    label = Planned(d, Estimate(0, 0, 0, "arithmetic")).label
    reason = f"{most:,.1f} contexts of {context:,} tokens are predicted to fit ({label})"
    reported = [fact.words for fact in against(spec, hardware, context, wanted)]
    if most < 1:
        less = "less is kept beside the cache than engines keep: small chunks, few streams, no graphs"
        return "only if", [reason], [less, *reported]
    if wanted > limit:
        reason = f"{wanted} distinct contexts do not fit: {limit:,.1f} at most"
        if claim.shared is False:
            return "impossible", [reason], []
        turns = "the contexts share one document (or few), or wait in host memory and take turns"
        return "only if", [reason], [turns, *reported]
    if wanted > most:
        return "only if", [reason], ["the contexts share documents, or less is kept beside the cache", *reported]
    conditions = [*_needed(plans, context, wanted), *reported]
    if conditions:
        return "only if", [reason], conditions
    return ("conservative" if most > 4 * wanted else "plausible"), [reason], []


def _needed(plans: list[Deployment], context: int, wanted: int) -> list[str]:
    """What the plans that hold ``wanted`` contexts have in common beyond usual settings of the released model."""

    def holding(found: Iterable[Deployment]) -> list[Deployment]:
        return [d for d in found if capacity_at(d, context).sessions >= wanted]

    held, conditions = holding(plans), []
    if not any(map(as_released, held)):
        ways = []
        pressed = holding(squeezed(d) for d in plans if as_released(d))
        if pressed:
            d = pressed[0]
            ways.append(
                f"the engine gets {d.memory_share:.0%} of the memory, nothing else runs on the cards, and prompts are "
                f"read {d.chunk:,} tokens at a time"
            )
        rounded = [d for d in held if not other_checkpoint(d)]
        ways += [f"the cache is rounded to {rounded[0].cache} (the release is not)"] if rounded else []
        ways += [
            f"{experts} experts, another checkpoint"
            for experts in dict.fromkeys(d.experts for d in held if other_checkpoint(d))
        ]
        conditions.append("; or ".join(ways))
        held += pressed
    if wanted > 1 and not any(d.strategy.dp * cache_share(d) == 1 for d in held):
        conditions.append("the cache is sharded (DP attention or CP), not copied to every card")
    return conditions


def _arithmetic(claim: Claim, spec: ModelSpec, hardware: Hardware, context: int, limit: float) -> list[str]:
    least, form = weights_least(spec, hardware)
    native, room = weights_native(spec, hardware), usable_total(hardware)
    packing, small = usual_cache(spec, hardware, claim.cache), smallest_cache(spec, claim.cache)
    lines = [f"weights {size(native)} as published" + (f", {size(least)} with 4-bit experts" if form == "int4" else "")]
    lines.append(f"{hardware.total_gpus} x {size(hardware.card.usable.value)} usable = {size(room)}")
    lines.append(f"one context: {size(cached_bytes(spec, packing, context))} as {packing}")
    lines.append(f"most that could fit, all sharded as {small}, nothing else in memory: {limit:,.1f} contexts")
    return lines
