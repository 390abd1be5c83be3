# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Products of many tokens' slots with FP4 or FP8 expert weights on Hopper, with the data flow made by hand.

What ``grouped_triton`` computes with one activation scale a row, as a persistent kernel of three parts: a warp that
fetches tiles and two warpgroups, each with 64 gate and 64 up rows (without a gate: twice 64 rows) of the tile's 256
rows and 128 slots. Their sums stay in registers; products of 128 columns are added to them in float32 while the next
ones run. Nothing but the shared stages ties the warpgroups together, so one computes while the other adds or decodes.
256 rows a tile because the L2 feeds about 32 bytes a clock to each processor: a tile of R rows and N slots asks for
(R / 2 + N) bytes a column and takes R * N / 4096 clocks for it.

FP4 words become e4m3 in the registers that feed the tensor core; FP8 goes there from shared memory, and a block's scale
is multiplied in where products are added. With words, columns are in ``many_slots_triton``'s order, so that a thread's
16 bytes of weights are all that it needs of a row in 128 columns: one load, and two blocks' scales instead of four.
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

from longread.kernels.experts.grouped_triton import CONSTRAINTS, DECODE, tables

M = gl.constexpr(64)  # rows of one product of a warpgroup
PIECE = gl.constexpr(64)  # slots of one
STAGES, FP8_STAGES = 6, 4  # what fits into shared memory
# $1 / (1 + 2^(-$1 / log 2)) with the reciprocal of the special units: 2^-22 off at most, at a third of a division.
SILU = gl.constexpr("""{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 t, t;
mul.f32 $0, $1, t;
}""")
BYTE = gl.constexpr("prmt.b32 $0, $1, 0, $2;")
# A warp's 16 bytes a thread of a row's 64, in the registers of the tensor core's rows; and with halves of a row apart.
FLAT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [8, 0, 0]],
        [[0, 0, 16], [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 2, 32],
    )
)
TOKENS_LAYOUT = gl.NVMMASharedLayout(128, 8)
WORDS_LAYOUT = gl.NVMMASharedLayout(64, 8)


def product(
    x: Tensor, factors: Tensor, w: Tensor, scales: Tensor, r: Tensor | None, blocks: Tensor, y: Tensor, gated: bool,
    limit: float | None,
) -> None:  # fmt: skip
    """Fill y [slots, rows or, gated, rows / 2] bfloat16 from x e4m3 [slots, K] and factors float32 [slots].

    w: words [E, rows, K / 2] with scale bytes [E, rows, K / 32] and r float32 [E, rows], x's columns placed for them;
    or e4m3 [E, rows, K] with scales float32 [E, rows / 128, K / 128] and no r. blocks: int32 [1 + count, 4], what
    ``many_slots_triton.blocks_of`` makes. gated: silu(gate) * up, clamped to ``limit``.
    """
    experts, rows, width = w.shape
    words = w.dtype == torch.uint8
    x_at = TensorDescriptor.from_tensor(x, [PIECE.value, 128], TOKENS_LAYOUT)
    box, layout = ([M.value, 64], WORDS_LAYOUT) if words else ([M.value, 128], TOKENS_LAYOUT)
    w_at = TensorDescriptor.from_tensor(w.view(experts * rows, width), box, layout)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    _grouped[(programs,)](
        x_at, w_at, scales.view(torch.int32) if words else scales, factors if r is None else r, factors, blocks, y,
        0.0 if limit is None else limit, 0,
        rows, x.shape[1] // 128, gated, limit is not None, words, STAGES if words else FP8_STAGES, num_warps=4,
    )  # fmt: skip


@gluon.jit
def tables_of(scales, number):
    """``tables`` of byte ``number`` of each scale word."""
    byte = gl.inline_asm_elementwise(
        BYTE, "=r,r,r", [scales, number + 0x4440], dtype=gl.int32, is_pure=True, pack=1
    )  # 4 is a byte of zeros
    return tables(byte)


