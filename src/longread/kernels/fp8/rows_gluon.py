# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products of few rows on Hopper's tensor cores, the weight straight from memory into the registers that feed them.

Products add up over K in any order, as long as both operands take the same one: so a thread reads 16 bytes at a time
and hands them to the tensor cores as they lie. No shared memory, no pipeline to fill, and up to 8 rows cost what one
does. K's blocks of 128 are split over the warps of a program, which adds them up in a fixed order: no counters either.
E4M3 becomes float16, exactly; each block of 128 is scaled and added in float32.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK, MOST = 128, 16  # MOST: rows up to which this is the faster


def fits(x: Tensor, w: Tensor) -> bool:
    """Whether ``launch`` takes x and w, and should."""
    kinds = torch.bfloat16, torch.float8_e4m3fn
    return x.is_cuda and x.dtype in kinds and w.shape[-1] % BLOCK == 0 and x.stride(0) % 16 == 0 and x.shape[0] <= MOST


def launch(
    x: Tensor, scales: Tensor, w: Tensor, factors: Tensor, out: Tensor, fp8: bool,
    block_n: int, blocks: int, warps: int, programs: int, early: int, overlap: bool,
) -> None:  # fmt: skip
    """x [T, G * K] times w [G, N, K] into ``out`` [T, G * N]; K: whole blocks of 128, T at most 64.

    ``block_n``: rows of the weight in a tile, 16 at least, a divisor of 128. ``blocks``: of K in a step, a power of
    two. ``programs``: of all groups together, which take their tiles in turns. ``early``: see ``_product``.
    """
    tokens, (height, width) = x.shape[0], w.shape[-2:]
    groups, tiles, most = w.numel() // (height * width), triton.cdiv(height, block_n), width // BLOCK
    turns = triton.cdiv(tiles, max(1, programs // groups))
    each = triton.cdiv(tiles, turns)  # as many programs as are needed for that many turns
    _product[each, groups](
        x, scales, w, factors, out, tokens, height, width, x.stride(0), scales.stride(-1), factors.stride(-2),
        out.stride(0), turns, fp8, most % blocks == 0, height % block_n == 0, triton.cdiv(most, blocks), turns > 1,
        block_n, max(8, triton.next_power_of_2(tokens)), blocks, warps, early if overlap else 0, overlap,
        num_warps=warps, launch_pdl=overlap,
    )  # fmt: skip


@gluon.jit
def _at(b, m, c):
    """Offsets [B, M, C] of three parts, each in its slice of one layout."""
    wide = gl.expand_dims(gl.expand_dims(b, 1), 2) + gl.expand_dims(gl.expand_dims(m, 0), 2)
    return wide + gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _weights(
    w, factors, tile, step, N, K, factor_stride, FP8: gl.constexpr, EVEN: gl.constexpr, WHOLE: gl.constexpr,
    B: gl.constexpr, BN: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Ask for a tile's step: [B, BN, 128] and the scales of its blocks, [B]. A tile behind the last asks for nothing.

    Rows and blocks behind the last are the last again; x has zeros for those blocks.
    """
    first = tile * BN
    b = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, A)))
    n = gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    of = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, A.parent)))
    if not EVEN:
        b, of = gl.minimum(b, K // 128 - 1), gl.minimum(of, K // 128 - 1)
    if not WHOLE:
        n = gl.minimum(n, N - 1 - first)
    at = _at(b * 128, n * K, c)
    values = gl.load(w + first.to(gl.int64) * K + at, mask=at * 0 + first < N, other=0.0, eviction_policy="evict_first")
    factor = 1.0
    if FP8:
        factor = gl.load(factors + (first // 128) * factor_stride + of, mask=of * 0 + first < N, other=0.0)
    return values, factor


@gluon.jit
def _activations(
    x, scales, step, T, K, x_stride, scale_stride, FP8: gl.constexpr, EVEN: gl.constexpr, B: gl.constexpr,
    BT: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """x's step, [B, 128, BT], and the scales of its blocks, [B, BT]. Rows behind the last are the last again."""
    scale = 1.0
    if FP8:
        of = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(1, X.parent)))
        t = gl.minimum(gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, X.parent))), T - 1)
        if not EVEN:
            of = gl.minimum(of, K // 128 - 1)
        scale = gl.load(scales + gl.expand_dims(of, 1) * scale_stride + gl.expand_dims(t, 0))
    b = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, X)))
    t = gl.minimum(gl.arange(0, BT, gl.SliceLayout(0, gl.SliceLayout(1, X))), T - 1)
    at = _at(b * 128, c, t * x_stride)
    if EVEN:
        values = gl.load(x + at)
    else:
        values = gl.load(x + at, mask=_at(b * 128, c, t * 0) < K, other=0.0)
    if FP8:
        values = values.to(gl.float16)
    return values, scale


