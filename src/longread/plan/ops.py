"""The operations of one step on the busiest card: FLOPs, bytes and launches by kind, before any efficiency.

Knows a deployment; no rates. A step's ops cover all layers: a pipeline stage runs its share of them (``timing``).
Splitting rules: TP cuts heads and FFN columns; down-projections, compressors, the indexer and the cache are whole on
every TP rank; CP cuts the tokens of a chunk, and the cache where the engine splits it; experts lie over all cards of a
stage.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from longread.plan.deployment import Deployment
from longread.plan.shapes import Reading, is_sparse, matrices, readings, scorings
from longread.plan.shards import cache_share
from longread.spec.model import ModelSpec

Kind = Literal[
    "linear", "experts", "attention", "sparse attention", "decode attention", "index", "top-k", "elementwise", "head"
]
# Expert-parallel ranks wait for the one with most rows; cut by columns there is nothing to wait for. Assumed: how even
# routing is depends on the text.
EP_SKEW = 1.2
# FlashMLA on Hopper: tiles of 64 query heads, in the sparse kernels and in dense decode (FlashMLA sm90 config.h B_H=64,
# recipes#234). Longread's own kernels are planned with 16, the smallest matrix tile.
HEAD_TILE = {"vllm": 64, "sglang": 64, "longread": 16}
_EXPERT_BYTES = {"fp8": 1.0 + 4 / 128**2, "fp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 128, "bf16": 2.0}
_DECODE_PATH = 512  # tokens of an extension that vLLM's FlashAttention MLA backend computes in absorbed form
# Kernels a layer: attention, router, experts, norms, quantisation. Assumed: counted from formulas, not traced.
_LAUNCHES = {"dense": 34, "sparse": 46, "v4": 62}


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of work over all layers. ``rate`` names the peak that bounds its FLOPs; ``launches`` are kernels."""

    name: str
    kind: Kind
    flops: float
    rate: str
    bytes: float
    launches: int


