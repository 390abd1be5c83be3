"""Claims of the time per output token, of tokens/s, and of prompt tokens/s."""

from collections.abc import Callable

from longread.plan.claims.claim import Claim, Finding, Outcome
from longread.plan.claims.limits import (
    MOST_A_STEP,
    PUBLISHED_A_STEP,
    Step,
    cold_rungs,
    decode_bound,
    generous,
    sessions_most,
    weights_least,
)
from longread.plan.claims.plans import (
    BATCHES,
    NO_PLAN,
    Planned,
    best_capacity,
    candidates,
    fitting,
    input_rate,
    most,
    output_rate,
    per_token,
    per_token_loaded,
    soonest,
)
from longread.plan.claims.words import many, seconds, times
from longread.plan.deployment import Deployment, ExpertFormat, Workload
from longread.plan.estimate import Estimate
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

RATE = "tokens/s"
PER_TOKEN, PER_STREAM = "time per output token", "output tokens/s of each stream"
OUTPUT, INPUT = "output tokens/s in all", "prompt tokens/s"
_USUAL = 1024  # tokens of prompt and of answer where a claim says nothing
_BATCH_MOST = 65536


def judge_output(claim: Claim, spec: ModelSpec, hardware: Hardware) -> list[Finding]:
    """Every statement about tokens that come out, and about prompts read per second."""
    found, rate = [], claim.rate
    plans = candidates(claim, spec, hardware, (claim.isl or _USUAL) + (claim.osl or 0))
    if claim.tpot is not None:
        found.append(_per_token(claim, spec, hardware, plans, claim.tpot, PER_TOKEN, PER_TOKEN))
    if rate is None:
        return found
    value = rate.value * (hardware.total_gpus if rate.scope == "gpu" else 1)
    if rate.of == "input":
        return [*found, _input(claim, spec, hardware, plans, value)]
    if rate.scope != "user":
        found.append(_output(claim, spec, hardware, plans, value))
    if rate.scope in ("user", None):
        found.append(_per_token(claim, spec, hardware, plans, 1 / rate.value, RATE, PER_STREAM))
    return found


def _per_token(
    claim: Claim,
    spec: ModelSpec,
    hardware: Hardware,
    plans: list[Deployment],
    tpot: float,
    group: str,
    aspect: str,
) -> Finding:
    """``aspect`` says whether the claim is a time, or the tokens/s of each stream; both are judged as a time."""
    batch, context = claim.streams, claim.isl or 1
    best, shared = generous(hardware), claim.shared is not False
    plain = decode_bound(spec, best, batch, context, packing=claim.cache)
    small = decode_bound(spec, best, batch, context, experts=_small(spec, best), packing=claim.cache, shared=shared)
    planned = soonest(fitting(plans, claim.isl or _USUAL, batch), _predicted(claim, batch))
    outcome, reasons, conditions = _step_outcome(plain, small, planned, tpot)
    load = f"one step of {many(batch, 'stream')} at {many(context, 'token')} of context"
    least = seconds(small.per_token(MOST_A_STEP))
    lines = [
        f"{load}: work {seconds(plain.work)}, weights and cache once from memory {seconds(plain.traffic)}",
        f"with 4-bit experts, one copy of a shared cache and {MOST_A_STEP} tokens a step: {least} a token",
        f"claimed {seconds(tpot)} a token = {1 / tpot:,.1f} tokens/s for each stream, {batch / tpot:,.0f} in all",
    ]
    predicted = planned.estimate if planned else None
    return Finding(
        group,
        aspect,
        outcome,
        tpot,
        "s",
        plain.seconds,
        predicted,
        tuple(reasons),
        tuple(lines),
        tuple(conditions),
        planned.label if planned else "",
    )


def _predicted(claim: Claim, batch: int) -> Callable[[Deployment], Estimate]:
    if claim.isl and claim.osl and claim.concurrency and claim.tpot is None:
        return per_token_loaded(_load(claim, batch))
    return per_token(batch, claim.isl or _USUAL)


def _small(spec: ModelSpec, hardware: Hardware) -> ExpertFormat:
    return weights_least(spec, hardware)[1]


