"""Claims of the first token: of a prompt that nobody read before (cold), and of one mostly read before (warm)."""

from dataclasses import dataclass

from longread.plan.claims.claim import Claim, Finding, Outcome
from longread.plan.claims.limits import (
    Rung,
    cold_rungs,
    generous,
    largest_suffix,
    load_rates,
    sessions_most,
    suffix_seconds,
    usual_cache,
)
from longread.plan.claims.plans import (
    NO_PLAN,
    Planned,
    best_capacity,
    candidates,
    cold,
    fitting,
    last_of_burst,
    soonest,
    warm,
)
from longread.plan.claims.warm_conditions import warm_conditions
from longread.plan.claims.words import many, seconds, share, size, times, tokens, work
from longread.plan.deployment import Deployment
from longread.plan.floor import cached_bytes, peak, prompt_work, suffix_floor
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

GROUP = "first token"
COLD, WARM = "first token, cold", "first token, warm"
WARM_TOGETHER, WARM_SPREAD = "first token, warm, all at once", "first token, warm, arrivals spread"


def judge_first_token(claim: Claim, spec: ModelSpec, hardware: Hardware) -> list[Finding]:
    """Cold and warm, each in what the claim leaves open. ``claim.ttft`` and ``claim.isl`` are set."""
    assert claim.ttft is not None and claim.isl is not None
    plans = candidates(claim, spec, hardware, claim.isl + (claim.osl or 0))
    plans = fitting(plans, claim.isl + (claim.osl or 0))
    found = [_cold(claim, spec, hardware, plans, claim.ttft, claim.isl)]
    if claim.state != "cold":
        found += _warm(claim, spec, hardware, plans, claim.ttft, claim.isl, found[0])
    return found[1:] if claim.state == "warm" else found


def _cold(claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment], ttft: float, isl: int) -> Finding:
    rungs = cold_rungs(spec, generous(hardware), isl)
    floor = rungs[0].floor.seconds
    planned = soonest(plans, cold(isl))
    outcome, reasons, conditions = _cold_outcome(claim, rungs, planned, plans, ttft, isl)
    return Finding(
        GROUP,
        COLD,
        outcome,
        ttft,
        "s",
        floor,
        planned.estimate if planned else None,
        tuple(reasons),
        tuple(_cold_arithmetic(spec, generous(hardware), isl, rungs, ttft)),
        tuple(conditions),
        planned.label if planned else "",
    )


def _cold_outcome(
    claim: Claim, rungs: list[Rung], planned: Planned | None, plans: list[Deployment], ttft: float, isl: int
) -> tuple[Outcome, list[str], list[str]]:
    floor, lowest = rungs[0].floor.seconds, rungs[-1].floor.seconds
    if ttft < lowest:
        granted = f" even with {rungs[-1].grant} ({seconds(lowest)})" if rungs[-1].grant else ""
        reason = f"{times(floor / ttft)} below one prompt on all cards at their peak: {seconds(floor)}{granted}"
        return "impossible", [reason], []
    if ttft < floor:
        needed = next(rung for rung in rungs if ttft >= rung.floor.seconds)
        least = needed.floor.seconds
        conditions = [
            f"{needed.grant}: its floor is {seconds(least)}, and the claim needs {share(least / ttft)} the peak",
            "what that costs in quality is measured at this length",
        ]
        return "only if", [f"below the floor of the model as published, {seconds(floor)}"], conditions
    if planned is None:
        return "only if", [NO_PLAN], ["the claimant's split and weights fit"]
    return _against(claim, planned, plans, ttft, isl, floor)


