# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""The indexer's scores of a chunk on Hopper, in FP8: what ``triton._score_chunk`` computes, its data flow made by hand.

A product is 64 rows by 4 queries of 64 heads, 512 clocks of the tensor cores; the CUDA cores' part of it, an addition
and a multiply-add a number, takes 256 and little may come on top. So a program has a warp that fetches rows, and
two warpgroups with nothing else to do than products and sums: while one sums, the product of another is made. No
warp waits for another of its warpgroup between these: of the four threads that hold a row's heads, each is handed what
belongs to two scores by shuffles, and scores go to memory from where they arise.

A score is 16 multiply-adds and 3 additions in float32, in a fixed order.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

H, D = 64, 128  # heads, channels
NQ, M = 4, 64  # queries and rows of a product
R, STAGES = 2, 6  # products' rows in a step, steps in shared memory
QUERIES, STEP = 2 * NQ, R * M  # queries of a program, rows of a step
START = 3  # steps that a program's beginning takes, about
SWIZZLED = gl.NVMMASharedLayout(128, 8)


def _hand() -> str:
    """PTX by which a quad's threads, who hold four shares of 8 scores, end with two whole scores each.

    $8 to $15: a thread's shares, of a row and the row 8 on (neighbours) by 4 queries. $16: the thread's number in the
    quad, whose low bit is the query it takes, and whose high bit the row. $0: that query's score; $4: 2 queries on.
    """
    handed = """selp.b32 s, {0}, {1}, {p};
selp.b32 {2}, {1}, {0}, {p};
shfl.sync.bfly.b32 s, s, {lane}, 31, -1;
add.f32 {3}, {2}, s;
"""
    four = ((8, "a"), (9, "b"), (12, "c"), (13, "d"))
    queries = [handed.format(f"${i}", f"${i + 2}", x, x, p="p", lane=1) for i, x in four]
    rows = [handed.format(*pair, pair[0], to, p="q", lane=2) for pair, to in ((("a", "b"), "$0"), (("c", "d"), "$4"))]
    unused = [f"mov.b32 ${i}, ${i // 4 * 4};\n" for i in (1, 2, 3, 5, 6, 7)]
    begin = """{.reg .pred p, q;
.reg .b32 a, b, c, d, s;
and.b32 s, $16, 1;
setp.ne.b32 p, s, 0;
and.b32 s, $16, 2;
setp.ne.b32 q, s, 0;
"""
    return begin + "".join(queries + rows + unused) + "}"


HAND = gl.constexpr(_hand())
HANDED = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 16))


