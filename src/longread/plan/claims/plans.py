"""What engines are expected to reach: the usual splits of a model on a machine, and the best prediction among them.

A claim names no split, so it is held against every usual one that fits; the planner's search looks closer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from longread.plan.claims.claim import Claim
from longread.plan.deployment import Deployment, EngineName, ExpertFormat, Strategy, Workload
from longread.plan.estimate import Estimate
from longread.plan.gpu_memory import Capacity, capacity_of, gpu_memory
from longread.plan.peer_capacity import peer_capacity
from longread.plan.raw import prefill_rate
from longread.plan.scaling import scale_for
from longread.plan.shards import check_strategy
from longread.plan.space import (
    LARGER_SHARES,
    SHARE,
    SMALLER_CHUNKS,
    Fixed,
    cache_formats,
    engine_limit,
    expert_formats,
    lossy,
    other_checkpoint,
    runs_today,
    strategies,
)
from longread.plan.timing import loaded_tpot, throughput, tpot, ttft_at_load, ttft_cold, ttft_warm
from longread.spec.count import kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "longread")  # of these, those that run on the hardware today
_SEATS = 1024  # vLLM's default of sequences at once on cards of this size
NO_PLAN = "nothing is predicted: no usual split fits these cards, or no engine runs it there (see memory)"
BATCHES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Planned:
    """One deployment with what it is predicted to reach."""

    deployment: Deployment
    estimate: Estimate

    @property
    def label(self) -> str:
        d = self.deployment
        parts = [f"{d.engine} {d.strategy.label}"]
        parts += [f"{d.experts} experts"] if d.experts != "native" else []
        parts += [f"{d.cache} cache"] if lossy(replace(d, experts="native")) else []
        parts += [f"{d.memory_share:.0%} of the memory, chunk {d.chunk:,}"] if d.memory_share > SHARE else []
        return ", ".join(parts)


def usual_splits(spec: ModelSpec, hardware: Hardware, engine: EngineName) -> Iterator[Strategy]:
    """Of the search's splits those over whole machines: heads, or data-parallel attention with whole experts, or
    context; machines as stages, as one wide replica, or as copies.
    """
    gpus, nodes = hardware.gpus, hardware.nodes
    for s in strategies(spec, hardware, engine, Fixed()):
        whole = s.gpus >= gpus and s.gpus * s.replicas == gpus * nodes
        if whole and s.pp in (1, nodes) and s.dp in (1, nodes, s.tp) and s.cp in (1, gpus) and s.ep == (s.dp > 1):
            yield s


def formats(claim: Claim, spec: ModelSpec) -> tuple[ExpertFormat, ...]:
    """The checkpoint's own, and four bits where it has eight: a claim may be of a converted one."""
    own = expert_formats(spec, Fixed(experts=claim.experts))[0]
    eight = claim.experts is None and spec.quant is not None and spec.quant.experts == "fp8"
    return (own, "int4") if eight else (own,)


def caches(claim: Claim, spec: ModelSpec, hardware: Hardware) -> tuple[str, ...]:
    """The search's: the usual one, and after it those that hold more."""
    first, *others = cache_formats(spec, hardware, Fixed(cache=claim.cache))
    size = sum(kv_bytes_per_token(spec, first).values())
    return (first, *(name for name in others if sum(kv_bytes_per_token(spec, name).values()) < size))


def candidates(claim: Claim, spec: ModelSpec, hardware: Hardware, context: int) -> list[Deployment]:
    """Deployments that the engines run and whose weights fit; ``context`` may be past the model's own."""
    plain = Deployment(
        spec,
        hardware,
        claim.strategy or Strategy(),
        max_num_seqs=max(1, min(claim.streams, _SEATS)),
        max_model_len=min(max(context, 1), spec.max_position),
    )
    found = []
    for engine in (claim.engine,) if claim.engine is not None else ENGINES:
        splits = [claim.strategy] if claim.strategy is not None else usual_splits(spec, hardware, engine)
        for strategy, experts in product(splits, formats(claim, spec)):
            d = replace(plain, engine=engine, strategy=strategy, experts=experts)
            if not ((claim.engine is not None or runs_today(d)) and _runs(d)):
                continue
            for cache in caches(claim, spec, hardware):
                found.append(_chunked(replace(d, cache=cache, max_model_len=max(context, 1))))
    return found


def no_plan(claim: Claim, spec: ModelSpec, hardware: Hardware) -> str:
    """Why no engine is predicted: what each of them lacks there, or that the usual splits do not fit."""
    split = claim.strategy or Strategy(tp=hardware.gpus, pp=hardware.nodes)
    found = []
    for engine in (claim.engine,) if claim.engine is not None else ENGINES[:2]:
        limit = engine_limit(Deployment(spec, hardware, split, engine))
        if limit is None:
            return "no usual split of the model fits these cards"
        found.append(limit)
    return f"no engine that is planned for runs it there: {found[0]}"


def split_problem(claim: Claim, spec: ModelSpec, hardware: Hardware) -> str | None:
    """Why a claimed split cannot be run by any engine; None where it can, or where none is claimed."""
    if claim.strategy is None:
        return None
    problems = []
    for engine in (claim.engine,) if claim.engine is not None else ENGINES:
        cache = caches(claim, spec, hardware)[0]
        problem = _problem(Deployment(spec, hardware, claim.strategy, engine, cache=cache, max_model_len=1))
        if problem is None:
            return None
        problems.append(problem)
    return problems[0]


