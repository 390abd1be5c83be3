"""Hyper-connections on a GPU: four streams a token, bound by reading and writing them.

``enter`` is two kernels (three for many tokens; few tokens have two of their own, few_triton.py). The first takes the
last output into the streams in place and, from what it has just written, makes partial sums of the 24 projections and
of the squares over a slice of the channels. The second adds the partial sums in a fixed order, makes the mixing weights
in registers, collapses, norms and quantises.
The projection is a float32 matrix times bfloat16 streams: the matrix is kept as two bfloat16 parts, whose sum differs
from it by 2^-18, so tensor cores sum it as exactly as float32 would.

Knows m = 4, and streams in bfloat16; everything else goes to the reference. Same signatures as ref.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fallback import fallback
from longread.kernels.fp8.ref import BLOCK, FP8, Quantised
from longread.kernels.hyper import few_triton as few
from longread.kernels.hyper import ref
from longread.kernels.hyper.few_triton import NUMBERS, SQUARES, collapsed
from longread.kernels.hyper.few_triton import divided as _divided
from longread.kernels.hyper.few_triton import softmax as _softmax
from longread.kernels.hyper.ref import Entered, HyperWeights

STREAMS = 4
MANY = 1024  # tokens from which the mixing weights have a kernel of their own: a lane a token


@dataclass(frozen=True, slots=True)
class Tile:
    """tokens x channels of a program's step, steps of a program, warps, pipeline stages; warps of the second kernel."""

    tokens: int
    channels: int
    steps: int
    warps: int
    stages: int
    finish_warps: int


# By the largest number of tokens; up to few.MOST have kernels of their own.
TILES: dict[int, Tile] = {
    1023: Tile(32, 64, 2, 8, 2, 8),
    1 << 62: Tile(64, 32, 16, 8, 3, 4),
}
TAKE_IN_MANY = Tile(32, 64, 8, 8, 2, 4)  # of MANY tokens, where they come in their order
TAKE_IN_REGISTERS = 128  # of a thread: two programs share a multiprocessor
WEIGH_MANY = 32  # tokens of a program


