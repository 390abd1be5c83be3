# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Products of few rows, as decode has them: bound by reading the weight, so every SM must read, all of the time.

One row of a plain weight: plain multiply-adds on whole rows of it (``_vector``). A few rows: tensor cores fed from
registers (rows_gluon.py). More: the tensor cores, the weight as their larger operand and K cut in parts so that every
SM reads (``_rows``); parts are summed in their order by whichever program finishes last. The same bits every time.
Each asks for weights, which never change, before it waits for the kernel before it: overlap.py.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fp8 import ref, rows_gluon
from longread.kernels.fp8.ref import BLOCK, Fp8Weight, Quantised, Weight
from longread.kernels.overlap import INTERPRETED, begin, overlap, ready

# Triton's interpreter truncates where the device rounds to the nearest, so there a value is rounded before its cast.
ROUND_FIRST = tl.constexpr(INTERPRETED)
FEW = 64  # rows up to which reading the weight costs more than the products
FILL = 132 * 3  # programs that keep every SM's loads in flight
COUNTERS = 1 << 20

# Tile sizes, by measurement on an H200; keys are explained where they are used. Of ``VECTOR`` and ``HAND`` the first
# entry counts whose K is not exceeded, of plain weights in ``VECTOR`` "plain". ``early``: when the next kernel may
# start, 1 from the beginning, 2 once this one's inputs are there, 0 as it ends.
VECTOR: dict[int | str, dict[str, Any]] = {
    1024: {"numbers": 16384, "depth": 2048, "warps": 2, "fill": FILL, "early": 1},
    4096: {"numbers": 8192, "depth": 2048, "warps": 4, "fill": 2 * FILL, "early": 1},
    1 << 30: {"numbers": 4096, "depth": 4096, "warps": 4, "fill": FILL, "early": 1},
    "plain": {"numbers": 2048, "depth": 1024, "warps": 8, "fill": 2 * FILL, "early": 1},
    "long": {"numbers": 8192, "depth": 2048, "warps": 4, "fill": FILL, "early": 1},
}
LONG = 1 << 26  # numbers of a plain matrix that reads for so long that its end does not count
ROWS: dict[str, Any] = {
    "block_n": 64, "depth_plain": 64, "warps": 4, "stages": 3, "fill": 132 * 2, "max_parts": 32, "early": 1,
    "ahead": True,
}  # fmt: skip
HAND: dict[int, dict[str, Any]] = {
    1024: {"block_n": 16, "blocks": 8, "warps": 4, "programs": 1 << 30, "early": 1},
    2048: {"block_n": 16, "blocks": 16, "warps": 8, "programs": 1 << 30, "early": 1},
    1 << 30: {"block_n": 16, "blocks": 16, "warps": 8, "programs": 1 << 30, "early": 1},
}
PIECE = 4096  # bytes that ``prefetch`` asks for at a time


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
    x, scales, w, factors, out, N, K, x_stride, scale_stride, factor_stride, out_stride,
    FP8: tl.constexpr, TWO: tl.constexpr, EVEN: tl.constexpr, STEPS: tl.constexpr, BN: tl.constexpr, C: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight times one row of x, or two. Each thread reads 16 bytes at a time along K.

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
    other = tl.zeros((BN, C, 128), tl.float32)
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
        if TWO:
            second = _scaled(x + x_stride, scales + 1, factors, k, block, K, scale_stride, FP8, EVEN)
            other += values * second[None]
    at = first + tl.arange(0, BN)
    here = out + group * N + at
    tl.store(here, narrow(tl.sum(tl.sum(total, 2), 1), out.dtype.element_ty), mask=at < N)
    if TWO:
        tl.store(here + out_stride, narrow(tl.sum(tl.sum(other, 2), 1), out.dtype.element_ty), mask=at < N)


