"""Differentiable pieces that both training twins are made of.

Knows tensors only: norms, rotation, straight-through rounding to the stored formats, experts as wide products. Shapes
never depend on data, so that every function can be compiled. Norms and roundings are float32 whatever autocast says.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

FP8_MAX, FP4_MAX, FP4_GROUP = 448.0, 6.0, 32


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / rms(x) over the last axis, times ``weight``; float32 whatever comes in."""
    wide = x.float()
    out = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return out if weight is None else out * weight.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on adjacent pairs of the last axis; cos, sin broadcast to [..., dim / 2]. The inverse takes ``-sin``."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


def rotate_tail(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``rotate`` on the last 2 * cos.shape[-1] channels, the others unchanged."""
    plain, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    return torch.cat((plain, rotate(turned, cos, sin)), -1)


def turned(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``rms_norm``, then ``rotate_tail``, in one dtype: what every query and key goes through."""
    return rotate_tail(rms_norm(x, weight, eps), cos, sin).to(dtype)


def working_dtype(device: torch.device) -> torch.dtype:
    """What products are taken in: autocast's type where it is on, otherwise float32."""
    on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if on else torch.float32


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] by weight [out, in]: under autocast a bfloat16 product."""
    return functional.linear(x, weight)


def fake_fp8(weight: Tensor, block: tuple[int, int] = (128, 128), pow2: bool = False) -> Tensor:
    """[..., rows, cols] rounded as kernels.quant.ref.quantise_fp8 stores it; the gradient passes unchanged."""
    rows, cols = weight.shape[-2:]
    high, wide = -(-rows // block[0]) * block[0], -(-cols // block[1]) * block[1]
    full = functional.pad(weight.detach(), (0, wide - cols, 0, high - rows))
    tiles = full.view(*weight.shape[:-2], high // block[0], block[0], wide // block[1], block[1])
    peak = tiles.abs().amax((-3, -1), keepdim=True)
    scale = torch.where(peak > 0, peak / FP8_MAX, 1.0)
    if pow2:
        scale = _power_above(scale)
    codes = (tiles / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    rounded = (codes * scale).reshape(full.shape)[..., :rows, :cols]
    return weight + (rounded - weight.detach())


def fake_fp4(weight: Tensor) -> Tensor:
    """[..., rows, cols], cols a multiple of 32, rounded as kernels.quant.ref.quantise_fp4 stores it."""
    groups = weight.detach().unflatten(-1, (-1, FP4_GROUP))
    peak = groups.abs().amax(-1, keepdim=True)
    scale = _power_above(torch.where(peak > 0, peak / FP4_MAX, 1.0))
    size = (groups / scale).abs()
    # E2M1 has steps of 1/2 below 2, of 1 below 4, of 2 up to 6; torch rounds ties to even, which is the even code.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = ((size / step).round() * step).clamp(max=FP4_MAX) * groups.sign() * scale
    return weight + (rounded.flatten(-2) - weight.detach())


def fake_bf16(weight: Tensor) -> Tensor:
    """Rounded to bfloat16, as plain tensors are stored."""
    return weight + (weight.detach().bfloat16().float() - weight.detach())


def _power_above(scale: Tensor) -> Tensor:
    """The least power of two that is not below ``scale``."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def masked_experts(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    gates: Tensor,
    limit: float | None,
    activate: Callable[[Tensor, Tensor, Tensor, float | None], Tensor] | None = None,
) -> Tensor:
    """All experts as three wide products, the unselected ones with gate 0.

    x [N, D]; w1, w3 [E, F, D]; w2 [E, D, F]; gates [N, E], the routing weights. ``limit``: V4's clamp. ``activate``: a
    compiled ``weighted``. Returns [N, D].
    """
    width = w1.shape[-1]
    gate = functional.linear(x, w1.reshape(-1, width))
    up = functional.linear(x, w3.reshape(-1, width))
    mixed = (activate or weighted)(gate, up, gates, limit)
    return functional.linear(mixed, w2.transpose(0, 1).reshape(width, -1))


def weighted(gate: Tensor, up: Tensor, gates: Tensor, limit: float | None) -> Tensor:
    """``gated``, times each expert's gate: gate, up [N, E * F], gates [N, E] -> [N, E * F]."""
    mixed = gated(gate, up, limit).unflatten(-1, (gates.shape[1], -1)) * gates[:, :, None].to(gate.dtype)
    return mixed.flatten(1)


def mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float | None) -> Tensor:
    """The shared (or dense) network: w2 . (silu(w1 x) * w3 x)."""
    return functional.linear(gated(functional.linear(x, w1), functional.linear(x, w3), limit), w2)


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up, clamped as V4 does where ``limit`` is given."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up
