"""What the engine takes of a GPU: which device runs a model, and the memory of its parts by formulas.

Knows a spec, sizes of pools and steps, and how models/native_v4.py holds its weights and buffers (native_v3.py:
plan/device_mla.py); knows no torch. The engine sizes its cache by these formulas, logs them beside what torch counts,
and tests hold the two together.
"""

from dataclasses import dataclass

from longread.plan.device_mla import COMPUTE, mla_step_bytes, mla_weights, quantised, unfit
from longread.plan.device_v4 import unfit_v4
from longread.plan.figures import gib
from longread.plan.machine import Gpu
from longread.spec.config import EngineOptions, MemoryPlan
from longread.spec.errors import ConfigError
from longread.spec.inventory import ITEMSIZE, inventory
from longread.spec.loaded import is_drafter
from longread.spec.model import ModelSpec
from longread.spec.state import PAGE_TOKENS, CacheKind, pages_for, state_groups

CAPABILITY = (9, 0)  # Hopper: what the kernels were written for
FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v4")  # what has a model of native weights
CONTEXT_BYTES = 640 * 2**20  # CUDA context, Triton's and cuBLAS's modules: 0.3 to 1.05 GiB measured with other engines
# Of all graphs beside one step's buffers, and what torch's allocator keeps but has not handed out: reserved less
# allocated at the peak of one H200's runs, V4-Flash with 8 and 32 layers (2.61 and 2.97 GB, results/hopper-v4-*.json).
GRAPH_BYTES, GRAPH_LAYER_BYTES = 1824 * 2**20, 15 * 2**20
WORKSPACE_BYTES = 64 * 2**20  # cuBLAS's, on two streams
SCORE_BYTES = 256 * 2**20  # kernels/indexer takes as many queries at a time as have so many bytes of scores
SAMPLED_ROWS = 16  # engine.device_sampler.ROWS
STAGING, STAGING_BYTES = 3, 32 * 2**20  # kv.device_copies: buffers of records on their way, of at least so many bytes


@dataclass(frozen=True, slots=True)
class Placed:
    """Which device runs a model, and why where that was not asked for."""

    device: str
    reason: str | None


def choose_device(options: EngineOptions, spec: ModelSpec, gpu: Gpu | str) -> Placed:
    """``gpu`` as ``plan.machine.probe_gpu`` found it. Raises ConfigError where what was asked for cannot be."""
    if options.device != "cpu":
        missing = _missing(options, spec, gpu)
        if options.device == "cuda" and missing is not None:
            raise ConfigError(f"device=cuda: {missing}; use device=cpu")
        if missing is None:
            assert isinstance(gpu, Gpu)
            return Placed("cuda", None if options.device == "cuda" else f"there is one: {gpu.name}")
    else:
        missing = None
    why = "" if missing is None else f" ({missing})"
    if options.kv_cache_dtype == "fp8":
        raise ConfigError(f"kv_cache_dtype=fp8 needs device=cuda{why}; on a CPU the cache has the type of dtype")
    if options.kv_cache_dtype == "bfloat16" and options.dtype != "bfloat16":
        raise ConfigError(f"kv_cache_dtype=bfloat16 needs dtype=bfloat16 on a CPU{why}, where the cache has its type")
    if options.gpu_memory_utilization is not None:
        raise ConfigError(f"gpu_memory_utilization says nothing about a CPU{why}; give kv_cache_memory_bytes")
    return Placed("cpu", missing)


