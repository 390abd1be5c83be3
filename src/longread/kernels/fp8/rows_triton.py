# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products of few rows, as decode has them: bound by reading the weight, so every SM must read, all of the time.

One row of a plain weight: plain multiply-adds on whole rows of it (``_vector``). A few rows: tensor cores fed from
registers (rows_gluon.py). More: the tensor cores, the weight as their larger operand and K cut in parts so that every
SM reads (``_rows``); parts are summed in their order by whichever program finishes last. The same bits every time.
The first two ask for weights, which never change, before they wait for the kernel before them: overlap.py.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.counters import counters
from longread.kernels.fp8 import ref, rows_gluon
from longread.kernels.fp8.ref import BLOCK, Fp8Weight, Quantised, Weight
from longread.kernels.overlap import INTERPRETED, begin, overlap, ready

# Triton's interpreter truncates where the device rounds to the nearest, so there a value is rounded before its cast.
ROUND_FIRST = tl.constexpr(INTERPRETED)
FEW = 64  # rows up to which reading the weight costs more than the products
FILL = 132 * 3  # programs that keep every SM's loads in flight
LONG = 1 << 26  # numbers of a matrix that reads for so long that its end does not count
NARROW = 132 * 16  # rows of a weight, up to which each SM has one tile of 16 of them at most
WIDE = 8192  # rows of a weight from which the tensor cores' copies of 9 to 16 rows of x cost more than the memory

# Tile sizes, by measurement on an H200; keys are explained where they are used. Of ``VECTOR`` and ``HAND`` the first
# entry counts whose K is not exceeded, of plain weights in ``VECTOR`` "plain". ``early``: when the next kernel may
# start, 1 from the beginning, 2 once this one's inputs are there.
VECTOR: dict[int | str, dict[str, Any]] = {
    1024: {"numbers": 16384, "depth": 2048, "warps": 2, "fill": FILL, "early": 1},
    4096: {"numbers": 8192, "depth": 2048, "warps": 4, "fill": 2 * FILL, "early": 1},
    8192: {"numbers": 4096, "depth": 4096, "warps": 4, "fill": FILL, "early": 1},
    1 << 30: {"numbers": 4096, "depth": 4096, "warps": 4, "fill": FILL, "early": 2},
    "plain": {"numbers": 2048, "depth": 1024, "warps": 8, "fill": 2 * FILL, "early": 1},
    "long": {"numbers": 8192, "depth": 2048, "warps": 4, "fill": FILL, "early": 1},
}
# ``HAND``: blocks that divide K, since a step that is not whole is masked. Where a program asks for all of its weights
# at once, 128 registers do, and two of eight warps run on an SM.
HAND: dict[int, dict[str, int]] = {
    1024: {"blocks": 8, "warps": 4, "early": 2, "registers": 255},
    1536: {"blocks": 4, "warps": 4, "early": 1, "registers": 255},
    2048: {"blocks": 16, "warps": 4, "early": 1, "registers": 255},
    4096: {"blocks": 16, "warps": 8, "early": 1, "registers": 128},
    7168: {"blocks": 8, "warps": 8, "early": 2, "registers": 255},
    1 << 30: {"blocks": 16, "warps": 8, "early": 2, "registers": 128},
}
HAND_NARROW = {**HAND, 4096: {"blocks": 32, "warps": 8, "early": 2, "registers": 128}}  # one program an SM: all of K
HAND_MORE = {"blocks": 8, "warps": 8, "early": 1, "registers": 255}  # over 8 rows: sums of twice the size
ROWS: dict[str, Any] = {"block_n": 64, "depth_plain": 64, "warps": 4, "stages": 3, "fill": 132 * 2, "max_parts": 32}
# Where adding the parts up costs more than more of them gain: each is as large as the result, one program reads all.
FEW_PARTS: dict[str, Any] = {**ROWS, "stages": 4, "fill": 132, "max_parts": 4}