def _against(
    claim: Claim, planned: Planned, plans: list[Deployment], ttft: float, isl: int, floor: float
) -> tuple[Outcome, list[str], list[str]]:
    """Above the floor: against the interval of the best plan, alone and with all streams at once."""
    e = planned.estimate
    conditions = []
    if claim.streams > 1:
        conditions.append(
            f"arrivals are spread, or fewer come at once: {claim.streams} prompts that arrive together take "
            f"{seconds(floor * claim.streams)} at the peak until the last one's first token, half of it on average"
        )
    if ttft < e.low:
        reason = (
            f"above the floor, but {floor / ttft:.0%} of the cards' peak; predicted {seconds(e.low)} to "
            f"{seconds(e.high)} ({planned.label})"
        )
        return (
            "only if",
            [reason],
            [f"the engine reaches {floor / ttft:.0%} of the peak over the whole prompt", *conditions],
        )
    reason = f"predicted {seconds(e.low)} to {seconds(e.high)} for one prompt alone ({planned.label})"
    mean_together = floor * (claim.streams + 1) / 2
    if claim.streams > 1 and ttft < mean_together:
        return "only if", [reason, f"all at once average {seconds(mean_together)} or more"], conditions
    last = e
    if claim.streams > 1:
        burst = soonest(plans, last_of_burst(claim, isl, None))
        last = burst.estimate if burst else e
    if ttft > max(last.high, e.high):
        return "conservative", [f"{reason}; a good plan is faster"], []
    return "plausible", [reason], conditions if ttft < last.low else []


def _cold_arithmetic(spec: ModelSpec, hardware: Hardware, isl: int, rungs: list[Rung], ttft: float) -> list[str]:
    found, floor, cards = prompt_work(spec, isl), rungs[0].floor, hardware.total_gpus
    quantised = "fp8" if spec.quant is not None else "bf16"
    rows = [("linear", found.linear, quantised, floor.linear)]
    rows += [("attention", found.attention, "bf16", floor.attention)]
    rows += [("indexer", found.indexer, quantised, floor.indexer)] if found.indexer else []
    lines = [
        f"{name}: {work(flops)} / ({cards} x {_tera(peak(hardware.card, rate))} {rate.upper()}) = {seconds(time)}"
        for name, flops, rate, time in rows
    ]
    memory = f"; weights once from memory {seconds(floor.memory)}, at the same time"
    lines.append(f"floor at 100 % of the peak, nothing lost or repeated: {seconds(floor.seconds)}{memory}")
    lines += [f"with {rung.grant}: {seconds(rung.floor.seconds)}" for rung in rungs[1:]]
    lines.append(f"claimed {seconds(ttft)}: needs {share(floor.seconds / ttft)} the peak")
    return lines


