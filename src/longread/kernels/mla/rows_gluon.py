# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Absorbed attention of one token a row on Hopper at a latent of 512 + 64: ``triton._attend``, its data flow by hand.

64 heads are the M of both products. Scores are split over the two warpgroups by keys and results by channels, so that
neither computes anything twice; the probabilities pass through shared memory. A tile of keys is fetched from the moment
its buffer is free, while the tile before it is worked on. Packed rows come by way of registers: their bytes are asked
for before the scores of the tile before them, and widened while the tensor cores make its results.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RANK, ROPE, HEADS, KEYS, WARPS = 512, 64, 64, 64, 8


def launch(
    folded: Tensor, pe: Tensor, store: Tensor, tables: Tensor, positions: Tensor, out: Tensor, lse: Tensor,
    scale: float, splits: int,
) -> None:  # fmt: skip
    """Fill ``out`` and ``lse`` as ``triton._attend`` does. Heads: whole 64s. ``scale`` is to base 2."""
    heads, rows, _ = folded.shape
    packed = store.dtype == torch.uint8
    plain = store.view(torch.bfloat16) if packed else store  # the rotated channels of a packed row are bfloat16
    codes, powers = (store.view(torch.float8_e4m3fn), store.view(torch.float32)) if packed else (plain, plain)
    _attend[(heads // HEADS, rows, splits)](
        folded, pe, plain, codes, powers, tables, positions, out, lse, rows, heads, scale, splits,
        folded.stride(0), pe.stride(0), pe.stride(1), tables.stride(0),
        splits == 1, store.shape[2], packed, RANK, ROPE, HEADS, KEYS, num_warps=WARPS,
    )  # fmt: skip


@gluon.jit
def _fetch(
    keys, turned, store, page, tile, length, WIDTH: gl.constexpr, PACKED: gl.constexpr, RANK: gl.constexpr,
    ROPE: gl.constexpr, BN: gl.constexpr, COPY: gl.constexpr, COPY_PE: gl.constexpr,
):  # fmt: skip
    """Start copying a tile: of packed rows the rotated channels only. What lies behind the end becomes zeros."""
    first = tile * BN
    base = store + page.to(gl.int64) * (256 * WIDTH) + (first % 256) * WIDTH
    if not PACKED:
        n = gl.arange(0, BN, gl.SliceLayout(1, COPY))
        at = gl.expand_dims(n * WIDTH, 1) + gl.expand_dims(gl.arange(0, RANK, gl.SliceLayout(0, COPY)), 0)
        async_copy.async_copy_global_to_shared(keys, base + at, mask=gl.expand_dims(first + n < length, 1))
    tail: gl.constexpr = WIDTH - ROPE
    n = gl.arange(0, BN, gl.SliceLayout(1, COPY_PE))
    at = gl.expand_dims(n * WIDTH + tail, 1) + gl.expand_dims(gl.arange(0, ROPE, gl.SliceLayout(0, COPY_PE)), 0)
    async_copy.async_copy_global_to_shared(turned, base + at, mask=gl.expand_dims(first + n < length, 1))
    async_copy.commit_group()


@gluon.jit
def _bytes(
    codes, powers, page, tile, length, WIDTH: gl.constexpr, RANK: gl.constexpr, BN: gl.constexpr, RAW: gl.constexpr
):  # fmt: skip
    """Ask for a tile's packed latents: FP8 [BN, RANK / 128, 128] and their scales [BN, RANK / 128], zeros behind the
    end. WIDTH: bytes of a row.
    """
    n = gl.arange(0, BN, gl.SliceLayout(1, gl.SliceLayout(2, RAW)))
    block = gl.arange(0, RANK // 128, gl.SliceLayout(0, gl.SliceLayout(2, RAW)))
    channel = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, RAW)))
    row = page.to(gl.int64) * 256 + (tile * BN) % 256
    there = gl.expand_dims(tile * BN + n < length, 1)
    at = gl.expand_dims(n * WIDTH, 1) + gl.expand_dims(block * 128, 0)
    wide = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(channel, 0), 1)
    raw = gl.load(codes + row * WIDTH + wide, mask=gl.expand_dims(there, 2), other=0.0)
    of = gl.expand_dims(n * (WIDTH // 4) + RANK // 4, 1) + gl.expand_dims(block, 0)
    return raw, gl.load(powers + row * (WIDTH // 4) + of, mask=there, other=0.0)


@gluon.jit
def _widened(raw, power, RANK: gl.constexpr, BN: gl.constexpr, COPY: gl.constexpr):
    wide = (raw.to(gl.float32) * gl.expand_dims(power, 2)).to(gl.bfloat16)
    return gl.convert_layout(gl.reshape(wide, (BN, RANK)), COPY)


@gluon.jit
def _finish(
    acc, total, peak, queries, out, lse, b, part, rows, heads, splits, some_keys,
    WHOLE: gl.constexpr, RANK: gl.constexpr, BM: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Divide by the sums and store. queries: shared memory that nobody needs any more."""
    SCORES: gl.constexpr = total.type.layout
    RESULT: gl.constexpr = acc.type.layout
    weight = gl.sum(total, 1)
    some = gl.where(weight > 0, weight, 1.0)
    acc = acc * gl.expand_dims(gl.convert_layout(1.0 / some, gl.SliceLayout(1, RESULT)), 1)
    if WHOLE:
        gl.thread_barrier()  # nobody reads the queries any more; whole rows leave by way of their place
        queries.store(acc.to(gl.bfloat16))
        gl.thread_barrier()
        h = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, COPY))
        r = gl.arange(0, RANK, gl.SliceLayout(0, COPY))
        place = gl.expand_dims((h * rows + b) * RANK, 1) + gl.expand_dims(r, 0)
        gl.store(out + place, queries.load(COPY))
    else:
        hs = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, SCORES))
        known = gl.where(weight > 0, peak + gl.log2(some), float("-inf"))
        gl.store(lse + (b * heads + hs) * splits + part, known)
        if some_keys:
            hr = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, RESULT))
            rr = gl.arange(0, RANK, gl.SliceLayout(0, RESULT))
            place = gl.expand_dims(((b * heads + hr) * splits + part) * RANK, 1) + gl.expand_dims(rr, 0)
            gl.store(out + place, acc)


@gluon.jit(do_not_specialize=["rows", "splits", "table_stride"])  # one kernel for all batches and contexts
def _attend(
    q, pe, store, codes, powers, tables, positions, out, lse, rows, heads, scale, splits,
    q_head, pe_row, pe_head, table_stride,
    WHOLE: gl.constexpr, WIDTH: gl.constexpr, PACKED: gl.constexpr, RANK: gl.constexpr, ROPE: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    NUMBERS: gl.constexpr = WIDTH // 2 if PACKED else WIDTH  # of a row as ``store`` has it
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])  # a warp takes half a row at once
    COPY_PE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    RAW: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [8, 1, 1], [2, 1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BN // 2, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, RANK // 2, 16])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    b = gl.program_id(1).to(gl.int64)
    part = gl.program_id(2)
    length = gl.load(positions + b) + 1
    blocks = gl.cdiv(length, BN)
    first = part * gl.cdiv(blocks, splits)
    last = gl.minimum(first + gl.cdiv(blocks, splits), blocks)
    table = tables + b * table_stride
    queries = gl.allocate_shared_memory(gl.bfloat16, [BM, RANK], SWIZZLED)
    queries_pe = gl.allocate_shared_memory(gl.bfloat16, [BM, ROPE], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BN, RANK], SWIZZLED)
    keys_pe = gl.allocate_shared_memory(gl.bfloat16, [2, BN, ROPE], SWIZZLED)
    chances = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], SWIZZLED)

    page = gl.load(table + first * BN // 256, mask=first < last, other=0)
    if first < last:
        _fetch(
            keys.index(0), keys_pe.index(0), store, page, first, length, NUMBERS, PACKED, RANK, ROPE, BN, COPY, COPY_PE
        )
        if PACKED:
            raw, power = _bytes(codes, powers, page, first, length, WIDTH, RANK, BN, RAW)
            keys.index(0).store(_widened(raw, power, RANK, BN, COPY))
    page = gl.load(table + (first + 1) * BN // 256, mask=first + 1 < last, other=0)
    h = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, COPY))
    r = gl.arange(0, RANK, gl.SliceLayout(0, COPY))
    queries.store(gl.load(q + b * RANK + gl.expand_dims(h * q_head, 1) + gl.expand_dims(r, 0)))
    he = gl.program_id(0) * BM + gl.arange(0, BM, gl.SliceLayout(1, COPY_PE))
    e = gl.arange(0, ROPE, gl.SliceLayout(0, COPY_PE))
    queries_pe.store(gl.load(pe + b * pe_row + gl.expand_dims(he * pe_head, 1) + gl.expand_dims(e, 0)))

    peak = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([BM, BN], gl.float32, SCORES)  # summed over keys at the end
    none = gl.zeros([BM, BN], gl.float32, SCORES)
    acc = gl.zeros([BM, RANK], gl.float32, RESULT)
    for tile in range(first, last):
        now = (tile - first) % 2
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # the tile is whole, and nobody reads the other buffer or the chances any more
        own = keys.index(now)
        scores = warpgroup_mma(queries, own.permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma(queries_pe, keys_pe.index(now).permute((1, 0)), scores, is_async=True)
        if tile + 1 < last:
            _fetch(
                keys.index(1 - now), keys_pe.index(1 - now), store, page, tile + 1, length,
                NUMBERS, PACKED, RANK, ROPE, BN, COPY, COPY_PE,
            )  # fmt: skip
        if PACKED:  # of the last tile's next one nothing is there
            end = gl.where(tile + 1 < last, length, 0)
            raw, power = _bytes(codes, powers, page, tile + 1, end, WIDTH, RANK, BN, RAW)
        page = gl.load(table + (tile + 2) * BN // 256, mask=tile + 2 < last, other=0)
        key = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
        logits = warpgroup_mma_wait(0, deps=[scores]) * scale
        logits = gl.where(gl.expand_dims(key < length, 0), logits, float("-inf"))
        higher = gl.maximum(peak, gl.max(logits, 1))
        shrink = gl.exp2(peak - higher)
        p = gl.exp2(logits - gl.expand_dims(higher, 1))
        chances.store(p.to(gl.bfloat16))
        fence_async_shared()
        total = total * gl.expand_dims(shrink, 1) + p
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, RESULT)), 1)
        peak = higher
        gl.thread_barrier()
        result = warpgroup_mma(chances, own, acc, is_async=True)
        if PACKED:
            keys.index(1 - now).store(_widened(raw, power, RANK, BN, COPY))
        acc = warpgroup_mma_wait(0, deps=[result])
    _finish(acc, total, peak, queries, out, lse, b, part, rows, heads, splits, first < last, WHOLE, RANK, BM, COPY)
