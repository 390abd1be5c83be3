# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The indexer's scores of a chunk on Hopper, in FP8: what ``triton._score_chunk`` computes, its data flow made by hand.

A product is 64 rows by 2 queries of 64 heads; the CUDA cores' part of it, an addition and a multiply-add a number,
takes two thirds of its time. A program has two such products under way, so that one is made while the other is summed,
and two programs share a multiprocessor. The sums are short of everything that waits: of the four threads that hold a
row's heads each is handed what belongs to one score, once, inside its warp; scores go to memory from where they arise.

A score is 16 multiply-adds and 3 additions in float32, in a fixed order.
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

H, D = 64, 128  # heads, channels
NQ, M = 2, 64  # queries and rows of a product
R, STAGES = 4, 2  # products' rows in a step (even), steps in shared memory
QUERIES, STEP = 2 * NQ, R * M  # queries of a program, rows of a step
WARPS = 4


def serves(q: Tensor) -> bool:
    """q: [T, heads, channels], FP8 like the keys."""
    fits = q.shape[1:] == (H, D) and q.dtype == torch.float8_e4m3fn
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def launch(
    grid: tuple[int, int], q: Tensor, w: Tensor, keys: Tensor, scales: Tensor, positions: Tensor, logits: Tensor,
    maxima: Tensor | None, first: int, n: int, span: int, ratio: int, top_k: int, group: int,
) -> None:  # fmt: skip
    """Scores of queries from ``first`` on: QUERIES of a program, against ``span`` rows, whole STEPs. Fills logits, and
    maxima of each ``group`` (at most M) neighbours.
    """
    _score[grid](
        q, w, keys, scales, positions, logits, logits if maxima is None else maxima,
        first, q.shape[0], n, logits.stride(0), 0 if maxima is None else maxima.stride(0), span,
        ratio, top_k, group, maxima is not None, H, D, NQ, M, STAGES, R, num_warps=WARPS,
    )  # fmt: skip


@gluon.jit
def _fetch(buffer, keys, first, n, M: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr):
    """Start copying rows first .. first + M; behind the last of all, that one again."""
    row = gl.minimum(first + gl.arange(0, M, gl.SliceLayout(1, COPY)), n - 1)
    at = gl.expand_dims(row * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    async_copy.async_copy_global_to_shared(buffer, keys + at)


@gluon.jit
def _columns(first, tokens, NQ: gl.constexpr, H: gl.constexpr, L: gl.constexpr):
    """Rows of q, and places of w, of the columns of a product that begins with query ``first``."""
    c = gl.arange(0, NQ * H, L)
    return gl.minimum(first + c // H, tokens - 1) * H + c % H


@gluon.jit
def _keep_queries(buffer, q, first, tokens, NQ: gl.constexpr, H: gl.constexpr, D: gl.constexpr, COPY: gl.constexpr):
    row = _columns(first, tokens, NQ, H, gl.SliceLayout(1, COPY)).to(gl.int64)
    at = gl.expand_dims(row * D, 1) + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, COPY)), 0)
    buffer.store(gl.load(q + at))


@gluon.jit
def _scales(scales, k, m, n, M: gl.constexpr, R: gl.constexpr):
    """Those of rows from k on, R tensors of M."""
    near = gl.load(scales + gl.minimum(k + m, n - 1)), gl.load(scales + gl.minimum(k + M + m, n - 1))
    return near if R == 2 else near + _scales(scales, k + 2 * M, m, n, M, R - 2)


