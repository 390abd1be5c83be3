"""Rotary position embedding in plain torch: frequencies, tables and the rotation of adjacent pairs.

Sources: RoPE arXiv 2104.09864, YaRN arXiv 2309.00071, DeepSeek-V3 inference/model.py. Everything here is float32 in the
order of operations of the published code: at position 10^6 a last-bit difference in a frequency is a visible angle.
"""

import math

import torch
from torch import Tensor

from longread.spec.model import RopeSpec


def frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Angle per position of each pair: float32 [dim / 2]. ``dim`` is the number of rotated channels, even."""
    base = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if rope.factor is None:
        return base
    if rope.original_max_position is None:
        raise ValueError("YaRN needs original_max_position")

    def corrected(rotations: float) -> float:
        turns = float(rope.original_max_position or 1) / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(corrected(rope.beta_fast)), 0)
    high: float = min(math.ceil(corrected(rope.beta_slow)), dim - 1)
    if low == high:
        high += 0.001  # the published code's guard against a zero-width ramp
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return base / rope.factor * (1 - keep) + base * keep


def mscale(factor: float | None, value: float) -> float:
    """YaRN's magnitude m = 0.1 * value * ln(factor) + 1; 1 without YaRN."""
    return 1.0 if factor is None or factor <= 1 else 0.1 * value * math.log(factor) + 1.0


def cos_sin(freqs: Tensor, positions: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tables for ``apply_interleaved``. positions: int64 [T]; returns two float32 [T, dim / 2], times ``magnitude``."""
    angles = positions.to(torch.float32)[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)


def turn(cos: Tensor, sin: Tensor) -> Tensor:
    """The tables as complex numbers, for ``rotate_``: build them once a step, not once a layer."""
    return torch.complex(cos, sin)


def apply_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent pairs (x0, x1), (x2, x3), … of the last axis; computed in float32, returned in x's dtype.

    x: [..., dim]; cos, sin: float32, broadcastable to [..., dim / 2] (for [T, H, dim] pass cos[:, None]). The inverse
    rotation is ``apply_interleaved(x, cos, -sin)``. A new contiguous tensor is returned.
    """
    return _rotated(x, torch.complex(cos, sin))


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """``apply_interleaved`` in place: turns complex64, broadcastable to [..., dim / 2]. Returns x."""
    even = all(s % 2 == 0 for s in x.stride()[:-1]) and x.storage_offset() % 2 == 0 and x.stride(-1) == 1
    if x.dtype == torch.float32 and even:  # then the pairs are complex numbers as they lie
        torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2)).mul_(turns)
        return x
    return x.copy_(_rotated(x, turns))


def _rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.complex(x[..., 0::2].float(), x[..., 1::2].float())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
