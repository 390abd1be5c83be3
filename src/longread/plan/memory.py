"""The memory that an engine takes, part by part, from the spec and the sizes of its pools.

The engine sizes its cache by these formulas, so plan and allocation cannot drift apart. Exact: weights, pages, slots,
snapshots. Upper bounds: the workspace of one step, and logits. Knows no machine and makes no choice.
"""

from longread.spec.config import MemoryPlan
from longread.spec.model import ModelSpec
from longread.spec.state import state_groups

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTENTION_BLOCK_BYTES = 64 * 2**20  # scores of one layer that exist at a time: attention works in query blocks
ATTENTION_BLOCKS = 2  # such blocks at once: scores and what they are computed from
LIVE_ACTIVATIONS = 12  # [tokens, hidden * streams] tensors alive at the worst place of a layer
# Interpreter, torch, server and a V4 tokenizer as loaded: 296 MiB measured; compiling numba's kernels on the very
# first run: some 70 MiB that stay; what the allocator keeps after a prompt of 15K tokens: 60; and slack.
RUNTIME_BYTES = 512 * 2**20
STORE_QUEUE_BYTES = 256 * 2**20  # kv.persist.QUEUE_BYTES
HOST_RING_SHARE = 4  # kv.host.RING_SHARE
COMPILED_BYTES = (
    96 * 2**20
)  # code that oneDNN compiles for products of lower precision: some 150 shapes, 80 MiB measured


def memory_plan(
    spec: ModelSpec,
    *,
    dtype: str,
    weight_bytes: int,
    num_pages: int,
    num_slots: int,
    num_snapshots: int,
    max_num_batched_tokens: int,
    host_cache_size: int = 0,
    store: bool = False,
) -> MemoryPlan:
    """The plan for pools of these sizes. With i = bytes of ``dtype``, N = max_num_batched_tokens:

    weights       weight_bytes (``spec.loaded.loaded_bytes``)
    kv_pages      num_pages * sum over row groups of layers * rows a page * width * i
    kv_slots      num_slots * sum over ring groups of layers * ring rows * width * (i, or 4 for float32 groups)
    kv_snapshots  the same for num_snapshots
    workspace     ``workspace_bytes``
    logits        3 * num_slots * vocab * 4: the logits, their processed copy, and the sampler's sorted copy
    runtime       RUNTIME_BYTES, and COMPILED_BYTES unless ``dtype`` is float32
    host_cache    host_cache_size, cut to whole records
    store_buffers with ``store``: the write queue (kv/persist.py), and staging for one record of each kind
    """
    page, slot = page_bytes(spec, dtype), slot_bytes(spec, dtype)
    return MemoryPlan(
        weights=weight_bytes,
        kv_pages=num_pages * page,
        kv_slots=num_slots * slot,
        kv_snapshots=num_snapshots * slot,
        workspace=workspace_bytes(spec, max_num_batched_tokens, num_slots),
        logits=3 * num_slots * spec.vocab * 4,
        runtime=RUNTIME_BYTES + (0 if dtype == "float32" else COMPILED_BYTES),
        host_cache=host_cache_bytes(page, slot, host_cache_size),
        store_buffers=max(STORE_QUEUE_BYTES, page + slot) + page + slot if store else 0,
    )


def host_cache_bytes(page: int, slot: int, size: int) -> int:
    """What the host arena takes of ``size``: at most a quarter for rings, the rest for pages, whole records only."""
    rings = size // HOST_RING_SHARE // slot if slot else 0
    return rings * slot + (size - rings * slot) // page * page


def page_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one page of 256 tokens over all layers and groups."""
    return sum(group.bytes_per_page(ITEMSIZE[dtype]) for group in state_groups(spec))


def slot_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of one sequence's rings over all layers and groups; 0 for models without any (MLA)."""
    return sum(group.bytes_per_slot(ITEMSIZE[dtype]) for group in state_groups(spec))


def workspace_bytes(spec: ModelSpec, max_num_batched_tokens: int, num_slots: int) -> int:
    """Upper bound of what one step allocates and frees, at any context length, in float32 whatever the dtype (norms,
    scores and routing compute in float32). N tokens, D hidden, streams = hyper.mult or 1:

    activations   12 * N * D * streams
    attention     2 score blocks of 64 MiB, which do not grow with the context, plus the step's own queries, keys and
                  outputs: ``_attention_floats`` a token
    experts       the larger of one dense FFN (3 * N * dense width) and a MoE layer whose tokens all meet in one expert
                  (N * (top_k + 2) * D gathered rows and sums, 3 * N * F hidden, 4 * N * routed for the router)
    Only one of attention and experts is alive at a time.
    """
    n, d, moe = max_num_batched_tokens, spec.hidden, spec.moe
    streams = spec.hyper.mult if spec.hyper is not None else 1
    activations = LIVE_ACTIVATIONS * n * d * streams
    attention = n * _attention_floats(spec) + min(n, num_slots) * _absorbed_floats(spec)
    routed = n * ((moe.top_k + 2) * d + 3 * moe.intermediate * max(1, moe.shared) + 4 * moe.routed)
    experts = max(routed, 3 * n * moe.dense_intermediate)
    return 4 * (activations + max(attention, experts)) + ATTENTION_BLOCKS * ATTENTION_BLOCK_BYTES


def _attention_floats(spec: ModelSpec) -> int:
    """Numbers a token that attention holds beside its score blocks.

    MLA: query (before and after RoPE), expanded keys and values of the chunk, output. V4: query before and after its
    norm and RoPE, output before and after the inverse RoPE, grouped output, index queries, chosen row ids (int64).
    """
    if spec.mla is not None:
        m = spec.mla
        query, expanded = m.qk_nope_head_dim + m.qk_rope_head_dim, m.qk_nope_head_dim + m.v_head_dim
        return spec.heads * (2 * query + expanded + query + 2 * m.v_head_dim) + 2 * (m.q_lora_rank or 0)
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None  # ModelSpec: without mla both are set
    return 4 * spec.heads * c.head_dim + 2 * c.o_groups * c.o_lora_rank + 2 * ix.heads * ix.head_dim + 2 * ix.top_k


def _absorbed_floats(spec: ModelSpec) -> int:
    """Numbers that one decoding sequence adds where queries and outputs live in the latent space (MLA)."""
    if spec.mla is None:
        return 0
    return spec.heads * (2 * spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim)