def attention_ranks(d: Deployment) -> int:
    """Cards that share the heads of one request."""
    return max(d.strategy.tp // d.strategy.dp, 1)


def expert_ranks(d: Deployment) -> int:
    """Cards over which the experts of one layer lie."""
    return d.strategy.tp * d.strategy.cp


def expert_format(d: Deployment) -> str:
    """The type that routed experts have in memory."""
    if d.experts != "native":
        return d.experts
    if d.spec.quant is None:
        return "plain"
    return d.spec.quant.experts


def expert_bytes(d: Deployment) -> float:
    """Bytes a number of a routed expert."""
    kind = expert_format(d)
    return _plain_bytes(d.spec) if kind == "plain" else _EXPERT_BYTES[kind]


def expert_rate(d: Deployment) -> str:
    """What multiplies: 4-bit weights run as bfloat16 where the tensor cores have no FP4 (Marlin on Hopper)."""
    kind = expert_format(d)
    if kind == "plain":
        return plain_rate(d.spec)
    if kind == "fp4":
        return "fp8" if "fp4" in d.hardware.card.flops else "bf16"  # Blackwell: MXFP4 by MXFP8
    return {"fp8": "fp8", "int4": "bf16", "bf16": "bf16"}[kind]


def _plain_bytes(spec: ModelSpec) -> float:
    return 4.0 if spec.torch_dtype == "float32" else 2.0


def plain_rate(spec: ModelSpec) -> str:
    """The rate name of the checkpoint's plain float type."""
    return "fp32" if spec.torch_dtype == "float32" else "bf16"


def rows_touched(experts: int, top_k: int, tokens: float) -> float:
    """Experts of a layer that at least one of ``tokens`` tokens goes to, with even routing."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@lru_cache(maxsize=64)
def launches(spec: ModelSpec) -> int:
    """Kernels of one step over all layers."""
    if spec.compressed is not None:
        return spec.layers * _LAUNCHES["v4"]
    return spec.layers * _LAUNCHES["sparse" if is_sparse(spec) else "dense"]


def prefill_ops(d: Deployment, chunk: int, prefix: int, *, sequences: int = 1, groups: int = 1) -> tuple[Op, ...]:
    """One chunk of ``chunk`` tokens behind ``prefix`` tokens of cache.

    ``sequences``: the chunk is that many sequences of equal length, each behind ``prefix``. ``groups``: attention
    data-parallel groups that compute a chunk at the same time (their rows meet in the experts).
    """
    spec, each = d.spec, chunk / sequences
    local = chunk / d.strategy.cp  # tokens of this chunk on one card
    ops = [*_weight_ops(d, local, chunk * groups, prompt=True)]
    attended = sequences / d.strategy.cp  # a balanced split (zigzag) gives every CP rank the same share of the pairs
    if spec.mla is not None and not is_sparse(spec):
        ops += _mha_ops(d, each, prefix, attended)
    else:
        ops += _sparse_ops(d, each, prefix, attended)
    scored = sum(r.rows(prefix, int(each)) * attended for r in scorings(spec, d.cache))
    if scored:
        flops = sum(r.rows(prefix, int(each)) * r.flops for r in scorings(spec, d.cache)) * attended
        ops.append(Op("indexer scores", "index", flops, _quantised_rate(d), 4 * scored, 0))
        ops.append(Op("indexer top-k", "top-k", 0.0, "bf16", 4 * scored, 0))
    ops.append(Op("norms, streams, quantisation", "elementwise", 0.0, "bf16", local * stream_bytes(d), launches(spec)))
    return tuple(ops)


def decode_ops(d: Deployment, batch: int, context: int) -> tuple[Op, ...]:
    """One step of ``batch`` sequences that see ``context`` tokens each."""
    spec = d.spec
    rows = -(-batch // d.strategy.dp)
    ops = [*_weight_ops(d, rows, batch, prompt=False)]
    ranks, cards = attention_ranks(d), cache_share(d)  # cards that a sequence's rows lie over, each reads its own
    flops = moved = 0.0
    for r in readings(spec, d.cache, False):
        read = r.rows_at(context) * rows / cards
        flops += read * r.flops * _padded(d, r.heads / ranks)
        moved += read * r.bytes
    ops.append(Op("attention", "decode attention", flops, plain_rate(spec), moved, 0))
    scored = [(r, r.rows_at(context) * rows / cards) for r in scorings(spec, d.cache, False)]
    if scored:
        flops, moved = sum(n * r.flops for r, n in scored), sum(n * r.bytes for r, n in scored)
        ops.append(Op("indexer scores", "index", flops, _quantised_rate(d), moved, 0))
        ops.append(Op("indexer top-k", "top-k", 0.0, "bf16", 8 * sum(n for _, n in scored), 0))
    ops.append(Op("norms, streams, quantisation", "elementwise", 0.0, "bf16", rows * stream_bytes(d), launches(spec)))
    ops.append(head_op(d, rows))
    return tuple(ops)


def head_op(d: Deployment, rows: int) -> Op:
    """Logits of ``rows`` tokens. The head is stored in the checkpoint's plain float type."""
    head = matrices(d.spec, False).head / attention_ranks(d) / d.strategy.cp
    return Op("head", "head", 2 * head * rows, plain_rate(d.spec), head * _plain_bytes(d.spec), 3)


def _weight_ops(d: Deployment, local: float, tokens: float, *, prompt: bool) -> tuple[Op, Op]:
    """Products with weights: ``local`` rows meet the linears of one card, ``tokens`` the experts of the stage."""
    spec, m, s = d.spec, matrices(d.spec, prompt), d.strategy
    own = m.split / attention_ranks(d) + m.whole + m.router + m.hyper + m.engram
    dense = m.dense / attention_ranks(d) / s.cp  # FFNs of all tokens: cp cuts them further, and all its rows meet there
    flops = 2 * (own * local + dense * local * (s.cp if prompt else 1))
    one = 1.0 if spec.quant is not None else _plain_bytes(spec)
    moved = (own + dense - m.plain) * one + m.plain * _plain_bytes(spec)
    linear = Op("linears", "linear", flops, _quantised_rate(d), moved, 0)
    ranks = expert_ranks(d)
    skew = EP_SKEW if s.ep and ranks > 1 and tokens > 1 else 1.0
    flops = 2 * m.expert * m.moe_layers * spec.moe.top_k * tokens / ranks * skew
    touched = rows_touched(spec.moe.routed, spec.moe.top_k, tokens)
    moved = m.expert * m.moe_layers * touched / ranks * skew * expert_bytes(d)
    return linear, Op("routed experts", "experts", flops, expert_rate(d), moved, 0)


def _mha_ops(d: Deployment, each: float, prefix: int, attended: float) -> list[Op]:
    """MLA prefill as multi-head attention: keys and values of the prefix are projected again for every chunk.

    A short suffix behind a long prefix is absorbed instead where that is cheaper: vLLM takes up to 512 tokens that way
    (its decode path), Longread any number.
    """
    spec, ranks = d.spec, attention_ranks(d)
    mla = spec.mla
    assert mla is not None
    rate = plain_rate(spec)
    pairs = spec.layers * each * (prefix + (each + 1) / 2) * attended
    per_pair = 2.0 * (mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim)
    heads = spec.heads / ranks
    again = 2.0 * mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim) * prefix * spec.layers * heads
    absorbed = pairs * 2.0 * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim) * heads
    if (d.engine == "longread" or each <= _DECODE_PATH) and absorbed < pairs * per_pair * heads + again:
        row = readings(spec, d.cache)[0]
        moved = row.layers * row.bytes * (prefix + each) / cache_share(d)
        return [Op("attention, absorbed", "decode attention", absorbed, rate, moved, 0)]
    ops = [Op("attention", "attention", pairs * per_pair * heads, rate, 0.0, 0)]
    if prefix:
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        moved = 2.0 * 2 * width * prefix * spec.layers * heads
        ops.append(Op("prefix projected again", "linear", again, _quantised_rate(d), moved, 0))
    return ops


