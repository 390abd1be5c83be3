# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's decode attention over packed rows on Hopper at head_dim 512: parts of ``rows_triton`` for 64 heads at a time.

Queries and two tiles of keys are in shared memory, scores are split over the warpgroups by keys, results by channels.
A tile's packed bytes are asked for while the scores of the tile before it are computed, wait in registers, and become
numbers in the other buffer while the tensor cores work on the results.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)
D, ROPE, WIDTH, BM, BN, WARPS = 512, 64, 584, 64, 64, 8
PROGRAMS = 132  # how many the keys are split for: one fits on an SM


def launch(grid: tuple[int, int, int], given: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    """given, sizes: the arguments of ``_part`` from q to splits, and from WINDOW to PER_PAGE."""
    _part[grid](*given, *sizes, BM, BN, num_warps=WARPS)


@gluon.jit
def _queries_ready(
    raw, cos, sin, eps, scale, BM: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, COPY: gl.constexpr
):
    """Queries [BM, D] normalised, rotated, times scale * log2(e)."""
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    wide = raw.to(gl.float32)
    factor = gl.rsqrt(gl.sum(wide * wide, 1) / D + eps) * (scale * LOG2E)
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, PAIR)) - (D // 2 - PAIRS)
    c = gl.expand_dims(gl.load(cos + pair, mask=pair >= 0, other=1.0), 0)
    s = gl.expand_dims(gl.load(sin + pair, mask=pair >= 0, other=0.0), 0)
    even, odd = gl.split(gl.reshape(wide * gl.expand_dims(factor, 1), (BM, D // 2, 2)))
    even, odd = gl.convert_layout(even, PAIR), gl.convert_layout(odd, PAIR)
    turned = gl.join(even * c - odd * s, even * s + odd * c)
    return gl.convert_layout(gl.reshape(turned, (BM, D)), COPY).to(gl.bfloat16)


@gluon.jit
def _entry(
    places, slot, tile, tiles, position, count, WINDOW: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr,
    PER_PAGE: gl.constexpr, BN: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Flat rows of a tile's keys in ring or store, int64 [BN] in layout L; -1 where there is none."""
    place = tile * BN + gl.arange(0, BN, L)
    entry = place - WINDOW
    flat = gl.where(place <= position, slot.to(gl.int64) * WINDOW + place, -1)
    if RATIO > 0:
        listed = (entry >= 0) & (entry < count)
        if CHOSEN:
            row = gl.load(places + entry, mask=listed, other=-1).to(gl.int64)
        else:
            page = gl.load(places + entry // PER_PAGE, mask=listed, other=0).to(gl.int64)
            row = gl.where(listed, page * PER_PAGE + entry % PER_PAGE, -1)
        flat = gl.where(entry < 0, flat, row)
    return gl.where(tile < tiles, flat, -1)


@gluon.jit
def _taken(
    ring, store, flat, recent, D: gl.constexpr, ROPE: gl.constexpr, WIDTH: gl.constexpr, BN: gl.constexpr,
    PACK: gl.constexpr,
):  # fmt: skip
    """Packed rows as they lie: FP8 bits and rotated channels [BN, D / 64, 64], and each row's scale bytes, int64 [BN].

    A thread takes 8 channels of each block of a row. Rows lie at multiples of 8 bytes.
    """
    NOPE: gl.constexpr = D - ROPE
    source = gl.where(recent, ring, store)
    at = flat * WIDTH
    block = gl.expand_dims(gl.expand_dims(gl.arange(0, D // 64, gl.SliceLayout(0, gl.SliceLayout(2, PACK))), 0), 2)
    inner = gl.expand_dims(gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, PACK))), 0), 1)
    seen = gl.expand_dims(gl.expand_dims(flat >= 0, 1), 2)
    row = gl.expand_dims(gl.expand_dims(at, 1), 2)
    bits = gl.load(
        source + gl.multiple_of(row, [8, 8, 8]) + (block * 64 + inner), mask=seen & (block < NOPE // 64), other=0
    )
    half = gl.multiple_of(gl.expand_dims(gl.expand_dims(flat * (WIDTH // 2), 1), 2), [4, 4, 4])
    wide = (source + NOPE).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    turned = gl.load(wide + half + (inner + (block - NOPE // 64) * 64), mask=seen & (block >= NOPE // 64), other=0.0)
    eighth = (source + (NOPE + 2 * ROPE)).to(gl.pointer_type(gl.int64), bitcast=True)
    scales = gl.load(eighth + flat * (WIDTH // 8), mask=flat >= 0, other=0)
    return bits, turned, scales


@gluon.jit
def _unpack(bits, turned, scales, D: gl.constexpr, ROPE: gl.constexpr, BN: gl.constexpr, PACK: gl.constexpr):
    """bfloat16 [BN, D]."""
    BLOCKS: gl.constexpr = D // 64
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, gl.SliceLayout(2, PACK)))
    byte = (gl.expand_dims(scales, 1) >> gl.expand_dims(block * 8, 0).to(gl.int64)) & 0xFF
    scale = (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)
    values = (bits.to(gl.float8e4nv, bitcast=True).to(gl.float32) * gl.expand_dims(scale, 2)).to(gl.bfloat16)
    last = gl.expand_dims(gl.expand_dims(block >= (D - ROPE) // 64, 0), 2)
    return gl.reshape(gl.where(last, turned, values), (BN, D))


# Numbers that follow the context's length and the batch are not specialised on: that would compile while serving.
@gluon.jit(do_not_specialize=["places_token", "most", "splits"])
def _part(
    q, q_token, cos, sin, ring, store, places, places_token, positions, slots, parts, peaks, totals, heads, most,
    eps, scale, splits, WINDOW: gl.constexpr, D: gl.constexpr, ROPE: gl.constexpr, WIDTH: gl.constexpr,
    RATIO: gl.constexpr, CHOSEN: gl.constexpr, PER_PAGE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """places: int32 [B, most] at stride places_token, chosen rows or page tables."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    PACK: gl.constexpr = gl.BlockedLayout([1, D // 64, 8], [4, 1, 8], [8, 1, 1], [2, 1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    KEY: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PACK))
    SEEN: gl.constexpr = gl.SliceLayout(0, SCORES)
    token, split = gl.program_id(0), gl.program_id(2)
    wide = token.to(gl.int64)
    position, slot = gl.load(positions + token), gl.load(slots + token)
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if CHOSEN:
            count = gl.minimum(count, most)
    tiles = gl.where(position < 0, 0, WINDOW // BN + gl.cdiv(count, BN))
    mine = places + wide * places_token
    queries = gl.allocate_shared_memory(gl.bfloat16, [BM, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BN, D], SWIZZLED)
    chances = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], SWIZZLED)

    head = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(1, COPY))
    at = gl.expand_dims(head * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    raw = gl.load(q + wide * q_token + at)
    entry = _entry(mine, slot, split, tiles, position, count, WINDOW, RATIO, CHOSEN, PER_PAGE, BN, KEY)
    bits, turned, powers = _taken(ring, store, entry, split < WINDOW // BN, D, ROPE, WIDTH, BN, PACK)
    entry = _entry(mine, slot, split + splits, tiles, position, count, WINDOW, RATIO, CHOSEN, PER_PAGE, BN, KEY)
    angles = token * (ROPE // 2)
    queries.store(_queries_ready(raw, cos + angles, sin + angles, eps, scale, BM, D, ROPE // 2, COPY))
    keys.index(0).store(_unpack(bits, turned, powers, D, ROPE, BN, PACK))

    peak = gl.full([BM], -1e30, gl.float32, gl.SliceLayout(1, SCORES))  # finite, so that no keys are no NaN
    total = gl.zeros([BM, BN], gl.float32, SCORES)  # summed over keys at the end
    none = gl.zeros([BM, BN], gl.float32, SCORES)
    acc = gl.zeros([BM, D], gl.float32, RESULT)
    buffer = 0
    for tile in range(split, tiles, splits):
        fence_async_shared()
        gl.thread_barrier()  # the tile is whole, and nobody reads the other buffer or the chances any more
        tile_keys = keys.index(buffer)
        scores = warpgroup_mma(queries, tile_keys.permute((1, 0)), none, use_acc=False, is_async=True)
        following = tile + splits
        bits, turned, powers = _taken(ring, store, entry, following < WINDOW // BN, D, ROPE, WIDTH, BN, PACK)
        entry = _entry(mine, slot, following + splits, tiles, position, count, WINDOW, RATIO, CHOSEN, PER_PAGE, BN, KEY)
        seen = _entry(mine, slot, tile, tiles, position, count, WINDOW, RATIO, CHOSEN, PER_PAGE, BN, SEEN) >= 0
        logits = warpgroup_mma_wait(0, deps=[scores])
        logits = gl.where(gl.expand_dims(seen, 0), logits, float("-inf"))
        higher = gl.maximum(peak, gl.max(logits, 1))
        shrink = gl.exp2(peak - higher)
        p = gl.exp2(logits - gl.expand_dims(higher, 1))
        chances.store(p.to(gl.bfloat16))
        fence_async_shared()
        total = total * gl.expand_dims(shrink, 1) + p
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, RESULT)), 1)
        peak = higher
        gl.thread_barrier()
        result = warpgroup_mma(chances, tile_keys, acc, is_async=True)
        buffer = 1 - buffer
        if following < tiles:
            keys.index(buffer).store(_unpack(bits, turned, powers, D, ROPE, BN, PACK))
        acc = warpgroup_mma_wait(0, deps=[result])
    part = (split * gl.num_programs(0) + token).to(gl.int64) * heads
    row = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(1, SCORES))
    gl.store(peaks + part + row, peak)
    gl.store(totals + part + row, gl.sum(total, 1))
    if split < tiles:  # otherwise nothing was summed, and the part is not read
        gl.thread_barrier()  # nobody reads the queries any more; whole rows leave by way of their place
        queries.store(acc.to(gl.bfloat16))
        gl.thread_barrier()
        gl.store(parts + part * D + at, queries.load(COPY))