def _step_outcome(
    plain: Step, small: Step, planned: Planned | None, tpot: float
) -> tuple[Outcome, list[str], list[str]]:
    hard = small.per_token(MOST_A_STEP)
    if tpot < hard:
        reason = (
            f"{times(hard / tpot)} below {seconds(hard)}: what the cards need with 4-bit experts and {MOST_A_STEP} "
            "tokens accepted in every step"
        )
        return "impossible", [reason], []
    if tpot < plain.seconds:
        return (
            "only if",
            [f"below {seconds(plain.seconds)}, one step of the model as published"],
            _grants(plain, small, tpot),
        )
    if planned is None:
        return "only if", [NO_PLAN], ["the claimant's split and weights fit"]
    e = planned.estimate
    reason = f"predicted {seconds(e.low)} to {seconds(e.high)} without drafts ({planned.label})"
    if tpot < e.low:
        needed = e.centre / tpot
        condition = (
            f"drafts (MTP) whose steps give {needed:.2f} tokens on average, or an engine that reaches "
            f"{plain.seconds / tpot:.0%} of what memory and cards allow"
        )
        return "only if", [reason], [condition]
    if tpot > e.high:
        return "conservative", [reason], []
    return "plausible", [reason], []


def _grants(plain: Step, small: Step, tpot: float) -> list[str]:
    """How the claim could be below one step: smaller experts, drafts, or both."""
    found = []
    if small.seconds <= tpot and small.seconds < plain.seconds * 0.999:
        found.append(
            f"4-bit experts or a cache shared by all streams: then one step takes {seconds(small.seconds)} or more"
        )
    needed = plain.traffic / tpot
    if plain.work <= tpot and needed <= MOST_A_STEP:
        beyond = f" (published: up to {PUBLISHED_A_STEP})" if needed > PUBLISHED_A_STEP else ""
        found.append(f"drafts (MTP) whose steps give at least {needed:.2f} tokens on average{beyond}")
    both = small.traffic / tpot
    if not found:
        found.append(f"4-bit experts and drafts whose steps give at least {max(both, 1.0):.2f} tokens on average")
    return found


def _load(claim: Claim, concurrency: int) -> Workload:
    isl, osl = claim.isl or _USUAL, claim.osl or _USUAL
    share = 0.0 if claim.new_tokens is None else 1 - claim.new_tokens / isl
    return Workload(isl, osl, share, concurrency, claim.tier or "device")


def _output(claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment], value: float) -> Finding:
    best, context = generous(hardware), claim.isl or 1
    batches = [claim.concurrency] if claim.concurrency else _batches(spec, best, context, claim)
    hard, at = max(_rate(spec, best, b, context, claim, granted=True) for b in batches)
    plain, plain_at = max(_rate(spec, best, b, context, claim) for b in batches)
    reading = _reading_limit(claim, spec, best)
    isl = claim.isl or _USUAL
    planned = _best_rate(claim, plans, isl)
    outcome, reasons, conditions = _rate_outcome(claim, value, min(hard, reading), min(plain, reading), planned, at)
    load = f"{many(plain_at, 'stream')}, {many(context, 'token')} of context"
    lines = [
        f"most, at {load}: {plain:,.0f} tokens/s = {plain_at:,} / {seconds(plain_at / plain)}",
        f"with 4-bit experts, a shared cache and {MOST_A_STEP} tokens a step: {hard:,.0f} tokens/s at {at:,} streams",
    ]
    if reading < float("inf"):
        lines.append(f"reading {isl:,}-token prompts for {claim.osl:,} tokens each allows {reading:,.0f} tokens/s")
    return Finding(
        RATE,
        OUTPUT,
        outcome,
        value,
        "tokens/s",
        min(plain, reading),
        planned.estimate if planned else None,
        tuple(reasons),
        tuple(lines),
        tuple(conditions),
        planned.label if planned else "",
    )


def _rate(
    spec: ModelSpec, hardware: Hardware, batch: int, context: int, claim: Claim, *, granted: bool = False
) -> tuple[float, int]:
    if granted:
        step = decode_bound(
            spec, hardware, batch, context, experts=_small(spec, hardware), packing=claim.cache, shared=True
        )
        return batch / step.per_token(MOST_A_STEP), batch
    return batch / decode_bound(spec, hardware, batch, context, packing=claim.cache).seconds, batch


def _batches(spec: ModelSpec, hardware: Hardware, context: int, claim: Claim) -> list[int]:
    """Powers of four up to what memory can hold of such contexts, and that number."""
    limit = int(min(_BATCH_MOST, max(sessions_most(spec, hardware, context, claim.cache), 1)))
    return sorted({4**n for n in range(9) if 4**n < limit} | {limit})


