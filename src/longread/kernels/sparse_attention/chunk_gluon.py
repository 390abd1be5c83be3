# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's prefill attention on Hopper at head_dim 512: what ``chunk_triton`` computes, with its data flow made by hand.

64 heads of a token are the M of both products; queries and two tiles of keys fill shared memory. Scores are split over
the two warpgroups by keys and results by channels, so neither computes anything twice; the probabilities pass through
shared memory. A tile is fetched from the moment its buffer is free, while the tile before it is worked on: a compiler's
pipeline would need a third buffer, for which there is no room, or leave each fetch only the time of one product.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

D, BM, BN, WARPS = 512, 64, 64, 8
LOG2E = gl.constexpr(1.4426950408889634)


def launch(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, slab: Tensor, rows: Tensor,
    chosen: Tensor | None, ratio: int, positions: Tensor, out: Tensor, scales: Tensor | None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, H * D], and ``scales`` if it is FP8. Other arguments are those of ``device_ref.chunk_turned``;
    ratio 0: the window alone. Heads: whole 64s.
    """
    tokens, heads, _ = q.shape
    _chunk[(tokens, heads // BM)](
        q, q.stride(0), cos, sin, sink, slab, rows, positions if chosen is None else chosen, positions, out,
        cos if scales is None else scales, 0 if scales is None else scales.stride(1),
        heads, 0 if chosen is None else chosen.shape[1], eps, scale,
        slab.shape[0] - tokens, D, cos.shape[-1], ratio, chosen is not None, scales is not None, BM, BN,
        num_warps=WARPS,
    )  # fmt: skip


@gluon.jit
def _listed(chosen, tile, count, WINDOW: gl.constexpr, CHOSEN: gl.constexpr, BN: gl.constexpr, L: gl.constexpr):
    """Entries of a tile, int32 [BN] in layout L; -1 where there is none. chosen: this token's."""
    entry = tile * BN - WINDOW + gl.arange(0, BN, L)
    real = (entry >= 0) & (entry < count)
    if CHOSEN:
        return gl.load(chosen + entry, mask=real, other=-1)
    return gl.where(real, entry, -1)


