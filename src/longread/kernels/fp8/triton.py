# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products with FP8 or plain weights, and the steps between them, on Hopper.

Knows rows, one matrix or a stack of them, and tile sizes; knows no model. Signatures are ref.py's. Many rows are
cuBLAS' work. Few rows (decode) are bound by reading the weight, and done here: one or two rows by plain multiply-adds
on whole rows of the weight, more by the tensor cores, the weight as their larger operand and K cut in parts so that
every SM reads. Parts are summed in their order by whichever program finishes last: the same bits every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longread.kernels.fallback import fallback
from longread.kernels.fp8 import ref
from longread.kernels.fp8.ref import BLOCK, Fp8Weight, Quantised, Weight, dequantise, result_dtype

__all__ = ["dequantise", "gated", "grouped_linear", "latents", "linear", "quantise", "turn_back"]

INTERPRETED: bool = triton.knobs.runtime.interpret
# Triton's interpreter truncates where the device rounds to the nearest, so there a value is rounded before its cast.
ROUND_FIRST = tl.constexpr(INTERPRETED)
FEW = 64  # rows up to which reading the weight costs more than the products
PAIR = 1  # rows up to which multiply-adds keep up with the memory
FILL = 132 * 3  # programs that keep every SM's loads in flight
COUNTERS = 1 << 20

# Tile sizes, by measurement on an H200; keys are explained where they are used. Of ``VECTOR`` the first entry counts
# whose K is not exceeded, of plain weights "plain".
VECTOR: dict[int | str, dict[str, Any]] = {
    1024: {"numbers": 16384, "depth": 2048, "warps": 2, "fill": FILL},
    4096: {"numbers": 8192, "depth": 2048, "warps": 4, "fill": 2 * FILL},
    1 << 30: {"numbers": 4096, "depth": 4096, "warps": 4, "fill": FILL},
    "plain": {"numbers": 2048, "depth": 1024, "warps": 8, "fill": 2 * FILL},
    "long": {"numbers": 8192, "depth": 2048, "warps": 4, "fill": FILL},
}
LONG = 1 << 26  # numbers of a plain matrix that reads for so long that its end does not count
ROWS: dict[str, Any] = {"block_n": 64, "depth_plain": 64, "warps": 4, "stages": 3, "fill": 132 * 2, "max_parts": 32}
STEP: dict[str, Any] = {"rows": 8, "blocks": 4, "warps": 4}


# Programmatic dependent launch: a kernel of this file may start while the one before it ends, and ask for its first
# weights; it touches nothing that changes before that one has finished.
OVERLAP: dict[str, bool] = {"on": not INTERPRETED}


@triton.jit
def _begin(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


# Elementwise pieces --------------------------------------------------------------------------------------------------


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """float32 to ``dtype``, to the nearest. FP8 takes magnitudes up to 448 only."""
    if ROUND_FIRST and dtype == tl.float8e4nv:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        # Below 2^-6 the grid is 2^-9 wide: a number that large leaves the sum no finer digits.
        small = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    if ROUND_FIRST and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype)


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
    tl.store(out + here, _narrow(x, out.dtype.element_ty), mask=inside)


@triton.jit
def _quantise(x, out, scales, T, K, x_stride, scale_stride, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr):
    _begin(PDL)
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
    _begin(PDL)
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
    _begin(PDL)
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
    _begin(PDL)
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
        rounded = _narrow(small, tl.float8e4nv).to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)
        values = tl.where(plain, rounded, _narrow(values, tl.bfloat16).to(tl.float32))
    there = out + row.to(tl.int64)[:, None, None] * D + at[None]
    tl.store(there, _narrow(values, out.dtype.element_ty), mask=inside)


@triton.jit
def _inverse(x, count: tl.constexpr, eps):
    """1 / sqrt(mean of squares + eps) of each row of x [R, C, n], zeros behind ``count`` numbers: [R, 1, 1]."""
    return (1.0 / tl.sqrt_rn(tl.sum(tl.sum(x * x, 2), 1) / count + eps))[:, None, None]


# Products of few rows ------------------------------------------------------------------------------------------------


@triton.jit
def _scaled(x, scales, factors, k, block, K, scale_stride, FP8: tl.constexpr, EVEN: tl.constexpr):
    """x's channels k [C, 128] in float32; in FP8 times their own and the weight's scales."""
    if EVEN:
        values = tl.load(x + k).to(tl.float32)
    else:
        values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if FP8:
        known = block * 128 < K
        own = tl.load(scales + block * scale_stride, mask=known, other=0.0)
        values = values * (own * tl.load(factors + block, mask=known, other=0.0))[:, None]
    return values


