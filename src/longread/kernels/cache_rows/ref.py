"""Packed cache rows in plain torch: how a latent or an index key lies in a uint8 store, and the way back.

Knows one row's bytes; knows no page, ring or sequence. Device-agnostic. A latent row of d channels, the last ``rope``
of them rotated, is

    d - rope FP8 E4M3 values | rope bfloat16 | one scale byte (E8M0: exponent + 127) a 64 values | zeros up to 8 bytes

and an index key of d channels is d FP8 values and one float32 scale. Scales are powers of two, so a value times its
scale is exact in bfloat16 and packing what was unpacked changes no value. Sources: DeepSeek-V4 inference/model.py (E4M3
per 64 channels, scale 2^ceil(log2(amax / 448))), OCP MX specification (E8M0).
"""

import torch
from torch import Tensor

BLOCK = 64  # latent channels that share a scale
FLOOR = 1e-4  # least amax: a block of zeros gets a scale that is a normal number
FP8 = torch.float8_e4m3fn


def exponents(amax: Tensor) -> Tensor:
    """Biased exponents of 2^ceil(log2(max(amax, FLOOR) / 448)): int32 in [0, 255], of amax's shape.

    Exact, by the float's bits: 448 is 1.75 * 2^8, so the mantissa carries into the exponent exactly above 1.75. The
    result is at once the E8M0 byte and, shifted by 23, the scale's float32 bits.
    """
    bits = amax.float().clamp_min(FLOOR).contiguous().view(torch.int32)
    return ((bits + 0x1FFFFF) >> 23) - 8


def powers(exponent: Tensor) -> Tensor:
    """float32 2^(exponent - 127) of biased exponents (any integer dtype)."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def latent_bytes(d: int, rope: int) -> int:
    """Bytes of a latent row: 584 for 512 channels with 64 rotated."""
    return -(-(d - rope + 2 * rope + _blocks(d, rope)) // 8) * 8


def pack_latent(x: Tensor, rope: int) -> Tensor:
    """x: [..., d] of any float dtype. Returns uint8 [..., latent_bytes(d, rope)]."""
    d = x.shape[-1]
    nope = d - rope
    values, bytes_ = _quantised(x[..., :nope].float())
    out = x.new_zeros(*x.shape[:-1], latent_bytes(d, rope), dtype=torch.uint8)
    out[..., :nope] = values.view(torch.uint8)
    out[..., nope : nope + 2 * rope] = x[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    out[..., nope + 2 * rope : nope + 2 * rope + _blocks(d, rope)] = bytes_
    return out


def unpack_latent(rows: Tensor, d: int, rope: int, dtype: torch.dtype) -> Tensor:
    """rows: uint8 [..., latent_bytes(d, rope)]. Returns ``dtype`` [..., d]; exact in bfloat16 and float32."""
    nope = d - rope
    values = rows[..., :nope].contiguous().view(FP8).float()
    turned = rows[..., nope : nope + 2 * rope].contiguous().view(torch.bfloat16)
    scales = powers(rows[..., nope + 2 * rope : nope + 2 * rope + _blocks(d, rope)])
    values = values * scales.repeat_interleave(BLOCK, -1)[..., :nope]
    return torch.cat([values.to(dtype), turned.to(dtype)], -1)


def roundtrip_latent(x: Tensor, rope: int) -> Tensor:
    """What unpacking returns after packing, in x's dtype and shape [..., d]."""
    return unpack_latent(pack_latent(x, rope), x.shape[-1], rope, x.dtype)


def index_bytes(di: int) -> int:
    """Bytes of an index key: 132 for 128 channels."""
    return di + 4


def pack_index(x: Tensor) -> Tensor:
    """x: [..., di], di a multiple of 4. Returns uint8 [..., index_bytes(di)]."""
    exponent = exponents(x.float().abs().amax(-1, keepdim=True))
    scale = powers(exponent)
    values = (x.float() / scale).to(FP8)
    return torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack_index(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: uint8 [..., index_bytes(di)]. Returns values float8_e4m3fn [..., di], to be multiplied by float32 [...]."""
    di = rows.shape[-1] - 4
    return rows[..., :di].contiguous().view(FP8), rows[..., di:].contiguous().view(torch.float32).squeeze(-1)


def _blocks(d: int, rope: int) -> int:
    return -(-(d - rope) // BLOCK)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: float32 [..., n]. FP8 values [..., n] and their blocks' scale bytes [..., ceil(n / 64)]."""
    n = x.shape[-1]
    blocks = -(-n // BLOCK)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - n)).unflatten(-1, (blocks, BLOCK))
    exponent = exponents(padded.abs().amax(-1))
    values = (padded / powers(exponent)[..., None]).flatten(-2)[..., :n]
    return values.to(FP8), exponent.to(torch.uint8)
