"""The memory that an engine takes, part by part, from the spec and the sizes of its pools.

The engine sizes its cache by these formulas, so plan and allocation cannot drift apart. Exact: weights, pages, slots,
snapshots. Upper bounds: the workspace of one step, and logits. Knows no machine and makes no choice.
"""

from longread.spec.config import MemoryPlan
from longread.spec.model import MLASpec, ModelSpec
from longread.spec.state import PAGE_TOKENS, state_groups

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Limits of the kernels' scratch, in numbers: models/v4_attention.py, kernels/indexer/ref.py, kernels/mla/ref.py.
SCORE_FLOATS, INDEX_FLOATS, GATHER_FLOATS, INDEX_SCRATCH_FLOATS = 1 << 21, 1 << 22, 1 << 22, 1 << 20
V4_MIN_BLOCK, V4_MAX_BLOCK = 8, 128
MLA_SCORES, MLA_QUERY_BLOCK, MLA_KEY_BLOCK = 16 << 20, 256, 1024
THREADS = 16  # where nobody says: MLA works on as many heads at a time
# What the processes take beside weights, cache and a step, measured. The engine's 386 MiB: 300 are Python and torch as
# imported, the rest numba's kernels and other code as it comes into use, and some 6 stay with the allocator. Compiling
# numba's kernels takes some 70 on the very first run. 176 of it are libraries' files, of which a system may map 60 to
# 120 more, and take them back. The server is a process of its own: up to 168 with its libraries, in the demo.
PROGRAM_BYTES, SERVER_BYTES = 392 * 2**20, 168 * 2**20
RUNTIME_BYTES = PROGRAM_BYTES + SERVER_BYTES
STORE_QUEUE_BYTES = 256 * 2**20  # kv.persist.QUEUE_BYTES
HOST_RING_SHARE = 4  # kv.host.RING_SHARE
COMPILED_BYTES = 96 * 2**20  # oneDNN's code for products of lower precision: some 150 shapes, 80 MiB measured


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
    threads: int = THREADS,
    max_model_len: int | None = None,
) -> MemoryPlan:
    """The plan for pools of these sizes. With i = bytes of ``dtype``, N = max_num_batched_tokens:

    weights       weight_bytes (``spec.loaded.loaded_bytes``)
    kv_pages      num_pages * sum over row groups of layers * rows a page * width * i
    kv_slots      num_slots * sum over ring groups of layers * ring rows * width * (i, or 4 for float32 groups)
    kv_snapshots  the same for num_snapshots
    workspace     ``workspace_bytes`` for sequences of max_model_len (default: the model's limit) or what the pages hold
    logits        3 * num_slots * vocab * 4: the logits, their processed copy, and the sampler's sorted copy
    runtime       RUNTIME_BYTES, and COMPILED_BYTES unless ``dtype`` is float32
    host_cache    host_cache_size, cut to whole records
    store_buffers with ``store``: the write queue (kv/persist.py), and staging for one record of each kind
    """
    page, slot = page_bytes(spec, dtype), slot_bytes(spec, dtype)
    limit = max_model_len or spec.max_position
    context = min(num_pages * PAGE_TOKENS, limit) or limit
    return MemoryPlan(
        weights=weight_bytes,
        kv_pages=num_pages * page,
        kv_slots=num_slots * slot,
        kv_snapshots=num_snapshots * slot,
        workspace=workspace_bytes(spec, max_num_batched_tokens, num_slots, context, dtype, threads),
        logits=3 * num_slots * spec.vocab * 4,
        runtime=RUNTIME_BYTES + (0 if dtype == "float32" else COMPILED_BYTES),
        host_cache=host_cache_bytes(page, slot, host_cache_size),
        store_buffers=store_buffer_bytes(page, slot) if store else 0,
    )


def store_buffer_bytes(page: int, slot: int) -> int:
    """The write queue, and staging for one record of each kind."""
    return max(STORE_QUEUE_BYTES, page + slot) + page + slot


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


def workspace_bytes(
    spec: ModelSpec,
    max_num_batched_tokens: int,
    num_slots: int,
    context: int | None = None,
    dtype: str = "float32",
    threads: int = THREADS,
) -> int:
    """Upper bound of what one step allocates and frees with sequences of up to ``context`` tokens (None: the model's
    own limit) on ``threads`` threads. N tokens, D hidden:

    per token   residual streams, the sublayer's input, and the larger of attention (``_v4_token_bytes``,
                ``_mla_token_bytes``) and experts (``_expert_token_bytes``): only one of the two is alive at a time
    blocks      scores and gathered rows of one query block (``_v4_block_bytes``, ``_mla_block_bytes``)
    """
    n, size = max_num_batched_tokens, ITEMSIZE[dtype]
    length = spec.max_position if context is None else context
    experts = _expert_token_bytes(spec, size)
    if spec.mla is not None:
        attention, blocks = _mla_token_bytes(spec, size), _mla_block_bytes(spec, n, num_slots, length, threads)
        return n * (4 * spec.hidden * size + max(attention, experts)) + blocks
    hyper = spec.hyper
    assert hyper is not None  # ModelSpec: V4 has it
    streams = 4 * hyper.mult * spec.hidden + 4 * 6 * hyper.mult**2 + 4 * spec.hidden
    attention, blocks = _v4_token_bytes(spec, size), _v4_block_bytes(spec, length)
    return n * (streams + 2 * spec.hidden * size + max(attention, experts)) + blocks