@triton.jit
def _tile(w, row, k, K, EVEN: tl.constexpr):
    here = w + row[:, None, None] * K + k[None]
    if EVEN:
        return tl.load(here, eviction_policy="evict_first")
    return tl.load(here, mask=(k < K)[None], other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(
    x, scales, w, factors, out, N, K, x_stride, scale_stride, factor_stride, out_stride,
    FP8: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight times one row of x, or two. Each thread reads 16 bytes at a time along K.

    The next tile is asked for before the present one is used, and the first before anything that x needs.
    """
    first = tl.program_id(0) * BN
    group = tl.program_id(1)
    row = tl.minimum(tl.arange(0, BN), N - 1 - first)  # rows behind the last are the last again
    channel = tl.arange(0, C)[:, None] * 128 + tl.arange(0, 128)[None, :]
    w += (group.to(tl.int64) * N + first) * K
    x += group * K
    scales += group * (K // 128) * scale_stride
    factors += group * tl.cdiv(N, 128) * factor_stride + (first // 128) * factor_stride
    total = tl.zeros((BN, C, 128), tl.float32)
    other = tl.zeros((BN, C, 128), tl.float32)
    tile = _tile(w, row, channel, K, EVEN)  # a weight never changes
    _begin(PDL)
    for step in tl.static_range(STEPS):
        k = step * (C * 128) + channel
        block = step * C + tl.arange(0, C)
        present = tile
        if step + 1 < STEPS:
            tile = _tile(w, row, k + C * 128, K, EVEN)
        values = present.to(tl.float32)
        total += values * _scaled(x, scales, factors, k, block, K, scale_stride, FP8, EVEN)[None]
        if TWO:
            second = _scaled(x + x_stride, scales + 1, factors, k, block, K, scale_stride, FP8, EVEN)
            other += values * second[None]
    at = first + tl.arange(0, BN)
    here = out + group * N + at
    tl.store(here, _narrow(tl.sum(tl.sum(total, 2), 1), out.dtype.element_ty), mask=at < N)
    if TWO:
        tl.store(here + out_stride, _narrow(tl.sum(tl.sum(other, 2), 1), out.dtype.element_ty), mask=at < N)


@triton.jit
def _rows(
    x, scales, w, factors, out, parts, counters, T, N, K, x_stride, scale_stride, factor_stride, out_stride,
    FP8: tl.constexpr, EVEN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile [BT, BN] of one group's product, over STEPS * BK of K, one of PARTS. BN divides 128; BK is 128 in FP8.

    FP8 sums 128 channels in the tensor cores and adds them, scaled, in float32.
    """
    _begin(PDL)
    tile_n, part = tl.program_id(0), tl.program_id(1)
    tiles_t = tl.cdiv(T, BT)
    group, first_t = tl.program_id(2) // tiles_t, tl.program_id(2) % tiles_t * BT
    first = tile_n * BN
    # Rows behind the last are the last again: nothing to mask in the loop.
    row_n = tl.minimum(tl.arange(0, BN), N - 1 - first)
    row_t = tl.minimum(first_t + tl.arange(0, BT), T - 1)
    k = tl.arange(0, BK)
    w += (group.to(tl.int64) * N + first) * K
    x += group * K
    scales += group * (K // 128) * scale_stride
    factors += group * tl.cdiv(N, 128) * factor_stride + (first // 128) * factor_stride
    total = tl.zeros((BN, BT), tl.float32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        step = part * STEPS + i
        at = step * BK + k
        here, there = w + row_n[:, None] * K + at[None, :], x + row_t[:, None] * x_stride + at[None, :]
        if EVEN:
            weight = tl.load(here, eviction_policy="evict_first")
            values = tl.load(there)
        else:
            weight = tl.load(here, mask=(at < K)[None, :], other=0.0, eviction_policy="evict_first")
            values = tl.load(there, mask=(at < K)[None, :], other=0.0)
        if FP8:
            scale = tl.load(scales + step * scale_stride + row_t) * tl.load(factors + step)
            total += tl.dot(weight, tl.trans(values)) * scale[None, :]
        else:
            if ROUND_FIRST:  # which multiplies bfloat16's bits as if they were integers
                weight, values = weight.to(tl.float32), values.to(tl.float32)
            total = tl.dot(weight, tl.trans(values), total)
    _finish(total, out, parts, counters, group, part, tile_n, first_t, T, N, out_stride, BT, BN, PARTS)


@triton.jit
def _finish(
    total, out, parts, counters, group, part, tile_n, first_t, T, N, out_stride,
    BT: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store a tile; with several parts, the program that comes last adds them up in their order."""
    t, n = first_t + tl.arange(0, BT), tile_n * BN + tl.arange(0, BN)
    inside = (t < T)[:, None] & (n < N)[None, :]
    there = out + t[:, None] * out_stride + group * N + n[None, :]
    total = tl.trans(total)
    if PARTS == 1:
        tl.store(there, _narrow(total, out.dtype.element_ty), mask=inside)
    else:
        first_part = group.to(tl.int64) * PARTS
        here = parts + t[:, None] * N + n[None, :]
        tl.store(here + (first_part + part) * T * N, total, mask=inside)
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tile_n
        tl.debug_barrier()  # the whole tile lies in memory before it is counted
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            summed = tl.zeros((BT, BN), tl.float32)
            for i in tl.static_range(PARTS):
                summed += tl.load(here + (first_part + i) * T * N, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(there, _narrow(summed, out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)  # ready for the next product that takes this counter


# Launchers -----------------------------------------------------------------------------------------------------------


def quantise(x: Tensor) -> Quantised:
    """ref.quantise in one pass. Rows of x may be strided."""
    tokens, width = x.shape
    x = _rows_of(x)
    out = _quantised_like(x, tokens, width)
    grid, tile = _steps(tokens, width)
    if tokens:
        _quantise[grid](x, *out, tokens, width, x.stride(0), out.scales.stride(1), **tile, **_overlap())
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
            h, *out, tokens, width, cap, *strides, CAPPED=limit is not None, QUANTISED=quantised, **tile, **_overlap()
        )
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
            R=1, num_warps=4, **_overlap(),
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
            **_overlap(),
        )
    return out if quantised else out.values


def linear(x: Tensor | Quantised, w: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """ref.linear. A quantised x of many rows needs scales of stride (1, T), as ``quantise`` makes them."""
    dtype = result_dtype(x, w, out_dtype)
    values, matrix = _values(x), _values(w)
    if values.shape[0] <= FEW and matrix.dtype != torch.float32:
        out = values.new_empty(values.shape[0], matrix.shape[0], dtype=dtype)
        return out if _few(x, w, out) else ref.linear(x, w, out_dtype)
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
    values, matrix = _values(x), _values(w)
    groups, height, width = matrix.shape
    out = values.new_empty(values.shape[0], groups * height, dtype=dtype)
    if values.shape[0] <= FEW and matrix.dtype != torch.float32:
        return out if _few(x, w, out) else ref.grouped_linear(x, w)
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
    if not _few(x, w, out):
        fallback("fp8.linear", f"{width} channels are not whole blocks")
        out.copy_(ref.linear(x, w, out.dtype))
    return out


def _few(x: Tensor | Quantised, w: Weight, out: Tensor) -> bool:
    """x times one matrix, or several, into ``out`` [T, groups * N] by the kernels of this file; False if they cannot.

    Rows of x and of ``out`` may be strided.
    """
    values, matrix = _values(x), _values(w)
    if matrix.shape[-1] % 16 or matrix.stride(-1) != 1 or values.stride(1) != 1:
        return False
    if values.shape[0]:
        (by_vector if values.shape[0] <= PAIR else by_rows)(x, w, out)
    return True


def by_vector(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """One or two rows. ``numbers``: of the weight in a tile; ``depth``: of them along K, at most."""
    values, matrix, scales, factors = _operands(x, w)
    height, width = matrix.shape[-2:]
    if config is None:
        if matrix.dtype == ref.FP8:
            config = next(VECTOR[most] for most in VECTOR if isinstance(most, int) and width <= most)
        else:
            config = VECTOR["long" if matrix.numel() >= LONG else "plain"]
    groups = matrix.numel() // (height * width)
    blocks = min(triton.next_power_of_2(-(-width // BLOCK)), config["depth"] // BLOCK)
    numbers = config["numbers"] * (1 if matrix.dtype == ref.FP8 else 0.5)
    block_n = max(1, min(BLOCK, int(numbers) // (blocks * BLOCK)))
    while block_n > 1 and triton.cdiv(height, block_n) * groups < config["fill"]:
        block_n //= 2
    _vector[triton.cdiv(height, block_n), groups](
        values, scales, matrix, factors, out, height, width, values.stride(0), scales.stride(-1), factors.stride(-2),
        out.stride(0), FP8=matrix.dtype == ref.FP8, TWO=values.shape[0] == 2, EVEN=width % (blocks * BLOCK) == 0,
        STEPS=triton.cdiv(width, blocks * BLOCK), BN=block_n, C=blocks, num_warps=config["warps"], **_overlap(),
    )  # fmt: skip
    return out


def by_rows(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] = ROWS) -> Tensor:
    """Any number of rows, 64 at a time. K is cut into equal parts of whole steps, so that ``fill`` programs read."""
    values, matrix, scales, factors = _operands(x, w)
    fp8 = matrix.dtype == ref.FP8
    tokens, (height, width) = values.shape[0], matrix.shape[-2:]
    groups = matrix.numel() // (height * width)
    # Triton has wgmma for 16 rows, not for 8.
    block_t = min(FEW, max(16, triton.next_power_of_2(tokens)))
    block_n, block_k = config["block_n"], BLOCK if fp8 else config["depth_plain"]
    tiles_n, tiles_t, steps = triton.cdiv(height, block_n), triton.cdiv(tokens, block_t), triton.cdiv(width, block_k)
    tiles = tiles_n * tiles_t * groups
    cuts = [p for p in range(1, min(steps, config["max_parts"]) + 1) if steps % p == 0]
    parts = next((p for p in cuts if tiles * p >= config["fill"]), cuts[-1])
    cut = parts > 1
    scratch = values.new_empty(groups * parts * tokens * height if cut else 1, dtype=torch.float32)
    counters = _counters(values.device, tiles) if cut else scratch
    _rows[tiles_n, parts, tiles_t * groups](
        values, scales, matrix, factors, out, scratch, counters, tokens, height, width, values.stride(0),
        scales.stride(-1), factors.stride(-2), out.stride(0), FP8=fp8, EVEN=width % block_k == 0,
        BT=block_t, BN=block_n, BK=block_k, PARTS=parts, STEPS=steps // parts, STAGES=config["stages"],
        num_warps=config["warps"], **_overlap(),
    )  # fmt: skip
    return out


_COUNTED: dict[torch.device, list[Any]] = {}


def _counters(device: torch.device, count: int) -> Tensor:
    """Zeros that a kernel leaves as zeros again, in turn from a long row of them.

    Two products at once on one device never take the same ones unless hundreds of thousands lie between them. Raises
    RuntimeError when the row would first be made inside a capture, which would give it to that graph.
    """
    held = _COUNTED.get(device)
    if held is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run a step before capturing one: products of few rows keep counters")
        held = _COUNTED[device] = [torch.zeros(COUNTERS, dtype=torch.int32, device=device), 0]
    at = held[1] if held[1] + count <= COUNTERS else 0
    held[1] = at + count
    return held[0][at : at + count]


def _values(x: Tensor | Quantised | Fp8Weight) -> Tensor:
    return x if isinstance(x, Tensor) else x.values


def _operands(x: Tensor | Quantised, w: Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, w, x's scales, w's scales), contiguous weights; where nothing is scaled, any matrix stands for the scales."""
    values, matrix = _values(x), _values(w).contiguous()
    if isinstance(x, Tensor) or isinstance(w, Tensor):
        return values, matrix, matrix, matrix
    return values, matrix, x.scales, w.scales.contiguous()


def _rows_of(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _quantised_like(x: Tensor, tokens: int, width: int) -> Quantised:
    scales = x.new_empty(-(-width // BLOCK), tokens, dtype=torch.float32).t()
    return Quantised(x.new_empty(tokens, width, dtype=ref.FP8), scales)


def _plain(x: Tensor, tokens: int, width: int) -> Quantised:
    """A result without scales, in the same shape of arguments."""
    out = x.new_empty(tokens, width)
    return Quantised(out, out)


def _overlap() -> dict[str, bool]:
    on = OVERLAP["on"] and not INTERPRETED
    return {"PDL": True, "launch_pdl": True} if on else {"PDL": False}


def _steps(tokens: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of an elementwise kernel."""
    rows = min(STEP["rows"], triton.next_power_of_2(max(1, tokens)))
    blocks = min(STEP["blocks"], triton.next_power_of_2(-(-width // BLOCK)))
    grid = triton.cdiv(tokens, rows), triton.cdiv(width, blocks * BLOCK)
    return grid, {"R": rows, "C": blocks, "num_warps": STEP["warps"]}