@gluon.jit
def _store(
    products, weights, scale, at, peak_at, M: gl.constexpr, NQ: gl.constexpr, H: gl.constexpr, G: gl.constexpr,
    PRUNED: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Weighted sums over heads, to at [M, NQ], and their maxima of G rows, to peak_at [M / G, NQ]. weights: halves."""
    # x + |x| is 2 max(x, 0), exactly, at an addition's rate, which is twice a maximum's.
    x = (products + gl.abs(products)) * gl.expand_dims(weights, 0)
    x = gl.permute(gl.reshape(x, (M, NQ, H // 8, 4, 2)), (0, 1, 3, 2, 4))
    own = gl.sum(gl.reshape(x, (M, NQ, 4, H // 4)), 3)  # of the heads that a thread holds
    s = gl.sum(gl.convert_layout(own, SHARED), 2) * gl.expand_dims(scale, 1)
    s = gl.maximum(s, -3.0e38)  # what is not a number comes last
    gl.store(at, s)
    if PRUNED:
        gl.store(peak_at, gl.max(gl.reshape(s, (M // G, G, NQ)), 1))


@gluon.constexpr_function
def _handed(M, NQ):
    """[M, NQ, 4]: the layout in which a thread has all four shares of one score."""
    lanes = [[0, 1, 0], [8, 0, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 2]], lanes, [[16, 0, 0], [32, 0, 0]], [], [M, NQ, 4])


@gluon.constexpr_function
def _grouped(M, NQ, G):
    """[M / G, G, NQ]: where ``_handed`` puts scores, by groups of rows."""
    r8, r1, r2, r4, r16, r32 = ([row // G, row % G, 0] for row in (8, 1, 2, 4, 16, 32))
    return gl.DistributedLinearLayout([], [[0, 0, 1], r8, r1, r2, r4], [r16, r32], [], [M // G, G, NQ])


@gluon.jit(do_not_specialize=["first", "tokens", "n"], do_not_specialize_on_alignment=["positions"])
def _score(
    q, w, keys, scales, positions, logits, maxima, first, tokens, n, logits_stride, maxima_stride, span,
    RATIO: gl.constexpr, TOP_K: gl.constexpr, G: gl.constexpr, PRUNED: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    NQ: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """2 NQ queries, left and right. Where none of them needs a choice, none is scored."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NQ * H, 32])
    SHARED: gl.constexpr = _handed(M, NQ)
    SCORES: gl.constexpr = gl.SliceLayout(2, SHARED)
    PEAKS: gl.constexpr = gl.SliceLayout(1, _grouped(M, NQ, G))
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 8)
    block = gl.program_id(0) * (2 * NQ)
    mine = first + block + gl.arange(0, 2 * NQ, gl.BlockedLayout([1], [32], [4], [0]))
    limit = gl.max((gl.load(positions + mine, mask=mine < tokens, other=-1) + 1) // RATIO, 0)
    lo = gl.program_id(1) * span
    hi = gl.minimum(lo + span, limit)
    if (limit > TOP_K) & (lo < hi):
        left = gl.allocate_shared_memory(gl.float8e4nv, [NQ * H, D], SWIZZLED)
        right = gl.allocate_shared_memory(gl.float8e4nv, [NQ * H, D], SWIZZLED)
        rows = gl.allocate_shared_memory(gl.float8e4nv, [R * STAGES, M, D], SWIZZLED)
        for i in gl.static_range(STAGES - 1):
            for j in gl.static_range(R):
                _fetch(rows.index(R * i + j), keys, lo + (R * i + j) * M, n, M, D, COPY)
            async_copy.commit_group()
        _keep_queries(left, q, first + block, tokens, NQ, H, D, COPY)
        _keep_queries(right, q, first + block + NQ, tokens, NQ, H, D, COPY)
        left_w = gl.load(w + _columns(first + block, tokens, NQ, H, gl.SliceLayout(0, PRODUCT))) * 0.5
        right_w = gl.load(w + _columns(first + block + NQ, tokens, NQ, H, gl.SliceLayout(0, PRODUCT))) * 0.5
        none = gl.zeros([M, NQ * H], gl.float32, PRODUCT)
        m = gl.arange(0, M, gl.SliceLayout(1, SCORES))
        g = gl.arange(0, M // G, gl.SliceLayout(1, PEAKS))
        local = gl.expand_dims(block + gl.arange(0, NQ, gl.SliceLayout(0, SCORES)), 0)
        at = logits + local * logits_stride + gl.expand_dims(m, 1)
        local = gl.expand_dims(block + gl.arange(0, NQ, gl.SliceLayout(0, PEAKS)), 0)
        peak = maxima + local * maxima_stride + gl.expand_dims(g, 1)
        r_at, r_peak = at + NQ * logits_stride, peak + NQ * maxima_stride
        buffer = 0
        scale = _scales(scales, lo, m, n, M, R)
        for k in range(lo, hi, R * M):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            gl.thread_barrier()  # these rows are here, and every warp's products with those before have been made
            one = rows.index(R * buffer)
            a = warpgroup_mma(one, left.permute((1, 0)), none, use_acc=False, is_async=True)
            b = warpgroup_mma(one, right.permute((1, 0)), none, use_acc=False, is_async=True)
            ahead = (buffer + STAGES - 1) % STAGES
            for i in gl.static_range(R):
                _fetch(rows.index(R * ahead + i), keys, k + (R * (STAGES - 1) + i) * M, n, M, D, COPY)
            async_copy.commit_group()
            # Asked for here, they are there when the next fence comes, which would wait for loads under way.
            later = _scales(scales, k + R * M, m, n, M, R)
            for i in gl.static_range(R):
                to = k + i * M
                a = warpgroup_mma_wait(1, deps=[a])
                _store(a, left_w, scale[i], at + to, peak + to // G, M, NQ, H, G, PRUNED, SHARED)
                if i + 1 < R:
                    one = rows.index(R * buffer + i + 1)
                    a = warpgroup_mma(one, left.permute((1, 0)), a, use_acc=False, is_async=True)
                # Nothing is under way when a step begins: ptxas makes products wait one by one if any crosses the loop.
                b = warpgroup_mma_wait(1 if i + 1 < R else 0, deps=[b])
                _store(b, right_w, scale[i], r_at + to, r_peak + to // G, M, NQ, H, G, PRUNED, SHARED)
                if i + 1 < R:
                    b = warpgroup_mma(one, right.permute((1, 0)), b, use_acc=False, is_async=True)
            scale = later
            buffer = (buffer + 1) % STAGES
        async_copy.wait_group(0)
