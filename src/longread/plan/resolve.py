"""From options, a model and a machine to the one configuration that runs, or to a refusal before anything is allocated.

Every value that the user left open gets a reason. Refusals name the limit, the value, and what to change.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longread.plan.device_memory import choose_device, device_plan, group_bytes, require_device_fit
from longread.plan.machine import Gpu, Machine, probe_gpu
from longread.plan.memory import host_cache_bytes, memory_plan, page_bytes, slot_bytes, store_buffer_bytes
from longread.spec.config import Choice, ComputeDtype, EngineOptions, MemoryPlan, ResolvedConfig, Slo
from longread.spec.config_json import require_runnable
from longread.spec.errors import ConfigError
from longread.spec.loaded import loaded_bytes
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, CacheKind, pages_for

DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEVICE_MAX_NUM_SEQS = 64
DEVICE_MAX_NUM_BATCHED_TOKENS = 8192
GPU_SHARE = 0.92  # of a GPU's memory, as vLLM's gpu_memory_utilization
DEFAULT_KV_BYTES = 4 * 2**30  # on a CPU that other programs share; documents that need more ask for it
DEFAULT_STORE_BYTES = 20 * 2**30
SNAPSHOTS_PER_SEQ = 6  # three page ends, prompt end, turn end, and an interval mark of a long document
SNAPSHOT_SHARE = 4  # at most a quarter of the cache goes to snapshots
HEADROOM = 0.9  # of the available memory: the estimate is a moment's, and others allocate too


@dataclass(slots=True)
class _Choices:
    made: list[Choice] = field(default_factory=list)

    def note(self, option: str, value: object, reason: str) -> None:
        self.made.append(Choice(option, str(value), reason))


@dataclass(frozen=True, slots=True)
class _Budget:
    """Bytes for pages and snapshots beside the slots; ``reason`` where it was not given."""

    size: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Pools:
    """``enough``: more pages would never be used."""

    pages: int
    snapshots: int
    enough: bool = False


def resolve(options: EngineOptions, spec: ModelSpec, machine: Machine, gpu: Gpu | str | None = None) -> ResolvedConfig:
    """Decide everything. Raises ``ConfigError`` or ``UnsupportedModelError``; allocates nothing. ``gpu``: as
    ``probe_gpu`` found it, None: it is looked for where it matters.
    """
    require_runnable(spec)
    _check_drawn(options)
    if spec.compressed is not None and not any(spec.compressed.ratios):
        raise ConfigError(
            f"{spec.label}: each of its compress_ratios is 0, so that no layer keeps anything in the cache; the engine "
            "runs models with at least one that does"
        )
    if gpu is None:
        gpu = "" if options.device == "cpu" else probe_gpu()
    where = choose_device(options, spec, gpu)
    choices = _Choices()
    if options.device == "auto" and where.reason is not None:
        choices.note("device", where.device, where.reason)
    if where.device == "cuda":
        assert isinstance(gpu, Gpu)
        return _resolve_device(options, spec, machine, gpu, choices)
    dtype = _dtype(options, spec, choices)
    seqs, batched = _batch(options, choices)
    weights = loaded_bytes(spec, dtype)
    store_size, host = _tiers(options, choices)
    target = _step_target(options, choices)

    def plan(pools: _Pools) -> MemoryPlan:
        return memory_plan(
            spec,
            dtype=dtype,
            weight_bytes=weights,
            num_pages=pools.pages,
            num_slots=seqs,
            num_snapshots=pools.snapshots,
            max_num_batched_tokens=batched,
            host_cache_size=host,
            store=options.store is not None,
            threads=os.cpu_count() or 1,
            max_model_len=options.max_model_len,
        )

    _check_model_len(options, spec)
    _require_fit(plan(_Pools(1, 0)), machine, "even with one page of cache")
    budget = _kv_budget(options, spec, machine, plan(_Pools(0, 0)))
    sizes = page_bytes(spec, dtype), slot_bytes(spec, dtype)
    pools = _pools(options, spec, sizes, seqs, budget, choices)
    final = plan(pools)
    if budget is not None and budget.reason is not None:
        unused = f"twice {seqs} sequences of full length, more is never used; within " if pools.enough else ""
        choices.note("kv_cache_memory_bytes", _size(final.kv_cache), unused + budget.reason)
    _require_fit(final, machine, "with the cache asked for")
    length = _model_len(options, spec, pools, choices)
    return ResolvedConfig(
        model=options.model,
        served_model_name=_served_name(options, choices),
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        num_pages=pools.pages,
        num_slots=seqs,
        num_snapshots=pools.snapshots,
        enable_prefix_caching=options.enable_prefix_caching,
        snapshot_interval=_snapshot_interval(options),
        seed=options.seed,
        memory=final,
        choices=tuple(choices.made),
        store=options.store,
        store_size=store_size,
        host_cache_size=host,
        slo=options.slo,
        step_target=target,
        random_weights=options.random_weights,
        layers=options.layers,
    )


def _resolve_device(
    options: EngineOptions, spec: ModelSpec, machine: Machine, gpu: Gpu, choices: _Choices
) -> ResolvedConfig:
    """The same for a GPU: what it holds goes to weights, one step, and all the rest to the cache."""
    cache: CacheKind = "model" if options.kv_cache_dtype == "bfloat16" else "fp8"
    if options.dtype == "auto":
        choices.note("dtype", "bfloat16", "of activations; weights are kept and multiplied as they are stored")
    if options.kv_cache_dtype == "auto":
        choices.note("kv_cache_dtype", "fp8", "as DeepSeek's own kernels keep it: half the bytes, and half the reads")
    seqs, batched = _device_batch(options, spec, choices)
    store_size, host = _tiers(options, choices)
    target = _step_target(options, choices)
    _check_model_len(options, spec)
    page, slot = group_bytes(spec, cache)
    buffers = store_buffer_bytes(page, slot) if options.store is not None else 0
    host_bytes = host_cache_bytes(page, slot, host)

    def plan(pools: _Pools) -> MemoryPlan:
        return device_plan(
            spec,
            cache=cache,
            num_pages=pools.pages,
            num_slots=seqs,
            num_snapshots=pools.snapshots,
            max_num_batched_tokens=batched,
            max_model_len=options.max_model_len or spec.max_position,
            host_cache=host_bytes,
            store_buffers=buffers,
        )

    share = options.gpu_memory_utilization or GPU_SHARE
    limit = min(int(share * gpu.total_bytes), gpu.free_bytes)
    require_device_fit(plan(_Pools(1, 0)), gpu, share, "even with one page of cache")
    budget = _given_budget(options, plan(_Pools(0, 0)))
    if budget is None and options.num_gpu_blocks_override is None:
        left = max(limit - plan(_Pools(0, 0)).on_device, 0)
        budget = _Budget(left, f"what gpu_memory_utilization={share:g} of {gpu.name} leaves beside weights and a step")
    pools = _pools(options, spec, (page, slot), seqs, budget, choices)
    final = plan(pools)
    if budget is not None and budget.reason is not None:
        unused = f"twice {seqs} sequences of full length, more is never used; within " if pools.enough else ""
        choices.note("kv_cache_memory_bytes", _size(final.kv_cache), unused + budget.reason)
    require_device_fit(final, gpu, share, "with the cache asked for")
    if host_bytes + buffers > machine.available_bytes:
        raise ConfigError(
            f"host_cache_size and the store's buffers take {_size(host_bytes + buffers)} of main memory, but "
            f"{_size(machine.available_bytes)} are available; lower host_cache_size"
        )
    return ResolvedConfig(
        model=options.model,
        served_model_name=_served_name(options, choices),
        dtype="bfloat16",
        max_model_len=_model_len(options, spec, pools, choices),
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        num_pages=pools.pages,
        num_slots=seqs,
        num_snapshots=pools.snapshots,
        enable_prefix_caching=options.enable_prefix_caching,
        snapshot_interval=_snapshot_interval(options),
        seed=options.seed,
        memory=final,
        choices=tuple(choices.made),
        store=options.store,
        store_size=store_size,
        host_cache_size=host,
        slo=options.slo,
        step_target=target,
        device="cuda",
        kv_cache=cache,
        random_weights=options.random_weights,
        layers=options.layers,
    )


def _check_drawn(options: EngineOptions) -> None:
    if options.layers is not None and not options.random_weights:
        raise ConfigError(
            f"layers={options.layers} needs random_weights: a checkpoint runs whole, with all of its layers"
        )


def _device_batch(options: EngineOptions, spec: ModelSpec, choices: _Choices) -> tuple[int, int]:
    seqs, batched = options.max_num_seqs, options.max_num_batched_tokens
    if seqs is None:
        seqs = min(DEVICE_MAX_NUM_SEQS, batched or DEVICE_MAX_NUM_SEQS)
        choices.note("max_num_seqs", seqs, "decoding rows share what is read of the weights; each takes a slot")
    if batched is None:
        batched = max(DEVICE_MAX_NUM_BATCHED_TOKENS, seqs)
        experts = spec.moe.routed
        reason = (
            f"each of {experts} experts gets {batched * spec.moe.top_k // experts} of its tokens, enough to multiply "
            "rather than to wait for weights; twice as many would double a step's buffers"
        )
        choices.note("max_num_batched_tokens", batched, reason)
    _check_batch(seqs, batched)
    return seqs, batched


def _step_target(options: EngineOptions, choices: _Choices) -> float | Literal["auto"] | None:
    """Seconds that a step may take; where an SLO decides, it says so."""
    slo, target = options.slo or Slo(), options.step_target
    if slo.step is not None:
        target = slo.step
        choices.note(
            "step_target", f"{target * 1e3:g}ms", "at most a quarter of the TTFT target: who comes waits for it"
        )
    elif target == "auto":
        choices.note("step_target", target, "chosen when the engine has measured its steps; said then")
    if slo.tpot is not None:
        reason = (
            "the TPOT target: beside decodes, a step takes as many prompt tokens as fit, by what steps are measured at"
        )
        least = target if isinstance(target, float) else math.inf
        choices.note("decode_step_target", f"{min(slo.tpot, least) * 1e3:g}ms", reason)
    return target


def _tiers(options: EngineOptions, choices: _Choices) -> tuple[int, int]:
    """Bytes of the disk store and of the host cache."""
    for option in ("store", "host_cache_size"):
        if getattr(options, option) and not options.enable_prefix_caching:
            raise ConfigError(
                f"{option} needs the prefix cache; leave it out, or do not set enable_prefix_caching=false"
            )
    if options.store is None and options.store_size is not None:
        raise ConfigError("store_size is given without a store; add store=FOLDER or leave it out")
    size = options.store_size or 0
    if options.store is not None and options.store_size is None:
        size = DEFAULT_STORE_BYTES
        choices.note("store_size", _size(size), "the default; the least recently used documents go first")
    return size, options.host_cache_size or 0


def _dtype(options: EngineOptions, spec: ModelSpec, choices: _Choices) -> ComputeDtype:
    if options.dtype != "auto":
        return options.dtype
    stored = spec.torch_dtype if spec.quant is None else f"quantised {spec.torch_dtype}"
    reason = (
        f"the checkpoint is {stored}; on a CPU float32 is the correctness reference and usually faster "
        "(bfloat16 halves the memory: dtype=bfloat16)"
    )
    choices.note("dtype", "float32", reason)
    return "float32"


def _batch(options: EngineOptions, choices: _Choices) -> tuple[int, int]:
    seqs, batched = options.max_num_seqs, options.max_num_batched_tokens
    if seqs is None:
        seqs = min(DEFAULT_MAX_NUM_SEQS, batched or DEFAULT_MAX_NUM_SEQS)
        choices.note("max_num_seqs", seqs, "a CPU gains little from larger decode batches, and each takes a slot")
    if batched is None:
        batched = max(DEFAULT_MAX_NUM_BATCHED_TOKENS, seqs)
        choices.note(
            "max_num_batched_tokens", batched, "large enough to fill a CPU, small enough to let others in between"
        )
    _check_batch(seqs, batched)
    return seqs, batched


def _check_batch(seqs: int, batched: int) -> None:
    if batched < seqs:
        raise ConfigError(
            f"max_num_batched_tokens={batched} is below max_num_seqs={seqs}: a step must hold one token a sequence; "
            f"raise the first or lower the second"
        )


def _check_model_len(options: EngineOptions, spec: ModelSpec) -> None:
    if options.max_model_len is not None and options.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len={options.max_model_len} is above what {spec.label} was made for "
            f"(max_position_embeddings={spec.max_position}); lower it"
        )


def _kv_budget(options: EngineOptions, spec: ModelSpec, machine: Machine, fixed: MemoryPlan) -> _Budget | None:
    """What the cache may take; ``fixed`` contains the slots. None: the page count is given."""
    given = _given_budget(options, fixed)
    if given is not None or options.num_gpu_blocks_override is not None:
        return given
    left = max(int(machine.available_bytes * HEADROOM) - fixed.total, 0)
    if left >= DEFAULT_KV_BYTES:
        return _Budget(
            DEFAULT_KV_BYTES, f"the default of {_size(DEFAULT_KV_BYTES)} for pages and snapshots; {_size(left)} is free"
        )
    return _Budget(
        left, f"what {HEADROOM:.0%} of the {_size(machine.available_bytes)} available leaves beside the rest"
    )


def _given_budget(options: EngineOptions, fixed: MemoryPlan) -> _Budget | None:
    """What the user gives the cache in bytes; ``fixed`` contains the slots."""
    if options.kv_cache_memory_bytes is None:
        return None
    if options.num_gpu_blocks_override is not None:
        raise ConfigError("give num_gpu_blocks_override or kv_cache_memory_bytes, not both")
    if options.kv_cache_memory_bytes <= fixed.kv_slots:
        raise ConfigError(
            f"kv_cache_memory_bytes={_size(options.kv_cache_memory_bytes)} does not hold the rings of max_num_seqs "
            f"sequences ({_size(fixed.kv_slots)}); raise it or lower max_num_seqs"
        )
    return _Budget(options.kv_cache_memory_bytes - fixed.kv_slots)


def _pools(
    options: EngineOptions,
    spec: ModelSpec,
    sizes: tuple[int, int],
    seqs: int,
    budget: _Budget | None,
    choices: _Choices,
) -> _Pools:
    """``sizes``: bytes of a page and of a slot."""
    page, slot = sizes
    # MLA has no rings: nothing has to be saved to resume at a page end.
    wanted = SNAPSHOTS_PER_SEQ * seqs if options.enable_prefix_caching and slot else 0
    if budget is None:
        assert options.num_gpu_blocks_override is not None  # _kv_budget: None only then
        pages, snapshots, enough = options.num_gpu_blocks_override, wanted, False
    else:
        snapshots = min(wanted, budget.size // SNAPSHOT_SHARE // slot) if slot else 0
        # More than every sequence at full length twice over is never looked at; do not take it from the machine.
        useful = 2 * seqs * pages_for(options.max_model_len or spec.max_position)
        pages = min((budget.size - snapshots * slot) // page, useful)
        enough = pages == useful
        choices.note("num_pages", pages, f"{_size(pages * page)} at {_size(page)} a page of {PAGE_TOKENS} tokens")
    if wanted:
        reason = f"at most {SNAPSHOTS_PER_SEQ} a sequence and a quarter of the cache, {_size(slot)} each"
        choices.note("num_snapshots", snapshots, reason)
    if wanted and not snapshots:
        raise ConfigError(
            f"the cache is too small for one snapshot of {_size(slot)} (at most a quarter of it holds snapshots); "
            "raise kv_cache_memory_bytes or set enable_prefix_caching=false"
        )
    if pages < seqs:
        beside = "" if budget is None else f" of {_size(budget.size)}"
        raise ConfigError(
            f"the cache{beside} holds {pages} pages, fewer than one for each of max_num_seqs={seqs} sequences "
            f"({_size(page)} a page); raise {_pages_option(options)} or lower max_num_seqs"
        )
    return _Pools(pages, snapshots, enough)


def _pages_option(options: EngineOptions) -> str:
    """What the number of pages hangs on."""
    return "kv_cache_memory_bytes" if options.num_gpu_blocks_override is None else "num_gpu_blocks_override"


def _model_len(options: EngineOptions, spec: ModelSpec, pools: _Pools, choices: _Choices) -> int:
    held = pools.pages * PAGE_TOKENS
    if options.max_model_len is None:
        length = min(spec.max_position, held)
        limit = "the model's own limit" if length == spec.max_position else f"what {pools.pages} pages hold"
        choices.note("max_model_len", length, limit)
        return length
    if options.max_model_len > held:
        raise ConfigError(
            f"max_model_len={options.max_model_len} needs {pages_for(options.max_model_len)} pages, the cache holds "
            f"{pools.pages} ({held} tokens); raise {_pages_option(options)} or lower max_model_len"
        )
    return options.max_model_len


def _require_fit(plan: MemoryPlan, machine: Machine, when: str) -> None:
    if plan.total <= machine.available_bytes:
        return
    cure = "lower kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, or use dtype=bfloat16"
    if plan.weights + plan.runtime > machine.available_bytes:
        cure = "the weights alone do not fit: dtype=bfloat16 halves float32, else it takes a larger machine"
    raise ConfigError(
        f"{_size(plan.total)} of memory are needed {when} (weights {_size(plan.weights)}, "
        f"cache {_size(plan.kv_cache)}, workspace {_size(plan.workspace)}, logits {_size(plan.logits)}, "
        f"program {_size(plan.runtime)}), but {_size(machine.available_bytes)} are available "
        f"(of {_size(machine.total_bytes)}, {machine.limited_by}); {cure}"
    )


def _served_name(options: EngineOptions, choices: _Choices) -> str:
    if options.served_model_name is not None:
        return options.served_model_name
    name = Path(options.model).resolve().name or options.model
    choices.note("served_model_name", name, "the checkpoint folder's name")
    return name


def _snapshot_interval(options: EngineOptions) -> int:
    if options.snapshot_interval % PAGE_TOKENS:
        raise ConfigError(
            f"snapshot_interval={options.snapshot_interval} is not a multiple of the page ({PAGE_TOKENS} tokens): "
            "snapshots lie at page ends"
        )
    return options.snapshot_interval


def _size(count: int) -> str:
    """Bytes for a message: exact below 10 KiB, else three digits."""
    if count < 10 * 1024:
        return f"{count} B"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"
