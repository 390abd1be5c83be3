# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products with FP8 or plain weights, and the steps between them, on Hopper.

Knows rows, one matrix or a stack of them; knows no model. Signatures are ref.py's. Many rows are cuBLAS' work, few
rows (decode) that of rows_triton.py.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from longread.kernels.fallback import fallback
from longread.kernels.fp8 import ref
from longread.kernels.fp8.ref import BLOCK, Fp8Weight, Quantised, Weight, dequantise, result_dtype
from longread.kernels.fp8.rows_triton import FEW, few, narrow, tensor_of
from longread.kernels.overlap import WAVE, begin, overlap, ready

__all__ = ["dequantise", "gated", "grouped_linear", "latents", "linear", "quantise", "turn_back"]

STEP: dict[str, Any] = {"rows": 8, "blocks": 4, "warps": 4}


# Elementwise pieces --------------------------------------------------------------------------------------------------


@triton.jit
def _power(peak):
    """The exponent bits of the least power of two that times 448 reaches max(peak, 1e-4): see ref.power_above."""
    bits = tl.maximum(peak, 1e-4).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@triton.jit
def _store(x, out, scales, row, block, seen, width, row_stride, scale_stride, quantised: tl.constexpr):
    """x: float32 [R, C, 128], blocks ``block`` [C] of rows ``row`` [R]; stored plain or in FP8 with its scales."""
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    here = row.to(tl.int64)[:, None, None] * row_stride + at[None]
    inside = seen[:, None, None] & (at < width)[None]
    if quantised:
        power = _power(tl.max(tl.abs(x), 2))
        # A power's reciprocal is exact: its exponent bits are 254 less the power's.
        x = x * ((254 - power) << 23).to(tl.float32, bitcast=True)[:, :, None]
        places = block[None, :].to(tl.int64) * scale_stride + row[:, None]
        known = seen[:, None] & (block * 128 < width)[None, :]
        tl.store(scales + places, (power << 23).to(tl.float32, bitcast=True), mask=known)
    tl.store(out + here, narrow(x, out.dtype.element_ty), mask=inside)


