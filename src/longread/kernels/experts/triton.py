# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Routed experts on Hopper: which of four ways a step's experts are computed, and their launches.

Knows shapes and regimes; the kernels are in few_triton.py, grouped_triton.py (products) and slots_triton.py (sorting,
summing). No launch waits for the device: sizes are upper bounds, and programs behind the last block in use return at
once.

- few tokens of quantised weights: few_triton.py.
- fused, more tokens: blocks of 16 slots, hidden activations quantised per 64 columns in the first product's epilogue.
  Bound by reading the chosen experts' weights.
- fused, many tokens: blocks of 64 or 128 slots; activations have one scale a row, so that nothing but an addition is
  left between tensor-core products.
- expanded (FP4 only): weights widened to FP8 with one scale a row, then torch's grouped product. It moves 4 bytes for
  each weight, so it pays over many tokens only.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.experts import few_triton as few
from longread.kernels.experts import ref
from longread.kernels.experts.grouped_triton import grouped
from longread.kernels.experts.ref import ExpertWeights, prepare
from longread.kernels.experts.routing_triton import route
from longread.kernels.experts.slots_triton import Slots, combine, gathered, one_scale, rows_to_fp8
from longread.kernels.fallback import fallback
from longread.kernels.fp8 import ref as fp8
from longread.kernels.fp8.ref import Quantised

__all__ = ["CONFIGS", "Config", "Way", "expand", "experts", "prepare", "route"]

Way = Literal["fused", "expanded"]
INTERPRETED = not isinstance(grouped, triton.JITFunction)
# Pairs up to which a step counts as few tokens, whatever the number of experts.
FEW = 1024
# Slots of an expert must start at a multiple of this for torch's grouped product (its scales are read 16 bytes at a
# time).
ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Config:
    """block: slots of a tile; rows: weight rows of each of a tile's two halves. warps and stages as in Triton.

    per_row: one activation scale a row instead of one per 128 (first product) and 64 (second) columns.
    """

    block: int
    rows: int = 64
    warps: int = 4
    stages13: int = 4
    stages2: int = 4
    per_row: bool = False


# By kind of weight: (largest mean number of pairs an expert, the configuration), in ascending order.
CONFIGS: dict[str, list[tuple[float, Config]]] = {
    "fp4_words": [
        (4, Config(block=16, stages13=3, stages2=3)),
        (24, Config(block=32, stages13=3, stages2=3, per_row=True)),
        (96, Config(block=64, stages13=3, stages2=3, per_row=True)),
        (float("inf"), Config(block=128, stages13=4, stages2=4, per_row=True)),
    ],
    "fp8": [
        (4, Config(block=16, stages13=5, stages2=5)),
        (24, Config(block=32, stages13=4, stages2=4)),
        (float("inf"), Config(block=64, stages13=4, stages2=4, per_row=True)),
    ],
    "plain": [
        (4, Config(block=16, stages13=3, stages2=3)),
        (24, Config(block=32, stages13=3, stages2=3)),
        (float("inf"), Config(block=64, stages13=3, stages2=3)),
    ],
}


def experts(
    u: Tensor,
    q: Quantised | None,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    limit: float | None,
    shared: Tensor,
    *,
    way: Way = "fused",
    config: Config | None = None,
) -> Tensor:
    """See ``ref.experts``. fp4 must have been through ``prepare``. Added in the order of a token's ids."""
    reason = _unsupported(u, w, ids)
    if reason is not None:
        fallback("experts.experts", reason)
        return ref.experts(u, q, ids, weights, w, limit, shared)
    if ids.shape[0] == 0:
        return torch.empty_like(shared)
    if w.kind != "plain" and q is None:
        q = _quantised(u)
    if way == "expanded" and w.kind == "fp4_words":
        assert q is not None  # made above
        return _expanded(q, ids, weights, w, limit, shared)
    if config is None and q is not None and few.fits(q, w):
        return few.experts(q, ids, weights, w, limit, shared)
    if config is None:
        config = choose(w.kind, ids.numel(), w.w13.shape[0])
    slots = Slots(ids, w.w13.shape[0], config.block)
    hidden, scales = first(u, q, slots, ids.shape[1], w, limit, config)
    return combine(second(hidden, scales, slots, w, config, u.dtype), slots, weights, shared)


