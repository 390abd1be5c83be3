"""Device functions that pack rows of the cache: the bytes of ``ref.py``, bit for bit, from one row in registers.

Called by kernels that have just computed a row, so that it goes to the store without a pass of its own.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def exponents(amax):
    """Biased exponents, int32, of the power-of-two scales of float32 ``amax``; see ``ref.exponents``."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    return ((bits + 0x1FFFFF) >> 23) - 8


@triton.jit
def powers(exponent):
    """float32 2^(exponent - 127) of int32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_latent(out, x, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """One packed latent. out: uint8 pointer to its row, 8-byte aligned. x: float32 [BLOCK], BLOCK = max(64, next power
    of two of D), anything behind D. Every byte of the row is written, padding as zeros.
    """
    NOPE: tl.constexpr = D - ROPE
    SCALES: tl.constexpr = (NOPE + 63) // 64
    ROW: tl.constexpr = (NOPE + 2 * ROPE + SCALES + 7) // 8 * 8
    GROUPS: tl.constexpr = BLOCK // 64
    c = tl.arange(0, BLOCK)
    groups = tl.reshape(tl.where(c < NOPE, x, 0.0), (GROUPS, 64))
    exponent = exponents(tl.max(tl.abs(groups), 1))
    values = (groups * powers(254 - exponent)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(out + c, tl.reshape(values, (BLOCK,)), mask=c < NOPE)
    turned = (out + NOPE).to(tl.pointer_type(tl.bfloat16))
    tl.store(turned + (c - NOPE), x.to(tl.bfloat16), mask=(c >= NOPE) & (c < D))
    g = tl.arange(0, GROUPS)
    tl.store(out + (NOPE + 2 * ROPE) + g, exponent.to(tl.uint8), mask=g < SCALES)
    pad = tl.arange(0, 8)
    tl.store(
        out + (NOPE + 2 * ROPE + SCALES) + pad, tl.zeros((8,), tl.uint8), mask=NOPE + 2 * ROPE + SCALES + pad < ROW
    )


@triton.jit
def store_index(out, x, D: tl.constexpr, BLOCK: tl.constexpr):
    """One packed index key. out: uint8 pointer to its row, 4-byte aligned; D is a multiple of 4. x: float32 [BLOCK],
    BLOCK the next power of two of D, anything behind D.
    """
    c = tl.arange(0, BLOCK)
    exponent = exponents(tl.max(tl.where(c < D, tl.abs(x), 0.0), 0))
    values = (x * powers(254 - exponent)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(out + c, values, mask=c < D)
    tl.store((out + D).to(tl.pointer_type(tl.float32)), powers(exponent))


@triton.jit
def load_latent(row, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [BLOCK] of one packed latent, zeros behind D. row: uint8 pointer, 8-byte aligned."""
    NOPE: tl.constexpr = D - ROPE
    c = tl.arange(0, BLOCK)
    values = tl.load(row + c, mask=c < NOPE, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    exponent = tl.load(row + (NOPE + 2 * ROPE) + c // 64, mask=c < NOPE, other=127).to(tl.int32)
    turned = (row + NOPE).to(tl.pointer_type(tl.bfloat16))
    rest = tl.load(turned + (c - NOPE), mask=(c >= NOPE) & (c < D), other=0.0).to(tl.float32)
    return tl.where(c < NOPE, values * powers(exponent), rest)