@gluon.jit
def _added(total, part, scale, WORDS: gl.constexpr):
    """total + part (times scale if not WORDS), here and not later: the compiler would keep every part until the end."""
    if WORDS:
        total = gl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [total, part], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        total = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $2, $3, $1;", "=f,f,f,f", [total, part, scale], dtype=gl.float32, is_pure=False, pack=1
        )
    return total


@gluon.jit
def _operand(weights, scales, OPERAND: gl.constexpr, WORDS: gl.constexpr):
    """Shared weights of 128 columns as an operand [M, 128]: e4m3 as they lie, or words uint8 [M, 64] decoded with
    scales int32 [M].
    """
    if WORDS:
        w = gl.convert_layout(gl.reshape(weights.load(FLAT), (M, 2, 32)), PARTS, assert_trivial=True)
        half = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, PARTS))), 0), 2)
        s = gl.expand_dims(gl.expand_dims(scales, 1), 2)
        low0, high0 = tables_of(s, half)
        low1, high1 = tables_of(s, half + 2)
        a, b = gl.inline_asm_elementwise(
            DECODE, CONSTRAINTS, [w, low0, high0, low1, high1],
            dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
        )  # fmt: skip
        both = gl.reshape(gl.join(a, b), (M, 4, 4, 4, 2))  # row, thread, word, column of the word, half
        both = gl.permute(both, (0, 2, 4, 1, 3))
        operand = gl.convert_layout(gl.reshape(both, (M, 128)), OPERAND, assert_trivial=True)
    else:
        operand = weights
    return operand


@gluon.jit
def _stored(x, buffer, y, slot, stop, row, WIDE: gl.constexpr, N: gl.constexpr):
    """x [M, N] -> y[slot + n, row + m] by way of shared memory [N, M], so that a row's numbers leave together."""
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gl.thread_barrier()  # what was there before has been read
    buffer.permute((1, 0)).store(x.to(gl.bfloat16))
    gl.thread_barrier()
    to = gl.expand_dims(slot + gl.arange(0, N, gl.SliceLayout(1, OUT)), 1)
    at = to.to(gl.int64) * WIDE + gl.expand_dims(row + gl.arange(0, M, gl.SliceLayout(0, OUT)), 0)
    gl.store(y + at, buffer.load(OUT), mask=to < stop)