@gluon.jit
def _fetch(
    buffer, slab, rows, entry, tile, token, position, WINDOW: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Start copying a tile's keys; those not seen become zeros. entry: what ``_listed`` gave for it."""
    place = tile * BN + gl.arange(0, BN, gl.SliceLayout(1, COPY))
    recent = place < WINDOW
    row = gl.where(recent, token + 1 + place, entry)
    seen = gl.where(recent, position - WINDOW + 1 + place >= 0, entry >= 0)
    source = slab if tile * BN < WINDOW else rows
    at = gl.expand_dims(row.to(gl.int64) * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    async_copy.async_copy_global_to_shared(buffer, source + at, mask=gl.expand_dims(seen, 1))
    async_copy.commit_group()


@gluon.jit
def queries_ready(
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
def _finish(
    rows, cos, sin, out, scales, scale_stride, at, first, token, QUANTISED: gl.constexpr, BM: gl.constexpr,
    D: gl.constexpr, PAIRS: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Rotate results [BM, D] back and store them at out + at; in FP8 with the scales of heads from ``first`` on."""
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    BLOCKS: gl.constexpr = D // 128
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, PAIR)) - (D // 2 - PAIRS)
    c = gl.expand_dims(gl.load(cos + pair, mask=pair >= 0, other=1.0), 0)
    s = gl.expand_dims(gl.load(sin + pair, mask=pair >= 0, other=0.0), 0)
    even, odd = gl.split(gl.reshape(rows.to(gl.float32), (BM, D // 2, 2)))
    even, odd = gl.convert_layout(even, PAIR), gl.convert_layout(odd, PAIR)
    back = gl.convert_layout(gl.reshape(gl.join(even * c + odd * s, odd * c - even * s), (BM, D)), COPY)
    if QUANTISED:
        groups = gl.reshape(back, (BM, BLOCKS, 128))
        top = gl.maximum(gl.max(gl.abs(groups), 2), 1e-4)
        power = ((top.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8  # fp8/ref.power_above
        groups = groups * gl.expand_dims(((254 - power) << 23).to(gl.float32, bitcast=True), 2)
        gl.store(out + at, gl.convert_layout(gl.reshape(groups, (BM, D)), COPY).to(gl.float8e4nv))
        SCALES: gl.constexpr = gl.BlockedLayout([1, 1], [32 // BLOCKS, BLOCKS], [8, 1], [1, 0])
        head = first + gl.arange(0, BM, gl.SliceLayout(1, SCALES))
        block = gl.expand_dims(head * BLOCKS, 1) + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, SCALES)), 0)
        powers = gl.convert_layout((power << 23).to(gl.float32, bitcast=True), SCALES)
        gl.store(scales + block.to(gl.int64) * scale_stride + token, powers)
    else:
        gl.store(out + at, back.to(gl.bfloat16))


@gluon.jit
def _chunk(
    q, q_token, cos, sin, sink, slab, rows, chosen, positions, out, scales, scale_stride, heads, top_k, eps, scale,
    WINDOW: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr,
    QUANTISED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])  # a warp takes half a row at once
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    KEY: gl.constexpr = gl.SliceLayout(1, COPY)
    token = gl.program_id(0)
    wide = token.to(gl.int64)
    position = gl.load(positions + token)
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if CHOSEN:
            count = gl.minimum(count, top_k)
    tiles = WINDOW // BN + gl.cdiv(count, BN)
    if position < 0:
        tiles = 0
    mine = chosen + wide * top_k
    queries = gl.allocate_shared_memory(gl.bfloat16, [BM, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BN, D], SWIZZLED)
    chances = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], SWIZZLED)

    head = gl.program_id(1) * BM + gl.arange(0, BM, KEY)
    at = gl.expand_dims(head * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    raw = gl.load(q + wide * q_token + at)
    if tiles > 0:
        entry = _listed(mine, 0, count, WINDOW, CHOSEN, BN, KEY)
        _fetch(keys.index(0), slab, rows, entry, 0, token, position, WINDOW, D, BN, COPY)
    angles = token * PAIRS
    queries.store(queries_ready(raw, cos + angles, sin + angles, eps, scale, BM, D, PAIRS, COPY))

    row_head = gl.program_id(1) * BM + gl.arange(0, BM, gl.SliceLayout(1, SCORES))
    drain = gl.load(sink + row_head) * LOG2E
    peak = drain
    total = gl.zeros([BM, BN], gl.float32, SCORES)  # summed over keys at the end
    none = gl.zeros([BM, BN], gl.float32, SCORES)
    acc = gl.zeros([BM, D], gl.float32, RESULT)
    entry = _listed(mine, 1, count, WINDOW, CHOSEN, BN, KEY)
    for tile in range(tiles):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # the tile is whole, and nobody reads the other buffer or the chances any more
        tile_keys = keys.index(tile % 2)
        scores = warpgroup_mma(queries, tile_keys.permute((1, 0)), none, use_acc=False, is_async=True)
        if tile + 1 < tiles:
            _fetch(keys.index((tile + 1) % 2), slab, rows, entry, tile + 1, token, position, WINDOW, D, BN, COPY)
        entry = _listed(mine, tile + 2, count, WINDOW, CHOSEN, BN, KEY)
        place = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        held = _listed(mine, tile, count, WINDOW, CHOSEN, BN, gl.SliceLayout(0, SCORES)) >= 0
        seen = gl.where(place < WINDOW, position - WINDOW + 1 + place >= 0, held)
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
        acc = warpgroup_mma_wait(0, deps=[result])
    weight = gl.sum(total, 1) + gl.exp2(drain - peak)
    acc = acc * gl.expand_dims(gl.convert_layout(1.0 / weight, gl.SliceLayout(1, RESULT)), 1)
    gl.thread_barrier()  # nobody reads the queries any more; whole rows leave by way of their place
    queries.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    _finish(
        queries.load(COPY), cos + angles, sin + angles, out + wide * heads * D, scales, scale_stride, at,
        gl.program_id(1) * BM, token, QUANTISED, BM, D, PAIRS, COPY,
    )  # fmt: skip
