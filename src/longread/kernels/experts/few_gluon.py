# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator"
"""Routed experts of few tokens on Hopper: ``few_triton``'s products with their weights by way of shared memory.

FP4 words are asked for several chunks of columns ahead without waiting in anybody's registers, so what is on its way
does not depend on how many programs an SM has room for.

Layouts are ``few_triton``'s: a thread of a quad has 16 neighbouring bytes of a row, which are 16 columns of the first
64 of a group and 16 of the others. Hidden activations are whole float16 here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from longread.kernels.experts.few_forms import DECODE, HIDDEN, LARGEST
from longread.kernels.experts.many_gluon import tables_of
from longread.kernels.experts.ref import ExpertWeights
from longread.kernels.fp8.ref import Quantised
from longread.kernels.overlap import begin, overlap, ready


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows of a program and its warps. ``groups`` of 128 columns are a unit: 1, and warps share the rows, or as
    many as there are warps, one for each. units: of a chunk; stages: chunks in shared memory, all but one on their way.
    """

    rows: int
    warps: int
    groups: int = 1
    units: int = 4
    stages: int = 3


# Of the first product and of the second. Whole layers are 2 to 5 % faster than with few_triton's from four tokens on
# (H200). A token alone gained nothing, nor did a kernel that summed its experts in one program.
SEVERAL = Tile(64, 4), Tile(128, 4, units=2)

FLAT2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
FLAT3 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# Rows of 128 columns of which a thread reads 16 and 16: two rows do not meet in a bank.
BYTES = gl.constexpr(gl.SwizzledSharedLayout(64, 1, 2, [2, 1, 0]))
HALVES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 2, [2, 1, 0]))


