"""Hyper-connections of few tokens (decode) on a GPU: two launches that wait for memory and for each other, little else.

The second launch has two programs a token:
one collapses, norms and quantises, which is what the next product waits for; the other makes post and a, 39 divisions
in a row, which nobody needs before the sublayer has ended. Each adds up the partial sums for itself, in a fixed order.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fp8.ref import Quantised
from longread.kernels.hyper.ref import HyperWeights
from longread.kernels.overlap import begin, overlap, ready

MOST = 64  # tokens
NUMBERS = 32  # floats of a partial sum: up to 24 projections, then the squares' sum at SQUARES
SQUARES = tl.constexpr(24)


@dataclass(frozen=True, slots=True)
class Tile:
    """tokens x channels of a program of the first launch and its warps; warps of the second."""

    tokens: int
    channels: int
    warps: int
    finish_warps: int


# By the largest number of tokens. One token: the projection's 1.6 MB are read by 128 programs at once.
TILES: dict[int, Tile] = {16: Tile(16, 32, 4, 4), MOST: Tile(32, 64, 8, 4)}


@triton.jit
def divided(x0, x1, x2, x3, eps):
    inverse = 1.0 / (x0 + x1 + x2 + x3 + eps)
    return x0 * inverse, x1 * inverse, x2 * inverse, x3 * inverse


@triton.jit
def softmax(x0, x1, x2, x3, eps):
    """The softmax of four numbers, plus eps."""
    top = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    x0 = tl.exp(x0 - top)
    x1 = tl.exp(x1 - top)
    x2 = tl.exp(x2 - top)
    x3 = tl.exp(x3 - top)
    inverse = 1.0 / (x0 + x1 + x2 + x3)
    return x0 * inverse + eps, x1 * inverse + eps, x2 * inverse + eps, x3 * inverse + eps


@triton.jit
def _mixed(post, a, k: tl.constexpr, here, y, f0, f1, f2, f3):
    """post_k y + sum_j a[j, k] f_j. post, a: pointers to each token's [4] and [4, 4]."""
    p = tl.load(post + k, mask=here, other=0.0)[:, None]
    a0 = tl.load(a + k, mask=here, other=0.0)[:, None]
    a1 = tl.load(a + 4 + k, mask=here, other=0.0)[:, None]
    a2 = tl.load(a + 8 + k, mask=here, other=0.0)[:, None]
    a3 = tl.load(a + 12 + k, mask=here, other=0.0)[:, None]
    return p * y + a0 * f0 + a1 * f1 + a2 * f2 + a3 * f3


