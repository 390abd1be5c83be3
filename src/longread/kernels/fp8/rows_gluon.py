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
TILE = 16  # rows of a weight that a program takes, the fewest that the tensor cores do; more at a time were slower


def fits(x: Tensor, w: Tensor) -> bool:
    """Whether ``launch`` takes x and w, and should."""
    kinds = torch.bfloat16, torch.float8_e4m3fn
    return x.is_cuda and x.dtype in kinds and w.shape[-1] % BLOCK == 0 and x.stride(0) % 16 == 0 and x.shape[0] <= MOST


def launch(
    x: Tensor, scales: Tensor, w: Tensor, factors: Tensor, out: Tensor, fp8: bool, blocks: int, warps: int, early: int,
    registers: int, overlap: bool,
) -> None:  # fmt: skip
    """x [T, G * K] times w [G, N, K] into ``out`` [T, G * N]; K: whole blocks of 128, T at most 64.

    ``blocks``: of K in a step, a power of two, ``warps`` at least. ``early``: see ``_product``.
    ``registers``: most of a thread, 255 whatever it takes; fewer let more programs run on an SM.
    """
    tokens, (height, width) = x.shape[0], w.shape[-2:]
    most = width // BLOCK
    _product[triton.cdiv(height, TILE), w.numel() // (height * width)](
        x, scales, w, factors, out, tokens, height, width, x.stride(0), scales.stride(-1), factors.stride(-2),
        out.stride(0), fp8, most % blocks == 0, height % TILE == 0, triton.cdiv(most, blocks), TILE,
        max(8, triton.next_power_of_2(tokens)), blocks, warps, early if overlap else 0, overlap,
        num_warps=warps, maxnreg=registers, launch_pdl=overlap,
    )  # fmt: skip


@gluon.jit
def _at(b, m, c):
    """Offsets [B, M, C] of three parts, each in its slice of one layout."""
    wide = gl.expand_dims(gl.expand_dims(b, 1), 2) + gl.expand_dims(gl.expand_dims(m, 0), 2)
    return wide + gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _weights(
    w, factors, first, step, N, K, FP8: gl.constexpr, EVEN: gl.constexpr, WHOLE: gl.constexpr, B: gl.constexpr,
    BN: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Ask for a step of the BN rows from ``first``: [B, BN, 128] and the scales of its blocks, [B].

    Rows and blocks behind the last are the last again; x has zeros for those blocks.
    """
    b = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, A)))
    n = gl.arange(0, BN, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    of = step * B + gl.arange(0, B, gl.SliceLayout(1, gl.SliceLayout(2, A.parent)))
    if not EVEN:
        b, of = gl.minimum(b, K // 128 - 1), gl.minimum(of, K // 128 - 1)
    if not WHOLE:
        n = gl.minimum(n, N - 1 - first)
    values = gl.load(w + _at(b * 128, n * K, c), eviction_policy="evict_first")
    factor = 1.0
    if FP8:
        factor = gl.load(factors + of)
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
    x, scales, w, factors, out, T, N, K, x_stride, scale_stride, factor_stride, out_stride, FP8: gl.constexpr,
    EVEN: gl.constexpr, WHOLE: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr, BT: gl.constexpr,
    B: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A tile of BN rows of the weight, STEPS * B blocks of K, times BT rows of x.

    The next step's weights are asked for before the present ones are used; the first before anything that another
    kernel writes. EARLY: the next kernel may start from the beginning (1), once this one's inputs are there (2), or as
    it ends (0).
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 16 if FP8 else 8)
    X: gl.constexpr = gl.DotOperandLayout(1, SUMS, 16 if FP8 else 8)
    if EARLY == 1:
        gdc_launch_dependents()
    first, group = gl.program_id(0) * BN, gl.program_id(1)
    w += (group.to(gl.int64) * N + first) * K
    x += group * K
    scales += group * (K // 128) * scale_stride
    factors += (group * gl.cdiv(N, 128) + first // 128) * factor_stride
    weight, factor = _weights(w, factors, first, 0, N, K, FP8, EVEN, WHOLE, B, BN, A)
    if PDL:
        gdc_wait()
    if EARLY == 2:
        gdc_launch_dependents()
    total = gl.zeros((B, BN, BT), gl.float32, SUMS)
    for step in gl.static_range(STEPS):
        present, own = weight, factor
        if step + 1 < STEPS:
            weight, factor = _weights(w, factors, first, step + 1, N, K, FP8, EVEN, WHOLE, B, BN, A)
        rows, scale = _activations(x, scales, step, T, K, x_stride, scale_stride, FP8, EVEN, B, BT, X)
        if FP8:
            block = mma_v2(present.to(gl.float16), rows, gl.zeros((B, BN, BT), gl.float32, SUMS))
            total += block * (gl.expand_dims(gl.expand_dims(own, 1), 2) * gl.expand_dims(scale, 1))
        else:
            total = mma_v2(present, rows, total)
    summed = gl.sum(total, 0)
    n = first + gl.arange(0, BN, gl.SliceLayout(1, summed.type.layout))
    t = gl.arange(0, BT, gl.SliceLayout(0, summed.type.layout))
    inside = gl.expand_dims(n < N, 1) & gl.expand_dims(t < T, 0)
    there = out + group * N + gl.expand_dims(n, 1) + gl.expand_dims(t * out_stride, 0)
    gl.store(there, summed.to(out.dtype.element_ty), mask=inside)
