"""Physical limits: what peak rates allow when nothing is lost, replicated or communicated.

Closed sums over positions, so that a claim can be held against arithmetic alone. No engine is faster than these.
"""

from dataclasses import dataclass, replace

from longread.plan.deployment import Deployment, Strategy
from longread.plan.ops import decode_ops, expert_format, rows_touched
from longread.plan.shapes import Reading, is_sparse, matrices, readings, scorings
from longread.spec.count import fixed_bytes_per_request, kv_bytes_per_token
from longread.spec.errors import ConfigError
from longread.spec.hardware import Card, Hardware
from longread.spec.model import ModelSpec

_FALLBACK = {"fp4": "fp8", "fp8": "bf16", "int8": "bf16", "tf32": "fp32", "bf16": "fp32"}


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of each kind of work on all cards together; ``memory``: weights and cache read once."""

    linear: float
    attention: float
    indexer: float
    memory: float = 0.0

    @property
    def compute(self) -> float:
        return self.linear + self.attention + self.indexer

    @property
    def seconds(self) -> float:
        """Work and memory traffic can overlap, so the larger bounds."""
        return max(self.compute, self.memory)


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of a prompt or suffix, by kind. ``experts`` is the part of ``linear`` in routed experts."""

    linear: float
    attention: float
    indexer: float
    experts: float

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.indexer


def peak(card: Card, rate: str) -> float:
    """FLOP/s of ``rate`` on this card, or of the next wider type that it has. Raises ``ConfigError`` without any."""
    return card.flops[peak_name(card, rate)].value


def peak_name(card: Card, rate: str) -> str:
    """``rate``, or the next wider type that this card has. Raises ``ConfigError`` without any."""
    name: str | None = rate
    while name is not None:
        if name in card.flops:
            return name
        name = _FALLBACK.get(name)
    raise ConfigError(f"{card.name} has no rate for {rate} or a wider type (it has: {', '.join(card.flops) or 'none'})")


def prompt_work(spec: ModelSpec, tokens: int, prefix: int = 0, *, absorbed: bool = False) -> Work:
    """FLOPs of ``tokens`` prompt tokens behind ``prefix`` cached ones.

    Linears: 2 * active parameters without embedding and head. MLA: multi-head form (2 * (192 + 128) * heads a pair for
    V3), or ``absorbed``, which needs no projection of the prefix; sparse models absorb always. The indexer scores every
    visible row.
    """
    m = matrices(spec)
    experts = 2 * m.expert * m.moe_layers * spec.moe.top_k * tokens
    linear = 2 * (m.split + m.whole + m.dense + m.router + m.hyper + m.engram) * tokens + experts
    found = readings(spec, "bfloat16")
    if spec.mla is not None and not is_sparse(spec) and not absorbed:
        per_pair = 2.0 * (spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim + spec.mla.v_head_dim)
        attention = found[0].rows(prefix, tokens) * per_pair * spec.heads
    else:
        attention = _sum(found, prefix, tokens)
    return Work(linear, attention, _sum(scorings(spec, "bfloat16"), prefix, tokens), experts)


def _sum(found: tuple[Reading, ...], prefix: int, tokens: int) -> float:
    return sum(r.rows(prefix, tokens) * r.flops * r.heads for r in found)


def cold_floor(
    spec: ModelSpec,
    hardware: Hardware,
    isl: int,
    *,
    attention: str = "bf16",
    experts: str = "fp8",
    index_copies: int = 1,
) -> Floor:
    """Least time to read ``isl`` tokens that nobody read before, on all cards of ``hardware`` together.

    ``attention`` and ``experts`` name the rate of those products (linears and indexer: FP8 where the checkpoint is
    quantised); ``index_copies``: how many cards repeat the whole indexer (a TP rank each in vLLM and SGLang).
    """
    work = prompt_work(spec, isl)
    return _floor(spec, hardware, work, attention, experts, index_copies, _weights_read(spec, isl), isl)


def suffix_floor(
    spec: ModelSpec, hardware: Hardware, suffix: int, context: int, *, attention: str = "bf16", experts: str = "fp8"
) -> Floor:
    """Least time for ``suffix`` new tokens behind ``context`` cached ones: the absorbed form of MLA if that is cheaper.

    The multi-head form has to project the prefix again: 2 * kv_lora * heads * (nope + v) FLOPs a token and layer.
    """
    work = prompt_work(spec, suffix, context, absorbed=True)
    if spec.mla is not None and not is_sparse(spec):
        plain, m = prompt_work(spec, suffix, context), spec.mla
        again = 2.0 * m.kv_lora_rank * spec.heads * (m.qk_nope_head_dim + m.v_head_dim) * spec.layers * context
        work = min(work, replace(plain, linear=plain.linear + again), key=lambda w: w.attention + w.linear)
    read = _weights_read(spec, suffix)
    return _floor(spec, hardware, work, attention, experts, 1, read, suffix)


def _floor(
    spec: ModelSpec, hardware: Hardware, work: Work, attention: str, experts: str, copies: int, read: float, tokens: int
) -> Floor:
    card, cards = hardware.card, hardware.total_gpus
    quantised = "fp8" if spec.quant is not None else ("fp32" if spec.torch_dtype == "float32" else "bf16")
    if spec.quant is None:
        attention = experts = quantised
    linear = (work.linear - work.experts) / peak(card, quantised) + work.experts / peak(card, experts)
    return Floor(
        linear / cards,
        work.attention / peak(card, attention) / cards,
        work.indexer / peak(card, quantised) / cards * copies,
        read / card.bandwidth.value / cards if tokens else 0.0,
    )


def _weights_read(spec: ModelSpec, tokens: int) -> float:
    """Bytes of weights that ``tokens`` tokens of one step touch at least, in the checkpoint's own format."""
    m = matrices(spec)
    plain = 4.0 if spec.torch_dtype == "float32" else 2.0
    one = 1.0 if spec.quant is not None else plain
    expert = {"fp8": 1.0, "fp4": 0.5 + 1 / 32}[spec.quant.experts] if spec.quant is not None else plain
    touched = rows_touched(spec.moe.routed, spec.moe.top_k, tokens)
    dense = m.split + m.whole + m.dense + m.router
    return dense * one + m.expert * m.moe_layers * touched * expert + m.head * plain


def decode_floor(d: Deployment, batch: int, context: int) -> float:
    """Least seconds of one decode step: weights touched and cache read once over all cards, or the work at peak.

    4-bit experts are granted the FP8 rate where engines multiply them as BF16: a kernel for it could be written.
    """
    card, cards = d.hardware.card, d.strategy.gpus
    ideal = replace(d, strategy=Strategy(), engine="longread")
    ops = [op for op in decode_ops(ideal, batch, context) if op.kind not in ("elementwise", "top-k")]
    four = expert_format(d) in ("fp4", "int4")
    work = sum(op.flops / peak(card, "fp8" if four and op.kind == "experts" else op.rate) for op in ops)
    moved = sum(op.bytes for op in ops) / card.bandwidth.value
    return max(work, moved) / cards


def cached_bytes(spec: ModelSpec, packing: str, tokens: int) -> float:
    """Bytes of one sequence's cache after ``tokens`` tokens, windows and open groups included."""
    return sum(kv_bytes_per_token(spec, packing).values()) * tokens + sum(
        fixed_bytes_per_request(spec, packing).values()
    )


def load_floor(spec: ModelSpec, packing: str, tokens: int, rate: float) -> float:
    """Seconds to bring the growing cache of ``tokens`` tokens back at ``rate`` bytes/s, everything sharded."""
    return sum(kv_bytes_per_token(spec, packing).values()) * tokens / rate
