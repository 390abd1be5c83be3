# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, assignment, untyped-decorator"
"""Routed experts of few tokens (decode) at the memory's rate: two kernels between routing and a layer's result.

Knows pairs (a token and one of its experts) and quantised weights in their device form; knows nothing of prefill. A
program is one warp, which waits for no other: it takes R rows of one expert's weight over all of K, asks for each 16
bytes a thread several groups of columns ahead, and multiplies from the registers that they arrive in. That needs no
shared memory because a product's columns may come in any order that both operands share (``_ordered``): a thread then
holds 16 neighbouring bytes of a row. Hopper's tensor cores take float16 this way; FP8 would be widened to it anyway.

A pair's sums do not depend on which other pairs are computed beside it, and are added in the order of a token's ids.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.counters import counters as zeros
from longread.kernels.experts import few_gluon
from longread.kernels.experts.few_forms import DECODE, HIDDEN, LARGEST, PAIRS
from longread.kernels.experts.grouped_triton import tables
from longread.kernels.experts.ref import ExpertWeights
from longread.kernels.experts.slots_triton import Slots
from longread.kernels.fp8.ref import Quantised
from longread.kernels.overlap import INTERPRETED, begin, overlap, ready

# Four e4m3 -> four float16.
WIDEN = tl.constexpr("""{
.reg .b32 s;
.reg .b16 a, b;
mov.b32 {a, b}, $4;
cvt.rn.f16x2.e4m3x2 s, a;
mov.b32 {$0, $1}, s;
cvt.rn.f16x2.e4m3x2 s, b;
mov.b32 {$2, $3}, s;
}""")
# Four upper and four lower bytes -> four float16.
JOIN = tl.constexpr("""{
.reg .b32 s;
prmt.b32 s, $5, $4, 0x5140;
mov.b32 {$0, $1}, s;
prmt.b32 s, $5, $4, 0x7362;
mov.b32 {$2, $3}, s;
}""")


@dataclass(frozen=True, slots=True)
class Few:
    """rows1, rows2: weight rows a program in the first product (half gate, half up) and the second; together: groups of
    128 columns asked for at a time; scanned: every program finds its pairs among all ids, without a sort before, and
    the second product sums, too.
    """

    rows1: int = 32
    rows2: int = 32
    together: int = 2
    scanned: bool = False


AT_ONCE = 128  # pairs up to which every one is compared with every other, instead of a sort
HELD = 64  # rows times groups of 128 columns that a program has asked for: what its registers have room for
MOST = 64  # tokens up to which weights are read faster here than by grouped_triton
# By kind of weight: (tokens up to which it is taken, the configuration). Microseconds of a layer's routing and experts
# on an H200, beside grouped_triton's: V4-Flash 42 (71) for 1 token, 72 (97) for 2, 122 (186) for 4, 214 (303) for 8,
# 594 (827) for 32; V3 105 (126) for 1, 164 (195) for 2, 215 (266) for 4, 263 (332) for 8. V3's 32 tokens were measured
# with ``together`` 1 only: 454 (450). FP4 of two tokens and more goes through few_gluon where that fits.
FEW: dict[str, list[tuple[int, Few]]] = {
    "fp4_words": [
        (1, Few(rows1=16, rows2=16, scanned=True)),
        (2, Few(rows1=16, scanned=True)),
        (4, Few(scanned=True)),
        (MOST, Few()),
    ],
    "fp8": [
        (1, Few(together=1, scanned=True)),
        (2, Few(rows1=16, scanned=True)),
        (8, Few(rows1=16)),
        (MOST, Few()),
    ],
}


@triton.jit
def _ordered(h0, h1, h2, h3, N: tl.constexpr):
    """float16 [N, 16] four times, columns 4j, 4j + 1, .. of 64 -> [N, 64], column 16q + 4i + b at 16i + 4q + b.

    A thread of a quad has read columns 16q to 16q + 15; so it holds what the tensor core wants from it.
    """
    tile = tl.join(tl.join(h0, h2), tl.join(h1, h3))
    return tl.reshape(tl.permute(tl.reshape(tile, (N, 4, 4, 4)), (0, 2, 1, 3)), (N, 64))


@triton.jit
def _byte(word, i: tl.constexpr):
    return ((word >> (8 * i)) & 0xFF).to(tl.uint8)


@triton.jit
def _widened(words, N: tl.constexpr, ASM: tl.constexpr):
    """int32 [N, 16], four e4m3 each -> float16 [N, 64], ordered."""
    if ASM:
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            WIDEN, "=h,=h,=h,=h,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    else:
        h0 = _byte(words, 0).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        h1 = _byte(words, 1).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        h2 = _byte(words, 2).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        h3 = _byte(words, 3).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return _ordered(h0, h1, h2, h3, N)


@triton.jit
def _halves(high, low, N: tl.constexpr, ASM: tl.constexpr):
    """int32 [N, 16], four upper bytes each, and four lower -> float16 [N, 64], ordered."""
    if ASM:
        h0, h1, h2, h3 = tl.inline_asm_elementwise(
            JOIN, "=h,=h,=h,=h,r,r", [high, low], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    else:
        h0 = (_byte(high, 0).to(tl.int16) << 8 | _byte(low, 0).to(tl.int16)).to(tl.float16, bitcast=True)
        h1 = (_byte(high, 1).to(tl.int16) << 8 | _byte(low, 1).to(tl.int16)).to(tl.float16, bitcast=True)
        h2 = (_byte(high, 2).to(tl.int16) << 8 | _byte(low, 2).to(tl.int16)).to(tl.float16, bitcast=True)
        h3 = (_byte(high, 3).to(tl.int16) << 8 | _byte(low, 3).to(tl.int16)).to(tl.float16, bitcast=True)
    return _ordered(h0, h1, h2, h3, N)


@triton.jit
def _code(word, shift, i: tl.constexpr, FIRST: tl.constexpr):
    """Column i of a word's half: float16."""
    code = (word >> (4 * i + (0 if FIRST else 16))) & 7
    sign = (word >> (8 * i + (7 if FIRST else 3)) & 1) << 7
    magnitude = tl.where(code == 0, 0, shift + tl.where(code == 1, 0, code * 4))
    return (magnitude | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _spread(scales, N: tl.constexpr):
    """[N, 4], one for every four words -> [N, 16]."""
    return tl.reshape(tl.broadcast_to(scales[:, :, None], (N, 4, 4)), (N, 16))


@triton.jit
def _codes(words, scales, R: tl.constexpr, ASM: tl.constexpr):
    """words: int32 [R, 16]; scales: int32 [R, 4], four times a row's four bytes -> float16 [R, 64] of both halves."""
    pick = (tl.arange(0, 4) // 2 * 8)[None, :]
    scale0 = _spread((scales >> pick) & 0xFF, R)
    scale1 = _spread((scales >> (pick + 16)) & 0xFF, R)
    if ASM:
        low0, high0 = tables(scale0)
        low1, high1 = tables(scale1)
        h0, h1, h2, h3, h4, h5, h6, h7 = tl.inline_asm_elementwise(
            DECODE, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r", [words, low0, high0, low1, high1],
            dtype=(tl.float16,) * 8, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        h0, h1 = _code(words, scale0, 0, True), _code(words, scale0, 1, True)
        h2, h3 = _code(words, scale0, 2, True), _code(words, scale0, 3, True)
        h4, h5 = _code(words, scale1, 0, False), _code(words, scale1, 1, False)
        h6, h7 = _code(words, scale1, 2, False), _code(words, scale1, 3, False)
    return _ordered(h0, h1, h2, h3, R), _ordered(h4, h5, h6, h7, R)


@triton.jit
def _weights(g, w_at, s_at, half, more, KIND: tl.constexpr):
    """Of group g, FP4: int32 [R, 4], four times a row's four scale bytes, and words [R, 64]; FP8: scales of the tile's
    halves and its two tiles [R, 64]. half: how many scales lie between the halves'.
    """
    j = tl.arange(0, 16)[None, :]
    if KIND == "fp4_words":
        # Rows last: a compiler deals lanes to the first of equal dimensions, and a quad is to hold one row's.
        scales = tl.trans(tl.load(s_at + g + tl.zeros((4, 1), tl.int32), mask=more, other=0))
        got = scales, tl.load(w_at + g * 16 + j, mask=more, other=0, eviction_policy="evict_first")
    else:
        scale, other = tl.load(s_at + g, mask=more, other=0.0), tl.load(s_at + g + half, mask=more, other=0.0)
        first = tl.load(w_at + g * 32 + j, mask=more, other=0, eviction_policy="evict_first")
        last = tl.load(w_at + g * 32 + 16 + j, mask=more, other=0, eviction_policy="evict_first")
        got = scale, first, last, other
    return got


@triton.jit
def _values(g, x_at, x_more, there, more, PLANES: tl.constexpr):
    """Of group g: x's two tiles [BT, 64], then its scales (x_more: pointers [BT] to group g's) or, where x lies in two
    planes of bytes, the lower bytes' two tiles.
    """
    j = tl.arange(0, 16)[None, :]
    mask = there[:, None] & more
    first = tl.load(x_at + g * 32 + j, mask=mask, other=0)
    second = tl.load(x_at + g * 32 + 16 + j, mask=mask, other=0)
    if PLANES:
        low = tl.load(x_more + g * 32 + j, mask=mask, other=0)
        got = first, second, low, tl.load(x_more + g * 32 + 16 + j, mask=mask, other=0)
    else:
        got = first, second, tl.load(x_more, mask=there & more, other=0.0)
    return got


@triton.jit
def _added(total, weights, values, KIND: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr, R: tl.constexpr,
           BT: tl.constexpr):  # fmt: skip
    """total [R, BT] + the product of a group."""
    if KIND == "fp4_words":
        a, b = _codes(weights[1], weights[0], R, ASM)
    else:
        a, b = _widened(weights[1], R, ASM), _widened(weights[2], R, ASM)
    if PLANES:
        c, d = _halves(values[0], values[2], BT, ASM), _halves(values[1], values[3], BT, ASM)
    else:
        c, d = _widened(values[0], BT, ASM), _widened(values[1], BT, ASM)
    if not ASM:  # the interpreter adds float16 in float16
        a, b, c, d = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
    if KIND == "fp4_words" and PLANES:
        total = tl.dot(b, tl.trans(d), tl.dot(a, tl.trans(c), total))
    else:
        part = tl.dot(b, tl.trans(d), tl.dot(a, tl.trans(c)))
        if KIND == "fp8":
            if PLANES:
                part *= weights[0]
            else:
                part *= tl.where(tl.arange(0, R) // 8 % 2 == 0, weights[0], weights[3])[:, None]
        if not PLANES:
            part *= values[2][None, :]
        total += part
    return total


@triton.jit
def _product(
    w_at, s_at, half, x_at, x_more, xs_group, there, groups,
    GROUPS: tl.constexpr, KIND: tl.constexpr, PLANES: tl.constexpr, ASM: tl.constexpr,
    R: tl.constexpr, BT: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """float32 [R, BT]: weight rows times x over all groups; AHEAD of them, a divisor, are on their way at any time.

    WAIT: x is there only after ``ready``. groups: GROUPS, which a compiler must not know: a branch before each product
    keeps it from moving the loads of the groups to come behind the products of those that are there.
    """
    total = tl.zeros((R, BT), tl.float32)
    weights, values = (), ()
    for i in tl.static_range(AHEAD):
        weights += (_weights(i, w_at, s_at, half, True, KIND),)
    ready(WAIT)
    for i in tl.static_range(AHEAD):
        values += (_values(i, x_at, x_more + i * xs_group, there, True, PLANES),)
    for first in range(0, GROUPS, AHEAD):
        next_weights, next_values = (), ()
        for i in tl.static_range(AHEAD):
            if first + i < groups:
                total = _added(total, weights[i], values[i], KIND, PLANES, ASM, R, BT)
            if (i + 1) % TOGETHER == 0:
                for j in tl.static_range(TOGETHER):
                    g = first + AHEAD + i + 1 - TOGETHER + j
                    next_weights += (_weights(g, w_at, s_at, half, g < GROUPS, KIND),)
                    next_values += (_values(g, x_at, x_more + g * xs_group, there, g < GROUPS, PLANES),)
        weights, values = next_weights, next_values
    return total


@triton.jit
def _members(ids, order, block_expert, block, pairs, SINGLE: tl.constexpr, SORTED: tl.constexpr, P: tl.constexpr,
             BT: tl.constexpr):  # fmt: skip
    """(expert or -1, int32 [BT] its pairs or -1) of a program: of pair ``block``, if it is the first of every BT pairs
    of its expert, all of those; or block ``block`` of what slots_triton has sorted.
    """
    place = tl.arange(0, BT)
    if SORTED:
        expert = tl.load(block_expert + block)
        pair = tl.load(order + block * BT + place)
    else:
        expert = tl.load(ids + block)
        if SINGLE:  # one token has an expert once
            pair = tl.where(place == 0, block, -1)
        else:
            index = tl.arange(0, P)
            same = (tl.load(ids + index, mask=index < pairs, other=-1) == expert).to(tl.int32)
            rank = tl.cumsum(same, 0) - 1
            mine = tl.sum(tl.where(index < block, same, 0), 0)
            hit = (same != 0)[None, :] & (rank[None, :] == (mine + place)[:, None])
            pair = tl.max(tl.where(hit, index[None, :], -1), 1)
            expert = tl.where(mine % BT == 0, expert, -1)
    return expert, pair


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _blocks(ids, order, block_expert, pairs, blocks, P: tl.constexpr, ENTRIES: tl.constexpr, BT: tl.constexpr):
    """Pairs of one expert, BT at a time, in the order of their first: what slots_triton's sort is for, for P pairs."""
    index = tl.arange(0, P)
    expert = tl.load(ids + index, mask=index < pairs, other=-1)
    for at in tl.static_range(0, ENTRIES, P):
        tl.store(order + at + index, tl.full((P,), -1, tl.int32), mask=at + index < blocks * BT)
    for at in tl.static_range(0, ENTRIES // BT, P):
        tl.store(block_expert + at + index, tl.full((P,), -1, tl.int32), mask=at + index < blocks)
    same = (expert[:, None] == expert[None, :]) & (expert >= 0)[:, None]
    rank = tl.sum((same & (index[None, :] < index[:, None])).to(tl.int32), 1)
    begins = (expert >= 0) & (rank % BT == 0)
    number = tl.cumsum(begins.to(tl.int32), 0) - 1
    begun = same & begins[None, :] & (rank[None, :] == (rank // BT * BT)[:, None])
    block = tl.sum(tl.where(begun, number[None, :], 0), 1)
    tl.debug_barrier()  # all of -1 lies in memory before what follows
    tl.store(order + block * BT + rank % BT, index, mask=expert >= 0)
    tl.store(block_expert + block, expert, mask=begins)


@triton.jit(do_not_specialize=["pairs", "xs_group"])
def _first(
    x, xs, w, s, r, ids, order, block_expert, hidden, pairs, limit, x_row, xs_row, xs_group,
    F: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
    ASM: tl.constexpr, SINGLE: tl.constexpr, SORTED: tl.constexpr, P: tl.constexpr,
    R: tl.constexpr, BT: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of up to BT pairs of one expert, R / 2 columns: float16 as two planes of bytes, [2, pairs, F].

    Eight rows of gate alternate with eight of up: in a tensor core's result both then lie in the same thread.
    """
    ready(PDL)
    begin(PDL)  # not before: what starts now may read the choice of experts
    GROUPS: tl.constexpr = K // 128
    block, tile = tl.program_id(0) // (2 * F // R), tl.program_id(0) % (2 * F // R)
    expert, pair = _members(ids, order, block_expert, block, pairs, SINGLE, SORTED, P, BT)
    if expert < 0:
        return
    there = pair >= 0
    token = (tl.maximum(pair, 0) // TOP_K).to(tl.int64)
    local = tl.arange(0, R)
    row = local // 8 % 2 * F + tile * (R // 2) + local // 16 * 8 + local % 8
    weight_row = expert.to(tl.int64) * (2 * F) + row
    if KIND == "fp4_words":
        w_at = w.to(tl.pointer_type(tl.int32)) + (weight_row * (K // 8))[:, None]
        s_at = s.to(tl.pointer_type(tl.int32)) + (weight_row * GROUPS)[None, :]
    else:
        w_at = w.to(tl.pointer_type(tl.int32)) + (weight_row * (K // 4))[:, None]
        s_at = s + (expert.to(tl.int64) * (2 * F // 128) + tile * (R // 2) // 128) * GROUPS
    x_at = x.to(tl.pointer_type(tl.int32)) + (token * (x_row // 4))[:, None]
    total = _product(
        w_at, s_at, F // 128 * GROUPS, x_at, xs + token * xs_row, xs_group, there, GROUPS + (pairs >> 16),
        GROUPS, KIND, False, ASM, R, BT, AHEAD, TOGETHER, False,
    )  # fmt: skip
    if KIND == "fp4_words":
        total *= tl.load(r + weight_row)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(total, (R // 16, 2, 8, BT)), (0, 2, 3, 1)))
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    value = gate / (1.0 + tl.exp(-gate)) * up * HIDDEN
    value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    bits = tl.reshape(value, (R // 2, BT)).to(tl.float16).to(tl.int16, bitcast=True)
    column = tile * (R // 2) + tl.arange(0, R // 2)
    out = hidden + (tl.maximum(pair, 0).to(tl.int64) * F)[None, :] + column[:, None]
    tl.store(out, (bits >> 8).to(tl.uint8), mask=there[None, :])
    tl.store(out + pairs.to(tl.int64) * F, bits.to(tl.uint8), mask=there[None, :])


@triton.jit
def _unrouted(ids, shared, out, block, column, shared_row, D: tl.constexpr, TOP_K: tl.constexpr):
    """The result of a token without any expert, by the program of its first pair: what was shared."""
    token = (block // TOP_K).to(tl.int64)
    most = -1
    for k in tl.static_range(TOP_K):
        most = tl.maximum(most, tl.load(ids + token * TOP_K + k))
    mask = (most < 0) & (block % TOP_K == 0) & (column < D)
    value = tl.load(shared + token * shared_row + column, mask=mask)
    tl.store(out + token * D + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["pairs"])
def _second(
    hidden, w, s, r, ids, order, block_expert, y, weights, shared, out, counters, pairs, shared_row,
    D: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr,
    SINGLE: tl.constexpr, SORTED: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R columns of up to BT pairs' results, float32 [pairs, D].

    Not SORTED: whoever adds the last pair of a token to a tile of columns sums the token's there, into ``out``;
    ``counters`` int32 [T, D / R] are zeros before and after.
    """
    begin(PDL)
    GROUPS: tl.constexpr = F // 128
    TILES: tl.constexpr = D // R
    block, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    # The choice of experts was finished before the first product began, and that one has begun; sorting was, too.
    expert, pair = _members(ids, order, block_expert, block, pairs, SINGLE, SORTED, P, BT)
    column = tile * R + tl.arange(0, R)
    if expert < 0:
        ready(PDL)
        if not SORTED:
            _unrouted(ids, shared, out, block, column, shared_row, D, TOP_K)
        return
    there = pair >= 0
    at = tl.maximum(pair, 0).to(tl.int64)
    weight_row = expert.to(tl.int64) * D + column
    if KIND == "fp4_words":
        w_at = w.to(tl.pointer_type(tl.int32)) + (weight_row * (F // 8))[:, None]
        s_at = s.to(tl.pointer_type(tl.int32)) + (weight_row * GROUPS)[None, :]
    else:
        w_at = w.to(tl.pointer_type(tl.int32)) + (weight_row * (F // 4))[:, None]
        s_at = s + (expert.to(tl.int64) * (D // 128) + tile * R // 128) * GROUPS
    x_at = hidden.to(tl.pointer_type(tl.int32)) + (at * (F // 4))[:, None]
    total = _product(
        w_at, s_at, 0, x_at, x_at + pairs.to(tl.int64) * (F // 4), 0, there, GROUPS + (pairs >> 16),
        GROUPS, KIND, True, ASM, R, BT, AHEAD, TOGETHER, PDL,
    )  # fmt: skip
    if KIND == "fp4_words":
        total *= tl.load(r + weight_row)[:, None]
    total *= 1.0 / HIDDEN
    tl.store(y + (at * D)[None, :] + column[:, None], total, mask=there[None, :])
    if not SORTED:
        token = at // TOP_K
        real = tl.zeros((BT,), tl.int32)
        for k in tl.static_range(TOP_K):
            real += (tl.load(ids + token * TOP_K + k) >= 0).to(tl.int32)
        counter = counters + token * TILES + tile
        tl.debug_barrier()  # all of the tile lies in memory before it is counted
        last = there & (tl.atomic_add(counter, 1, mask=there, sem="acq_rel") == real - 1)
        tl.debug_barrier()
        if tl.max(last.to(tl.int32), 0) > 0:
            _sum(y, ids, weights, shared, out, token, column, last, shared_row, D, TOP_K)
            tl.store(counter, 0, mask=last)


@triton.jit
def _sum(y, ids, weights, shared, out, token, column, mask, shared_row, D: tl.constexpr, TOP_K: tl.constexpr):
    """out = shared + a token's results by weight, in the order of its ids. token [n], column [m], mask [n]."""
    inside = mask[:, None] & (column < D)[None, :]
    total = tl.load(shared + (token * shared_row)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        there = mask & (tl.load(ids + pair, mask=mask, other=-1) >= 0)
        weight = tl.load(weights + pair, mask=there, other=0.0)
        here = y + (pair * D)[:, None] + column[None, :]
        value = tl.load(here, mask=there[:, None] & (column < D)[None, :], other=0.0, cache_modifier=".cg")
        total += tl.where(there[:, None], weight[:, None] * value, 0.0)
    tl.store(out + (token * D)[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sums(y, ids, weights, shared, out, shared_row, D: tl.constexpr, TOP_K: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) + tl.zeros((1,), tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    _sum(y, ids, weights, shared, out, token, column, token >= 0, shared_row, D, TOP_K)


class Blocks(NamedTuple):
    """Pairs of an expert, PAIRS at a time. order: int32 [count * PAIRS], a pair or -1; experts: int32 [count] or -1."""

    order: Tensor
    experts: Tensor
    count: int


def blocks_of(ids: Tensor, experts: int) -> Blocks:
    """ids: int32 [T, k], -1 for none, contiguous. ``count`` is an upper bound."""
    pairs = ids.numel()
    if pairs > AT_ONCE:
        slots = Slots(ids, experts, PAIRS)
        return Blocks(slots.order, slots.block_expert, slots.blocks)
    count = min(pairs, experts) + pairs // PAIRS
    order, expert = ids.new_empty(count * PAIRS), ids.new_empty(count)
    _blocks[(1,)](
        ids, order, expert, pairs, count, P=max(16, triton.next_power_of_2(pairs)),
        ENTRIES=triton.next_power_of_2(count * PAIRS), BT=PAIRS, num_warps=8,
    )  # fmt: skip
    return Blocks(order, expert, count)


def fits(q: Quantised, w: ExpertWeights) -> bool:
    """Whether these kernels take such tokens and weights."""
    x = q.values
    return x.shape[0] <= MOST and w.kind in ("fp4_words", "fp8") and x.stride(1) == 1 and x.stride(0) % 16 == 0


def experts(
    q: Quantised, ids: Tensor, weights: Tensor, w: ExpertWeights, limit: float | None, shared: Tensor,
    config: Few | None = None,
) -> Tensor:  # fmt: skip
    """See ``ref.experts``; ids and weights as ``route`` makes them. Hidden activations are rounded to float16."""
    (tokens, top_k), (count, rows, _), d = ids.shape, w.w13.shape, w.w2.shape[1]
    ids, weights = ids.contiguous(), weights.contiguous()
    if config is None and few_gluon.fits(q, w):
        y = few_gluon.products(q, *blocks_of(ids, count), ids.numel(), w, limit)
        return summed(y, ids, weights, shared)
    config = config or chosen(w.kind, tokens)
    pairs, f = ids.numel(), rows // 2
    order = block_expert = ids
    blocks = pairs
    if not config.scanned:
        order, block_expert, blocks = blocks_of(ids, count)
    hidden = torch.empty(2, pairs, f, dtype=torch.uint8, device=ids.device)
    y = torch.empty(pairs, d, dtype=torch.float32, device=ids.device)
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    members = {
        "SINGLE": tokens == 1, "SORTED": not config.scanned,
        "P": max(16, triton.next_power_of_2(pairs)) if config.scanned else 16, "BT": PAIRS, "KIND": w.kind,
        "TOP_K": top_k, "ASM": not INTERPRETED,
        "num_warps": 1, "num_stages": 1, **overlap(tokens, blocks * (d // config.rows2)),
    }  # fmt: skip
    x, xs = q
    r13, r2 = (w.w13, w.w2) if w.r13 is None or w.r2 is None else (w.r13, w.r2)
    _first[(blocks * (rows // config.rows1),)](
        x, xs, w.w13, w.s13, r13, ids, order, block_expert, hidden, pairs, 0.0 if limit is None else limit,
        x.stride(0), xs.stride(0), xs.stride(1), F=f, K=x.shape[1], LIMITED=limit is not None,
        **_held(x.shape[1], config.rows1, config.together), **members,
    )  # fmt: skip
    counters = zeros(ids.device, tokens * (d // config.rows2)) if config.scanned else ids
    _second[(blocks * (d // config.rows2),)](
        hidden, w.w2, w.s2, r2, ids, order, block_expert, y, weights, shared, out, counters, pairs, shared.stride(0),
        D=d, F=f, **_held(f, config.rows2, config.together), **members,
    )  # fmt: skip
    return out if config.scanned else summed(y, ids, weights, shared)


def summed(y: Tensor, ids: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """shared [T, D] + a token's rows of y float32 [pairs, D] by weight, in the order of its ids."""
    (tokens, top_k), d = ids.shape, y.shape[1]
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    wide = min(256, triton.next_power_of_2(d))
    _sums[(tokens, triton.cdiv(d, wide))](
        y, ids, weights, shared, out, shared.stride(0), D=d, TOP_K=top_k, WIDE=wide, num_warps=2,
    )  # fmt: skip
    return out


def chosen(kind: str, tokens: int) -> Few:
    return next(config for most, config in FEW[kind] if tokens <= most)


def _held(width: int, rows: int, together: int) -> dict[str, int]:
    """A product's rows a program and groups of columns ahead, which divide all of them."""
    groups = width // 128
    ahead = next(n for n in range(min(groups, max(1, HELD // rows)), 0, -1) if groups % n == 0)
    return {"R": rows, "AHEAD": ahead, "TOGETHER": math.gcd(ahead, together)}