@triton.jit(do_not_specialize=["tokens"])
def _take_in(
    x_ptr, out_ptr, y_ptr, post_ptr, a_ptr, rows_ptr, fn_ptr, part_ptr, tokens, hidden, y_stride,
    part_token, part_slice, part_number,
    N: tl.constexpr, UPDATE: tl.constexpr, GATHER: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Streams' = post_k y + sum_j a[j, k] streams_j of a block of tokens and a slice of channels, and their sums."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here = t < tokens
    row = tl.load(rows_ptr + t, mask=here, other=0) if GATHER else t
    width = 4 * hidden
    r = tl.arange(0, 64)  # fn's rows: 32 of the high part, 32 of the low part, tokens beside them: x needs no registers
    n = r % 32
    fn = fn_ptr + (r // 32 * N + n) * width
    if UPDATE:
        p = post_ptr + row * 4
        p0 = tl.load(p, mask=here, other=0.0)[:, None]
        p1 = tl.load(p + 1, mask=here, other=0.0)[:, None]
        p2 = tl.load(p + 2, mask=here, other=0.0)[:, None]
        p3 = tl.load(p + 3, mask=here, other=0.0)[:, None]
        a = a_ptr + row * 16
        a00 = tl.load(a, mask=here, other=0.0)[:, None]
        a01 = tl.load(a + 1, mask=here, other=0.0)[:, None]
        a02 = tl.load(a + 2, mask=here, other=0.0)[:, None]
        a03 = tl.load(a + 3, mask=here, other=0.0)[:, None]
        a10 = tl.load(a + 4, mask=here, other=0.0)[:, None]
        a11 = tl.load(a + 5, mask=here, other=0.0)[:, None]
        a12 = tl.load(a + 6, mask=here, other=0.0)[:, None]
        a13 = tl.load(a + 7, mask=here, other=0.0)[:, None]
        a20 = tl.load(a + 8, mask=here, other=0.0)[:, None]
        a21 = tl.load(a + 9, mask=here, other=0.0)[:, None]
        a22 = tl.load(a + 10, mask=here, other=0.0)[:, None]
        a23 = tl.load(a + 11, mask=here, other=0.0)[:, None]
        a30 = tl.load(a + 12, mask=here, other=0.0)[:, None]
        a31 = tl.load(a + 13, mask=here, other=0.0)[:, None]
        a32 = tl.load(a + 14, mask=here, other=0.0)[:, None]
        a33 = tl.load(a + 15, mask=here, other=0.0)[:, None]
    sums = tl.zeros((64, BT), tl.float32)
    squares = tl.zeros((BT, BD), tl.float32)
    first = tl.program_id(1) * (BD * STEPS)
    for i in range(STEPS):
        d = first + i * BD + tl.arange(0, BD)
        inside = here[:, None] & (d < hidden)[None, :]
        x = x_ptr + row[:, None] * width + d[None, :]
        x0 = tl.load(x, mask=inside, other=0.0)
        x1 = tl.load(x + hidden, mask=inside, other=0.0)
        x2 = tl.load(x + 2 * hidden, mask=inside, other=0.0)
        x3 = tl.load(x + 3 * hidden, mask=inside, other=0.0)
        if UPDATE:
            y = tl.load(y_ptr + row[:, None] * y_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
            f0 = x0.to(tl.float32)
            f1 = x1.to(tl.float32)
            f2 = x2.to(tl.float32)
            f3 = x3.to(tl.float32)
            x0 = (p0 * y + a00 * f0 + a10 * f1 + a20 * f2 + a30 * f3).to(x_ptr.dtype.element_ty)
            x1 = (p1 * y + a01 * f0 + a11 * f1 + a21 * f2 + a31 * f3).to(x_ptr.dtype.element_ty)
            x2 = (p2 * y + a02 * f0 + a12 * f1 + a22 * f2 + a32 * f3).to(x_ptr.dtype.element_ty)
            x3 = (p3 * y + a03 * f0 + a13 * f1 + a23 * f2 + a33 * f3).to(x_ptr.dtype.element_ty)
            o = out_ptr + t[:, None] * width + d[None, :]
            tl.store(o, x0, mask=inside)
            tl.store(o + hidden, x1, mask=inside)
            tl.store(o + 2 * hidden, x2, mask=inside)
            tl.store(o + 3 * hidden, x3, mask=inside)
        f0 = x0.to(tl.float32)
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        f3 = x3.to(tl.float32)
        squares += f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
        chosen = (n < N)[:, None] & (d < hidden)[None, :]
        sums = tl.dot(tl.load(fn[:, None] + d[None, :], mask=chosen, other=0.0), tl.trans(x0), sums)
        sums = tl.dot(tl.load(fn[:, None] + (hidden + d)[None, :], mask=chosen, other=0.0), tl.trans(x1), sums)
        sums = tl.dot(tl.load(fn[:, None] + (2 * hidden + d)[None, :], mask=chosen, other=0.0), tl.trans(x2), sums)
        sums = tl.dot(tl.load(fn[:, None] + (3 * hidden + d)[None, :], mask=chosen, other=0.0), tl.trans(x3), sums)
    both = tl.sum(tl.reshape(sums, (2, 32, BT)), 0)
    n = tl.arange(0, 32)
    both = tl.where((n == SQUARES)[:, None], tl.sum(squares, 1)[None, :], both)
    part = part_ptr + t[None, :] * part_token + tl.program_id(1) * part_slice + n[:, None] * part_number
    tl.store(part, both, mask=here[None, :])


@triton.jit
def _stored_and_exact(x, at, inside, ASM: tl.constexpr):
    """float32 x rounded, stored at ``at``: what was stored, and that as float32."""
    if ASM:  # two numbers at once; else the compiler rounds them one by one, at an eighth of the rate
        tl.static_assert(at.dtype.element_ty == tl.bfloat16)
        rounded, exact = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $4, $3; shl.b32 $1, $0, 16; and.b32 $2, $0, 0xFFFF0000;",
            "=&r,=&r,=&r,r,r", [x], dtype=(tl.bfloat16, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        rounded = x.to(at.dtype.element_ty)
        exact = rounded.to(tl.float32)
    tl.store(at, rounded, mask=inside)
    return rounded, exact


@triton.jit(do_not_specialize=["tokens"])
def _take_in_many(
    x_ptr, y_ptr, post_ptr, a_ptr, fn_ptr, part_ptr, tokens, hidden, y_stride, part_slice, part_number,
    N: tl.constexpr, UPDATE: tl.constexpr, ASM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """``_take_in`` of many tokens, in place: a step's four streams go through shared memory to one product at once.

    Programs next to each other take slices of the same tokens. The slices are whole: slices * STEPS * BD = hidden.
    """
    t = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    inside = (t < tokens)[:, None]
    width = 4 * hidden
    r = tl.arange(0, 64)  # fn's rows: 32 of the high part, 32 of the low part
    k = tl.arange(0, 4 * BD)
    fn = fn_ptr + (r // 32 * N + r % 32)[:, None] * width + ((k // BD) * hidden + k % BD)[None, :]
    real = (r % 32 < N)[:, None]
    p0, p1, p2, p3, a00, a01, a02, a03, a10, a11, a12, a13, a20, a21, a22, a23, a30, a31, a32, a33 = _mixing(
        post_ptr + t[:, None] * 4, a_ptr + t[:, None] * 16, inside, UPDATE
    )
    sums = tl.zeros((64, BT), tl.float32)
    squares = tl.zeros((BT, BD), tl.float32)
    first = tl.program_id(0) * (BD * STEPS)
    x = x_ptr + t[:, None] * width + (first + tl.arange(0, BD))[None, :]
    ys = y_ptr + t[:, None] * y_stride + (first + tl.arange(0, BD))[None, :]
    for i in range(STEPS):
        x0 = tl.load(x + i * BD, mask=inside, other=0.0)
        x1 = tl.load(x + hidden + i * BD, mask=inside, other=0.0)
        x2 = tl.load(x + 2 * hidden + i * BD, mask=inside, other=0.0)
        x3 = tl.load(x + 3 * hidden + i * BD, mask=inside, other=0.0)
        f0 = x0.to(tl.float32)
        f1 = x1.to(tl.float32)
        f2 = x2.to(tl.float32)
        f3 = x3.to(tl.float32)
        if UPDATE:
            y = tl.load(ys + i * BD, mask=inside, other=0.0).to(tl.float32)
            g0 = p0 * y + a00 * f0 + a10 * f1 + a20 * f2 + a30 * f3
            g1 = p1 * y + a01 * f0 + a11 * f1 + a21 * f2 + a31 * f3
            g2 = p2 * y + a02 * f0 + a12 * f1 + a22 * f2 + a32 * f3
            g3 = p3 * y + a03 * f0 + a13 * f1 + a23 * f2 + a33 * f3
            x0, f0 = _stored_and_exact(g0, x + i * BD, inside, ASM)
            x1, f1 = _stored_and_exact(g1, x + hidden + i * BD, inside, ASM)
            x2, f2 = _stored_and_exact(g2, x + 2 * hidden + i * BD, inside, ASM)
            x3, f3 = _stored_and_exact(g3, x + 3 * hidden + i * BD, inside, ASM)
        squares += f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3
        # [BT, BD, 2, 2] to [BT, 4 * BD], stream by stream: within a thread's registers.
        streams = tl.permute(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (0, 2, 3, 1))
        part_of_fn = tl.load(fn + first + i * BD, mask=real, other=0.0)
        sums = tl.dot(part_of_fn, tl.trans(tl.reshape(streams, (BT, 4 * BD))), sums)
    both = tl.sum(tl.reshape(sums, (2, 32, BT)), 0)
    n = tl.arange(0, 32)
    both = tl.where((n == SQUARES)[:, None], tl.sum(squares, 1)[None, :], both)
    part = part_ptr + t[None, :] + tl.program_id(0) * part_slice + n[:, None] * part_number
    tl.store(part, both, mask=(t < tokens)[None, :])


@triton.jit
def _mixing(p, a, inside, UPDATE: tl.constexpr):
    """post and a of a block of tokens, a number of [BT, 1] each; zeros where nothing is taken in."""
    inside = inside & UPDATE
    return (
        tl.load(p, mask=inside, other=0.0), tl.load(p + 1, mask=inside, other=0.0),
        tl.load(p + 2, mask=inside, other=0.0), tl.load(p + 3, mask=inside, other=0.0),
        tl.load(a, mask=inside, other=0.0), tl.load(a + 1, mask=inside, other=0.0),
        tl.load(a + 2, mask=inside, other=0.0), tl.load(a + 3, mask=inside, other=0.0),
        tl.load(a + 4, mask=inside, other=0.0), tl.load(a + 5, mask=inside, other=0.0),
        tl.load(a + 6, mask=inside, other=0.0), tl.load(a + 7, mask=inside, other=0.0),
        tl.load(a + 8, mask=inside, other=0.0), tl.load(a + 9, mask=inside, other=0.0),
        tl.load(a + 10, mask=inside, other=0.0), tl.load(a + 11, mask=inside, other=0.0),
        tl.load(a + 12, mask=inside, other=0.0), tl.load(a + 13, mask=inside, other=0.0),
        tl.load(a + 14, mask=inside, other=0.0), tl.load(a + 15, mask=inside, other=0.0),
    )  # fmt: skip


@triton.jit
def _number(p, i, mask, part_slice, part_number, S: tl.constexpr):
    """Number i of a token (or of a block of tokens): the sum over the slices, in their order."""
    total = tl.load(p + i * part_number, mask=mask, other=0.0)
    for s in tl.static_range(1, S):
        total += tl.load(p + s * part_slice + i * part_number, mask=mask, other=0.0)
    return total


@triton.jit
def _weigh(
    p, mask, part_slice, part_number, base_ptr, scale_ptr, post_ptr, a_ptr, hidden, eps, rms_eps,
    ITERS: tl.constexpr, HEAD: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The collapse's four weights, returned; post and a, stored. p, post_ptr, a_ptr: those of a token or of many."""
    mean = _number(p, SQUARES, mask, part_slice, part_number, S) / (4 * hidden)
    inverse = tl.rsqrt(mean + rms_eps)
    scale = tl.load(scale_ptr) * inverse
    c0 = tl.sigmoid(_number(p, 0, mask, part_slice, part_number, S) * scale + tl.load(base_ptr)) + eps
    c1 = tl.sigmoid(_number(p, 1, mask, part_slice, part_number, S) * scale + tl.load(base_ptr + 1)) + eps
    c2 = tl.sigmoid(_number(p, 2, mask, part_slice, part_number, S) * scale + tl.load(base_ptr + 2)) + eps
    c3 = tl.sigmoid(_number(p, 3, mask, part_slice, part_number, S) * scale + tl.load(base_ptr + 3)) + eps
    if not HEAD:
        scale = tl.load(scale_ptr + 1) * inverse
        for i in tl.static_range(4):
            logit = _number(p, 4 + i, mask, part_slice, part_number, S) * scale + tl.load(base_ptr + 4 + i)
            tl.store(post_ptr + i, 2 * tl.sigmoid(logit), mask=mask)
        scale = tl.load(scale_ptr + 2) * inverse
        b = base_ptr + 8
        a00 = _number(p, 8, mask, part_slice, part_number, S) * scale + tl.load(b)
        a01 = _number(p, 9, mask, part_slice, part_number, S) * scale + tl.load(b + 1)
        a02 = _number(p, 10, mask, part_slice, part_number, S) * scale + tl.load(b + 2)
        a03 = _number(p, 11, mask, part_slice, part_number, S) * scale + tl.load(b + 3)
        a10 = _number(p, 12, mask, part_slice, part_number, S) * scale + tl.load(b + 4)
        a11 = _number(p, 13, mask, part_slice, part_number, S) * scale + tl.load(b + 5)
        a12 = _number(p, 14, mask, part_slice, part_number, S) * scale + tl.load(b + 6)
        a13 = _number(p, 15, mask, part_slice, part_number, S) * scale + tl.load(b + 7)
        a20 = _number(p, 16, mask, part_slice, part_number, S) * scale + tl.load(b + 8)
        a21 = _number(p, 17, mask, part_slice, part_number, S) * scale + tl.load(b + 9)
        a22 = _number(p, 18, mask, part_slice, part_number, S) * scale + tl.load(b + 10)
        a23 = _number(p, 19, mask, part_slice, part_number, S) * scale + tl.load(b + 11)
        a30 = _number(p, 20, mask, part_slice, part_number, S) * scale + tl.load(b + 12)
        a31 = _number(p, 21, mask, part_slice, part_number, S) * scale + tl.load(b + 13)
        a32 = _number(p, 22, mask, part_slice, part_number, S) * scale + tl.load(b + 14)
        a33 = _number(p, 23, mask, part_slice, part_number, S) * scale + tl.load(b + 15)
        a00, a01, a02, a03 = _softmax(a00, a01, a02, a03, eps)
        a10, a11, a12, a13 = _softmax(a10, a11, a12, a13, eps)
        a20, a21, a22, a23 = _softmax(a20, a21, a22, a23, eps)
        a30, a31, a32, a33 = _softmax(a30, a31, a32, a33, eps)
        a00, a10, a20, a30 = _divided(a00, a10, a20, a30, eps)
        a01, a11, a21, a31 = _divided(a01, a11, a21, a31, eps)
        a02, a12, a22, a32 = _divided(a02, a12, a22, a32, eps)
        a03, a13, a23, a33 = _divided(a03, a13, a23, a33, eps)
        for _ in range(ITERS - 1):
            a00, a01, a02, a03 = _divided(a00, a01, a02, a03, eps)
            a10, a11, a12, a13 = _divided(a10, a11, a12, a13, eps)
            a20, a21, a22, a23 = _divided(a20, a21, a22, a23, eps)
            a30, a31, a32, a33 = _divided(a30, a31, a32, a33, eps)
            a00, a10, a20, a30 = _divided(a00, a10, a20, a30, eps)
            a01, a11, a21, a31 = _divided(a01, a11, a21, a31, eps)
            a02, a12, a22, a32 = _divided(a02, a12, a22, a32, eps)
            a03, a13, a23, a33 = _divided(a03, a13, a23, a33, eps)
        tl.store(a_ptr, a00, mask=mask)
        tl.store(a_ptr + 1, a01, mask=mask)
        tl.store(a_ptr + 2, a02, mask=mask)
        tl.store(a_ptr + 3, a03, mask=mask)
        tl.store(a_ptr + 4, a10, mask=mask)
        tl.store(a_ptr + 5, a11, mask=mask)
        tl.store(a_ptr + 6, a12, mask=mask)
        tl.store(a_ptr + 7, a13, mask=mask)
        tl.store(a_ptr + 8, a20, mask=mask)
        tl.store(a_ptr + 9, a21, mask=mask)
        tl.store(a_ptr + 10, a22, mask=mask)
        tl.store(a_ptr + 11, a23, mask=mask)
        tl.store(a_ptr + 12, a30, mask=mask)
        tl.store(a_ptr + 13, a31, mask=mask)
        tl.store(a_ptr + 14, a32, mask=mask)
        tl.store(a_ptr + 15, a33, mask=mask)
    return c0, c1, c2, c3


@triton.jit(do_not_specialize=["tokens"])
def _weigh_many(
    part_ptr, base_ptr, scale_ptr, pre_ptr, post_ptr, a_ptr, tokens, hidden, eps, rms_eps,
    part_token, part_slice, part_number, ITERS: tl.constexpr, S: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Mixing weights of BT tokens, a lane each; the collapse's go to pre_ptr [T, 4]."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here = t < tokens
    c0, c1, c2, c3 = _weigh(
        part_ptr + t * part_token, here, part_slice, part_number, base_ptr, scale_ptr, post_ptr + t * 4, a_ptr + t * 16,
        hidden, eps, rms_eps, ITERS, False, S,
    )  # fmt: skip
    tl.store(pre_ptr + t * 4, c0, mask=here)
    tl.store(pre_ptr + t * 4 + 1, c1, mask=here)
    tl.store(pre_ptr + t * 4 + 2, c2, mask=here)
    tl.store(pre_ptr + t * 4 + 3, c3, mask=here)


@triton.jit(do_not_specialize=["scale_stride"])
def _finish(
    x_ptr, part_ptr, sum_ptr, base_ptr, scale_ptr, gain_ptr, u_ptr, q_ptr, s_ptr, post_ptr, a_ptr,
    hidden, eps, rms_eps, part_token, part_slice, part_number, scale_stride,
    ITERS: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, WEIGH: tl.constexpr, HEAD: tl.constexpr,
    QUANTISE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """A token: its mixing weights (or those in sum_ptr [T, 4]), the collapse, the norm, FP8. BD covers the channels."""
    t = tl.program_id(0).to(tl.int64)
    if not WEIGH:
        t = tl.num_programs(0) - 1 - t  # of many tokens, those taken in last may still be in the L2 cache
    d = tl.arange(0, BD)
    inside = d < hidden
    x = x_ptr + t * 4 * hidden + d  # asked for first: they arrive while the weights are made
    x0 = tl.load(x, mask=inside, other=0.0)
    x1 = tl.load(x + hidden, mask=inside, other=0.0)
    x2 = tl.load(x + 2 * hidden, mask=inside, other=0.0)
    x3 = tl.load(x + 3 * hidden, mask=inside, other=0.0)
    gain = tl.load(gain_ptr + d, mask=inside, other=0.0)
    if WEIGH:
        n = tl.arange(0, 32)
        s = tl.arange(0, S2)
        part = part_ptr + t * part_token + s[:, None] * part_slice + n[None, :] * part_number
        own = sum_ptr + t * 32
        tl.store(own + n, tl.sum(tl.load(part, mask=(s < S)[:, None], other=0.0), 0))
        tl.debug_barrier()  # each thread then reads every number
        c0, c1, c2, c3 = _weigh(
            own, t >= 0, 0, 1, base_ptr, scale_ptr, post_ptr + t * 4, a_ptr + t * 16,
            hidden, eps, rms_eps, ITERS, HEAD, 1,
        )  # fmt: skip
    else:
        c0 = tl.load(sum_ptr + t * 4)
        c1 = tl.load(sum_ptr + t * 4 + 1)
        c2 = tl.load(sum_ptr + t * 4 + 2)
        c3 = tl.load(sum_ptr + t * 4 + 3)
    collapsed(
        x0, x1, x2, x3, c0, c1, c2, c3, gain, u_ptr, q_ptr, s_ptr, t, d, inside, hidden, rms_eps, scale_stride,
        QUANTISE, BD,
    )  # fmt: skip


def weights(fn: Tensor, base: Tensor, scale: Tensor) -> HyperWeights:
    """fn float32 [n, m*D] as two bfloat16 parts [2, n, m*D], where the kernels can use them. See ``ref.weights``."""
    if fn.shape[0] not in (STREAMS, STREAMS * (STREAMS + 2)):
        return ref.weights(fn, base, scale)
    high = fn.bfloat16()
    low = (fn.float() - high.float()).bfloat16()
    return HyperWeights(torch.stack((high, low)).contiguous(), base.float().contiguous(), scale.float().contiguous())


def enter(
    streams: Tensor,
    y: Tensor | None,
    post: Tensor | None,
    a: Tensor | None,
    w: HyperWeights,
    gain: Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
    quantised: bool,
) -> Entered:
    """See ``ref.enter``."""
    tokens, m, hidden = streams.shape
    reason = _refused(streams, w, quantised)
    if reason:
        fallback("hyper.enter", reason)
        return ref.enter(streams, y, post, a, _joined(w), gain, iters, eps, rms_eps, quantised)
    u = streams.new_empty(tokens, hidden)
    new_post, new_a = (streams.new_empty(tokens, *s, dtype=torch.float32) for s in ((m,), (m, m)))
    q = None
    if quantised:
        scales = streams.new_empty(-(-hidden // BLOCK), tokens, dtype=torch.float32).t()
        q = Quantised(streams.new_empty(tokens, hidden, dtype=FP8), scales)
    if 0 < tokens <= few.MOST:
        part = few.take_in(streams, streams, y, post, a, None, w.fn)
        few.finish(streams, part, w, gain, u, q, new_post, new_a, iters, eps, rms_eps)
    elif tokens:
        how = _tile(tokens)
        part = _sums(streams, streams, y, post, a, None, w.fn, how)
        _finished(streams, part, w, gain, u, q, new_post, new_a, iters, eps, rms_eps, how)
    return Entered(u, q, new_post, new_a)


def leave(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    a: Tensor,
    rows: Tensor,
    w: HyperWeights,
    gain: Tensor,
    eps: float,
    rms_eps: float,
) -> Tensor:
    """See ``ref.leave``."""
    reason = _refused(streams, w, False)
    if reason:
        fallback("hyper.leave", reason)
        return ref.leave(streams, y, post, a, rows, _joined(w), gain, eps, rms_eps)
    count, hidden = rows.shape[0], streams.shape[2]
    u = streams.new_empty(count, hidden)
    taken = streams.new_empty(count, STREAMS, hidden)
    if 0 < count <= few.MOST:
        part = few.take_in(streams, taken, y, post, a, rows, w.fn)
        few.finish(taken, part, w, gain, u, None, None, None, 0, eps, rms_eps)
    elif count:
        how = _tile(count)
        part = _sums(streams, taken, y, post, a, rows, w.fn, how)
        _finished(taken, part, w, gain, u, None, None, None, 0, eps, rms_eps, how)
    return u


def _refused(streams: Tensor, w: HyperWeights, quantised: bool) -> str:
    if streams.shape[1] != STREAMS or w.fn.dim() != 3:
        return f"{streams.shape[1]} streams"
    if streams.dtype != w.fn.dtype:
        return f"streams in {streams.dtype}"
    if not streams.is_contiguous():
        return "strided streams"
    if quantised and streams.shape[2] % BLOCK:
        return f"hidden size {streams.shape[2]} is not a multiple of {BLOCK}"
    return ""


def _joined(w: HyperWeights) -> HyperWeights:
    return w if w.fn.dim() == 2 else HyperWeights(w.fn.float().sum(0), w.base, w.scale)


def _tile(tokens: int) -> Tile:
    return next(tile for most, tile in TILES.items() if tokens <= most)


def _sums(
    streams: Tensor, out: Tensor, y: Tensor | None, post: Tensor | None, a: Tensor | None, rows: Tensor | None,
    fn: Tensor, how: Tile,
) -> Tensor:  # fmt: skip
    """The first kernel. Returns the partial sums, float32 [T, slices, 32] in either order in memory."""
    tokens, _, hidden = out.shape
    if tokens >= MANY and out is streams and hidden % (TAKE_IN_MANY.channels * 2) == 0:
        return _sums_of_many(streams, y, post, a, fn)
    steps = min(how.steps, triton.cdiv(hidden, how.channels))
    slices = triton.cdiv(hidden, how.channels * steps)
    if tokens >= MANY:  # read a lane a token
        part = fn.new_empty(slices, NUMBERS, tokens, dtype=torch.float32).permute(2, 0, 1)
    else:  # read by one program a token
        part = fn.new_empty(tokens, slices, NUMBERS, dtype=torch.float32)
    if y is not None and y.stride(1) != 1:
        y = y.contiguous()
    grid = (triton.cdiv(tokens, how.tokens), slices)
    given: tuple[Any, ...] = (streams, out, y, post, a, rows, fn, part)
    _take_in[grid](
        *given, tokens, hidden, 0 if y is None else y.stride(0), *part.stride(),
        N=fn.shape[1], UPDATE=y is not None, GATHER=rows is not None,
        BT=how.tokens, BD=how.channels, STEPS=steps, num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return part


def _sums_of_many(streams: Tensor, y: Tensor | None, post: Tensor | None, a: Tensor | None, fn: Tensor) -> Tensor:
    """The same for MANY tokens or more, in place."""
    tokens, _, hidden = streams.shape
    how, steps = TAKE_IN_MANY, TAKE_IN_MANY.steps
    while hidden % (how.channels * steps):
        steps //= 2
    slices = hidden // (how.channels * steps)
    part = fn.new_empty(slices, NUMBERS, tokens, dtype=torch.float32).permute(2, 0, 1)
    if y is not None and y.stride(1) != 1:
        y = y.contiguous()
    given = (streams, part, part) if y is None else (y, post, a)  # or anything, unused
    _take_in_many[(slices, triton.cdiv(tokens, how.tokens))](
        streams, *given, fn, part, tokens, hidden, given[0].stride(0), *part.stride()[1:],
        N=fn.shape[1], UPDATE=y is not None, ASM=streams.is_cuda and streams.dtype == torch.bfloat16,
        BT=how.tokens, BD=how.channels, STEPS=steps, num_warps=how.warps, num_stages=how.stages,
        maxnreg=TAKE_IN_REGISTERS,
    )  # fmt: skip
    return part


def _finished(
    x: Tensor, part: Tensor, w: HyperWeights, gain: Tensor, u: Tensor, q: Quantised | None, post: Tensor | None,
    a: Tensor | None, iters: int, eps: float, rms_eps: float, how: Tile,
) -> None:  # fmt: skip
    """The second kernel, or second and third: fills u, q, post and a from the streams x and the partial sums."""
    tokens, hidden = u.shape
    slices = part.shape[1]
    many = tokens >= MANY and post is not None
    own = part.new_empty(tokens, STREAMS if many else NUMBERS)
    if many:
        _weigh_many[(triton.cdiv(tokens, WEIGH_MANY),)](
            part, w.base, w.scale, own, post, a, tokens, hidden, eps, rms_eps, *part.stride(),
            ITERS=iters, S=slices, BT=WEIGH_MANY, num_warps=1,
        )  # fmt: skip
    values, scales = (u, part) if q is None else q
    _finish[(tokens,)](
        x, part, own, w.base, w.scale, gain, u, values, scales,
        part if post is None else post, part if a is None else a,
        hidden, eps, rms_eps, *part.stride(), scales.stride(1),
        ITERS=iters, S=slices, S2=triton.next_power_of_2(slices), WEIGH=not many, HEAD=post is None,
        QUANTISE=q is not None, BD=triton.next_power_of_2(hidden), num_warps=how.finish_warps,
    )  # fmt: skip
