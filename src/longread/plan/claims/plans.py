"""What engines are expected to reach: the usual splits of a model on a machine, and the best prediction among them.

A claim names no split, so it is held against every usual one that fits; the planner's search looks closer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from longread.plan.calibrate import default_factors, predict
from longread.plan.claims.claim import Claim
from longread.plan.claims.limits import usual_cache
from longread.plan.deployment import Deployment, EngineName, ExpertFormat, Strategy, Workload
from longread.plan.estimate import Estimate
from longread.plan.gpu_memory import Capacity, capacity_of, gpu_memory
from longread.plan.published import Run
from longread.plan.shards import check_strategy
from longread.plan.space import runs_today
from longread.plan.timing import loaded_tpot, throughput, tpot, ttft_at_load, ttft_cold, ttft_warm
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

ENGINES: tuple[EngineName, ...] = ("vllm", "sglang", "longread")  # of these, those that run on the hardware today
BATCHES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True)
class Planned:
    """One deployment with what it is predicted to reach."""

    deployment: Deployment
    estimate: Estimate

    @property
    def label(self) -> str:
        d = self.deployment
        experts = "" if d.experts == "native" else f", {d.experts} experts"
        return f"{d.engine} {d.strategy.label}{experts}"


def strategies(hardware: Hardware) -> Iterator[Strategy]:
    """Splits over all cards: heads, data-parallel attention, context, each within a machine, machines as stages."""
    gpus, nodes = hardware.gpus, hardware.nodes
    yield Strategy(tp=gpus, pp=nodes)
    if gpus > 1:
        yield Strategy(tp=gpus, dp=gpus, ep=True, pp=nodes)
        yield Strategy(cp=gpus, pp=nodes)
    if nodes > 1:
        yield Strategy(tp=gpus * nodes)
        yield Strategy(tp=gpus * nodes, dp=nodes, ep=True)
        yield Strategy(tp=gpus * nodes, dp=gpus * nodes, ep=True)
        yield Strategy(tp=gpus, replicas=nodes)


def expert_formats(spec: ModelSpec) -> tuple[ExpertFormat, ...]:
    """The checkpoint's own, and four bits where it has eight."""
    return ("native", "int4") if spec.quant is not None and spec.quant.experts != "fp4" else ("native",)


def candidates(claim: Claim, spec: ModelSpec, hardware: Hardware, context: int) -> list[Deployment]:
    """Deployments that the engines accept and whose weights fit; ``context`` may be past the model's own."""
    found = []
    splits = [claim.strategy] if claim.strategy is not None else list(strategies(hardware))
    formats = (claim.experts,) if claim.experts is not None else expert_formats(spec)
    for engine in (claim.engine,) if claim.engine is not None else ENGINES:
        for strategy in splits:
            for experts in formats:
                d = Deployment(
                    spec,
                    hardware,
                    strategy,
                    engine=engine,
                    experts=experts,
                    cache=claim.cache or usual_cache(spec),
                    max_num_seqs=max(1, min(claim.streams, 1024)),
                    max_model_len=min(max(context, 1), spec.max_position),
                )
                if (claim.engine is not None or runs_today(d)) and _runs(d):
                    found.append(replace(d, max_model_len=max(context, 1)))
    return found


def split_problem(claim: Claim, spec: ModelSpec, hardware: Hardware) -> str | None:
    """Why a claimed split cannot be run by any engine; None where it can, or where none is claimed."""
    if claim.strategy is None:
        return None
    problems = []
    for engine in (claim.engine,) if claim.engine is not None else ENGINES:
        cache = claim.cache or usual_cache(spec)
        try:
            check_strategy(Deployment(spec, hardware, claim.strategy, engine, cache=cache, max_model_len=1))
        except ConfigError as error:
            problems.append(str(error))
        else:
            return None
    return problems[0]


def _runs(d: Deployment) -> bool:
    try:
        check_strategy(d)
    except ConfigError:
        return False
    return gpu_memory(d).weight_total < d.hardware.card.usable.value


def fitting(found: list[Deployment], context: int, sessions: int = 1) -> list[Deployment]:
    """Those that keep ``sessions`` sequences of ``context`` tokens, with the published weights if any does.

    All where none does: what is short of memory is the memory finding's to say.
    """
    kept = [d for d in found if capacity_at(d, context).sessions >= sessions]
    return [d for d in kept if d.experts == "native"] or kept or found


def capacity_at(d: Deployment, context: int) -> Capacity:
    wanted = replace(d, max_model_len=max(context, 1))
    return capacity_of(wanted, gpu_memory(wanted), max(context, 1))


def best_capacity(found: list[Deployment], context: int) -> tuple[Deployment, Capacity] | None:
    pairs = [(d, capacity_at(d, context)) for d in found]
    return max(pairs, key=lambda pair: pair[1].sessions) if pairs else None


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
        run = Run("claim", "", d, "prefill", 1.0, isl)
        return predict(run, default_factors()).times(d.strategy.replicas)

    return measure