def fits(q: Quantised, w: ExpertWeights) -> bool:
    """Whether these kernels take such tokens and weights."""
    if w.kind != "fp4_words" or not q.values.is_cuda or torch.cuda.get_device_capability(q.values.device)[0] != 9:
        return False
    _, rows, width = w.w13.shape
    first, second = SEVERAL
    return q.values.shape[0] > 1 and _whole(rows, 2 * width, first) and _whole(w.w2.shape[1], rows // 2, second)


def _whole(rows: int, columns: int, tile: Tile) -> bool:
    chunk = 128 * tile.groups * tile.units
    return rows % tile.rows == 0 and columns % chunk == 0 and columns >= chunk * (tile.stages - 1)


def products(
    q: Quantised, order: Tensor, experts: Tensor, blocks: int, pairs: int, w: ExpertWeights, limit: float | None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:  # fmt: skip
    """Each pair's row through its expert: float32 [pairs, D]. order, experts: see ``few_triton.Blocks``."""
    first, second = tiles or SEVERAL
    hidden = _hidden(q, experts, order, blocks, pairs, w, limit, first)
    d, f = w.w2.shape[1], hidden.shape[1]
    y = torch.empty(pairs, d, dtype=torch.float32, device=hidden.device)
    programs = blocks * (d // second.rows)
    _second[(programs,)](
        hidden, w.w2, w.s2, w.r2, experts, order, y, D=d, F=f, **_sizes(second),
        **overlap(q.values.shape[0], programs),
    )  # fmt: skip
    return y


def _hidden(
    q: Quantised, ids: Tensor, order: Tensor, blocks: int, pairs: int, w: ExpertWeights, limit: float | None,
    tile: Tile,
) -> Tensor:  # fmt: skip
    """Launch the first product. Hidden activations, float16 [pairs, F]."""
    x, xs = q
    rows = w.w13.shape[1]
    hidden = torch.empty(pairs, rows // 2, dtype=torch.float16, device=x.device)
    programs = blocks * (rows // tile.rows)
    _first[(programs,)](
        x, xs, w.w13, w.s13, w.r13, ids, order, hidden, 0.0 if limit is None else limit, x.stride(0), xs.stride(0),
        xs.stride(1), F=rows // 2, K=x.shape[1], TOP_K=pairs // x.shape[0], LIMITED=limit is not None,
        **_sizes(tile), **overlap(x.shape[0], programs),
    )  # fmt: skip
    return hidden


def _sizes(tile: Tile) -> dict[str, int]:
    return {
        "G": tile.groups, "R": tile.rows, "SUB": tile.units, "STAGES": tile.stages, "WARPS": tile.warps,
        "num_warps": tile.warps,
    }  # fmt: skip


@gluon.constexpr_function
def _words(groups, warps, rows, whole):
    """Layout of words [groups, rows, 16], or in halves of a row's, [groups, rows, 2, 8]: in the registers of the tensor
    core's rows. Warps take groups where there are as many, else rows.
    """

    def at(group, row, word):
        return [group, row, word] if whole else [group, row, word // 8, word % 8]

    registers = [at(0, 0, 1), at(0, 0, 2), at(0, 8, 0)]
    spread = 1 if groups > 1 else warps
    while 16 * spread < rows:
        registers.append(at(0, 16 * spread, 0))
        spread *= 2
    lanes = [at(0, 0, 4), at(0, 0, 8), at(0, 1, 0), at(0, 2, 0), at(0, 4, 0)]
    each = [at(1 << i, 0, 0) if groups > 1 else at(0, 16 << i, 0) for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, each, [], [groups, rows, 16] if whole else [groups, rows, 2, 8])


@gluon.jit
def _at(a, b, c):
    """[A, B, C] of three parts, each in its slice of one layout."""
    wide = gl.expand_dims(gl.expand_dims(a, 1), 2) + gl.expand_dims(gl.expand_dims(b, 0), 2)
    return wide + gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _decoded(words, scales, G: gl.constexpr, R: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """Shared words int32 [G, R, 16] and scale bytes int32 [R, G] -> a float16 operand [G, R, 128]."""
    WHOLE: gl.constexpr = _words(G, WARPS, R, True)
    PARTS: gl.constexpr = _words(G, WARPS, R, False)
    w = gl.convert_layout(gl.reshape(words.load(WHOLE), (G, R, 2, 8)), PARTS, assert_trivial=True)
    s = scales.permute((1, 0)).load(gl.SliceLayout(2, gl.SliceLayout(3, PARTS)))
    s = gl.expand_dims(gl.expand_dims(s, 2), 3)
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, PARTS))))
    half = gl.expand_dims(gl.expand_dims(gl.expand_dims(half, 0), 1), 3)
    low0, high0 = tables_of(s, half)
    low1, high1 = tables_of(s, half + 2)
    h0, h1, h2, h3, h4, h5, h6, h7 = gl.inline_asm_elementwise(
        DECODE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [w, low0, high0, low1, high1],
        dtype=(gl.float16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    # [group, row, block of a half, word, column / 2, column % 2, half] of four columns a word and half.
    both = gl.join(gl.join(gl.join(h0, h2), gl.join(h1, h3)), gl.join(gl.join(h4, h6), gl.join(h5, h7)))
    both = gl.reshape(gl.permute(both, (0, 1, 6, 2, 3, 4, 5)), (G, R, 128))
    return gl.convert_layout(both, A, assert_trivial=True)


@gluon.jit
def _ask(ring, w_at, scales, s_at, chunk, slot, G: gl.constexpr):
    """Ask for a chunk of G groups: weights and their scales."""
    async_copy.async_copy_global_to_shared(ring.index(slot), w_at + chunk * (G * 16))
    async_copy.async_copy_global_to_shared(scales.index(slot), s_at + chunk * G)


@gluon.jit
def _ask_columns(columns, x_at, chunk, slot, G: gl.constexpr):
    async_copy.async_copy_global_to_shared(columns.index(slot), x_at + chunk * (G * 128))


@gluon.jit
def _words_at(w, row, K: gl.constexpr, G: gl.constexpr, W: gl.constexpr):
    """Pointers int32 [G, R, 16] to the first groups' words. row: int64 [R] in W's slice."""
    g = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(2, W)))
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, W)))
    return w.to(gl.pointer_type(gl.int32), bitcast=True) + _at(g * 16, row * (K // 8), j)


@gluon.jit
def _columns_at(x, row, stride, G: gl.constexpr, X: gl.constexpr):
    """Pointers [G, 8, 128] to the first groups' columns. row: int32 [8] in X's slice."""
    g = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    c = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, X)))
    return x + _at(g * 128, row.to(gl.int64) * stride, c)