def _reading_limit(claim: Claim, spec: ModelSpec, hardware: Hardware) -> float:
    """Output tokens/s at most if every prompt has to be read first; infinite where the claim does not say so."""
    if claim.isl is None or claim.osl is None or claim.state != "cold":
        return float("inf")
    return claim.osl / max(cold_rungs(spec, hardware, claim.isl)[-1].floor.compute, 1e-12)


def _best_rate(claim: Claim, plans: list[Deployment], isl: int) -> Planned | None:
    wanted = [claim.concurrency] if claim.concurrency else list(BATCHES)
    found = []
    for streams in wanted:
        kept = fitting(plans, isl, streams)
        if claim.concurrency is None:
            held = best_capacity(kept, isl)
            if held is not None and held[1].sessions < streams and streams > 1:
                continue
        planned = most(kept, output_rate(_load(claim, streams)))
        if planned is not None:
            found.append(planned)
    return max(found, key=lambda p: p.estimate.centre) if found else None


def _rate_outcome(
    claim: Claim, value: float, hard: float, plain: float, planned: Planned | None, streams: int
) -> tuple[Outcome, list[str], list[str]]:
    if value > hard:
        reason = f"{times(value / hard)} above {hard:,.0f} tokens/s, the most of the cards with all that can be granted"
        return "impossible", [reason], []
    if value > plain:
        return (
            "only if",
            [f"above {plain:,.0f} tokens/s, the most of the model as published without drafts"],
            [f"4-bit experts, or drafts whose steps give {value / plain:.2f} tokens or more on average"],
        )
    if planned is None:
        return "only if", [NO_PLAN], ["the claimant's split and weights fit"]
    e = planned.estimate
    lengths = f"{claim.isl or _USUAL:,} tokens in, {claim.osl or _USUAL:,} out"
    reason = f"predicted {e.low:,.0f} to {e.high:,.0f} tokens/s at best, {lengths}, without drafts ({planned.label})"
    if value > e.high:
        conditions = [f"the cards reach {value / plain:.0%} of the most that they can give, or drafts help"]
        if claim.concurrency is None:
            conditions.append(f"hundreds of streams at once (the most is reached near {streams})")
        if claim.isl is None:
            conditions.append("prompts are short or cached, or prompt tokens are counted as well")
        return "only if", [reason], conditions
    if value < e.low:
        return "conservative", [reason], []
    return "plausible", [reason], []


def _input(claim: Claim, spec: ModelSpec, hardware: Hardware, plans: list[Deployment], value: float) -> Finding:
    isl = claim.isl or _USUAL
    rungs = cold_rungs(spec, generous(hardware), isl)
    plain, hard = (isl / rung.floor.compute for rung in (rungs[0], rungs[-1]))
    planned = most(fitting(plans, isl), input_rate(isl))
    e = planned.estimate if planned else None
    if value > hard:
        outcome: Outcome = "impossible"
        reasons = [f"{times(value / hard)} above {hard:,.0f} tokens/s: the work of a prompt token at the cards' peak"]
        conditions = []
        if claim.state != "cold":
            outcome, share = "only if", 1 - hard / value
            conditions = [f"cached tokens are counted as read: a hit ratio of {share:.1%} or more"]
    elif value > plain:
        outcome, reasons = "only if", [f"above {plain:,.0f} tokens/s, the most of the model as published"]
        conditions = [rung.grant for rung in rungs if rung.grant]
    elif e is None or planned is None:
        outcome, reasons, conditions = "only if", [NO_PLAN], []
    else:
        reasons = [f"predicted {e.low:,.0f} to {e.high:,.0f} tokens/s, prompts of {isl:,} ({planned.label})"]
        outcome = "only if" if value > e.high else "conservative" if value < e.low else "plausible"
        conditions = [f"the cards reach {value / plain:.0%} of their peak"] if value > e.high else []
    lines = [f"{isl:,} tokens take {seconds(rungs[0].floor.compute)} at the cards' peak: {plain:,.0f} tokens/s"]
    return Finding(
        RATE,
        INPUT,
        outcome,
        value,
        "tokens/s",
        plain,
        e,
        tuple(reasons),
        tuple(lines),
        tuple(conditions),
        planned.label if planned else "",
    )
