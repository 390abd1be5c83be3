"""Memory of one step on one card beside weights and cache: activations, workspaces, logits, graphs, reserve.

Formulas per chunk token, held to what vLLM 0.26 reported on one H200 with full layer shapes and few layers, weights and
profiled peak together (chunk 8192 unless said): V4-Flash with 32 layers 112.0 GiB, formula 112.1; 114.8 at chunk 16384,
formula 114.6; V3.2 with 4 layers 45.5, formula 43.9; V3 43.9, formula 42.4. Knows no weights and no cache.
"""

from dataclasses import dataclass

from longread.plan.deployment import Deployment
from longread.spec.hardware import GIB

MIB = 2**20
SPARSE_HEADS = (
    64,
    128,
)  # FlashMLA's sparse kernels take 64 or 128 query heads: fewer are padded (vLLM 0.26 flashmla.py)
INDEX_LOGITS_LIMIT = 512 * MIB  # vLLM cuts queries to stay below (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
STREAM_TILE = 64 * MIB  # longread keeps one tile of index scores and folds it into the running top-k
MLA_CONTEXT_TOKENS = 64 * 1024  # vLLM expands this much cached context to keys and values at a time (dense MLA)
SGLANG_MLA_TOKENS = 128 * 1024  # SGLang expands this much at a time (SGLANG_MAX_KV_CHUNK_CAPACITY)
SPARSE_CONTEXT_LENGTHS = 5  # vLLM unpacks the FP8 cache of V3.2 to bfloat16, up to 5 * max_model_len rows
V4_GATHER_REQUESTS = 4  # vLLM unpacks the rows of 4 V4 prompts at a time (PREFILL_CHUNK_SIZE)
GRAPH_BYTES = GIB  # H200: torch's reserved peak stayed 1.0 to 5.1 GiB above vLLM's target in V4 and V3.2 runs
CONTEXT_BYTES = GIB // 2  # CUDA context and modules: 0.3 (V3, V3.2) to 1.05 GiB (V4, TileLang and JIT kernels)
NCCL_BYTES = GIB  # 2 x 4 MiB (NCCL_BUFFSIZE's default) x 32 channels x 4 communicators