@triton.jit
def _quantise(x, out, scales, T, K, x_stride, scale_stride, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    ready(PDL)
    row = tl.program_id(0) * R + tl.arange(0, R)
    block = tl.program_id(1) * C + tl.arange(0, C)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    seen = row < T
    inside = seen[:, None, None] & (at < K)[None]
    values = tl.load(x + row.to(tl.int64)[:, None, None] * x_stride + at[None], mask=inside, other=0.0).to(tl.float32)
    _store(values, out, scales, row, block, seen, K, K, scale_stride, True)


@triton.jit
def _gated(
    h, out, scales, T, F, limit, h_stride, scale_stride,
    CAPPED: tl.constexpr, QUANTISED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    ready(PDL)
    row = tl.program_id(0) * R + tl.arange(0, R)
    block = tl.program_id(1) * C + tl.arange(0, C)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    seen = row < T
    inside = seen[:, None, None] & (at < F)[None]
    here = h + row.to(tl.int64)[:, None, None] * h_stride + at[None]
    gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(here + F, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    _store(gate * tl.sigmoid(gate) * up, out, scales, row, block, seen, F, F, scale_stride, QUANTISED)


@triton.jit
def _turn_back(
    o, cos, sin, out, scales, T, o_stride, scale_stride,
    WIDTH: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, QUANTISED: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    ready(PDL)
    row = tl.program_id(0) * R + tl.arange(0, R)
    block = tl.program_id(1) * C + tl.arange(0, C)
    seen = row < T
    # Flat, so that the load takes a layout of its own, in which a thread's pairs are those it loads angles for.
    at = tl.program_id(1) * C * 128 + tl.arange(0, C * 128)
    inside = seen[:, None] & (at < WIDTH)[None, :]
    values = tl.load(o + row.to(tl.int64)[:, None] * o_stride + at[None, :], mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(values.to(tl.float32), (R, C, 64, 2)))
    pair = (block[:, None] * 64 + tl.arange(0, 64)[None, :]) % (D // 2) - (D - ROPE) // 2
    turned = seen[:, None, None] & (pair >= 0)[None]
    place = row[:, None, None] * (ROPE // 2) + pair[None]
    c = tl.load(cos + place, mask=turned, other=1.0)
    s = tl.load(sin + place, mask=turned, other=0.0)
    back = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (R, C, 128))
    _store(back, out, scales, row, block, seen, WIDTH, WIDTH, scale_stride, QUANTISED)


@triton.jit
def _latents(
    x, q_gain, kv_gain, cos, sin, c_q, scales, kv, T, x_stride, scale_stride, eps,
    Q: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, QUANTISED: tl.constexpr, PACKED: tl.constexpr,
    Q_BLOCKS: tl.constexpr, D_BLOCKS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    ready(PDL)
    row = tl.program_id(0) * R + tl.arange(0, R)
    base = x + row.to(tl.int64)[:, None, None] * x_stride
    if tl.program_id(1) == 0:
        _latent_query(base, q_gain, c_q, scales, row, row < T, scale_stride, eps, Q, Q_BLOCKS, QUANTISED)
    else:
        _latent_key(base + Q, kv_gain, cos, sin, kv, row, row < T, eps, D, ROPE, D_BLOCKS, R, PACKED)


@triton.jit
def _latent_query(
    base, gains, out, scales, row, seen, scale_stride, eps,
    Q: tl.constexpr, BLOCKS: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(base + at[None], mask=seen[:, None, None] & (at < Q)[None], other=0.0).to(tl.float32)
    values = values * _inverse(values, Q, eps) * tl.load(gains + at, mask=at < Q, other=0.0).to(tl.float32)[None]
    _store(values, out, scales, row, block, seen, Q, Q, scale_stride, QUANTISED)


@triton.jit
def _latent_key(
    base, gains, cos, sin, out, row, seen, eps,
    D: tl.constexpr, ROPE: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCKS)[:, None] * 64 + tl.arange(0, 64)[None, :]
    inside = seen[:, None, None] & (at < D)[None]
    values = tl.load(base + at[None], mask=inside, other=0.0).to(tl.float32)
    values = values * _inverse(values, D, eps) * tl.load(gains + at, mask=at < D, other=0.0).to(tl.float32)[None]
    even, odd = tl.split(tl.reshape(values, (R, BLOCKS, 32, 2)))
    pair = tl.arange(0, BLOCKS)[:, None] * 32 + tl.arange(0, 32)[None, :] - (D - ROPE) // 2
    turned = seen[:, None, None] & ((pair >= 0) & (pair < ROPE // 2))[None]
    place = row[:, None, None] * (ROPE // 2) + pair[None]
    c = tl.load(cos + place, mask=turned, other=1.0)
    s = tl.load(sin + place, mask=turned, other=0.0)
    values = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (R, BLOCKS, 64))
    if PACKED:
        # What a packed cache row gives back: 64 channels share a power of two; rotated ones are bfloat16.
        plain = (at < D - ROPE)[None]
        power = _power(tl.max(tl.where(plain, tl.abs(values), 0.0), 2))[:, :, None]
        small = tl.where(plain, values, 0.0) * ((254 - power) << 23).to(tl.float32, bitcast=True)
        rounded = narrow(small, tl.float8e4nv).to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)
        values = tl.where(plain, rounded, narrow(values, tl.bfloat16).to(tl.float32))
    there = out + row.to(tl.int64)[:, None, None] * D + at[None]
    tl.store(there, narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _inverse(x, count: tl.constexpr, eps):
    """1 / sqrt(mean of squares + eps) of each row of x [R, C, n], zeros behind ``count`` numbers: [R, 1, 1]."""
    return (1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 2), 1) / count + eps))[:, None, None]


# Launchers -----------------------------------------------------------------------------------------------------------


def quantise(x: Tensor) -> Quantised:
    """ref.quantise in one pass. Rows of x may be strided."""
    tokens, width = x.shape
    x = _rows_of(x)
    out = _quantised_like(x, tokens, width)
    grid, tile = _steps(tokens, width)
    if tokens:
        _quantise[grid](
            x,
            *out,
            tokens,
            width,
            x.stride(0),
            out.scales.stride(1),
            **tile,
            **overlap(tokens, math.prod(grid)),
        )
    return out


def gated(h: Tensor, limit: float | None, quantised: bool) -> Quantised | Tensor:
    """ref.gated in one pass. Rows of h may be strided."""
    tokens, width = h.shape[0], h.shape[1] // 2
    h = _rows_of(h)
    out = _quantised_like(h, tokens, width) if quantised else _plain(h, tokens, width)
    grid, tile = _steps(tokens, width)
    if tokens:
        cap = 0.0 if limit is None else limit
        strides = h.stride(0), out.scales.stride(1)
        _gated[grid](
            h, *out, tokens, width, cap, *strides, CAPPED=limit is not None, QUANTISED=quantised, **tile,
            **overlap(tokens, math.prod(grid)),
        )  # fmt: skip
    return out if quantised else out.values


def latents(
    x: Tensor, q_gain: Tensor, kv_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, quantised: bool, packed: bool
) -> tuple[Quantised | Tensor, Tensor]:
    """ref.latents in one pass. Rows of x may be strided; everything else is contiguous."""
    tokens, rank, width, rope = x.shape[0], q_gain.shape[0], kv_gain.shape[0], 2 * cos.shape[1]
    x = _rows_of(x)
    c_q = _quantised_like(x, tokens, rank) if quantised else _plain(x, tokens, rank)
    kv = x.new_empty(tokens, width)
    if tokens:
        grid = tokens, 2
        _latents[grid](
            x, q_gain, kv_gain, cos.contiguous(), sin.contiguous(), *c_q, kv, tokens, x.stride(0),
            c_q.scales.stride(1), eps, Q=rank, D=width, ROPE=rope, QUANTISED=quantised, PACKED=packed,
            Q_BLOCKS=triton.next_power_of_2(-(-rank // BLOCK)), D_BLOCKS=triton.next_power_of_2(-(-width // 64)),
            R=1, num_warps=4, **overlap(tokens, 2 * tokens),
        )  # fmt: skip
    return c_q if quantised else c_q.values, kv


def turn_back(o: Tensor, cos: Tensor, sin: Tensor, quantised: bool) -> Quantised | Tensor:
    """ref.turn_back in one pass. Tokens of o may be strided."""
    tokens, heads, dim = o.shape
    o = o if o.stride(2) == 1 and o.stride(1) == dim else o.contiguous()
    out = _quantised_like(o, tokens, heads * dim) if quantised else _plain(o, tokens, heads * dim)
    grid, tile = _steps(tokens, heads * dim)
    if tokens:
        sizes = {"WIDTH": heads * dim, "D": dim, "ROPE": 2 * cos.shape[1]}
        strides = o.stride(0), out.scales.stride(1)
        _turn_back[grid](
            o,
            cos.contiguous(),
            sin.contiguous(),
            *out,
            tokens,
            *strides,
            QUANTISED=quantised,
            **sizes,
            **tile,
            **overlap(tokens, math.prod(grid)),
        )
    return out if quantised else out.values


def linear(x: Tensor | Quantised, w: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """ref.linear. A quantised x of many rows needs scales of stride (1, T), as ``quantise`` makes them."""
    dtype = result_dtype(x, w, out_dtype)
    values, matrix = tensor_of(x), tensor_of(w)
    if values.shape[0] <= FEW and matrix.dtype != torch.float32:
        out = values.new_empty(values.shape[0], matrix.shape[0], dtype=dtype)
        return out if few(x, w, out) else ref.linear(x, w, out_dtype)
    if isinstance(x, Tensor) and isinstance(w, Tensor):
        if dtype == x.dtype == w.dtype:
            return functional.linear(x, w)
        if x.is_cuda and x.dtype == w.dtype and dtype == torch.float32:
            return torch.mm(x, w.t(), out_dtype=dtype)
    if not (isinstance(x, Quantised) and isinstance(w, Fp8Weight)):
        return ref.linear(x, w, out_dtype)
    out = values.new_empty(values.shape[0], matrix.shape[0], dtype=dtype)
    return _many(x, w, out)


def grouped_linear(x: Tensor | Quantised, w: Weight) -> Tensor:
    """ref.grouped_linear; many rows are one product a group, on slices of x and of the result."""
    dtype = result_dtype(x, w, None)
    values, matrix = tensor_of(x), tensor_of(w)
    groups, height, width = matrix.shape
    out = values.new_empty(values.shape[0], groups * height, dtype=dtype)
    if values.shape[0] <= FEW and matrix.dtype != torch.float32:
        return out if few(x, w, out) else ref.grouped_linear(x, w)
    if not (isinstance(x, Quantised) and isinstance(w, Fp8Weight)) or width % BLOCK:
        return ref.grouped_linear(x, w)
    blocks = width // BLOCK
    for g in range(groups):
        part = Quantised(x.values[:, g * width : (g + 1) * width], x.scales[:, g * blocks : (g + 1) * blocks])
        _many(part, Fp8Weight(w.values[g], w.scales[g]), out[:, g * height : (g + 1) * height])
    return out


def _many(x: Quantised, w: Fp8Weight, out: Tensor) -> Tensor:
    """x times one FP8 matrix into ``out``, which may be a slice of columns."""
    tokens, width = x.values.shape
    blocks = width // BLOCK
    # cuBLAS reads 16 bytes of scales at a time, and wants them without holes.
    fits = width % BLOCK == 0 and blocks % 4 == 0 and tokens % 16 == 0 and w.values.shape[0] % 16 == 0
    if x.values.is_cuda and fits and w.scales.is_contiguous() and x.scales.stride() == (1, tokens):
        kinds = functional.ScalingType
        torch.ops.aten._scaled_mm_v2.out(
            x.values, w.values.t(), [x.scales], [kinds.BlockWise1x128.value], [], [w.scales.t()],
            [kinds.BlockWise128x128.value], [], None, out.dtype, [], False, out=out,
        )  # fmt: skip
        return out
    if not few(x, w, out):
        fallback("fp8.linear", f"{width} channels are not whole blocks")
        out.copy_(ref.linear(x, w, out.dtype))
    return out


def _rows_of(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _quantised_like(x: Tensor, tokens: int, width: int) -> Quantised:
    scales = x.new_empty(-(-width // BLOCK), tokens, dtype=torch.float32).t()
    return Quantised(x.new_empty(tokens, width, dtype=ref.FP8), scales)


def _plain(x: Tensor, tokens: int, width: int) -> Quantised:
    """A result without scales, in the same shape of arguments."""
    out = x.new_empty(tokens, width)
    return Quantised(out, out)


def _steps(tokens: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of an elementwise kernel: as few rows a program as make one wave of them."""
    blocks = min(STEP["blocks"], triton.next_power_of_2(-(-width // BLOCK)))
    across = triton.cdiv(width, blocks * BLOCK)
    rows = min(STEP["rows"], triton.next_power_of_2(max(1, triton.cdiv(tokens * across, WAVE))))
    grid = triton.cdiv(tokens, rows), across
    return grid, {"R": rows, "C": blocks, "num_warps": STEP["warps"]}