def _sparse_ops(d: Deployment, each: float, prefix: int, attended: float) -> list[Op]:
    """Attention over chosen rows, windows and HCA's rows, with the heads that the kernel's tiles are padded to."""
    ranks = attention_ranks(d)
    flops = workspace = 0.0
    for r in readings(d.spec, d.cache):
        flops += r.rows(prefix, int(each)) * attended * r.flops * _padded(d, r.heads / ranks)
        workspace += _workspace(d, r, prefix + each)
    return [Op("sparse attention", "sparse attention", flops, plain_rate(d.spec), workspace, 0)]


def _workspace(d: Deployment, r: Reading, context: float) -> float:
    """Bytes moved to make a bfloat16 copy of a quantised cache for the sparse prefill kernel, each chunk and layer."""
    if d.cache in ("bfloat16", "float16", "float32") or d.engine == "longread" or r.name == "window":
        return 0.0
    width = d.spec.mla.kv_lora_rank if d.spec.mla is not None else 512
    return r.layers * context / r.ratio * (r.bytes + 4.0 * width)


def _padded(d: Deployment, heads: float) -> float:
    """Heads that the kernel computes for ``heads`` real ones on one card."""
    if d.hardware.card.architecture not in ("hopper", "blackwell"):
        return heads
    return max(heads, float(min(HEAD_TILE[d.engine], d.spec.heads)))


def _quantised_rate(d: Deployment) -> str:
    return "fp8" if d.spec.quant is not None else plain_rate(d.spec)


def stream_bytes(d: Deployment) -> float:
    """Bytes of activations that one token moves outside the products, over all layers.

    Passes over the residual stream (norms, quantisation, residual adds; V4 mixes ``hc_mult`` streams twice a layer),
    over query and output heads (norm, RoPE, quantisation) and over the routed rows (permute, activate, combine).
    """
    return _stream_bytes(d.spec, attention_ranks(d), expert_ranks(d))


@lru_cache(maxsize=64)
def _stream_bytes(spec: ModelSpec, heads_over: int, experts_over: int) -> float:
    size = _plain_bytes(spec)
    hidden = spec.hidden * size
    routed = spec.moe.top_k * (4 * hidden + 6 * spec.moe.intermediate * size) / experts_over
    if spec.mla is not None:
        width = 2 * (spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim) + 2 * spec.mla.v_head_dim
        heads = 2 * spec.heads * width * size / heads_over
        return spec.layers * (14 * hidden + heads + routed)
    c, hyper = spec.compressed, spec.hyper
    assert c is not None
    streams = (hyper.mult if hyper is not None else 1) * hidden
    layers = spec.shared_kv.kv_sources[-1] if spec.shared_kv is not None else spec.layers
    return layers * (8 * streams + 6 * hidden + 8 * spec.heads * c.head_dim * size / heads_over + routed)