ACTIVATIONS = ("residual", "attention", "experts", "workspace")
RESERVE = ("context", "communication", "tables")


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes, and where the figure comes from."""

    size: int
    source: str


def step_parts(d: Deployment, layers: int) -> dict[str, Part]:
    """Everything by name, for a stage of ``layers`` layers."""
    return _activations(d) | _logits(d) | _reserve(d, layers)


def _activations(d: Deployment) -> dict[str, Part]:
    """The residual streams, the larger of attention and experts, and workspaces, in bfloat16.

    residual  2 copies of [chunk, hidden * streams]
    attention MLA expanded: query, key, value, output, and W_kvb's output; absorbed (DSA): query before and after,
              latent and final output; V4: query before and after norm and RoPE, padded, and the output.
              Heads of one card, padded to 64 or 128 by the sparse kernels.
    experts   top_k * (max(2 * F, hidden) + F) + hidden a token (vLLM's two modular buffers), F a card's columns
    """
    spec, s = d.spec, d.strategy
    tokens = -(-d.chunk // s.cp)
    streams = spec.hyper.mult if spec.hyper is not None else 1
    columns = spec.moe.intermediate // (1 if s.ep else s.tp * s.cp)
    share = spec.moe.top_k  # every expert of a token may lie on this card
    experts = share * (max(2 * columns, spec.hidden) + columns) + spec.hidden
    attention = _attention_numbers(d)
    name = "attention" if attention >= experts else "experts"
    parts = {
        "residual": Part(2 * 2 * tokens * spec.hidden * streams, "2 copies of the streams in bfloat16"),
        name: Part(2 * tokens * max(attention, experts), _held(d)),
    }
    workspace = _workspace(d)
    return parts | ({"workspace": workspace} if workspace is not None else {})


def _held(d: Deployment) -> str:
    if d.hardware.card.architecture == "cpu":
        return "what the same step takes on a card; not measured on CPUs"
    return "formula, held to H200 profiles of vLLM 0.26"


def _attention_numbers(d: Deployment) -> int:
    """Numbers a token."""
    spec = d.spec
    heads = spec.heads // (d.strategy.tp // d.strategy.dp)
    if spec.compressed is not None:
        return 4 * _padded(heads) * spec.compressed.head_dim
    m = spec.mla
    assert m is not None  # ModelSpec: without compressed it is set
    query = m.qk_nope_head_dim + m.qk_rope_head_dim
    if spec.indexer is not None:
        wide = m.kv_lora_rank + m.qk_rope_head_dim
        return heads * (query + m.v_head_dim + wide) + _padded(heads) * m.kv_lora_rank
    expanded = m.qk_nope_head_dim + m.v_head_dim
    return heads * (2 * query + expanded + 2 * m.v_head_dim)


def _padded(heads: int) -> int:
    return next((size for size in SPARSE_HEADS if heads <= size), heads)


def _workspace(d: Deployment) -> Part | None:
    """What vLLM reserves to unpack or expand cached context; SGLang gathers alike; longread reads pages in place."""
    spec = d.spec
    if d.engine == "longread":
        return None
    heads = spec.heads // (d.strategy.tp // d.strategy.dp)
    if spec.compressed is not None:
        ratio = min((r for r in spec.compressed.ratios if r), default=1)
        rows = d.max_model_len // ratio + spec.compressed.window + d.chunk
        size = 2 * V4_GATHER_REQUESTS * rows * spec.compressed.head_dim
        # vLLM lays it over the experts' buffers, which activations count already: only what is larger adds.
        experts = 2 * d.chunk * spec.moe.top_k * (spec.hidden + spec.moe.intermediate)
        return Part(max(size - experts, 0), "vLLM 0.26: bfloat16 rows of 4 prompts, over the experts' buffers")
    m = spec.mla
    assert m is not None
    if spec.indexer is not None:
        rows = SPARSE_CONTEXT_LENGTHS * d.max_model_len + d.chunk * _padded(heads)
        size = 2 * rows * (m.kv_lora_rank + m.qk_rope_head_dim)
        return Part(size, "vLLM 0.26: 5 * max_model_len rows in bfloat16, and the concatenated queries")
    expanded = heads * (m.qk_nope_head_dim + m.v_head_dim) + m.kv_lora_rank + m.qk_rope_head_dim
    if d.engine == "sglang":
        rows = min(d.max_model_len, SGLANG_MLA_TOKENS)
        keys = heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        why = "SGLang 0.5.23 (forward_mha.py): latents, W_kvb's output and keys of 128K tokens of context, together"
        return Part(2 * rows * (expanded + keys), why)
    rows = min(max(8 * d.max_model_len, 64 * d.max_num_seqs), MLA_CONTEXT_TOKENS)
    return Part(2 * rows * expanded, "vLLM 0.26: 64K tokens of context expanded to keys and values")


def _logits(d: Deployment) -> dict[str, Part]:
    """Index scores of one chunk against the longest context, and vocabulary logits of every sequence."""
    spec = d.spec
    vocabulary = Part(3 * 4 * d.max_num_seqs * spec.vocab, "float32 logits, their processed and their sorted copy")
    if spec.indexer is None:
        return {"vocabulary logits": vocabulary}
    ratios = [r for r in spec.compressed.ratios if r] if spec.compressed is not None else [1]
    whole = 4 * -(-d.chunk // d.strategy.cp) * (d.max_model_len // min(ratios))
    if d.engine == "longread":
        index = Part(min(whole, STREAM_TILE), "streamed into the top-k, one tile of scores at a time")
    elif d.engine == "vllm":
        index = Part(min(whole, INDEX_LOGITS_LIMIT), "chunk x context x 4 B, cut at 512 MiB (vLLM 0.26)")
    else:
        index = Part(whole, "chunk x context x 4 B at once (sglang#35201)")
    return {"index scores": index, "vocabulary logits": vocabulary}


def _reserve(d: Deployment, layers: int) -> dict[str, Part]:
    tables = Part(_tables(d, layers), "RoPE tables in float32; W_kvb a second time in bfloat16, for absorbed decoding")
    if d.hardware.card.architecture == "cpu":
        return {"tables": tables}
    parts = {
        "graphs": Part(GRAPH_BYTES, "torch's reserved peak above vLLM's target, measured on one H200"),
        "context": Part(CONTEXT_BYTES, "CUDA context and modules, 0.3 to 1.05 GiB measured on one H200"),
        "tables": tables,
    }
    if d.strategy.gpus > 1:
        parts["communication"] = Part(NCCL_BYTES, "derived: 2 x 4 MiB x 32 channels x 4 communicators of NCCL")
    return parts


def _tables(d: Deployment, layers: int) -> int:
    """cos and sin for every position, once for each RoPE of the model, and what MLA's absorbed form keeps twice."""
    spec = d.spec
    if spec.mla is None:
        assert spec.compressed is not None  # ModelSpec: without mla it is set
        return 2 * 4 * spec.max_position * spec.compressed.rope_head_dim
    m = spec.mla
    heads = spec.heads // (d.strategy.tp // d.strategy.dp)
    absorbed = 2 * layers * heads * (m.qk_nope_head_dim + m.v_head_dim) * m.kv_lora_rank
    return 4 * spec.max_position * m.qk_rope_head_dim + absorbed