def choose(kind: str, pairs: int, count: int) -> Config:
    """The configuration for ``pairs`` (token, expert) pairs over ``count`` experts."""
    mean = 0.0 if pairs <= FEW else pairs / count
    return next(config for most, config in CONFIGS[kind] if mean <= most)


def first(
    u: Tensor, q: Quantised | None, slots: Slots, top_k: int, w: ExpertWeights, limit: float | None, config: Config
) -> tuple[Tensor, Tensor | None]:
    """silu(gate) * up of every slot: plain [slots, F], or e4m3 and its scales, [slots, F / 64] or one a row."""
    _, rows, width = w.w13.shape
    if w.kind == "fp4_words":
        width *= 2
    per_row = config.per_row and w.kind != "plain"
    to_fp8 = w.kind != "plain" and not per_row
    hidden = torch.empty(slots.count, rows // 2, dtype=torch.float8_e4m3fn if to_fp8 else u.dtype, device=u.device)
    scales: Tensor | None = None
    if w.kind == "plain":
        x, xs = u, u
    else:
        assert q is not None  # the caller's
        x, xs = one_scale(*q) if per_row else q
        if to_fp8:
            scales = torch.empty(slots.count, rows // 2 // config.rows, dtype=torch.float32, device=u.device)
    group = 0 if per_row or w.kind == "plain" else 128
    grouped[(slots.blocks * (rows // 2 // config.rows),)](
        x, xs, w.w13, _or(w.s13, x), _or(w.r13, x), slots.order, slots.block_expert, hidden, _or(scales, hidden),
        0.0 if limit is None else limit, x.stride(0), xs.stride(0), xs.stride(1) if group else 0,
        ROWS=rows, K=width, TOP_K=top_k, KIND=w.kind, GATED=True, GROUP=group, OUT="fp8" if to_fp8 else "same",
        LIMITED=limit is not None, ASM=not INTERPRETED, BR=config.rows, BT=config.block,
        num_warps=config.warps, num_stages=config.stages13,
    )  # fmt: skip
    if per_row:
        return rows_to_fp8(hidden, slots.ends, None, gate=False)
    return hidden, scales


def second(
    hidden: Tensor, scales: Tensor | None, slots: Slots, w: ExpertWeights, config: Config, dtype: torch.dtype
) -> Tensor:
    """Every slot's row through its expert's w2: [slots, D], float32 where tokens are few, else ``dtype``."""
    rows = w.w2.shape[1]
    y = torch.empty(slots.count, rows, dtype=torch.float32 if config.block <= 16 else dtype, device=hidden.device)
    group = 0 if scales is None or scales.dim() == 1 else 64
    xs = hidden if scales is None else scales
    grouped[(slots.blocks * (rows // 2 // config.rows),)](
        hidden, xs, w.w2, _or(w.s2, hidden), _or(w.r2, hidden), slots.order, slots.block_expert, y, y,
        0.0, hidden.stride(0), xs.stride(0), 1 if group else 0,
        ROWS=rows, K=hidden.shape[1], TOP_K=1, KIND=w.kind, GATED=False, GROUP=group, OUT="same", LIMITED=False,
        ASM=not INTERPRETED, BR=config.rows, BT=config.block,
        num_warps=config.warps, num_stages=config.stages2,
    )  # fmt: skip
    return y


@triton.jit
def _expand(words, shifts, out, rows, K: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    q = tl.arange(0, WIDE // 8)[None, :]
    inside = (q < K // 8) & (row < rows)
    word = tl.load(words.to(tl.pointer_type(tl.int32)) + row * (K // 8) + q, mask=inside, other=0)
    column = q // 16 * 128 + q % 16 * 4
    for half in tl.static_range(2):
        shift = tl.load(shifts + row * (K // 32) + (column + 64 * half) // 32, mask=inside, other=8).to(tl.int32)
        packed = tl.zeros_like(word)
        for i in tl.static_range(4):
            code = (word >> (16 * half + 4 * i)) & 7
            sign = (word >> (8 * i + 7 - 4 * half)) & 1
            magnitude = tl.where(code == 0, 0, shift + tl.where(code == 1, 0, code * 4))
            packed |= (magnitude | (sign << 7)) << (8 * i)
        tl.store(out.to(tl.pointer_type(tl.int32)) + row * (K // 4) + (column + 64 * half) // 4, packed, mask=inside)


def expand(words: Tensor, shifts: Tensor) -> Tensor:
    """fp4_words [E, rows, K / 2] and their scale bytes -> e4m3 [E, rows, K], to be multiplied by r13 or r2."""
    count, rows, half = words.shape
    out = torch.empty(count, rows, 2 * half, dtype=torch.float8_e4m3fn, device=words.device)
    each = 64 if INTERPRETED else 4
    _expand[(triton.cdiv(count * rows, each),)](
        words, shifts, out.view(torch.uint8), count * rows,
        K=2 * half, WIDE=triton.next_power_of_2(2 * half), R=each, num_warps=8,
    )  # fmt: skip
    return out


def _expanded(
    q: Quantised, ids: Tensor, weights: Tensor, w: ExpertWeights, limit: float | None, shared: Tensor
) -> Tensor:
    """The widened weights live only for their product: w13's are freed before w2's are made."""
    assert w.s13 is not None and w.s2 is not None and w.r13 is not None and w.r2 is not None  # fp4_words has them
    slots = Slots(ids, w.w13.shape[0], ALIGNED)
    x, factors = gathered(*one_scale(*q), slots, ids.shape[1])
    both = _grouped_product(x, factors, expand(w.w13, w.s13), w.r13, slots.ends)
    del x
    hidden, factors = rows_to_fp8(both, slots.ends, limit, gate=True)
    del both
    return combine(_grouped_product(hidden, factors, expand(w.w2, w.s2), w.r2, slots.ends), slots, weights, shared)


def _grouped_product(x: Tensor, factors: Tensor, w: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """x [slots, K] by share of an expert times w [E, N, K] -> bfloat16 [slots, N]."""
    if x.is_cuda:
        return torch._scaled_grouped_mm(
            x, w.transpose(-2, -1), factors, rows, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=False
        )
    out = torch.zeros(x.shape[0], w.shape[1], dtype=torch.bfloat16)
    begin = 0
    for e, end in enumerate(ends.tolist()):
        product = x[begin:end].float() @ w[e].float().t()
        out[begin:end] = (product * factors[begin:end, None] * rows[e]).to(torch.bfloat16)
        begin = end
    return out


def _quantised(u: Tensor) -> Quantised:
    if not u.is_cuda:
        return fp8.quantise(u)
    from longread.kernels.fp8.triton import quantise

    return quantise(u)


def _or(x: Tensor | None, anything: Tensor) -> Tensor:
    """A pointer that is not followed still has to be one."""
    return anything if x is None else x


def _unsupported(u: Tensor, w: ExpertWeights, ids: Tensor) -> str | None:
    width, hidden = u.shape[1], w.w13.shape[1] // 2
    if width % 128 or hidden % 128:
        return "hidden or intermediate size is not a multiple of 128"
    if w.kind == "fp4":
        return "FP4 weights that were not prepared"
    # The interpreter multiplies float32, not bfloat16.
    if w.kind == "plain" and not u.dtype == w.w13.dtype == (torch.float32 if INTERPRETED else torch.bfloat16):
        return f"{w.w13.dtype} weights under {u.dtype} activations"
    if ids.shape[0] and w.w13.shape[0] > 1024:
        return "more than 1024 experts"
    return None