@triton.jit
def _rows(
    x, scales, w, factors, out, parts, counters, T, N, K, x_stride, scale_stride, factor_stride, out_stride,
    FP8: tl.constexpr, EVEN: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PARTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile [BT, BN] of one group's product, over STEPS * BK of K, one of PARTS. BN divides 128; BK is 128 in FP8.

    FP8 sums 128 channels in the tensor cores and adds them, scaled, in float32.
    """
    begin(EARLY == 1)
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
    if AHEAD and PDL:
        # All of its weights come to L2 while the kernel before this one ends; a pipeline could ask for two steps only.
        share: tl.constexpr = STEPS * BK * w.dtype.element_ty.primitive_bitwidth * BN // 1024  # bytes of each thread
        piece = tl.arange(0, 128)
        row = tl.minimum(piece // (128 // BN), N - 1 - first)
        address = (w + row * K + part * STEPS * BK).to(tl.int64) + piece % (128 // BN) * share
        _ask(address, tl.full((128,), share, tl.int32))
    ready(PDL)
    begin(EARLY == 2)
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


@triton.jit
def _ask(address, size):
    """Ask for ``size`` bytes at each address, a multiple of 16, to be brought into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // dummy $0", "=r,l,r", [address, size], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _prefetch(w, size, PIECE: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = (tl.program_id(0) * 32 + tl.arange(0, 32)).to(tl.int64) * PIECE
    _ask(w.to(tl.int64) + tl.minimum(at, size - PIECE), tl.full((32,), PIECE, tl.int32))
    ready(PDL)  # so that who waits for this kernel has waited for those before it


def few(x: Tensor | Quantised, w: Weight, out: Tensor) -> bool:
    """x times one matrix, or several, into ``out`` [T, groups * N] by the kernels of this file; False if they cannot.

    Rows of x and of ``out`` may be strided.
    """
    rows, matrix = tensor_of(x), tensor_of(w)
    if matrix.shape[-1] % 16 or matrix.stride(-1) != 1 or rows.stride(1) != 1:
        return False
    if not rows.shape[0]:
        return True
    alone = rows.shape[0] == 1
    if rows_gluon.fits(rows, matrix) and not (alone and matrix.dtype != ref.FP8):
        by_hand(x, w, out)
    else:
        (by_vector if alone else by_rows)(x, w, out)
    return True


def by_hand(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """Up to 64 rows, K in whole blocks of 128. Keys of ``config``: see rows_gluon.launch."""
    rows, matrix, scales, factors = _operands(x, w)
    if config is None:
        config = next(HAND[most] for most in HAND if matrix.shape[-1] <= most)
    blocks = min(config["blocks"], triton.next_power_of_2(matrix.shape[-1] // BLOCK))
    warps = min(config["warps"], blocks)
    rows_gluon.launch(
        rows, scales, matrix, factors, out, matrix.dtype == ref.FP8, config["block_n"], blocks, warps,
        config["programs"], config["early"], "launch_pdl" in overlap(),
    )  # fmt: skip
    return out


def prefetch(w: Weight) -> None:
    """Ask for a weight to be brought into L2 and return: for the product after some kernels that leave memory idle.

    Pays where the weight fits into L2 (50 MB) beside what those kernels read.
    """
    matrix = tensor_of(w)
    size = matrix.numel() * matrix.element_size()
    if matrix.is_cuda and size >= PIECE:
        count = triton.cdiv(size, 32 * PIECE)
        _prefetch[(count,)](matrix, size, PIECE=PIECE, num_warps=1, **overlap())


def by_vector(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] | None = None) -> Tensor:
    """One or two rows. ``numbers``: of the weight in a tile; ``depth``: of them along K, at most."""
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
    _vector[triton.cdiv(height, block_n), groups](
        rows, scales, matrix, factors, out, height, width, rows.stride(0), scales.stride(-1), factors.stride(-2),
        out.stride(0), FP8=matrix.dtype == ref.FP8, TWO=rows.shape[0] == 2, EVEN=width % (blocks * BLOCK) == 0,
        STEPS=triton.cdiv(width, blocks * BLOCK), BN=block_n, C=blocks, num_warps=config["warps"], **_overlap(config),
    )  # fmt: skip
    return out


def by_rows(x: Tensor | Quantised, w: Weight, out: Tensor, config: dict[str, Any] = ROWS) -> Tensor:
    """Any number of rows, 64 at a time. K is cut into equal parts of whole steps, so that ``fill`` programs read."""
    rows, matrix, scales, factors = _operands(x, w)
    fp8 = matrix.dtype == ref.FP8
    tokens, (height, width) = rows.shape[0], matrix.shape[-2:]
    groups = matrix.numel() // (height * width)
    # Triton has wgmma for 16 rows, not for 8.
    block_t = min(FEW, max(16, triton.next_power_of_2(tokens)))
    block_n, block_k = config["block_n"], BLOCK if fp8 else config["depth_plain"]
    tiles_n, tiles_t, steps = triton.cdiv(height, block_n), triton.cdiv(tokens, block_t), triton.cdiv(width, block_k)
    tiles = tiles_n * tiles_t * groups
    cuts = [p for p in range(1, min(steps, config["max_parts"]) + 1) if steps % p == 0]
    parts = next((p for p in cuts if tiles * p >= config["fill"]), cuts[-1])
    cut = parts > 1
    scratch = rows.new_empty(groups * parts * tokens * height if cut else 1, dtype=torch.float32)
    counters = _counters(rows.device, tiles) if cut else scratch
    _rows[tiles_n, parts, tiles_t * groups](
        rows, scales, matrix, factors, out, scratch, counters, tokens, height, width, rows.stride(0),
        scales.stride(-1), factors.stride(-2), out.stride(0), FP8=fp8, EVEN=width % block_k == 0,
        BT=block_t, BN=block_n, BK=block_k, PARTS=parts, STEPS=steps // parts, STAGES=config["stages"],
        AHEAD=config["ahead"] and width % block_k == 0, num_warps=config["warps"], **_overlap(config),
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


def tensor_of(x: Tensor | Quantised | Fp8Weight) -> Tensor:
    """What is multiplied, without its scales."""
    return x if isinstance(x, Tensor) else x.values


def _operands(x: Tensor | Quantised, w: Weight) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, w, x's scales, w's scales), contiguous weights; where nothing is scaled, any matrix stands for the scales."""
    rows, matrix = tensor_of(x), tensor_of(w).contiguous()
    if isinstance(x, Tensor) or isinstance(w, Tensor):
        return rows, matrix, matrix, matrix
    return rows, matrix, x.scales, w.scales.contiguous()


def _overlap(config: dict[str, Any]) -> dict[str, Any]:
    given = overlap()
    return {"EARLY": config["early"] if given["PDL"] else 0, **given}