@triton.jit
def narrow(x, dtype: tl.constexpr):
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
    x, scales, w, factors, out, N, K, scale_stride, factor_stride,
    FP8: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight times one row of x. Each thread reads 16 bytes at a time along K.

    The next tile is asked for before the present one is used, and the first before anything that x needs.
    """
    begin(EARLY == 1)
    first = tl.program_id(0) * BN
    group = tl.program_id(1)
    row = tl.minimum(tl.arange(0, BN), N - 1 - first)  # rows behind the last are the last again
    channel = tl.arange(0, C)[:, None] * 128 + tl.arange(0, 128)[None, :]
    w += (group.to(tl.int64) * N + first) * K
    x += group * K
    scales += group * (K // 128) * scale_stride
    factors += group * tl.cdiv(N, 128) * factor_stride + (first // 128) * factor_stride
    total = tl.zeros((BN, C, 128), tl.float32)
    tile = _tile(w, row, channel, K, EVEN)  # a weight never changes
    ready(PDL)
    begin(EARLY == 2)
    for step in tl.static_range(STEPS):
        k = step * (C * 128) + channel
        block = step * C + tl.arange(0, C)
        present = tile
        if step + 1 < STEPS:
            tile = _tile(w, row, k + C * 128, K, EVEN)
        values = present.to(tl.float32)
        total += values * _scaled(x, scales, factors, k, block, K, scale_stride, FP8, EVEN)[None]
    at = first + tl.arange(0, BN)
    tl.store(out + group * N + at, narrow(tl.sum(tl.sum(total, 2), 1), out.dtype.element_ty), mask=at < N)


@triton.jit
def _rows(
    x, scales, w, factors, out, parts, counters, T, N, K, x_stride, scale_stride, factor_stride, out_stride,
    FP8: tl.constexpr, EVEN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile [BT, BN] of one group's product, over STEPS * BK of K, one of PARTS. BN divides 128; BK is 128 in FP8.

    FP8 sums 128 channels in the tensor cores and adds them, scaled, in float32.
    """
    begin(PDL)
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
    ready(PDL)
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
        tl.store(there, narrow(total, out.dtype.element_ty), mask=inside)
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
            tl.store(there, narrow(summed, out.dtype.element_ty), mask=inside)
            tl.store(counter, 0)  # ready for the next product that takes this counter


def few(x: Tensor | Quantised, w: Weight, out: Tensor) -> bool:
    """x times one matrix, or several, into ``out`` [T, groups * N] by the kernels of this file; False if they cannot.

    Rows of x and of ``out`` may be strided.
    """
    rows, matrix = tensor_of(x), tensor_of(w)
    if matrix.shape[-1] % 16 or matrix.stride(-1) != 1 or rows.stride(1) != 1:
        return False
    if rows.shape[0]:
        # A copy of a weight is made in the same step: only by_rows waits before it reads one.
        lasting = matrix.is_contiguous() and (isinstance(w, Tensor) or w.scales.is_contiguous())
        (_fastest(rows, matrix) if lasting else by_rows)(x, w, out)
    return True


def _fastest(rows: Tensor, matrix: Tensor) -> Callable[[Tensor | Quantised, Weight, Tensor], Tensor]:
    """Which kernel, by measurement on an H200."""
    tokens, width = rows.shape[0], matrix.shape[-1]
    height = matrix.numel() // width
    # A row alone: multiply-adds keep up with the memory where the tensor cores' larger tiles would leave SMs without.
    alone = tokens == 1 and (matrix.dtype != ref.FP8 or (width > 4096 and height <= NARROW))
    crowded = tokens > 8 and height >= WIDE
    if rows_gluon.fits(rows, matrix) and not alone and not crowded and matrix.numel() < LONG:
        return by_hand
    return by_vector if tokens == 1 else by_rows