def _problem(d: Deployment) -> str | None:
    try:
        check_strategy(d)
    except ConfigError as error:
        return str(error)
    return engine_limit(d)


def _runs(d: Deployment) -> bool:
    return _problem(d) is None and gpu_memory(d).weight_total < d.hardware.card.usable.value


def fitting(found: list[Deployment], context: int, sessions: int = 1) -> list[Deployment]:
    """Those that keep ``sessions`` sequences of ``context`` tokens: as released if any does, else squeezed, else with
    other weights or a rounded cache. All where none does: what is short of memory is the memory finding's to say.
    """
    kept = [d for d in found if capacity_at(d, context).sessions >= sessions]
    if any(map(as_released, kept)):
        return [d for d in kept if as_released(d)]
    pressed = [squeezed(d) for d in found if as_released(d)]
    return [d for d in pressed if capacity_at(d, context).sessions >= sessions] or kept or found


def as_released(d: Deployment) -> bool:
    """The published weights, and nothing rounded that the release does not round."""
    return not other_checkpoint(d) and not lossy(d)


def _chunked(d: Deployment) -> Deployment:
    """With the largest of the search's chunks beside which one context fits; as it is where none does."""
    options = (d, *(replace(d, chunk=chunk) for chunk in SMALLER_CHUNKS))
    return next((option for option in options if capacity_at(option, d.max_model_len).sessions >= 1), d)


def squeezed(d: Deployment) -> Deployment:
    """All memory that the search gives an engine at most, small chunks and one seat: what one long sequence needs."""
    return replace(d, memory_share=LARGER_SHARES[-1], chunk=SMALLER_CHUNKS[-1], max_num_seqs=1)


def capacity_at(d: Deployment, context: int) -> Capacity:
    """As the search counts it: what the engine's own allocator makes of the memory."""
    d = replace(d, max_model_len=max(context, 1))
    memory = gpu_memory(d)
    own = capacity_of(d, memory, d.max_model_len)
    if d.engine == "longread":
        return own
    sessions = peer_capacity(d, memory=memory).sessions
    return replace(own, sessions=sessions, tokens=int(sessions * d.max_model_len))


def best_capacity(found: list[Deployment], context: int) -> tuple[Deployment, Capacity] | None:
    pairs = [(d, capacity_at(d, context)) for d in found]
    return max(pairs, key=lambda pair: pair[1].sessions) if pairs else None


def held_at_most(found: list[Deployment], context: int) -> tuple[Deployment, Capacity] | None:
    """``best_capacity``; where that holds not even one context, of the squeezed ones if that helps."""
    best = best_capacity(found, context)
    if best is None or best[1].sessions >= 1:
        return best
    pressed = best_capacity([squeezed(d) for d in found if as_released(d)], context)
    return pressed if pressed is not None and pressed[1].sessions >= 1 else best


def soonest(found: list[Deployment], measure: Callable[[Deployment], Estimate]) -> Planned | None:
    """The deployment with the least centre; one that lacks a rate that the measure needs is passed over."""
    return _pick(found, measure, min)


def most(found: list[Deployment], measure: Callable[[Deployment], Estimate]) -> Planned | None:
    return _pick(found, measure, max)


def _pick(
    found: list[Deployment], measure: Callable[[Deployment], Estimate], choose: Callable[..., Planned]
) -> Planned | None:
    planned = []
    for d in found:
        try:
            planned.append(Planned(d, measure(d)))
        except ConfigError:
            continue
    return choose(planned, key=lambda p: p.estimate.centre) if planned else None


def cold(isl: int) -> Callable[[Deployment], Estimate]:
    return lambda d: ttft_cold(d, isl).total


def warm(claim: Claim, isl: int, suffix: int) -> Callable[[Deployment], Estimate]:
    text = not claim.ids
    return lambda d: ttft_warm(d, isl, suffix, claim.tier or "device", text=text).total


def last_of_burst(claim: Claim, isl: int, suffix: int | None) -> Callable[[Deployment], Estimate]:
    """First token of the last of all streams that arrive at once; ``suffix`` None: nothing was read before."""
    share = 0.0 if suffix is None else 1 - suffix / isl
    load = Workload(isl, claim.osl or 1, share, claim.streams, claim.tier or "device")
    return lambda d: ttft_at_load(d, load)[1]


def per_token(batch: int, context: int) -> Callable[[Deployment], Estimate]:
    return lambda d: tpot(d, max(1, -(-batch // d.strategy.replicas)), context).total


def per_token_loaded(load: Workload) -> Callable[[Deployment], Estimate]:
    return lambda d: loaded_tpot(d, load)


def output_rate(load: Workload) -> Callable[[Deployment], Estimate]:
    return lambda d: throughput(d, load)


def input_rate(isl: int) -> Callable[[Deployment], Estimate]:
    """Prompt tokens/s of a machine that is full of prompts of ``isl`` tokens."""

    def measure(d: Deployment) -> Estimate:
        rate = prefill_rate(d, isl) * d.strategy.replicas
        scale = scale_for(d, "prefill", lambda other: 1 / prefill_rate(other, isl), None)
        return Estimate(rate / scale.high, rate / scale.centre, rate / scale.low, scale.provenance, scale.source)

    return measure
