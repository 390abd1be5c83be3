# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Routed experts on Hopper: which of four ways a step's experts are computed, and their launches.

Knows shapes and regimes; the kernels are in few_triton.py, few_gluon.py, grouped_triton.py and many_gluon.py (products)
and in slots_triton.py and many_slots_triton.py (sorting, placing, summing). No launch waits for the device: sizes are
upper bounds, and programs behind the last block in use return at once.

- few tokens of quantised weights: few_triton.py, bound by reading the chosen experts' weights; FP4 of two tokens and
  more by way of shared memory (few_gluon.py).
- more, or plain weights: blocks of 16 slots, hidden activations quantised per 64 columns in the first product's
  epilogue; of 32, or of 64 where no other kernel fits. With ``per_row`` activations have one scale a row, so that
  nothing but an addition is left between tensor-core products.
- many tokens: ``per_row`` in a persistent kernel with tiles of its own.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longread.kernels.experts import few_triton as few
from longread.kernels.experts import ref
from longread.kernels.experts.grouped_triton import grouped
from longread.kernels.experts.many_slots_triton import blocks_of, hidden_to_fp8, spread
from longread.kernels.experts.ref import ExpertWeights, prepare
from longread.kernels.experts.routing_triton import route
from longread.kernels.experts.slots_triton import Slots, combine, one_scale
from longread.kernels.fallback import fallback
from longread.kernels.fp8 import ref as fp8
from longread.kernels.fp8.ref import Quantised

__all__ = ["CONFIGS", "Config", "experts", "prepare", "route"]

INTERPRETED = not isinstance(grouped, triton.JITFunction)
# Pairs up to which a step counts as few tokens, whatever the number of experts.
FEW = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """block: slots of a tile; rows: weight rows of each of a tile's two halves. warps and stages as in Triton.

    per_row: one activation scale a row instead of one per 128 (first product) and 64 (second) columns.
    persistent: the kernel of ``many_gluon``, where it runs; it has tiles of its own, and block only aligns an expert's.
    """

    block: int
    rows: int = 64
    warps: int = 4
    stages13: int = 4
    stages2: int = 4
    per_row: bool = False
    persistent: bool = False


# By kind of weight: (largest mean number of pairs an expert, the configuration), in ascending order.
CONFIGS: dict[str, list[tuple[float, Config]]] = {
    "fp4_words": [
        (4, Config(block=16, stages13=3, stages2=3)),
        (11, Config(block=32, stages13=3, stages2=3, per_row=True)),
        (float("inf"), Config(block=16, per_row=True, persistent=True)),
    ],
    "fp8": [
        (4, Config(block=16, stages13=5, stages2=5)),
        (24, Config(block=32, stages13=4, stages2=4)),
        (float("inf"), Config(block=16, per_row=True, persistent=True)),
    ],
    "plain": [
        (4, Config(block=16, stages13=3, stages2=3)),
        (24, Config(block=32, stages13=3, stages2=3)),
        (float("inf"), Config(block=64, stages13=3, stages2=3)),
    ],
}


# In place of a persistent one where its kernel does not run.
WIDE = Config(block=64, per_row=True)


def experts(
    u: Tensor,
    q: Quantised | None,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    limit: float | None,
    shared: Tensor,
    *,
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
    if config is None and q is not None and few.fits(q, w):
        return few.experts(q, ids, weights, w, limit, shared)
    if config is None:
        config = choose(w.kind, ids.numel(), w.w13.shape[0])
    if config.persistent and not _whole_tiles(u, w):
        config = WIDE
    slots = Slots(ids, w.w13.shape[0], config.block)
    if config.persistent:
        assert q is not None  # plain weights have no such configuration
        return combine(many(q, slots, ids.shape[1], w, limit), slots, weights, shared)
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
        return hidden_to_fp8(hidden, slots, placed=False)
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


def _quantised(u: Tensor) -> Quantised:
    if not u.is_cuda:
        return fp8.quantise(u)
    from longread.kernels.fp8.triton import quantise

    return quantise(u)


def _or(x: Tensor | None, anything: Tensor) -> Tensor:
    """A pointer that is not followed still has to be one."""
    return anything if x is None else x


def many(q: Quantised, slots: Slots, top_k: int, w: ExpertWeights, limit: float | None) -> Tensor:
    """Every slot's row through its expert: bfloat16 [slots, D], for many tokens."""
    assert w.s13 is not None and w.s2 is not None  # what is quantised has scales
    from longread.kernels.experts.many_gluon import product

    placed = w.kind == "fp4_words"
    blocks = blocks_of(slots)
    x, factors = spread(*q, slots, top_k, placed)
    hidden = torch.empty(slots.count, w.w13.shape[1] // 2, dtype=torch.bfloat16, device=x.device)
    product(x, factors, w.w13, w.s13, w.r13, blocks, hidden, True, limit)
    del x
    values, factors = hidden_to_fp8(hidden, slots, placed)
    del hidden
    y = torch.empty(slots.count, w.w2.shape[1], dtype=torch.bfloat16, device=values.device)
    product(values, factors, w.w2, w.s2, w.r2, blocks, y, False, None)
    return y


def _whole_tiles(u: Tensor, w: ExpertWeights) -> bool:
    """Whether ``many_gluon`` has tiles for these: 256 rows, 128 columns, Hopper's products."""
    whole = w.w13.shape[1] % 256 == 0 and w.w2.shape[1] % 256 == 0 and u.shape[1] % 128 == 0
    hopper = u.is_cuda and torch.cuda.get_device_capability(u.device)[0] == 9
    return whole and hopper and u.dtype == torch.bfloat16


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