@gluon.jit(do_not_specialize=["T", "scale_stride", "factor_stride"])  # one kernel for 1 to 8 rows
def _product(
    x, scales, w, factors, out, T, N, K, x_stride, scale_stride, factor_stride, out_stride, turns: gl.constexpr,
    FP8: gl.constexpr, EVEN: gl.constexpr, WHOLE: gl.constexpr, STEPS: gl.constexpr, AGAIN: gl.constexpr,
    BN: gl.constexpr, BT: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """``turns`` tiles (AGAIN: more than one) of BN rows of the weight, STEPS * B blocks of K, times BT rows of x.

    The next step's weights are asked for before the present ones are used; the first before anything that another
    kernel writes. EARLY: the next kernel may start from the beginning (1), once this one's inputs are there (2), or as
    it ends (0). x is kept where STEPS is 1.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 16 if FP8 else 8)
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 16 if FP8 else 8)
    if EARLY == 1:
        gdc_launch_dependents()
    tile, group = gl.program_id(0), gl.program_id(1)
    w += group.to(gl.int64) * N * K
    x += group * K
    scales += group * (K // 128) * scale_stride
    factors += group * gl.cdiv(N, 128) * factor_stride
    out += group * N
    weight, factor = _weights(w, factors, tile, 0, N, K, factor_stride, FP8, EVEN, WHOLE, B, BN, A)
    if PDL:
        gdc_wait()
    if EARLY == 2:
        gdc_launch_dependents()
    if STEPS == 1:
        rows, scale = _activations(x, scales, 0, T, K, x_stride, scale_stride, FP8, EVEN, B, BT, X)
    for _ in gl.static_range(turns):
        total = gl.zeros((B, BN, BT), gl.float32, SUMS)
        after = tile + gl.num_programs(0)
        for step in gl.static_range(STEPS):
            present, own = weight, factor
            if step + 1 < STEPS:
                weight, factor = _weights(w, factors, tile, step + 1, N, K, factor_stride, FP8, EVEN, WHOLE, B, BN, A)
            elif AGAIN:
                weight, factor = _weights(w, factors, after, 0, N, K, factor_stride, FP8, EVEN, WHOLE, B, BN, A)
            if STEPS > 1:
                rows, scale = _activations(x, scales, step, T, K, x_stride, scale_stride, FP8, EVEN, B, BT, X)
            if FP8:
                block = mma_v2(present.to(gl.float16), rows, gl.zeros((B, BN, BT), gl.float32, SUMS))
                by = gl.expand_dims(gl.expand_dims(own, 1), 2) * gl.expand_dims(scale, 1)
                total += block * by
            else:
                total = mma_v2(present, rows, total)
        summed = gl.sum(total, 0)
        n = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, summed.type.layout))
        t = gl.arange(0, BT, gl.SliceLayout(0, summed.type.layout))
        inside = gl.expand_dims(n < N, 1) & gl.expand_dims(t < T, 0)
        there = gl.expand_dims(n, 1) + gl.expand_dims(t * out_stride, 0)
        gl.store(out + there, summed.to(out.dtype.element_ty), mask=inside)
        tile = after