def _missing(options: EngineOptions, spec: ModelSpec, gpu: Gpu | str) -> str | None:
    """Why a GPU cannot run this; None: it can."""
    if isinstance(gpu, str):
        return gpu
    if gpu.capability[0] != CAPABILITY[0]:  # what is newer lacks Hopper's tensor-core instructions
        found, wanted = (".".join(map(str, pair)) for pair in (gpu.capability, CAPABILITY))
        return f"{gpu.name} has compute capability {found}; the kernels need {wanted} (Hopper)"
    if spec.family not in FAMILIES:
        return f"{spec.label} is of family {spec.family}; GPUs run {', '.join(FAMILIES)}"
    if options.dtype == "float32":
        return "dtype=float32 is the CPU's; on GPUs activations are bfloat16"
    reason = None
    if spec.mla is not None:
        reason = unfit(spec, spec.mla, options.kv_cache_dtype != "bfloat16")
    elif spec.compressed is not None and spec.indexer is not None and spec.hyper is not None:
        context = pages_for(min(options.max_model_len or spec.max_position, spec.max_position)) * PAGE_TOKENS
        reason = unfit_v4(spec, spec.compressed, spec.indexer, spec.hyper, context)
    return reason and f"{spec.label}: {reason}, which the GPU's kernels need"


def device_plan(
    spec: ModelSpec,
    *,
    cache: CacheKind,
    num_pages: int,
    num_slots: int,
    num_snapshots: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    host_cache: int = 0,
    store_buffers: int = 0,
) -> MemoryPlan:
    """The plan for pools of these sizes on one GPU. N = max_num_batched_tokens, L = max_model_len:

    weights    ``native_bytes``
    kv_*       pages, slots and snapshots at ``state_groups(spec, cache)``'s widths
    workspace  the larger of ``step_bytes(N, L)`` and ``sampler_bytes``; page tables: slots * pages of L * 4; staging of
               records between the tiers
    logits     float32 of a bucket's rows
    runtime    CUDA's context, cuBLAS, the graphs: these hold a short chunk's buffers, ``step_bytes(512, L)``
    """
    page, slot = group_bytes(spec, cache)
    step = max(step_bytes(spec, max_num_batched_tokens, max_model_len, cache), sampler_bytes(spec, num_slots))
    tables = num_slots * pages_for(max_model_len) * 4
    tables += STAGING * max(STAGING_BYTES, page, slot)
    graphs = GRAPH_BYTES + spec.layers * GRAPH_LAYER_BYTES
    graphs += step_bytes(spec, min(512, max_num_batched_tokens), max_model_len, cache)
    return MemoryPlan(
        weights=native_bytes(spec),
        kv_pages=num_pages * page,
        kv_slots=num_slots * slot,
        kv_snapshots=num_snapshots * slot,
        workspace=step + tables,
        logits=4 * (bucket(num_slots) + 1) * spec.vocab,
        runtime=CONTEXT_BYTES + WORKSPACE_BYTES + graphs,
        host_cache=host_cache,
        store_buffers=store_buffers,
    )


def native_bytes(spec: ModelSpec) -> int:
    """The backbone as models/native_v4.py holds it: stored types, but scales of FP8 matrices as float32, and for FP4
    experts a float32 factor a row beside their scales (kernels/experts ``prepare``). V2 and V3: ``mla_weights``.
    """
    if spec.mla is not None:
        return mla_weights(spec, spec.mla)
    total = 0
    for entry in inventory(spec):
        if is_drafter(entry.name, spec):
            continue
        wide = entry.scale_of is not None and ".experts." not in entry.name
        total += entry.elements * (4 if wide else ITEMSIZE[entry.dtype])
        if entry.dtype == "int8":
            total += 4 * entry.shape[0]
    return total


def group_bytes(spec: ModelSpec, cache: CacheKind) -> tuple[int, int]:
    """Bytes of a page and of a slot over all groups and layers."""
    groups = state_groups(spec, cache)
    return sum(g.bytes_per_page(COMPUTE) for g in groups), sum(g.bytes_per_slot(COMPUTE) for g in groups)


def bucket(rows: int) -> int:
    """The smallest power of two that holds so many decoding rows."""
    return 1 << (rows - 1).bit_length()


def sampler_bytes(spec: ModelSpec, num_slots: int) -> int:
    """engine.device_sampler: logits, their noise in 64 bits and its parts, of one block of rows."""
    return 40 * min(SAMPLED_ROWS, bucket(num_slots)) * spec.vocab