@gluon.jit
def _scales_at(s, row, K: gl.constexpr, G: gl.constexpr, S: gl.constexpr):
    """Pointers int32 [R, G] to the first groups' scale bytes. row: int64 [R] in S's slice."""
    at = gl.expand_dims(row * (K // 128), 1) + gl.expand_dims(gl.arange(0, G, gl.SliceLayout(0, S)), 0)
    return s.to(gl.pointer_type(gl.int32), bitcast=True) + at


@gluon.jit
def _keep_factors(factors, xs, row, xs_row, xs_group, G: gl.constexpr, UNITS: gl.constexpr, T: gl.constexpr):
    """The scales of x's groups into shared memory, [UNITS, G, 8]. row: int32 [8] in T's slice."""
    u = gl.arange(0, UNITS, gl.SliceLayout(1, gl.SliceLayout(2, T)))
    g = gl.arange(0, G, gl.SliceLayout(0, gl.SliceLayout(2, T)))
    values = gl.load(xs + _at(u * (G * xs_group), g * xs_group, row * xs_row))
    factors._reinterpret(gl.float32, [UNITS, G, 8], FLAT3).store(values)


@gluon.jit
def _product(
    total, words, scales, columns, factors, unit,
    G: gl.constexpr, R: gl.constexpr, SUB: gl.constexpr, WARPS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """total [G, R, 8] + SUB units' products. words, scales: their [SUB * G, R, 16] and [R, SUB * G]; columns: theirs,
    [SUB * G, 8, 128]. SCALED: x's groups have factors, of which theirs begin at ``unit``.
    """
    C: gl.constexpr = total.type.layout
    A: gl.constexpr = gl.DotOperandLayout(0, C, 16)
    X: gl.constexpr = gl.DotOperandLayout(1, C, 16)
    for u in gl.static_range(SUB):
        a = _decoded(words.slice(u * G, G, 0), scales.slice(u * G, G, 1), G, R, WARPS, A)
        b = columns.slice(u * G, G, 0).permute((0, 2, 1)).load(X).to(gl.float16)
        if SCALED:
            part = mma_v2(a, b, gl.zeros([G, R, 8], gl.float32, C))
            factor = factors.index(unit + u).load(gl.SliceLayout(1, C))
            total += part * gl.expand_dims(factor, 1)
        else:
            total = mma_v2(a, b, total)
    return total


@gluon.jit(do_not_specialize=["xs_group"])
def _first(
    x, xs, w, s, r, ids, order, hidden, limit, x_row, xs_row, xs_group,
    F: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, LIMITED: gl.constexpr,
    G: gl.constexpr, R: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """silu(gate) * up of up to 8 pairs of one expert, R / 2 columns: float16 [pairs, F]. ids: each block's expert."""
    ready(PDL)
    begin(PDL)  # not before: what starts now may read the choice of experts
    M: gl.constexpr = 1 if G > 1 else WARPS
    W: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [G, M, 1], [2, 1, 0])
    S: gl.constexpr = gl.BlockedLayout([1, SUB * G if SUB * G < 4 else 4], [32, 1], [WARPS, 1], [1, 0])
    X: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 4, 8], [WARPS, 1, 1], [2, 1, 0])
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [G, M, 1], [1, 16, 8])
    UNITS: gl.constexpr = K // 128 // G
    CHUNKS: gl.constexpr = UNITS // SUB
    TILES: gl.constexpr = 2 * F // R
    block, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    expert = gl.load(ids + block)
    if expert < 0:
        return
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, SUB * G, R, 16], FLAT3)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, R, SUB * G], FLAT2)
    factors = gl.allocate_shared_memory(gl.float32, [UNITS, G, 8], FLAT2)
    w_at = _words_at(w, _gated_row(expert, tile, F, R, gl.SliceLayout(0, gl.SliceLayout(2, W))), K, SUB * G, W)
    s_at = _scales_at(s, _gated_row(expert, tile, F, R, gl.SliceLayout(1, S)), K, SUB * G, S)
    order += block * 8
    columns = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, SUB * G, 8, 128], BYTES)
    x_at = _columns_at(x, _tokens(order, TOP_K, gl.SliceLayout(0, gl.SliceLayout(2, X))), x_row, SUB * G, X)
    for i in gl.static_range(STAGES - 1):
        _ask(ring, w_at, scales, s_at, i, i, SUB * G)
        _ask_columns(columns, x_at, i, i, SUB * G)
        async_copy.commit_group()
    T: gl.constexpr = gl.BlockedLayout([1, 1, 1], [4, 1, 8], [WARPS, 1, 1], [2, 1, 0])
    N: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, T))
    _keep_factors(factors, xs, _tokens(order, TOP_K, N), xs_row, xs_group, G, UNITS, T)
    total = gl.zeros([G, R, 8], gl.float32, C)
    for chunk in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # the chunk is there, and nobody reads the one before it any more
        following = chunk + STAGES - 1
        if following < CHUNKS:
            _ask(ring, w_at, scales, s_at, following, following % STAGES, SUB * G)
            _ask_columns(columns, x_at, following, following % STAGES, SUB * G)
        async_copy.commit_group()
        slot = chunk % STAGES
        total = _product(
            total, ring.index(slot), scales.index(slot), columns.index(slot), factors, chunk * SUB, G, R, SUB, WARPS,
            True,
        )  # fmt: skip
    _put_hidden(gl.sum(total, 0), r, hidden, expert, tile, order, limit, F, R, LIMITED)