def _expert_token_bytes(spec: ModelSpec, size: int) -> int:
    """A MoE layer whose tokens all meet in one expert, or a dense one: router, sums, gathered rows, hidden, output."""
    moe, d = spec.moe, spec.hidden
    router = 4 * 3 * moe.routed + 8 * 4 * moe.top_k
    routed = 4 * d + 2 * d * size + 4 * d + 3 * moe.intermediate * size
    shared = 4 * d + d * size + 3 * moe.intermediate * max(1, moe.shared) * size
    dense = 3 * moe.dense_intermediate * size + d * size
    return max(router + max(routed, shared), dense)


def _v4_token_bytes(spec: ModelSpec, size: int) -> int:
    """Projections of the input, compressed query, queries and index queries twice (before and after norm or RoPE), key,
    output in float32; then the output in the model's type, and its grouped product twice; RoPE's tables.
    """
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None  # ModelSpec: without mla both are set
    inputs = c.q_lora_rank + c.head_dim + 4 * c.head_dim + 4 * ix.head_dim + ix.heads
    index = 2 * ix.heads * ix.head_dim
    queries = 2 * spec.heads * c.head_dim + index
    own = (inputs + c.q_lora_rank + queries + c.head_dim) * size + 4 * ix.heads
    cast = spec.heads * c.head_dim * size if size < 4 else 0
    after = cast + 2 * c.o_groups * c.o_lora_rank * size + spec.hidden * size
    return own + 4 * spec.heads * c.head_dim + after + 16 * c.rope_head_dim


def _v4_block_bytes(spec: ModelSpec, context: int) -> int:
    """One query block: index scores with their masks, gathered rows and their masked copy, attention's scores and their
    softmax. Limits as in models/v4_attention.py; a block has at most 128 queries, so a short context needs less.
    """
    c, ix = spec.compressed, spec.indexer
    assert c is not None and ix is not None
    csa, hca = -(-context // 4), -(-context // 128)
    scores = min(INDEX_FLOATS, V4_MAX_BLOCK * csa) if csa > ix.top_k else 0
    gathered = min(GATHER_FLOATS, V4_MAX_BLOCK * ix.top_k * c.head_dim) if scores else 0
    keys = c.window + V4_MAX_BLOCK + max(min(csa, 4 * ix.top_k), hca)
    attention = min(max(SCORE_FLOATS, V4_MIN_BLOCK * spec.heads * keys), V4_MAX_BLOCK * spec.heads * keys)
    queries = 3 * V4_MAX_BLOCK * spec.heads * c.head_dim
    scratch = INDEX_SCRATCH_FLOATS if scores else 0
    return 8 * scores + 4 * (2 * gathered + 2 * attention + queries + scratch)


def _mla_token_bytes(spec: ModelSpec, size: int) -> int:
    """Down-projections and the normalised query latent, query, output in float32, in the model's type, and projected.

    A chunk shorter than ``crossover`` keeps queries and outputs in the latent space instead: counted as a block.
    """
    m = spec.mla
    assert m is not None
    down = 2 * (m.q_lora_rank or 0) + 2 * m.kv_lora_rank + 2 * m.qk_rope_head_dim
    query = spec.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    cast = query * 4 + spec.heads * m.v_head_dim * size if size < 4 else 0
    output = spec.heads * m.v_head_dim
    return (down + query) * size + 4 * output + cast + 2 * spec.hidden * size


def _mla_block_bytes(spec: ModelSpec, tokens: int, num_slots: int, context: int, threads: int) -> int:
    """The larger of the two forms. Expanded: one tile of scores, keys and values of one block of keys, sums, for the
    heads that are worked on together. Absorbed: queries, mixed latents and two score tiles.
    """
    m = spec.mla
    assert m is not None
    latent = m.kv_lora_rank + m.qk_rope_head_dim
    few = min(spec.heads, max(2, threads), MLA_SCORES // (MLA_QUERY_BLOCK * MLA_KEY_BLOCK))
    each = m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim
    expanded = few * (MLA_QUERY_BLOCK * MLA_KEY_BLOCK + 2 * MLA_KEY_BLOCK * each + tokens * (m.v_head_dim + 3))
    absorbed_tokens = min(tokens, max(num_slots, crossover(m)))
    keys = min(context, MLA_KEY_BLOCK)  # a chunk's tile; a single query has all its keys in one
    scores = max(min(MLA_SCORES, absorbed_tokens * spec.heads * keys), min(MLA_SCORES, spec.heads * context))
    absorbed = absorbed_tokens * spec.heads * (latent + 2 * m.kv_lora_rank + m.v_head_dim) + 2 * scores
    return 4 * max(expanded, absorbed)


def crossover(m: MLASpec) -> int:
    """Tokens from which a chunk is expanded (kernels/mla/ref.py); a chunk that never is counts as any length."""
    gain = 2 * m.kv_lora_rank - m.qk_nope_head_dim - m.v_head_dim
    return 1 << 40 if gain <= 0 else m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim) // gain + 1