def step_bytes(spec: ModelSpec, tokens: int, bound: int, cache: CacheKind) -> int:
    """Most that is alive at a time while models/native_v4.py computes a chunk of T = ``tokens`` of a sequence of up to
    L = ``bound``. H heads of d channels, D hidden, m streams, r the smallest ratio of a compressed layer:

    always     streams [T, m, D]; a sublayer's input plain and in FP8, its predecessor's output, their mixing weights
    attention  queries and index queries [T, H d + Hi di], the latter once more in FP8, c_q, kv and the window's slab,
               compressors' inputs in float32, choices; then the output [T, H d], or before it the scores (at most
               SCORE_BYTES); for the whole context rows [L / r, d] in bfloat16 and index keys
    experts    hidden [T k, 2 F], activations in FP8, outputs [T k, D]; the shared expert's; router's logits

    V2 and V3: ``mla_step_bytes``.
    """
    if spec.mla is not None:
        return mla_step_bytes(spec, spec.mla, tokens, bound)
    c, ix, hyper, moe, d = spec.compressed, spec.indexer, spec.hyper, spec.moe, spec.hidden
    if c is None or ix is None or hyper is None:
        raise ConfigError(f"{spec.label}: no plan for family {spec.family} on a GPU")
    always = hyper.mult * d * COMPUTE + 2 * d * COMPUTE + quantised(d) + 8 * (hyper.mult + hyper.mult**2)
    always += 4 * 4 * c.rope_head_dim
    csa, wide = 4 in c.ratios, spec.heads * c.head_dim
    ratio = 4 if csa else 128
    rows = bound // ratio if any(c.ratios) else 0
    selects = csa and rows > ix.top_k
    index = ix.heads * ix.head_dim if selects else 0
    own = (wide + index) * COMPUTE + index + quantised(c.q_lora_rank) + 2 * c.head_dim * COMPUTE
    own += (4 * (4 * c.head_dim + 4 * ix.head_dim + 2 * ix.heads) + 4 * ix.top_k) if csa else 8 * c.head_dim
    scores = min(SCORE_BYTES, 4 * tokens * rows) if selects else 0
    context = rows * c.head_dim * COMPUTE + (rows * (ix.head_dim + 4) if selects else 0)
    attention = tokens * own + max(tokens * wide * COMPUTE, scores) + context
    f, k = moe.intermediate, moe.top_k
    routed = k * (max(2 * f * COMPUTE, d * COMPUTE) + quantised(f) + 32)
    shared = max(1, moe.shared) * (2 * f * COMPUTE + quantised(f)) + d * COMPUTE
    experts = tokens * (routed + shared + 4 * moe.routed)
    return tokens * always + max(attention, experts)


def require_device_fit(plan: MemoryPlan, gpu: Gpu, share: float, when: str) -> None:
    """Raises ConfigError where a plan is beyond what the engine may take of the GPU, or beyond what is free."""
    limit = int(share * gpu.total_bytes)
    if plan.on_device <= min(limit, gpu.free_bytes):
        return
    cure, least = "lower max_num_batched_tokens, max_num_seqs or the cache", plan.weights + plan.runtime
    if least > gpu.total_bytes:
        cure = "the weights alone do not fit: it takes a larger GPU, or fewer layers of random weights"
    elif least > gpu.free_bytes:
        cure = "the weights alone do not fit beside what other processes hold of this GPU: end those"
    elif least > limit:
        cure = "the weights alone do not fit in that share: raise gpu_memory_utilization"
    elif limit < gpu.free_bytes:
        cure += ", or raise gpu_memory_utilization"
    else:
        cure += "; other processes hold memory of this GPU"
    raise ConfigError(
        f"{gib(plan.on_device)} of GPU memory are needed {when} (weights {gib(plan.weights)}, cache "
        f"{gib(plan.kv_cache)}, a step {gib(plan.workspace)}, logits {gib(plan.logits)}, CUDA and its graphs "
        f"{gib(plan.runtime)}), but {gpu.name} gives {gib(limit)} (gpu_memory_utilization={share:g} of "
        f"{gib(gpu.total_bytes)}) and {gib(gpu.free_bytes)} are free; {cure}"
    )