@gluon.jit
def _least(x, limit):
    """min(x, limit), and NaN where x is."""
    return gl.inline_asm_elementwise(
        "min.NaN.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _write(
    gate, up, buffer, y, r_at, factors, slot, stop, row, limit, ROWS: gl.constexpr, HALF: gl.constexpr,
    GATED: gl.constexpr, LIMITED: gl.constexpr, WORDS: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """A piece's end: gate and up [M, N] of slots slot .. slot + N, of which those below stop are stored."""
    m = gl.arange(0, M, gl.SliceLayout(1, C))
    column = slot + gl.arange(0, N, gl.SliceLayout(0, C))
    factor = gl.expand_dims(gl.load(factors + column, mask=column < stop, other=0.0), 0)
    if WORDS:
        gate = gate * gl.expand_dims(gl.load(r_at + m), 1)
        up = up * gl.expand_dims(gl.load(r_at + HALF + m), 1)
    gate = gate * factor
    up = up * factor
    if GATED:
        if LIMITED:
            gate = _least(gate, limit)
            up = -_least(-_least(up, limit), limit)
        hidden = gl.inline_asm_elementwise(SILU, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1) * up
        _stored(hidden, buffer, y, slot, stop, row, ROWS // 2, N)
    else:
        _stored(gate, buffer, y, slot, stop, row, ROWS, N)
        _stored(up, buffer, y, slot, stop, row + HALF, ROWS, N)


@gluon.jit
def _tile(
    which: gl.constexpr, tokens, weights, buffer, full, empty, stage, phase, s, r, factors, y, slot, stop, weight_row,
    row, limit, fresh, ROWS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr,
    WORDS: gl.constexpr, S: gl.constexpr, N1: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of a tile of PIECE + N1 slots. -> the stage and phase after it."""
    HALF: gl.constexpr = ROWS // 2 if GATED else 2 * M
    C0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 32])
    C1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1 if N1 else PIECE, 32])
    UP: gl.constexpr = (HALF if WORDS else HALF // 128) * GROUPS
    A: gl.constexpr = gl.DotOperandLayout(0, C0, 4)
    if WORDS:
        s_at = s + (weight_row + gl.arange(0, M, gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))) * GROUPS
    else:
        s_at = s + weight_row // 128 * GROUPS
    gate0 = gl.zeros([M, PIECE], gl.float32, C0)
    up0 = gl.zeros([M, PIECE], gl.float32, C0)
    pa = gl.zeros([M, PIECE], gl.float32, C0)
    pb = gl.zeros([M, N1 if N1 else PIECE], gl.float32, C1)
    if N1:
        gate1 = gl.zeros([M, N1], gl.float32, C1)
        up1 = gl.zeros([M, N1], gl.float32, C1)
    gate_scale = gl.load(s_at)
    up_scale = gl.load(s_at + UP)
    for k in range(GROUPS):
        mbarrier.wait(full.index(stage), phase)
        following = gl.minimum(k + 1, GROUPS - 1)
        first = tokens.index(2 * stage).permute((1, 0))
        g = _operand(weights.index(4 * stage + which), gate_scale, A, WORDS)
        a = warpgroup_mma(g, first, pa, use_acc=fresh, is_async=True)
        if N1:
            second = tokens.index(2 * stage + 1).slice(0, N1, 0).permute((1, 0))
            b = warpgroup_mma(g, second, pb, use_acc=fresh, is_async=True)
        u = _operand(weights.index(4 * stage + 2 + which), up_scale, A, WORDS)
        gs, us = gate_scale, up_scale
        gate_scale = gl.load(s_at + following)
        up_scale = gl.load(s_at + UP + following)
        if N1:
            pa = warpgroup_mma_wait(1, deps=[a])
            gate0 = _added(gate0, pa, gs, WORDS)
            a = warpgroup_mma(u, first, pa, use_acc=fresh, is_async=True)
            pb = warpgroup_mma_wait(1, deps=[b])
            gate1 = _added(gate1, pb, gs, WORDS)
            b = warpgroup_mma(u, second, pb, use_acc=fresh, is_async=True)
            pa = warpgroup_mma_wait(1, deps=[a])
            up0 = _added(up0, pa, us, WORDS)
            pb = warpgroup_mma_wait(0, deps=[b])
            mbarrier.arrive(empty.index(stage), count=1)
            up1 = _added(up1, pb, us, WORDS)
        else:
            b = warpgroup_mma(u, first, pb, use_acc=fresh, is_async=True)
            pa = warpgroup_mma_wait(1, deps=[a])
            gate0 = _added(gate0, pa, gs, WORDS)
            pb = warpgroup_mma_wait(0, deps=[b])
            mbarrier.arrive(empty.index(stage), count=1)
            up0 = _added(up0, pb, us, WORDS)
        stage += 1
        if stage == S:
            stage = 0
            phase ^= 1
    r_at = r + weight_row
    _write(gate0, up0, buffer, y, r_at, factors, slot, stop, row, limit, ROWS, HALF, GATED, LIMITED, WORDS, PIECE, C0)
    if N1:
        _write(
            gate1, up1, buffer.slice(0, N1, 0), y, r_at, factors, slot + PIECE, stop, row, limit,
            ROWS, HALF, GATED, LIMITED, WORDS, N1, C1)  # fmt: skip
    return stage, phase


@gluon.jit
def _place(t, blocks, ROWS: gl.constexpr, TILES: gl.constexpr):
    """expert, first slot, slot behind the last, tile of rows: of the t-th tile."""
    at = blocks + 4 + t // TILES * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), t % TILES


@gluon.jit
def _compute(
    which: gl.constexpr, tokens, weights, buffer, full, empty, s, r, factors, blocks, y, limit, fresh,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr, WORDS: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    EACH: gl.constexpr = 2 * M if GATED else 4 * M  # a tile's rows of one matrix
    TILES: gl.constexpr = ROWS // (4 * M)
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), gl.load(blocks) * TILES, gl.num_programs(0)):
        expert, slot, stop, tile = _place(t, blocks, ROWS, TILES)
        row = tile * EACH + which * M
        weight_row = expert * ROWS + row
        if stop - slot > 96:
            stage, phase = _tile(
                which, tokens, weights, buffer, full, empty, stage, phase, s, r, factors, y, slot, stop, weight_row,
                row, limit, fresh, ROWS, GROUPS, GATED, LIMITED, WORDS, S, 64)  # fmt: skip
        elif stop - slot > 64:
            stage, phase = _tile(
                which, tokens, weights, buffer, full, empty, stage, phase, s, r, factors, y, slot, stop, weight_row,
                row, limit, fresh, ROWS, GROUPS, GATED, LIMITED, WORDS, S, 32)  # fmt: skip
        else:
            stage, phase = _tile(
                which, tokens, weights, buffer, full, empty, stage, phase, s, r, factors, y, slot, stop, weight_row,
                row, limit, fresh, ROWS, GROUPS, GATED, LIMITED, WORDS, S, 0)  # fmt: skip


@gluon.jit
def _fetch(
    x, w, tokens, weights, full, empty, blocks,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, WORDS: gl.constexpr, S: gl.constexpr,
):  # fmt: skip
    EACH: gl.constexpr = 2 * M if GATED else 4 * M
    HALF: gl.constexpr = ROWS // 2 if GATED else 2 * M
    TILES: gl.constexpr = ROWS // (4 * M)
    BYTES: gl.constexpr = 64 if WORDS else 128  # of a row and stage
    stage = 0
    phase = 1
    for t in range(gl.program_id(0), gl.load(blocks) * TILES, gl.num_programs(0)):
        expert, slot, stop, tile = _place(t, blocks, ROWS, TILES)
        row = expert * ROWS + tile * EACH
        wide = stop - slot > PIECE
        for k in range(GROUPS):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            if wide:
                mbarrier.expect(bar, 4 * M * BYTES + 2 * PIECE * 128)
                tma.async_copy_global_to_shared(x, [slot + PIECE, k * 128], bar, tokens.index(2 * stage + 1))
            else:
                mbarrier.expect(bar, 4 * M * BYTES + PIECE * 128)
            tma.async_copy_global_to_shared(x, [slot, k * 128], bar, tokens.index(2 * stage))
            for i in gl.static_range(4):
                at = row + (i // 2) * HALF + (i % 2) * M
                tma.async_copy_global_to_shared(w, [at, k * BYTES], bar, weights.index(4 * stage + i))
            stage += 1
            if stage == S:
                stage = 0
                phase ^= 1


@gluon.jit
def _grouped(
    x, w, s, r, factors, blocks, y, limit, fresh,
    ROWS: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr, WORDS: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """fresh: 0, which the compiler must not know: a product that provably ignores its sum's registers gets others."""
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [2 * S, PIECE, 128], x.layout)
    weights = gl.allocate_shared_memory(w.dtype, [4 * S, M, 64 if WORDS else 128], w.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [2, PIECE, M], gl.NVMMASharedLayout(128, 16))
    full = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    old = fresh != 0
    gl.warp_specialize(
        [
            (_compute, (
                gl.constexpr(0), tokens, weights, buffers.index(0), full, empty, s, r, factors, blocks, y, limit, old,
                ROWS, GROUPS, GATED, LIMITED, WORDS, S)),
            (_compute, (
                gl.constexpr(1), tokens, weights, buffers.index(1), full, empty, s, r, factors, blocks, y, limit, old,
                ROWS, GROUPS, GATED, LIMITED, WORDS, S)),
            (_fetch, (x, w, tokens, weights, full, empty, blocks, ROWS, GROUPS, GATED, WORDS, S)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