def by_hand(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, int] | None = None) -> Tensor:
    """Up to 64 rows, K in whole blocks of 128. Keys of ``config``: see rows_gluon.launch."""
    rows, matrix, scales, factors = _operands(x, w)
    width = matrix.shape[-1]
    if config is None:
        narrow = matrix.numel() // width <= NARROW
        by_width = HAND_NARROW if narrow else HAND
        config = next(by_width[most] for most in by_width if width <= most)
        if rows.shape[0] > 8:
            config = {**HAND_MORE, "blocks": 16} if narrow else HAND_MORE
        if matrix.dtype != ref.FP8:  # twice the bytes on their way
            config = {**config, "registers": 255}
    blocks = min(config["blocks"], triton.next_power_of_2(width // BLOCK))
    rows_gluon.launch(
        rows, scales, matrix, factors, out, matrix.dtype == ref.FP8, blocks, min(config["warps"], blocks),
        config["early"], config["registers"], "launch_pdl" in overlap(rows.shape[0]),
    )  # fmt: skip
    return out


def by_vector(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """One row. ``numbers``: of the weight in a tile; ``depth``: of them along K, at most."""
    rows, matrix, scales, factors = _operands(x, w)
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
    given = overlap(late=True)  # EARLY says when the next kernel may start
    _vector[triton.cdiv(height, block_n), groups](
        rows, scales, matrix, factors, out, height, width, scales.stride(-1), factors.stride(-2),
        FP8=matrix.dtype == ref.FP8, EVEN=width % (blocks * BLOCK) == 0, STEPS=triton.cdiv(width, blocks * BLOCK),
        BN=block_n, C=blocks, EARLY=config["early"] if given["PDL"] else 0, num_warps=config["warps"], **given,
    )  # fmt: skip
    return out


def by_rows(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """Any number of rows, 64 at a time. K is cut into equal parts of whole steps, so that ``fill`` programs read."""
    rows, matrix, scales, factors = _operands(x, w)
    fp8 = matrix.dtype == ref.FP8
    tokens, (height, width) = rows.shape[0], matrix.shape[-2:]
    groups = matrix.numel() // (height * width)
    if config is None:
        config = FEW_PARTS if tokens > 32 or (tokens > 16 and groups * height <= WIDE) else ROWS
    # Triton has wgmma for 16 rows, not for 8.
    block_t = min(FEW, max(16, triton.next_power_of_2(tokens)))
    block_n, block_k = config["block_n"], BLOCK if fp8 else config["depth_plain"]
    tiles_n, tiles_t, steps = triton.cdiv(height, block_n), triton.cdiv(tokens, block_t), triton.cdiv(width, block_k)
    tiles = tiles_n * tiles_t * groups
    cuts = [p for p in range(1, min(steps, config["max_parts"]) + 1) if steps % p == 0]
    parts = next((p for p in cuts if tiles * p >= config["fill"]), cuts[-1])
    cut = parts > 1
    scratch = rows.new_empty(groups * parts * tokens * height if cut else 1, dtype=torch.float32)
    counted = counters(rows.device, tiles) if cut else scratch
    _rows[tiles_n, parts, tiles_t * groups](
        rows, scales, matrix, factors, out, scratch, counted, tokens, height, width, rows.stride(0),
        scales.stride(-1), factors.stride(-2), out.stride(0), FP8=fp8, EVEN=width % block_k == 0,
        BT=block_t, BN=block_n, BK=block_k, PARTS=parts, STEPS=steps // parts, STAGES=config["stages"],
        num_warps=config["warps"], **overlap(tokens, tiles * parts),
    )  # fmt: skip
    return out


def tensor_of(x: Tensor | Quantised | Fp8Weight) -> Tensor:
    """What is multiplied, without its scales."""
    return x if isinstance(x, Tensor) else x.values


def _operands(x: Tensor | Quantised, w: Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, w, x's scales, w's scales), contiguous weights; where nothing is scaled, any matrix stands for the scales."""
    rows, matrix = tensor_of(x), tensor_of(w).contiguous()
    if isinstance(x, Tensor) or isinstance(w, Tensor):
        return rows, matrix, matrix, matrix
    return rows, matrix, x.scales, w.scales.contiguous()