@triton.jit(do_not_specialize=["tokens"])
def _take_in_few(
    x_ptr, out_ptr, y_ptr, post_ptr, a_ptr, rows_ptr, fn_ptr, part_ptr, tokens, hidden, y_stride,
    N: tl.constexpr, UPDATE: tl.constexpr, GATHER: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Streams' = post_k y + sum_j a[j, k] streams_j of a block of tokens and a slice of channels, and their sums."""
    width = 4 * hidden
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    r = tl.arange(0, 64)  # fn's rows: 32 of the high part, 32 of the low part
    n = r % 32
    fn = fn_ptr + (r // 32 * N + n)[:, None] * width + d[None, :]
    chosen = (n < N)[:, None] & (d < hidden)[None, :]
    w0 = tl.load(fn, mask=chosen, other=0.0)
    w1 = tl.load(fn + hidden, mask=chosen, other=0.0)
    w2 = tl.load(fn + 2 * hidden, mask=chosen, other=0.0)
    w3 = tl.load(fn + 3 * hidden, mask=chosen, other=0.0)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    here = t < tokens
    inside = here[:, None] & (d < hidden)[None, :]
    row = tl.load(rows_ptr + t, mask=here, other=0) if GATHER else t
    x = x_ptr + row[:, None] * width + d[None, :]
    x0 = tl.load(x, mask=inside, other=0.0)
    x1 = tl.load(x + hidden, mask=inside, other=0.0)
    x2 = tl.load(x + 2 * hidden, mask=inside, other=0.0)
    x3 = tl.load(x + 3 * hidden, mask=inside, other=0.0)
    if UPDATE:
        y = tl.load(y_ptr + row[:, None] * y_stride + d[None, :], mask=inside, other=0.0).to(tl.float32)
        f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        post, a = post_ptr + row * 4, a_ptr + row * 16
        x0 = _mixed(post, a, 0, here, y, f0, f1, f2, f3).to(x_ptr.dtype.element_ty)
        x1 = _mixed(post, a, 1, here, y, f0, f1, f2, f3).to(x_ptr.dtype.element_ty)
        x2 = _mixed(post, a, 2, here, y, f0, f1, f2, f3).to(x_ptr.dtype.element_ty)
        x3 = _mixed(post, a, 3, here, y, f0, f1, f2, f3).to(x_ptr.dtype.element_ty)
        o = out_ptr + t[:, None] * width + d[None, :]
        tl.store(o, x0, mask=inside)
        tl.store(o + hidden, x1, mask=inside)
        tl.store(o + 2 * hidden, x2, mask=inside)
        tl.store(o + 3 * hidden, x3, mask=inside)
    f0, f1, f2, f3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
    squares = tl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, 1)
    sums = tl.dot(w0, tl.trans(x0))
    sums = tl.dot(w1, tl.trans(x1), sums)
    sums = tl.dot(w2, tl.trans(x2), sums)
    sums = tl.dot(w3, tl.trans(x3), sums)
    both = tl.sum(tl.reshape(sums, (2, 32, BT)), 0)
    n = tl.arange(0, 32)
    both = tl.where((n == SQUARES)[:, None], squares[None, :], both)
    part = part_ptr + (t[None, :] * tl.num_programs(1) + tl.program_id(1)) * 32 + n[:, None]
    tl.store(part, both, mask=here[None, :])


@triton.jit
def _number(numbers, i: tl.constexpr):
    """Number i of 32, for every thread: zeros added to it, so no memory is asked."""
    return tl.sum(tl.where(tl.arange(0, 32) == i, numbers, 0.0), 0)


@triton.jit
def collapsed(
    x0, x1, x2, x3, c0, c1, c2, c3, gain, u_ptr, q_ptr, s_ptr, t, d, inside, hidden, rms_eps, scale_stride,
    QUANTISE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Token t's streams x [BD] in the proportions c, normed, with gain: stored, and in FP8 with scales per 128."""
    u = c0 * x0.to(tl.float32) + c1 * x1.to(tl.float32) + c2 * x2.to(tl.float32) + c3 * x3.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(u * u, 0) / hidden + rms_eps)
    u = (u * inverse * gain.to(tl.float32)).to(u_ptr.dtype.element_ty)
    tl.store(u_ptr + t * hidden + d, u, mask=inside)
    if QUANTISE:
        wide = tl.reshape(u.to(tl.float32), (BD // 128, 128))
        peak = tl.maximum(tl.max(tl.abs(wide), 1), 1e-4)
        # The exponent of peak / 448 rounded up: 448 is 1.75 * 2^8.
        power = ((peak.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        block = tl.arange(0, BD // 128)
        values = tl.reshape((wide * inverse[:, None]).to(tl.float8e4nv), (BD,))
        tl.store(q_ptr + t * hidden + d, values, mask=inside)
        scale = (power << 23).to(tl.float32, bitcast=True)
        tl.store(s_ptr + block * scale_stride + t, scale, mask=block * 128 < hidden)


@triton.jit
def _sinkhorn(x, a_ptr, eps, ITERS: tl.constexpr):
    """a [4, 4] of a token from its logits, which are numbers 8 and up of x. In registers, by every thread alike."""
    a00, a01, a02, a03 = softmax(_number(x, 8), _number(x, 9), _number(x, 10), _number(x, 11), eps)
    a10, a11, a12, a13 = softmax(_number(x, 12), _number(x, 13), _number(x, 14), _number(x, 15), eps)
    a20, a21, a22, a23 = softmax(_number(x, 16), _number(x, 17), _number(x, 18), _number(x, 19), eps)
    a30, a31, a32, a33 = softmax(_number(x, 20), _number(x, 21), _number(x, 22), _number(x, 23), eps)
    a00, a10, a20, a30 = divided(a00, a10, a20, a30, eps)
    a01, a11, a21, a31 = divided(a01, a11, a21, a31, eps)
    a02, a12, a22, a32 = divided(a02, a12, a22, a32, eps)
    a03, a13, a23, a33 = divided(a03, a13, a23, a33, eps)
    for _ in range(ITERS - 1):
        a00, a01, a02, a03 = divided(a00, a01, a02, a03, eps)
        a10, a11, a12, a13 = divided(a10, a11, a12, a13, eps)
        a20, a21, a22, a23 = divided(a20, a21, a22, a23, eps)
        a30, a31, a32, a33 = divided(a30, a31, a32, a33, eps)
        a00, a10, a20, a30 = divided(a00, a10, a20, a30, eps)
        a01, a11, a21, a31 = divided(a01, a11, a21, a31, eps)
        a02, a12, a22, a32 = divided(a02, a12, a22, a32, eps)
        a03, a13, a23, a33 = divided(a03, a13, a23, a33, eps)
    i = tl.arange(0, 4)
    first = tl.where(i == 0, a00, tl.where(i == 1, a01, tl.where(i == 2, a02, a03)))
    tl.store(a_ptr + i, first)
    second = tl.where(i == 0, a10, tl.where(i == 1, a11, tl.where(i == 2, a12, a13)))
    tl.store(a_ptr + 4 + i, second)
    third = tl.where(i == 0, a20, tl.where(i == 1, a21, tl.where(i == 2, a22, a23)))
    tl.store(a_ptr + 8 + i, third)
    fourth = tl.where(i == 0, a30, tl.where(i == 1, a31, tl.where(i == 2, a32, a33)))
    tl.store(a_ptr + 12 + i, fourth)


@triton.jit(do_not_specialize=["scale_stride"])
def _finish_few(
    x_ptr, part_ptr, base_ptr, scale_ptr, gain_ptr, u_ptr, q_ptr, s_ptr, post_ptr, a_ptr,
    hidden, eps, rms_eps, scale_stride,
    N: tl.constexpr, ITERS: tl.constexpr, S: tl.constexpr, S2: tl.constexpr, QUANTISE: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A token: program 0 its collapse, BD covers the channels; program 1 its post and a, where fn has N = 24 rows."""
    begin(PDL)
    t = tl.program_id(0).to(tl.int64)
    n, s = tl.arange(0, 32), tl.arange(0, S2)
    part = part_ptr + (t * S + s[:, None]) * 32 + n[None, :]
    base = tl.load(base_ptr + n, mask=n < N, other=0.0)
    if tl.program_id(1) == 0:
        scale = tl.load(scale_ptr)
        d = tl.arange(0, BD)
        inside = d < hidden
        gain = tl.load(gain_ptr + d, mask=inside, other=0.0)
        ready(PDL)
        numbers = tl.load(part, mask=(s < S)[:, None], other=0.0)
        x = x_ptr + t * 4 * hidden + d  # they arrive while the weights are made
        x0 = tl.load(x, mask=inside, other=0.0)
        x1 = tl.load(x + hidden, mask=inside, other=0.0)
        x2 = tl.load(x + 2 * hidden, mask=inside, other=0.0)
        x3 = tl.load(x + 3 * hidden, mask=inside, other=0.0)
        numbers = tl.sum(numbers, 0)
        inverse = tl.rsqrt(_number(numbers, SQUARES) / (4 * hidden) + rms_eps)
        pre = tl.sigmoid(numbers * (scale * inverse) + base) + eps
        collapsed(
            x0, x1, x2, x3, _number(pre, 0), _number(pre, 1), _number(pre, 2), _number(pre, 3), gain,
            u_ptr, q_ptr, s_ptr, t, d, inside, hidden, rms_eps, scale_stride, QUANTISE, BD,
        )  # fmt: skip
    elif N > 4:
        scale, last = tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
        ready(PDL)
        numbers = tl.sum(tl.load(part, mask=(s < S)[:, None], other=0.0), 0)
        inverse = tl.rsqrt(_number(numbers, SQUARES) / (4 * hidden) + rms_eps)
        post = 2 * tl.sigmoid(numbers * (scale * inverse) + base)
        tl.store(post_ptr + t * 4 + n - 4, post, mask=(n >= 4) & (n < 8))
        _sinkhorn(numbers * (last * inverse) + base, a_ptr + t * 16, eps, ITERS)


def take_in(
    streams: Tensor, out: Tensor, y: Tensor | None, post: Tensor | None, a: Tensor | None, rows: Tensor | None,
    fn: Tensor,
) -> Tensor:  # fmt: skip
    """Streams [.., 4, D] with y taken in, to out [T, 4, D]. Returns the partial sums, float32 [T, slices, 32]."""
    tokens, _, hidden = out.shape
    how = _tile(tokens)
    slices = triton.cdiv(hidden, how.channels)
    part = fn.new_empty(tokens, slices, NUMBERS, dtype=torch.float32)
    if y is not None and y.stride(1) != 1:
        y = y.contiguous()
    blocks = triton.cdiv(tokens, how.tokens)
    _take_in_few[blocks, slices](
        streams, out, y, post, a, rows, fn, part, tokens, hidden, 0 if y is None else y.stride(0),
        N=fn.shape[1], UPDATE=y is not None, GATHER=rows is not None, BT=how.tokens, BD=how.channels,
        num_warps=how.warps,
    )  # fmt: skip
    return part


def finish(
    x: Tensor, part: Tensor, w: HyperWeights, gain: Tensor, u: Tensor, q: Quantised | None, post: Tensor | None,
    a: Tensor | None, iters: int, eps: float, rms_eps: float,
) -> None:  # fmt: skip
    """Fills u, q, post and a from the streams x and the partial sums; without post and a, the head's collapse."""
    tokens, hidden = u.shape
    slices = part.shape[1]
    values, scales = (u, part) if q is None else q
    _finish_few[(tokens, 1 if post is None else 2)](
        x, part, w.base, w.scale, gain, u, values, scales, part if post is None else post, part if a is None else a,
        hidden, eps, rms_eps, scales.stride(1),
        N=w.fn.shape[1], ITERS=iters, S=slices, S2=triton.next_power_of_2(slices), QUANTISE=q is not None,
        BD=triton.next_power_of_2(hidden), num_warps=_tile(tokens).finish_warps, **overlap(tokens, 2 * tokens),
    )  # fmt: skip


def _tile(tokens: int) -> Tile:
    return next(tile for most, tile in TILES.items() if tokens <= most)
