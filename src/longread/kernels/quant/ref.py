"""Block quantisation of weights: FP8 E4M3 with tile scales, FP4 E2M1 pairs with row-group scales.

Knows codes, scales and tiles of one matrix; knows no tensor names, files or models. The forms are DeepSeek's on-disk
forms (deepseek-ai/DeepSeek-V3 README_WEIGHTS.md; V4: OCP Microscaling 1.0 E2M1 and E8M0 codes):

- FP8: ``W[i, j] = code[i, j] * scale[i // rows, j // cols]``; scales are float32, or E8M0 bytes (2^(byte - 127)).
- FP4: int8 [out, in / 2], the low nibble is the even column; one E8M0 scale per row and 32 columns.

Decoding works in strips of rows, so that beside its result it holds a bounded temporary whatever the matrix's size.
"""

from typing import Literal

import torch
from torch import Tensor

ScaleFormat = Literal["float32", "float32_pow2", "ue8m0"]
FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Elements decoded at a time: 512 KiB of float32. It stays in cache, and it is small beside the results, between which
# the allocator leaves holes of this size.
_STRIP = 1 << 17


def decode_scale(scale: Tensor) -> Tensor:
    """float32 values of a scale tensor of any shape: float32 as it is, float8_e8m0fnu as 2^(byte - 127).

    Byte 255 is NaN. Read as bytes, since torch has few CPU operations on float8_e8m0fnu.
    """
    if scale.dtype == torch.float32:
        return scale
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"a scale is float32 or float8_e8m0fnu, not {scale.dtype}")
    byte = scale.view(torch.uint8).to(torch.int32)
    # A float32 with exponent field e is 2^(e - 127): the byte moves there. 0 means 2^-127, a subnormal; 255 is NaN.
    bits = torch.where(byte == 0, 0x00400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def encode_ue8m0(scale: Tensor) -> Tensor:
    """float8_e8m0fnu of positive float32 values, rounded up to the next power of two (within 2^-127 .. 2^127)."""
    mantissa, exponent = torch.frexp(scale.float())  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return (power.clamp(-127, 127) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantise_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[rows, cols] in ``dtype`` from float8_e4m3fn [rows, cols] and a scale [ceil(rows / b0), ceil(cols / b1)].

    The product is taken in float32 and rounded once. Raises ValueError when the scale has another shape.
    """
    rows, cols = weight.shape
    _check_scale(scale, scale_shape((rows, cols), block))
    # Widened over columns only: [row blocks, cols], 1 / b0 of the matrix.
    wide = decode_scale(scale).repeat_interleave(block[1], dim=1)[:, :cols]
    row_block = torch.arange(rows, device=weight.device) // block[0]
    out = torch.empty(rows, cols, dtype=dtype, device=weight.device)
    strip = max(1, _STRIP // max(1, cols))
    for lo in range(0, rows, strip):
        out[lo : lo + strip] = wide[row_block[lo : lo + strip]].mul_(weight[lo : lo + strip].float())
    return out


def quantise_fp8(weight: Tensor, block: tuple[int, int], scale_format: ScaleFormat) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [rows, cols], scale) of a float [rows, cols]: each tile's largest magnitude maps to 448.

    ``scale_format``: "float32"; "float32_pow2" (rounded up to a power of two, kept as float32, as V3.1 stores them);
    "ue8m0" (the same as bytes). A tile of zeros gets scale 1.
    """
    rows, cols = weight.shape
    shape = scale_shape((rows, cols), block)
    padded = weight.new_zeros(shape[0] * block[0], shape[1] * block[1], dtype=torch.float32)
    padded[:rows, :cols] = weight
    tiles = padded.view(shape[0], block[0], shape[1], block[1])
    peak = tiles.abs().amax(dim=(1, 3))
    scale = torch.where(peak > 0, peak / FP8_MAX, 1.0)
    stored = scale if scale_format == "float32" else encode_ue8m0(scale)
    factor = decode_scale(stored)
    codes = (tiles / factor[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX)
    codes = codes.reshape(padded.shape)[:rows, :cols].to(torch.float8_e4m3fn)
    return codes, (factor if scale_format == "float32_pow2" else stored)


def dequantise_fp4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 2 * half] in ``dtype`` from int8 [rows, half] pairs and a scale [rows, ceil(2 * half / 32)]."""
    rows, half = packed.shape
    _check_scale(scale, (rows, -(-2 * half // FP4_GROUP)))
    factors = decode_scale(scale)
    # Both values of every byte at once: [256, 2], low nibble (even column) first.
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    out = torch.empty(rows, 2 * half, dtype=dtype, device=packed.device)
    strip = max(1, _STRIP // max(1, 2 * half))
    for lo in range(0, rows, strip):
        codes = packed[lo : lo + strip].contiguous().view(torch.uint8).int()
        wide = factors[lo : lo + strip].repeat_interleave(FP4_GROUP, dim=1)[:, : 2 * half]
        out[lo : lo + strip] = pairs[codes].flatten(1).mul_(wide)
    return out


def quantise_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [rows, cols / 2], float8_e8m0fnu [rows, ceil(cols / 32)]) of a float [rows, cols], cols even.

    The scale is the least power of two that keeps the group within 6; codes are the nearest E2M1 value, ties to the
    even code.
    """
    rows, cols = weight.shape
    if cols % 2:
        raise ValueError(f"FP4 packs pairs of columns, so the number of columns must be even, not {cols}")
    groups = -(-cols // FP4_GROUP)
    padded = weight.new_zeros(rows, groups * FP4_GROUP, dtype=torch.float32)
    padded[:, :cols] = weight
    tiles = padded.view(rows, groups, FP4_GROUP)
    peak = tiles.abs().amax(dim=2)
    scale = encode_ue8m0(torch.where(peak > 0, peak / FP4_MAX, 1.0))
    scaled = (tiles / decode_scale(scale)[:, :, None]).view(rows, -1)[:, :cols]
    codes = _nearest_e2m1(scaled.abs()) + 8 * torch.signbit(scaled).to(torch.uint8)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).view(torch.int8), scale


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Tiles of ``block`` that cover a matrix of ``shape``; the last row and column of tiles may be partial."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _nearest_e2m1(magnitude: Tensor) -> Tensor:
    """uint8 codes 0..7 of magnitudes; a value halfway between two codes goes to the even one."""
    values = torch.tensor(E2M1, device=magnitude.device)
    middles = (values[1:] + values[:-1]) / 2
    up = torch.bucketize(magnitude, middles, right=True)  # a tie counts as above
    down = torch.bucketize(magnitude, middles)  # a tie counts as below
    return torch.where(up % 2 == 0, up, down).to(torch.uint8)


def _check_scale(scale: Tensor, expected: tuple[int, int]) -> None:
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale of shape {tuple(scale.shape)}, expected {expected}")
