"""What is asked, checked before a search: loads that cannot be, and decisions that contradict or are nonsense.

Each refusal names the limit and what to ask instead. Places nothing.
"""

import math

from longread.plan.claims.limits import granted_floors
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.figures import gib, seconds
from longread.plan.floor import cold_floor, decode_floor, suffix_floor
from longread.plan.space import Fixed, cache_formats
from longread.spec.count import kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

HOST_MAX = 64 * 2**40  # bytes of main memory a machine: more than any that holds eight cards


def require_possible(spec: ModelSpec, hardware: Hardware, w: Workload, fixed: Fixed) -> dict[str, float]:
    """The physical floors of a load, in the formats that are fixed.

    Raises ``ConfigError`` for a load that is nonsense, or whose targets are below even what could be granted; targets
    between that and the floors ``beyond_release`` names.
    """
    _check_load(spec, w)
    new = max(w.isl - w.cached, 1)
    cold = cold_floor(spec, hardware, w.isl).seconds
    first = suffix_floor(spec, hardware, new, w.cached).seconds if w.cached else cold
    everything = Deployment(
        spec,
        hardware,
        Strategy(tp=hardware.total_gpus),
        experts=fixed.experts or "native",
        cache=cache_formats(spec, hardware, fixed)[0],
    )
    between = decode_floor(everything, 1, w.isl + w.osl // 2)  # fewer than asked may run at once
    least = granted_floors(spec, hardware, w, fixed.experts, fixed.cache)
    what = f"{new:,} new tokens behind {w.cached:,} read ones" if w.cached else f"{w.isl:,} tokens"
    machine = f"all {hardware.total_gpus} cards of {hardware.label}"
    if w.ttft_target is not None and w.ttft_target < least["ttft"]:
        raise ConfigError(
            f"slo ttft={seconds(w.ttft_target)} is below the physical floor of {seconds(first)}: {what} at the peak "
            f"rates of {machine}, nothing lost ({seconds(least['ttft'])} with all that could be granted); ask for more "
            "time, less new input, or more cards"
        )
    if w.tpot_target is not None and w.tpot_target < least["tpot"]:
        raise ConfigError(
            f"slo tpot={seconds(w.tpot_target)} is below the physical floor of {seconds(between)}: one token of one "
            f"sequence reads its weights and cache at the peak bandwidth of {machine} ({seconds(least['tpot'])} with "
            "drafts and all else that could be granted); ask for more time, or more cards"
        )
    return {"ttft": first, "ttft cold": cold, "tpot": between}


def beyond_release(w: Workload, floors: dict[str, float]) -> list[str]:
    """Targets that no engine reaches with the formats at hand, and by what one could."""
    found = []
    if w.ttft_target is not None and w.ttft_target < floors["ttft"]:
        found.append(
            f"slo ttft={seconds(w.ttft_target)} is below the floor of {seconds(floors['ttft'])} in the model's own "
            "types: only attention in FP8 or an indexer that skips scores could reach it, and no engine here has them"
        )
    if w.tpot_target is not None and w.tpot_target < floors["tpot"]:
        found.append(
            f"slo tpot={seconds(w.tpot_target)} is below the floor of {seconds(floors['tpot'])} for one token a step: "
            "only drafts (MTP, DSpark) or smaller experts could reach it, and neither is planned here"
        )
    return found


def _check_load(spec: ModelSpec, w: Workload) -> None:
    for name, value in (("isl", w.isl), ("osl", w.osl), ("concurrency", w.concurrency)):
        if value < 1:
            raise ConfigError(f"{name}={value}; it must be at least 1")
    if not 0 <= w.prefix <= 1:
        raise ConfigError(f"prefix={w.prefix:g}; it is the share of the input that was read before, from 0 to 1")
    if w.isl + w.osl > spec.max_position:
        raise ConfigError(
            f"isl + osl = {w.isl + w.osl:,} tokens, and {spec.label} was made for {spec.max_position:,} "
            f"(max_position_embeddings); osl={w.osl} leaves at most isl={max(spec.max_position - w.osl, 0)}; or take a "
            "model with a longer context"
        )
    for name, target in (("ttft", w.ttft_target), ("tpot", w.tpot_target)):
        if target is not None and not 0 < target < math.inf:
            raise ConfigError(f"slo {name}={target:g} s; it must be above 0")
    if w.tpot_target is not None and w.osl < 2:
        raise ConfigError("slo tpot needs osl of at least 2: one token has nothing between")


def require_sense(spec: ModelSpec, hardware: Hardware, fixed: Fixed, w: Workload | None) -> None:
    """Raises ``ConfigError`` for what is fixed and cannot be with any engine; ``w`` None: there is no load."""
    _check_split(hardware, fixed)
    if fixed.cache is not None:
        kv_bytes_per_token(
            spec, fixed.cache
        )  # raises for a packing that is unknown or that the model has no record for
    if fixed.memory_share is not None and not 0 < fixed.memory_share <= 1:
        raise ConfigError(f"gpu_memory_utilization={fixed.memory_share:g}; it must be above 0 and at most 1")
    if fixed.chunk is not None and fixed.chunk < 1:
        raise ConfigError(f"max_num_batched_tokens={fixed.chunk}; it must be at least 1")
    _check_context(spec, fixed, w)
    _check_host(hardware, fixed, w)


def _check_split(hardware: Hardware, fixed: Fixed) -> None:
    known = {name: getattr(fixed, name) for name in ("tp", "pp", "cp", "replicas", "dp")}
    for name, value in known.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it must be at least 1")
    needed = math.prod(value for name, value in known.items() if value is not None and name != "dp")
    if needed > hardware.total_gpus:
        said = " x ".join(f"{name}={value}" for name, value in known.items() if value is not None and name != "dp")
        raise ConfigError(
            f"{said}: it needs {needed:,} GPUs, {hardware.label} has {hardware.total_gpus}; lower one of them"
        )
    if fixed.dp is not None and (fixed.dp > hardware.total_gpus or (fixed.tp is not None and fixed.tp % fixed.dp)):
        cards = f"tp={fixed.tp}" if fixed.tp is not None else f"{hardware.total_gpus}"
        raise ConfigError(f"dp={fixed.dp} groups cannot share {cards} cards evenly; dp must divide tp")


def _check_context(spec: ModelSpec, fixed: Fixed, w: Workload | None) -> None:
    if fixed.context is None:
        return
    if not 1 <= fixed.context <= spec.max_position:
        raise ConfigError(
            f"max_model_len={fixed.context} is outside 1..{spec.max_position}, what {spec.label} was made for "
            "(max_position_embeddings)"
        )
    if w is not None and fixed.context < w.isl + w.osl:
        raise ConfigError(
            f"max_model_len={fixed.context} is below isl + osl = {w.isl + w.osl}; raise it or ask for less"
        )


def _check_host(hardware: Hardware, fixed: Fixed, w: Workload | None) -> None:
    if fixed.host_cache is None:
        return
    most = hardware.host_memory.value if hardware.host_memory is not None else HOST_MAX
    if not 0 <= fixed.host_cache <= most:
        whose = f"{hardware.label} has" if hardware.host_memory is not None else "a machine has at most"
        raise ConfigError(f"host_cache_size={gib(fixed.host_cache)} a machine; {whose} {gib(most)} of main memory")
    if fixed.host_cache == 0 and w is not None and w.cached and w.tier != "device":
        raise ConfigError(f"host_cache_size=0 keeps nothing outside the cards, and the load reads from {w.tier}")