def _tera(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s"


@dataclass(frozen=True, slots=True)
class _Warm:
    """What a warm claim is held against. ``suffix``: new tokens of each request, one where the claim does not say."""

    claim: Claim
    spec: ModelSpec
    hardware: Hardware
    plans: list[Deployment]
    ttft: float
    isl: int
    suffix: int
    told: bool
    cold: Finding

    def floor(self, requests: int = 1, *, granted: bool = False) -> float:
        """Least seconds for ``requests`` at once: their suffixes, and the load of one context where a tier is named."""
        hardware, start = generous(self.hardware), max(self.isl - self.suffix, 0)
        work = suffix_seconds(self.spec, hardware, self.suffix, self.isl, granted=granted) * requests
        weights = suffix_floor(self.spec, hardware, self.suffix, start).memory * (0.5 if granted else 1.0)
        tier, loaded = self.claim.tier, 0.0
        rate = load_rates(self.hardware).get(tier or "device")
        if rate is not None:
            contexts = requests if self.claim.shared is False else 1
            packing = usual_cache(self.spec, self.hardware, self.claim.cache)
            loaded = contexts * cached_bytes(self.spec, packing, self.isl - self.suffix) / rate
        return max(work, weights, loaded)  # layer by layer they overlap


def _warm(
    claim: Claim,
    spec: ModelSpec,
    hardware: Hardware,
    plans: list[Deployment],
    ttft: float,
    isl: int,
    cold_found: Finding,
) -> list[Finding]:
    told = claim.new_tokens
    w = _Warm(claim, spec, hardware, plans, ttft, isl, min(told or 1, isl), told is not None, cold_found)
    if claim.streams == 1:
        return [_warm_finding(w, WARM, 1)]
    found = []
    if claim.together is not False:
        found.append(_warm_finding(w, WARM_TOGETHER, claim.streams))
    if claim.together is not True:
        found.append(_warm_finding(w, WARM_SPREAD, 1))
    return found


def _warm_finding(w: _Warm, aspect: str, requests: int) -> Finding:
    planned = None
    if w.suffix < w.isl and w.plans:
        measure = warm(w.claim, w.isl, w.suffix) if requests == 1 else last_of_burst(w.claim, w.isl, w.suffix)
        planned = soonest(w.plans, measure)
    outcome, reasons, conditions = _warm_outcome(w, requests, planned)
    one = suffix_seconds(w.spec, generous(w.hardware), 1, w.isl)
    lines = [f"one new token behind {w.isl:,}: {seconds(one)} on all cards at their peak"]
    if w.suffix > 1:
        lines.append(f"{w.suffix:,} new tokens: {seconds(w.floor())}")
    if requests > 1:
        lines.append(f"{requests} requests at once, {many(w.suffix, 'new token')} each: {seconds(w.floor(requests))}")
    fits = largest_suffix(w.spec, generous(w.hardware), w.isl, w.ttft / requests)
    each = " each" if requests > 1 else ""
    lines.append(
        f"{seconds(w.ttft)} allow {tokens(fits)} new tokens{each} at 100 % of the peak, {tokens(fits / 2)} at 50 %"
    )
    return Finding(
        GROUP,
        aspect,
        outcome,
        w.ttft,
        "s",
        w.floor(requests),
        planned.estimate if planned else None,
        tuple(reasons),
        tuple(lines),
        tuple(conditions),
        planned.label if planned else "",
    )


def _warm_outcome(w: _Warm, requests: int, planned: Planned | None) -> tuple[Outcome, list[str], list[str]]:
    hard, floor = w.floor(requests, granted=True), w.floor(requests)
    what = many(w.suffix, "new token") + (f" for each of {requests}" if requests > 1 else "")
    if w.ttft < hard:
        more = f" ({seconds(hard)} with FP8 attention)" if hard < floor * 0.999 else ""
        return "impossible", [f"{what} alone take {seconds(floor)} at the cards' peak{more}"], []
    if sessions_most(w.spec, w.hardware, w.isl, w.claim.cache) < 1:
        size_of = size(cached_bytes(w.spec, usual_cache(w.spec, w.hardware, w.claim.cache), w.isl))
        return "impossible", [f"one context of {w.isl:,} tokens ({size_of}) does not fit beside the weights"], []
    if not w.told and w.cold.outcome in ("plausible", "conservative") and requests == 1:
        return w.cold.outcome, ["it is so even if nobody read the prompt before"], []
    conditions = warm_conditions(w.claim, w.spec, w.hardware, w.plans, requests)
    if not w.told or planned is None:
        least = f"at least {seconds(floor)} for {what}" if floor < w.ttft else f"{seconds(floor)} in BF16 attention"
        return "only if", [f"{least}; the claim says neither suffix nor hit ratio" if not w.told else least], conditions
    e = planned.estimate
    reason = f"predicted {seconds(e.low)} to {seconds(e.high)} for {what} ({planned.label})"
    if w.ttft < e.low:
        return "only if", [reason, f"the claim is above the floor of {seconds(floor)}"], conditions
    if w.ttft > e.high:
        return "conservative", [reason], []
    held = best_capacity(w.plans, w.isl)
    distinct = w.claim.shared is False and held is not None and held[1].sessions < w.claim.streams
    if distinct and w.claim.tier in (None, "device"):
        return "only if", [reason, "that many distinct contexts do not stay in the cards' memory"], conditions
    return "plausible", [reason], []
