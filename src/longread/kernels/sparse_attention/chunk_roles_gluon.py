# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's prefill attention on Hopper at head_dim 512, with a role a group of warps; what ``chunk_triton`` computes.

64 heads of a token are the M of both products. Four warps fetch tiles of keys into two buffers, four make scores and
probabilities, eight sum values; so the tensor cores multiply values of one tile while the scores of the next arise, and
a program goes through its tokens without a pause for loading. A tile's buffer, and the place of its probabilities, are
free again when its values have been summed: one barrier tells both the fetchers and the scorers.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

D, BM, BN = 512, 64, 64
LEAST_WINDOW = 128  # two tiles a job: the divisors of one job's results are read before the next job's are written
VALUE_WARPS = 8
SCORE_REGISTERS, FETCH_REGISTERS = 112, 64  # of 512 for four threads, one of each group of four warps
LOG2E = gl.constexpr(1.4426950408889634)


def launch(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, slab: Tensor, rows: Tensor,
    chosen: Tensor | None, ratio: int, positions: Tensor, out: Tensor, scales: Tensor | None,
) -> None:  # fmt: skip
    """Fill ``out`` [T, H * D], and ``scales`` if it is FP8. Other arguments are those of ``device_ref.chunk_turned``;
    ratio 0: the window alone. Heads: whole 64s.
    """
    tokens, heads, _ = q.shape
    jobs = tokens * (heads // BM)
    programs = min(jobs, torch.cuda.get_device_properties(q.device).multi_processor_count)
    _chunk[(programs,)](
        q, q.stride(0), cos, sin, sink, slab, rows, positions if chosen is None else chosen, positions, out,
        cos if scales is None else scales, 0 if scales is None else scales.stride(1),
        heads, 0 if chosen is None else chosen.shape[1], eps, scale, jobs,
        slab.shape[0] - tokens, D, cos.shape[-1], ratio, chosen is not None, scales is not None, BM, BN,
        SCORE_REGISTERS, FETCH_REGISTERS, num_warps=VALUE_WARPS,
    )  # fmt: skip


@gluon.jit
def _job(
    job, positions, heads, top_k, WINDOW: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """(token, first head, position, entries, tiles) of a program's job."""
    blocks = heads // BM
    token = job // blocks
    position = gl.load(positions + token)
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if CHOSEN:
            count = gl.minimum(count, top_k)
    tiles = WINDOW // BN + gl.cdiv(count, BN)
    if position < 0:
        tiles = 0
    return token, job % blocks * BM, position, count, tiles


@gluon.jit
def _listed(chosen, place, count, WINDOW: gl.constexpr, CHOSEN: gl.constexpr):
    """Entries at ``place``; -1 where there is none. chosen: this token's."""
    entry = place - WINDOW
    real = (entry >= 0) & (entry < count)
    if CHOSEN:
        return gl.load(chosen + entry, mask=real, other=-1)
    return gl.where(real, entry, -1)


@gluon.jit
def _fetch(
    q, q_token, slab, rows, chosen, positions, heads, top_k, jobs, queries, keys, asked, met, full, free,
    WINDOW: gl.constexpr, D: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr,
):  # fmt: skip
    """Every job's queries, raw, and the keys of its tiles, one after another; those not seen become zeros."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PART: gl.constexpr = 16  # rows: few enough for their addresses to stay in registers
    channel = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    done = 0
    jobs_done = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, head, position, count, tiles = _job(job, positions, heads, top_k, WINDOW, RATIO, CHOSEN, BM, BN)
        mine = chosen + token.to(gl.int64) * top_k
        if tiles > 0:
            mbarrier.wait(met, jobs_done % 2 ^ 1)
            for part in gl.static_range(BM // PART):
                row = head + part * PART + gl.arange(0, PART, gl.SliceLayout(1, COPY))
                at = q + token.to(gl.int64) * q_token + (gl.expand_dims(row * D, 1) + channel)
                async_copy.async_copy_global_to_shared(queries.index(0).slice(part * PART, PART), at)
            async_copy.mbarrier_arrive(asked, increment_count=False)
            jobs_done += 1
        for tile in range(tiles):
            buffer = keys.index(done % 2)
            source = slab if tile * BN < WINDOW else rows
            mbarrier.wait(free.index(done % 2), done // 2 % 2 ^ 1)
            for part in gl.static_range(BN // PART):
                place = tile * BN + part * PART + gl.arange(0, PART, gl.SliceLayout(1, COPY))
                recent = place < WINDOW
                entry = _listed(mine, place, count, WINDOW, CHOSEN)
                row = gl.where(recent, token + 1 + place, entry)
                seen = gl.where(recent, position - WINDOW + 1 + place >= 0, entry >= 0)
                at = source + (gl.expand_dims(row.to(gl.int64) * D, 1) + channel)
                async_copy.async_copy_global_to_shared(
                    buffer.slice(part * PART, PART), at, mask=gl.expand_dims(seen, 1)
                )
            async_copy.mbarrier_arrive(full.index(done % 2), increment_count=False)
            done += 1
    async_copy.wait_group(0)


@gluon.jit
def _make_ready(queries, cos, sin, eps, scale, BM: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr):
    """Queries [BM, D] normalised, rotated, times scale * log2(e), in their place."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    PART: gl.constexpr = 8
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, PAIR)) - (D // 2 - PAIRS)
    c = gl.expand_dims(gl.load(cos + pair, mask=pair >= 0, other=1.0), 0)
    s = gl.expand_dims(gl.load(sin + pair, mask=pair >= 0, other=0.0), 0)
    for part in gl.static_range(BM // PART):
        wide = queries.slice(part * PART, PART).load(COPY).to(gl.float32)
        factor = gl.rsqrt(gl.sum(wide * wide, 1) / D + eps) * (scale * LOG2E)
        even, odd = gl.split(gl.reshape(wide * gl.expand_dims(factor, 1), (PART, D // 2, 2)))
        even, odd = gl.convert_layout(even, PAIR), gl.convert_layout(odd, PAIR)
        turned = gl.reshape(gl.join(even * c - odd * s, even * s + odd * c), (PART, D))
        queries.slice(part * PART, PART).store(gl.convert_layout(turned, COPY).to(gl.bfloat16))


@gluon.jit
def _score(
    cos, sin, sink, chosen, positions, heads, top_k, eps, scale, jobs,
    queries, keys, chances, shrinks, inverse, asked, met, full, scored,
    WINDOW: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A tile's probabilities, how results up to it shrink, and with a job's last tile what its results are divided by.

    The running maximum starts as the sink, which enters the sum at the end.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    none = gl.zeros([BM, BN], gl.float32, SCORES)
    done = 0
    jobs_done = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, head, position, count, tiles = _job(job, positions, heads, top_k, WINDOW, RATIO, CHOSEN, BM, BN)
        if tiles > 0:
            mine = chosen + token.to(gl.int64) * top_k
            angles = token * PAIRS
            mbarrier.wait(asked, jobs_done % 2)
            jobs_done += 1
            _make_ready(queries.index(0), cos + angles, sin + angles, eps, scale, BM, D, PAIRS)
            fence_async_shared()
            gl.thread_barrier()
            drain = gl.load(sink + head + gl.arange(0, BM, ROW)) * LOG2E
            peak = drain
            total = gl.zeros([BM, BN], gl.float32, SCORES)  # summed over keys at the end
            for tile in range(tiles):
                place = tile * BN + gl.arange(0, BN, gl.SliceLayout(0, SCORES))
                held = _listed(mine, place, count, WINDOW, CHOSEN) >= 0
                seen = gl.where(place < WINDOW, position - WINDOW + 1 + place >= 0, held)
                mbarrier.wait(full.index(done % 2), done // 2 % 2)
                fence_async_shared()
                # Buffer 0, which the compiler must not know: it would keep 32 descriptors in registers all along.
                logits = warpgroup_mma(
                    queries.index(done >> 30), keys.index(done % 2).permute((1, 0)), none, use_acc=False, is_async=True
                )
                logits = warpgroup_mma_wait(0, deps=[logits])
                mbarrier.arrive(met, pred=tile + 1 == tiles)  # the next job's queries may come
                logits = gl.where(gl.expand_dims(seen, 0), logits, float("-inf"))
                higher = gl.maximum(peak, gl.max(logits, 1))
                shrink = gl.exp2(peak - higher)
                p = gl.exp2(logits - gl.expand_dims(higher, 1))
                chances.index(done % 2).store(p.to(gl.bfloat16))
                shrinks.index(done % 2).store(shrink)
                total = total * gl.expand_dims(shrink, 1) + p
                peak = higher
                if tile + 1 == tiles:
                    inverse.store(1.0 / (gl.sum(total, 1) + gl.exp2(drain - peak)))
                fence_async_shared()
                mbarrier.arrive(scored.index(done % 2))
                done += 1


@gluon.jit
def _finish(
    staged, cos, sin, out, scales, scale_stride, first, token, QUANTISED: gl.constexpr, BM: gl.constexpr,
    D: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Rotate results [BM, D] back and store them at ``out``; in FP8 with the scales of heads from ``first`` on."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    PAIR: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    PART: gl.constexpr = 16
    pair = gl.arange(0, D // 2, gl.SliceLayout(0, PAIR)) - (D // 2 - PAIRS)
    c = gl.expand_dims(gl.load(cos + pair, mask=pair >= 0, other=1.0), 0)
    s = gl.expand_dims(gl.load(sin + pair, mask=pair >= 0, other=0.0), 0)
    row = gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(1, COPY)), 1)
    at = row * D + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    for part in gl.static_range(BM // PART):
        rows = staged.slice(part * PART, PART).load(COPY)
        even, odd = gl.split(gl.reshape(rows.to(gl.float32), (PART, D // 2, 2)))
        even, odd = gl.convert_layout(even, PAIR), gl.convert_layout(odd, PAIR)
        back = gl.reshape(gl.join(even * c + odd * s, odd * c - even * s), (PART, D))
        back = gl.convert_layout(back, COPY)
        to = out + part * PART * D + at
        if QUANTISED:
            _store_quantised(back, to, scales + token, scale_stride, first + part * PART, PART, D, COPY)
        else:
            gl.store(to, back.to(gl.bfloat16))


@gluon.jit
def _store_quantised(
    rows, to, scales, scale_stride, first, R: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr
):  # fmt: skip
    """Rows [R, D] in FP8 at ``to``, a power of two a block of 128 channels at scales; first: head of the first row."""
    BLOCKS: gl.constexpr = D // 128
    groups = gl.reshape(rows, (R, BLOCKS, 128))
    top = gl.maximum(gl.max(gl.abs(groups), 2), 1e-4)
    power = ((top.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8  # fp8/ref.power_above
    groups = groups * gl.expand_dims(((254 - power) << 23).to(gl.float32, bitcast=True), 2)
    gl.store(to, gl.convert_layout(gl.reshape(groups, (R, D)), COPY).to(gl.float8e4nv))
    POWERS: gl.constexpr = power.type.layout
    head = first + gl.arange(0, R, gl.SliceLayout(1, POWERS))
    block = gl.expand_dims(head * BLOCKS, 1) + gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(0, POWERS)), 0)
    gl.store(scales + block.to(gl.int64) * scale_stride, (power << 23).to(gl.float32, bitcast=True))


@gluon.jit
def _sum_values(
    cos, sin, positions, out, scales, scale_stride, heads, top_k, jobs, keys, chances, shrinks, inverse, scored, free,
    WINDOW: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr,
    QUANTISED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Sums of values, and every job's results, which leave as rows by way of its last tile's buffer."""
    # Half of a warp's columns an instruction: ptxas grants one no more registers than an even share of all warps.
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 4, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
    done = 0
    for job in range(gl.program_id(0), jobs, gl.num_programs(0)):
        token, head, _, _, tiles = _job(job, positions, heads, top_k, WINDOW, RATIO, CHOSEN, BM, BN)
        angles = token * PAIRS
        mine = out + (token.to(gl.int64) * heads + head) * D
        acc = gl.zeros([BM, D], gl.float32, RESULT)
        for tile in range(tiles):
            b = done % 2
            mbarrier.wait(scored.index(b), done // 2 % 2)
            fence_async_shared()
            shrink = shrinks.index(b).load(ROW)
            acc = warpgroup_mma(chances.index(b), keys.index(b), acc * gl.expand_dims(shrink, 1), is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(b), pred=tile + 1 < tiles)
            done += 1
        if tiles > 0:
            staged = keys.index((done - 1) % 2)
            acc = acc * gl.expand_dims(inverse.load(ROW), 1)
            staged.store(acc.to(gl.bfloat16))
            gl.thread_barrier()
            _finish(
                staged, cos + angles, sin + angles, mine, scales, scale_stride, head, token, QUANTISED, BM, D, PAIRS
            )
            mbarrier.arrive(free.index((done - 1) % 2))
        else:
            _nothing(mine, scales, scale_stride, head, token, QUANTISED, BM, D)


@gluon.jit
def _nothing(out, scales, scale_stride, first, token, QUANTISED: gl.constexpr, BM: gl.constexpr, D: gl.constexpr):
    """Padding's results: zeros, with the least scale there is."""
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, COPY)), 1)
    at = out + (row * D + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0))
    zeros = gl.zeros([BM, D], gl.float32, COPY)
    if QUANTISED:
        gl.store(at, zeros.to(gl.float8e4nv))
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
        block = first * (D // 128) + gl.arange(0, BM * (D // 128), LINE)
        top = gl.full([BM * (D // 128)], 1e-4, gl.float32, LINE)
        power = ((top.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        least = (power << 23).to(gl.float32, bitcast=True)
        gl.store(scales + block.to(gl.int64) * scale_stride + token, least)
    else:
        gl.store(at, zeros.to(gl.bfloat16))


@gluon.jit(do_not_specialize=["jobs"])
def _chunk(
    q, q_token, cos, sin, sink, slab, rows, chosen, positions, out, scales, scale_stride, heads, top_k, eps, scale,
    jobs,
    WINDOW: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, RATIO: gl.constexpr, CHOSEN: gl.constexpr,
    QUANTISED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, SCORE: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [1, BM, D], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [2, BN, D], SWIZZLED)
    chances = gl.allocate_shared_memory(gl.bfloat16, [2, BM, BN], SWIZZLED)
    shrinks = gl.allocate_shared_memory(gl.float32, [2, BM], LINE)
    inverse = gl.allocate_shared_memory(gl.float32, [BM], LINE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=128)
    mbarrier.init(met, count=1)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=128)  # every fetching thread, when its copies are there
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_sum_values, (
                cos, sin, positions, out, scales, scale_stride, heads, top_k, jobs, keys, chances, shrinks, inverse,
                scored, free, WINDOW, D, PAIRS, RATIO, CHOSEN, QUANTISED, BM, BN,
            )),
            (_score, (
                cos, sin, sink, chosen, positions, heads, top_k, eps, scale, jobs, queries, keys, chances,
                shrinks, inverse, asked, met, full, scored, WINDOW, D, PAIRS, RATIO, CHOSEN, BM, BN,
            )),
            (_fetch, (
                q, q_token, slab, rows, chosen, positions, heads, top_k, jobs, queries, keys, asked, met, full, free,
                WINDOW, D, RATIO, CHOSEN, BM, BN,
            )),
        ],
        [4, 4],
        [SCORE, FETCH],
    )  # fmt: skip
