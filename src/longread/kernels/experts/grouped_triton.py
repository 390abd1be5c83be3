# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Products of slots (pairs of a token and an expert, sorted by expert) with their experts' weights, for Hopper.

Knows tiles, forms of weights and how each becomes a tensor-core operand; knows neither how slots are made nor how
results are summed. Weights are the A operand (rows of a tile), tokens the B operand, so that a block of 16 tokens still
fills the tensor core, and FP4 words become e4m3 in the registers that feed it. FP8 products are added up in float32
after at most 128 columns, because Hopper's FP8 accumulator keeps about 14 bits.
"""

import triton
import triton.language as tl

from longread.kernels.cache_rows.triton import exponents, powers

# Four-byte word -> e4m3 of columns 4q..4q+3 and 64+4q..64+4q+3 (ref.prepare). $2: word; $3, $7, $11, $15 (each given
# four times, as a pack of four elements does): the tables of the first half's block and of the second's. A selector's
# nibble picks a table byte, so four codes cost one prmt; 0xEA is (a & b) | c.
DECODE = tl.constexpr("""{
.reg .b32 m, p, n;
and.b32 m, $2, 0x77777777;
prmt.b32 p, $3, $7, m;
lop3.b32 $0, $2, 0x80808080, p, 0xEA;
shr.b32 m, m, 16;
prmt.b32 p, $11, $15, m;
shl.b32 n, $2, 4;
lop3.b32 $1, n, 0x80808080, p, 0xEA;
}""")
CONSTRAINTS = tl.constexpr("=r,=r," + ",".join(["r"] * 17))


@triton.jit
def tables(shifts):
    """The eight e4m3 magnitudes of a block whose scale byte (8 * shift) is ``shifts``: bytes 0-3 and 4-7."""
    # Code 0 stays zero, code 1 (0.5) is 8 * shift, code c >= 2 is 4 * c + 8 * shift.
    return 0x0C080000 + shifts * 0x01010100, 0x1C181410 + shifts * 0x01010101


@triton.jit
def decoded(words, scales, HALF: tl.constexpr):
    """words: uint8 [R, 32], the words 8 * HALF .. + 8 of a group. scales: int32 [R], the group's four scale bytes.

    -> e4m3 [R, 32] of the columns from 32 * HALF, and of those from 64 + 32 * HALF. One block a row in each, so nothing
    depends on the column, and the compiler decodes in the very registers that feed the tensor core. True only where a
    thread's registers hold whole words in a row: so they do, for the tensor core takes e4m3 in fours.
    """
    low0, high0 = tables((scales >> (8 * HALF)) & 0xFF)
    low1, high1 = tables((scales >> (16 + 8 * HALF)) & 0xFF)
    return tl.inline_asm_elementwise(
        DECODE,
        CONSTRAINTS,
        [words, low0[:, None], high0[:, None], low1[:, None], high1[:, None]],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@triton.jit
def decoded_plainly(group_rows, scales, HALF: tl.constexpr):
    """``decoded`` in plain operations, from pointers to a group's bytes [R, 1]; for where there is no assembler."""
    j = 32 * HALF + tl.arange(0, 32)[None, :]
    i = j % 4
    signs = tl.load(group_rows + j).to(tl.int32)
    first = tl.load(group_rows + j - i + i // 2).to(tl.int32) >> (i % 2 * 4)
    second = tl.load(group_rows + j - i + 2 + i // 2).to(tl.int32) >> (i % 2 * 4)
    shift0 = ((scales >> (8 * HALF)) & 0xFF)[:, None]
    shift1 = ((scales >> (16 + 8 * HALF)) & 0xFF)[:, None]
    return _e4m3(first & 7, signs & 0x80, shift0), _e4m3(second & 7, (signs & 8) << 4, shift1)


@triton.jit
def _e4m3(code, sign, shift):
    magnitude = tl.where(code == 0, 0, shift + tl.where(code == 1, 0, code * 4))
    return (magnitude | sign).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _words_product(acc, rows, k, xa, xb, xc, xd, x_scale0, x_scale1, scales, GROUP: tl.constexpr, ASM: tl.constexpr):
    """acc [R, T] + the product of group k of 128 columns, four times 32; x_scale: float32 [1, T] or unused."""
    at = rows + k * 64
    if ASM:
        a, c = decoded(tl.load(at + tl.arange(0, 32)[None, :]), scales, 0)
        b, d = decoded(tl.load(at + 32 + tl.arange(0, 32)[None, :]), scales, 1)
    else:
        a, c = decoded_plainly(at, scales, 0)
        b, d = decoded_plainly(at, scales, 1)
    part = tl.dot(a, xa)
    part = tl.dot(b, xb, part)
    if GROUP == 64:
        acc += part * x_scale0
        part = tl.dot(c, xc)
    else:
        part = tl.dot(c, xc, part)
    part = tl.dot(d, xd, part)
    if GROUP == 0:
        return acc + part
    return acc + part * x_scale1


@triton.jit
def _product(acc, rows, k, x0, x1, x_scale0, x_scale1, scales, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The same of weights that are operands as they lie; scales: float32 [R, 1], the weights'."""
    j = tl.arange(0, 64)[None, :]
    w0 = tl.load(rows + k * 128 + j)
    w1 = tl.load(rows + k * 128 + 64 + j)
    if KIND == "plain":
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        return tl.dot(w1, x1, acc, input_precision="ieee")
    part = tl.dot(w0, x0)
    if GROUP == 64:
        acc += part * (x_scale0 * scales)
        part = tl.dot(w1, x1)
    else:
        part = tl.dot(w1, x1, part)
    if GROUP == 0:
        return acc + part * scales
    return acc + part * (x_scale1 * scales)


@triton.jit
def _scaled(gate, up, r, weight_row, half, xs, x_rows, xs_row, KIND: tl.constexpr, GROUP: tl.constexpr):
    """The sums [BR, BT] times what holds for whole rows: a weight's, FP4 only, and where GROUP is 0 a token's."""
    if KIND == "fp4_words":
        gate *= tl.load(r + weight_row)[:, None]
        up *= tl.load(r + weight_row + half)[:, None]
    if GROUP == 0 and KIND != "plain":
        factor = tl.load(xs + x_rows * xs_row)[None, :]
        gate *= factor
        up *= factor
    return gate, up


@triton.jit
def _store(
    gate, up, y, ys, slots, row, tile, limit,
    ROWS: tl.constexpr, TILES: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr, LIMITED: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """A tile's end: silu(gate) * up, quantised where OUT is "fp8"; or both halves as they are. gate, up: [BR, BT]."""
    WIDE: tl.constexpr = ROWS // 2 if GATED else ROWS
    out = (slots.to(tl.int64) * WIDE)[None, :] + row[:, None]
    if GATED:
        if LIMITED:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        if OUT == "fp8":
            scale = powers(exponents(tl.max(tl.abs(hidden), 0)))
            tl.store(y + out, (hidden / scale[None, :]).to(tl.float8e4nv))
            tl.store(ys + slots.to(tl.int64) * TILES + tile, scale)
        else:
            tl.store(y + out, hidden.to(y.dtype.element_ty))
    else:
        tl.store(y + out, gate.to(y.dtype.element_ty))
        tl.store(y + out + BR, up.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["xs_group"])
def grouped(
    x, xs, w, s, r, order, block_expert, y, ys,
    limit, x_row, xs_row, xs_group,
    ROWS: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    GROUP: tl.constexpr, OUT: tl.constexpr, LIMITED: tl.constexpr, ASM: tl.constexpr,
    BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One tile of 2 * BR weight rows and one block of BT slots.

    GATED: x is [T, K] by token, the tile is BR rows of gate and the same of up, y is [slots, ROWS / 2]; else x is
    [slots, K], y is [slots, ROWS]. x's scales xs: per GROUP columns at row * xs_row + group * xs_group, or one a row
    (GROUP 0), or none (plain). OUT: "fp8" (GATED only): y e4m3 and ys float32 [slots, ROWS / 2 / BR]; else "same": y's
    dtype. w: [E, ROWS, K(/2)]; s: scales as ExpertWeights says; r: float32 [E, ROWS] or anything.
    """
    TILES: tl.constexpr = ROWS // (2 * BR)
    GROUPS: tl.constexpr = K // 128
    block = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    slots = block * BT + tl.arange(0, BT)
    if GATED:
        pair = tl.load(order + slots)
        there = pair >= 0
        x_rows = tl.maximum(pair, 0) // TOP_K
    else:
        there = slots >= 0
        x_rows = slots
    x_rows = x_rows.to(tl.int64)
    half: tl.constexpr = ROWS // 2 if GATED else BR
    row = tile * (BR if GATED else 2 * BR) + tl.arange(0, BR)
    weight_row = expert.to(tl.int64) * ROWS + row
    BYTES: tl.constexpr = K // 2 if KIND == "fp4_words" else K
    gate_rows = w + (weight_row * BYTES)[:, None]
    up_rows = gate_rows + half * BYTES
    x_at = x + (x_rows * x_row)[None, :]
    if KIND == "fp4_words":
        s32 = s.to(tl.pointer_type(tl.int32))
        gate_scale_at = s32 + weight_row * GROUPS
        up_scale_at = gate_scale_at + half * GROUPS
    elif KIND == "fp8":
        gate_scale_at = s + ((expert.to(tl.int64) * (ROWS // 128) + row // 128) * GROUPS)[:, None]
        up_scale_at = s + ((expert.to(tl.int64) * (ROWS // 128) + (row + half) // 128) * GROUPS)[:, None]
    gate = tl.zeros((BR, BT), dtype=tl.float32)
    up = tl.zeros((BR, BT), dtype=tl.float32)
    for k in range(GROUPS):
        xs0 = 1.0
        xs1 = 1.0
        if GROUP == 128:
            xs1 = tl.load(xs + x_rows * xs_row + k * xs_group)[None, :]
        elif GROUP == 64:
            xs0 = tl.load(xs + x_rows * xs_row + 2 * k * xs_group)[None, :]
            xs1 = tl.load(xs + x_rows * xs_row + (2 * k + 1) * xs_group)[None, :]
        gate_scale = 1.0
        up_scale = 1.0
        if KIND != "plain":
            gate_scale = tl.load(gate_scale_at + k)
            up_scale = tl.load(up_scale_at + k)
        if KIND == "fp4_words":
            at = x_at + k * 128 + tl.arange(0, 32)[:, None]
            xa = tl.load(at, mask=there[None, :], other=0.0)
            xb = tl.load(at + 32, mask=there[None, :], other=0.0)
            xc = tl.load(at + 64, mask=there[None, :], other=0.0)
            xd = tl.load(at + 96, mask=there[None, :], other=0.0)
            gate = _words_product(gate, gate_rows, k, xa, xb, xc, xd, xs0, xs1, gate_scale, GROUP, ASM)
            up = _words_product(up, up_rows, k, xa, xb, xc, xd, xs0, xs1, up_scale, GROUP, ASM)
        else:
            at = x_at + k * 128 + tl.arange(0, 64)[:, None]
            x0 = tl.load(at, mask=there[None, :], other=0.0)
            x1 = tl.load(at + 64, mask=there[None, :], other=0.0)
            gate = _product(gate, gate_rows, k, x0, x1, xs0, xs1, gate_scale, KIND, GROUP)
            up = _product(up, up_rows, k, x0, x1, xs0, xs1, up_scale, KIND, GROUP)
    gate, up = _scaled(gate, up, r, weight_row, half, xs, x_rows, xs_row, KIND, GROUP)
    _store(gate, up, y, ys, slots, row, tile, limit, ROWS, TILES, GATED, OUT, LIMITED, BR)