@gluon.jit
def _tokens(order, TOP_K: gl.constexpr, L: gl.constexpr):
    """int32 [8]: whose pairs a block has, 0 for none."""
    return gl.maximum(gl.load(order + gl.arange(0, 8, L)), 0) // TOP_K


@gluon.jit
def _gated_row(expert, tile, F: gl.constexpr, R: gl.constexpr, L: gl.constexpr):
    """int64 [R] rows of w13 of a tile. Eight rows of gate alternate with eight of up: in a tensor core's result both
    then lie in the same thread.
    """
    local = gl.arange(0, R, L)
    row = local // 8 % 2 * F + tile * (R // 2) + local // 16 * 8 + local % 8
    return expert.to(gl.int64) * (2 * F) + row


@gluon.jit
def _put_hidden(
    total, r, hidden, expert, tile, order, limit, F: gl.constexpr, R: gl.constexpr, LIMITED: gl.constexpr,
):  # fmt: skip
    """total: [R, 8], eight rows of gate, eight of up."""
    L: gl.constexpr = total.type.layout
    row = _gated_row(expert, tile, F, R, gl.SliceLayout(1, L))
    total *= gl.expand_dims(gl.load(r + row), 1)
    gate, up = gl.split(gl.permute(gl.reshape(total, (R // 16, 2, 8, 8)), (0, 2, 3, 1)))
    if LIMITED:  # NaN stays
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    value = gate / (1.0 + gl.exp(-gate)) * up * HIDDEN
    value = gl.where(value > LARGEST, LARGEST, gl.where(value < -LARGEST, -LARGEST, value)).to(gl.float16)
    N: gl.constexpr = value.type.layout
    n = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, N)))
    pair = gl.load(order + n)
    high = gl.arange(0, R // 16, gl.SliceLayout(1, gl.SliceLayout(2, N)))
    low = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, N)))
    to = _at(high * 8 + tile * (R // 2), low, gl.maximum(pair, 0).to(gl.int64) * F)
    gl.store(hidden + to, value, mask=_at(high * 0, low * 0, pair) >= 0)


@gluon.jit
def _second(
    hidden, w, s, r, ids, order, y,
    D: gl.constexpr, F: gl.constexpr, G: gl.constexpr, R: gl.constexpr, SUB: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """R columns of up to 8 pairs' results, float32 [pairs, D]. ids: each block's expert."""
    begin(PDL)
    M: gl.constexpr = 1 if G > 1 else WARPS
    W: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [G, M, 1], [2, 1, 0])
    S: gl.constexpr = gl.BlockedLayout([1, SUB * G if SUB * G < 4 else 4], [32, 1], [WARPS, 1], [1, 0])
    X: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [WARPS, 1, 1], [2, 1, 0])
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [G, M, 1], [1, 16, 8])
    UNITS: gl.constexpr = F // 128 // G
    CHUNKS: gl.constexpr = UNITS // SUB
    TILES: gl.constexpr = D // R
    block, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    # The choice of experts was finished before the first product began, and that one has begun; sorting was, too.
    expert = gl.load(ids + block)
    if expert < 0:
        ready(PDL)
        return
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, SUB * G, R, 16], FLAT3)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, R, SUB * G], FLAT2)
    columns = gl.allocate_shared_memory(gl.float16, [STAGES, SUB * G, 8, 128], HALVES)
    w_at = _words_at(w, _plain_row(expert, tile, D, R, gl.SliceLayout(0, gl.SliceLayout(2, W))), F, SUB * G, W)
    s_at = _scales_at(s, _plain_row(expert, tile, D, R, gl.SliceLayout(1, S)), F, SUB * G, S)
    order += block * 8
    pair = gl.maximum(gl.load(order + gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, X)))), 0)
    x_at = _columns_at(hidden, pair, F, SUB * G, X)
    if PDL:  # weights first; they then belong to the first chunk's group, all of them
        for i in gl.static_range(STAGES - 1):
            _ask(ring, w_at, scales, s_at, i, i, SUB * G)
        ready(PDL)
        for i in gl.static_range(STAGES - 1):
            _ask_columns(columns, x_at, i, i, SUB * G)
            async_copy.commit_group()
    else:
        for i in gl.static_range(STAGES - 1):
            _ask(ring, w_at, scales, s_at, i, i, SUB * G)
            _ask_columns(columns, x_at, i, i, SUB * G)
            async_copy.commit_group()
    total = gl.zeros([G, R, 8], gl.float32, C)
    for chunk in range(CHUNKS):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # the chunk is there, and nobody reads the one before it any more
        following = chunk + STAGES - 1
        if following < CHUNKS:
            _ask(ring, w_at, scales, s_at, following, following % STAGES, SUB * G)
            _ask_columns(columns, x_at, following, following % STAGES, SUB * G)
        async_copy.commit_group()
        slot = chunk % STAGES
        total = _product(
            total, ring.index(slot), scales.index(slot), columns.index(slot), scales, chunk * SUB, G, R, SUB, WARPS,
            False,
        )  # fmt: skip
    summed = gl.sum(total, 0)
    L: gl.constexpr = summed.type.layout
    summed *= gl.expand_dims(gl.load(r + _plain_row(expert, tile, D, R, gl.SliceLayout(1, L))), 1) * (1 / HIDDEN)
    own = gl.load(order + gl.arange(0, 8, gl.SliceLayout(0, L)))
    column = tile * R + gl.arange(0, R, gl.SliceLayout(1, L))
    to = gl.expand_dims(gl.maximum(own, 0).to(gl.int64) * D, 0) + gl.expand_dims(column, 1)
    gl.store(y + to, summed, mask=gl.expand_dims(own, 0) + gl.expand_dims(column * 0, 1) >= 0)


@gluon.jit
def _plain_row(expert, tile, D: gl.constexpr, R: gl.constexpr, L: gl.constexpr):
    """int64 [R] rows of w2 of a tile."""
    return expert.to(gl.int64) * D + tile * R + gl.arange(0, R, L)