def serves(q: Tensor) -> bool:
    """q: [T, heads, channels], FP8 like the keys."""
    fits = q.shape[1:] == (H, D) and q.dtype == torch.float8_e4m3fn
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def launch(
    q: Tensor, w: Tensor, keys: Tensor, scales: Tensor, positions: Tensor, logits: Tensor, maxima: Tensor | None,
    first: int, count: int, n: int, ratio: int, top_k: int, group: int,
) -> None:  # fmt: skip
    """Scores of ``count`` queries from ``first`` on against n rows. Fills logits, in whole QUERIES and STEPs, and the
    maxima of each ``group`` (at most M) neighbours.
    """
    tiles = -(-count // QUERIES)
    span = _span(tiles, n, torch.cuda.get_device_properties(q.device).multi_processor_count)
    queries = TensorDescriptor.from_tensor(q.view(-1, D), [NQ * H, D], SWIZZLED)
    rows = TensorDescriptor.from_tensor(keys, [STEP, D], SWIZZLED)
    _score[(tiles, -(-n // span))](
        queries, w, rows, scales, positions, logits, logits if maxima is None else maxima,
        first, q.shape[0], n, logits.stride(0), 0 if maxima is None else maxima.stride(0), span,
        ratio, top_k, group, maxima is not None, H, D, NQ, M, STAGES, R, num_warps=4,
    )  # fmt: skip


def _span(tiles: int, n: int, processors: int) -> int:
    """Rows of a program, one on each multiprocessor at a time: those with which the last of all ends soonest."""

    def steps(pieces: int) -> int:
        return -(-tiles * pieces // processors) * (-(-n // (pieces * STEP)) + START)

    pieces = min(range(1, max(1, n // 1024) + 1), key=steps)
    return -(-n // (pieces * STEP)) * STEP


@gluon.jit
def _columns(first, tokens, NQ: gl.constexpr, H: gl.constexpr, L: gl.constexpr):
    """Places of w of the columns of a product that begins with query ``first``."""
    c = gl.arange(0, NQ * H, L)
    return gl.minimum(first + c // H, tokens - 1) * H + c % H


@gluon.jit
def _scales(scales, k, m, n, M: gl.constexpr, R: gl.constexpr):
    """Those of rows from k on, R tensors of M."""
    here = (gl.load(scales + gl.minimum(k + m, n - 1)),)
    return here if R == 1 else here + _scales(scales, k + M, m, n, M, R - 1)


@gluon.constexpr_function
def _shares():
    """[M, NQ, 4]: what is left when a thread has summed its own heads of a product."""
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[8, 0, 0], [0, 1, 0], [0, 2, 0]], lanes, [[16, 0, 0], [32, 0, 0]], [], [M, NQ, 4]
    )


@gluon.constexpr_function
def _handed():
    """[M, NQ]: where HAND puts scores."""
    return gl.DistributedLinearLayout(
        [[0, 2]], [[0, 1], [8, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [M, NQ]
    )


@gluon.constexpr_function
def _grouped(G):
    """[M / G, G, NQ]: the same by groups of rows."""
    r8, r1, r2, r4, r16, r32 = ([row // G, row % G, 0] for row in (8, 1, 2, 4, 16, 32))
    return gl.DistributedLinearLayout([[0, 0, 2]], [[0, 0, 1], r8, r1, r2, r4], [r16, r32], [], [M // G, G, NQ])


@gluon.jit
def _own(products, weights, M: gl.constexpr, NQ: gl.constexpr, H: gl.constexpr):
    """[M, NQ, 4]: weighted sums over the heads that a thread has. weights: halves."""
    # x + |x| is 2 max(x, 0), exactly, at an addition's rate, which is twice a maximum's.
    x = (products + gl.abs(products)) * gl.expand_dims(weights, 0)
    x = gl.permute(gl.reshape(x, (M, NQ, H // 8, 4, 2)), (0, 1, 3, 2, 4))
    return gl.convert_layout(gl.sum(gl.reshape(x, (M, NQ, 4, H // 4)), 3), _shares(), assert_trivial=True)


@gluon.jit
def _handed_out(own, M: gl.constexpr, NQ: gl.constexpr):
    """[M, NQ]: the sums of four threads' shares, half of them with each of two."""
    share = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, _shares()))), 0), 1)
    s = gl.inline_asm_elementwise(HAND, HANDED, [own, share], dtype=gl.float32, is_pure=True, pack=8)
    s = gl.permute(gl.reshape(s, (M // 16, 2, 8, 2, 2, 2, 2)), (0, 2, 3, 5, 6, 1, 4))  # row 8 and query 1 last
    s, _ = gl.split(s)
    s, _ = gl.split(s)  # row 16, row 1, query 2, row 8, query 1
    s = gl.reshape(gl.permute(s, (0, 3, 1, 2, 4)), (M, NQ))
    return gl.convert_layout(s, _handed(), assert_trivial=True)


@gluon.jit
def _fetch(
    q, rows_at, queries, rows, ready, full, empty, query, lo, hi,
    H: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if lo < hi:
        mbarrier.expect(ready, 2 * NQ * H * D)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(q, [(query + i * NQ) * H, 0], ready, queries.index(i))
    stage = 0
    phase = 1
    for k in range(lo, hi, STEP):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), STEP * D)
        tma.async_copy_global_to_shared(rows_at, [k, 0], full.index(stage), rows.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _sum(
    which: gl.constexpr, queries, rows, ready, full, empty, w, scales, logits, maxima, first, tokens, n, block,
    logits_stride, maxima_stride, lo, hi, G: gl.constexpr, PRUNED: gl.constexpr, H: gl.constexpr, NQ: gl.constexpr,
    M: gl.constexpr, STAGES: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """A warpgroup: queries block + which * NQ and on."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NQ * H, 32])
    SCORES: gl.constexpr = _handed()
    PEAKS: gl.constexpr = gl.SliceLayout(1, _grouped(G))
    if lo < hi:
        block += which * NQ
        weights = gl.load(w + _columns(first + block, tokens, NQ, H, gl.SliceLayout(0, PRODUCT))) * 0.5
        products = gl.zeros([M, NQ * H], gl.float32, PRODUCT)
        m = gl.arange(0, M, gl.SliceLayout(1, SCORES))
        g = gl.arange(0, M // G, gl.SliceLayout(1, PEAKS))
        at = (block + gl.arange(0, NQ, gl.SliceLayout(0, SCORES))) * logits_stride
        at = logits + (gl.expand_dims(at, 0) + gl.expand_dims(lo + m, 1))
        peak = (block + gl.arange(0, NQ, gl.SliceLayout(0, PEAKS))) * maxima_stride
        peak = maxima + (gl.expand_dims(peak, 0) + gl.expand_dims(lo // G + g, 1))
        mine = queries.index(which).permute((1, 0))
        scale = _scales(scales, lo, m, n, M, R)
        stage = 0
        phase = 0
        mbarrier.wait(ready, 0)
        for k in range(lo, hi, R * M):
            mbarrier.wait(full.index(stage), phase)
            later = _scales(scales, k + R * M, m, n, M, R)
            for i in gl.static_range(R):
                one = rows.index(stage).slice(i * M, M, 0)
                products = warpgroup_mma(one, mine, products, use_acc=False, is_async=True)
                products = warpgroup_mma_wait(0, deps=[products])
                own = _own(products, weights, M, NQ, H)
                if i + 1 == R:
                    mbarrier.arrive(empty.index(stage), count=1)
                s = _handed_out(own, M, NQ) * gl.expand_dims(scale[i], 1)
                s = gl.maximum(s, -3.0e38)  # what is not a number comes last
                gl.store(at + i * M, s)
                if PRUNED:
                    gl.store(peak + i * (M // G), gl.max(gl.reshape(s, (M // G, G, NQ)), 1))
            scale = later
            at += R * M
            peak += R * M // G
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit(do_not_specialize=["first", "tokens", "n"], do_not_specialize_on_alignment=["positions"])
def _score(
    q, w, keys, scales, positions, logits, maxima, first, tokens, n, logits_stride, maxima_stride, span,
    RATIO: gl.constexpr, TOP_K: gl.constexpr, G: gl.constexpr, PRUNED: gl.constexpr, H: gl.constexpr, D: gl.constexpr,
    NQ: gl.constexpr, M: gl.constexpr, STAGES: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Where none of a program's queries needs a choice, none is scored."""
    block = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * NQ)  # those that see most come first
    mine = first + block + gl.arange(0, 2 * NQ, gl.BlockedLayout([1], [32], [4], [0]))
    limit = gl.max((gl.load(positions + mine, mask=mine < tokens, other=-1) + 1) // RATIO, 0)
    lo = gl.program_id(1) * span
    hi = gl.minimum(lo + span, limit)
    hi = gl.where(limit > TOP_K, hi, lo)
    queries = gl.allocate_shared_memory(gl.float8e4nv, [2, NQ * H, D], q.layout)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, R * M, D], keys.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_sum, (
                gl.constexpr(0), queries, rows, ready, full, empty, w, scales, logits, maxima, first, tokens, n,
                block, logits_stride, maxima_stride, lo, hi, G, PRUNED, H, NQ, M, STAGES, R)),
            (_sum, (
                gl.constexpr(1), queries, rows, ready, full, empty, w, scales, logits, maxima, first, tokens, n,
                block, logits_stride, maxima_stride, lo, hi, G, PRUNED, H, NQ, M, STAGES, R)),
            (_fetch, (
                q, keys, queries, rows, ready, full, empty, first + block, lo, hi,
                H, D, NQ, R * M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
