# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""What V4's attention kernels share: queries made ready, packed rows made numbers.

Sources: DeepSeek-V4 inference/model.py (weightless RMS per head, rotated last channels).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rotated(raw, cos, sin, D: tl.constexpr, PAIRS: tl.constexpr):
    """Queries [M, D] with their last 2 * PAIRS channels rotated, float32. cos, sin: the token's angles."""
    pair = tl.arange(0, D // 2) - (D // 2 - PAIRS)
    c = tl.load(cos + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=pair >= 0, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(raw, (raw.shape[0], D // 2, 2)))
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (raw.shape[0], D))


@triton.jit
def normalised(q, cos, sin, scratch, head, heads, eps, scale, D: tl.constexpr, PAIRS: tl.constexpr):
    """Queries of heads ``head`` [M] of one token, [M, D] bfloat16: normalised, rotated, times scale * log2(e).

    q, scratch: this token's [heads, D]; cos, sin: its PAIRS angles. What is returned has been written to ``scratch``
    and read again: an operand that is loaded stays in shared memory, one that is computed would sit in registers
    that the accumulator needs. Every thread of the program must come here.
    """
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    real = head[:, None] < heads
    raw = tl.load(q + at, mask=real, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(raw * raw, 1) / D + eps) * (scale * LOG2E)
    tl.store(scratch + at, rotated(raw * factor[:, None], cos, sin, D, PAIRS).to(tl.bfloat16), mask=real)
    tl.debug_barrier()
    return tl.load(scratch + at, mask=real, other=0.0)


@triton.jit
def turned(q, cos, sin, head, heads, eps, scale, D: tl.constexpr, PAIRS: tl.constexpr):
    """The same queries rotated only, and what their products are to be multiplied by, [M]: for few heads."""
    at = head[:, None] * D + tl.arange(0, D)[None, :]
    raw = tl.load(q + at, mask=head[:, None] < heads, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(raw * raw, 1) / D + eps) * (scale * LOG2E)
    return rotated(raw, cos, sin, D, PAIRS).to(tl.bfloat16), factor


@triton.jit
def unpacked(store, row, seen, D: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr):
    """Packed rows ``row`` (int64 [N]) as [N, D] bfloat16, zeros where not ``seen``. Layout: cache_rows/ref.py.

    Taken as [N, D / 64, 64], so that a thread's channels share one scale and it is read once.
    """
    NOPE: tl.constexpr = D - ROPE
    block = tl.arange(0, D // 64)
    channel = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    # Rows lie at multiples of 8 bytes and no more. Said, because of page * 64 + row % 64 the compiler may conclude that
    # every row number is a multiple of 16, and load 16 bytes at once from where only 8 are aligned.
    at, pair_at = tl.multiple_of(row * WIDTH, 8), tl.multiple_of(row * (WIDTH // 2), 4)
    seen3 = seen[:, None, None]
    bits = tl.load(store + at[:, None, None] + channel[None], mask=seen3 & (channel < NOPE)[None], other=0)
    used = seen[:, None] & (block * 64 < NOPE)[None, :]
    exponent = tl.load(store + at[:, None] + (NOPE + 2 * ROPE) + block[None, :], mask=used, other=0)
    scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
    pair = (store + NOPE).to(tl.pointer_type(tl.bfloat16)) + pair_at[:, None, None]
    turned = tl.load(pair + (channel - NOPE)[None], mask=seen3 & (channel >= NOPE)[None], other=0.0)
    return tl.reshape(tl.where((channel < NOPE)[None], values.to(tl.bfloat16), turned), (row.shape[0], D))
