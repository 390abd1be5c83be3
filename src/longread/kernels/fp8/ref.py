"""Products with FP8 or plain weights in plain torch, and the steps between products that may quantise their result.

Knows activations as rows, a weight as one matrix or a stack of them, and DeepSeek's FP8 blocks: 1 x 128 of an
activation, 128 x 128 of a weight. Knows no model. Runs on any device, in any float dtype; nothing is quantised unless
asked. Sources: DeepSeek-V3 and V4 inference/kernel.py (scales are powers of two, amax is floored at 1e-4).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.cache_rows.ref import roundtrip_latent
from longread.kernels.norm.ref import rms_norm
from longread.kernels.rope.ref import apply_interleaved

BLOCK = 128
FP8 = torch.float8_e4m3fn
FLOOR = 1e-4  # the least amax that counts: zeros get a scale too


class Quantised(NamedTuple):
    """Rows in FP8. values: float8_e4m3fn [T, K]. scales: float32 [T, ceil(K / 128)], powers of two.

    Scales lie column after column in memory, stride (1, >= T): as torch's scaled_mm wants 1 x 128 blocks.
    """

    values: Tensor
    scales: Tensor


class Fp8Weight(NamedTuple):
    """values: float8_e4m3fn [..., N, K]. scales: float32 [..., ceil(N / 128), ceil(K / 128)]."""

    values: Tensor
    scales: Tensor


Weight = Fp8Weight | Tensor


def quantise(x: Tensor) -> Quantised:
    """x: [T, K] of any float dtype. Scale of a token's 128 channels: 2^ceil(log2(max(amax, 1e-4) / 448))."""
    tokens, width = x.shape
    blocks = -(-width // BLOCK)
    wide = functional.pad(x.float(), (0, blocks * BLOCK - width)).view(tokens, blocks, BLOCK)
    scales = x.new_empty(blocks, tokens, dtype=torch.float32).t()
    scales.copy_(power_above(wide.abs().amax(-1)))
    values = (wide / scales[:, :, None]).view(tokens, -1)[:, :width]
    return Quantised(values.to(FP8).contiguous(), scales)


def power_above(peak: Tensor) -> Tensor:
    """The least power of two that times 448 reaches max(peak, 1e-4). float32 to float32."""
    # 448 is 1.75 * 2^8: the exponent of peak less 8, and one more where its mantissa exceeds 1.75 (0x600000).
    bits = peak.clamp(min=FLOOR).view(torch.int32)
    return ((((bits + 0x1FFFFF) >> 23) - 8) << 23).view(torch.float32)


def dequantise(x: Quantised) -> Tensor:
    """float32 [T, K]."""
    wide = x.scales.repeat_interleave(BLOCK, 1)[:, : x.values.shape[1]]
    return x.values.float() * wide


def widened(w: Weight) -> Tensor:
    """A weight's values in float32, [..., N, K]."""
    if isinstance(w, Tensor):
        return w.float()
    n, k = w.values.shape[-2:]
    wide = w.scales.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return w.values.float() * wide


def linear(x: Tensor | Quantised, w: Weight, out_dtype: torch.dtype | None = None) -> Tensor:
    """x [T, K] times w [N, K] -> [T, N], summed in float32.

    A quantised x takes an FP8 weight, a plain one a plain weight of its dtype. out_dtype: x's, or bfloat16 where x is
    quantised. Raises TypeError for a pair that does not go together.
    """
    dtype = result_dtype(x, w, out_dtype)
    if isinstance(x, Tensor) and isinstance(w, Tensor) and x.dtype == w.dtype == dtype:
        return functional.linear(x, w)
    wide = x.float() if isinstance(x, Tensor) else dequantise(x)
    return functional.linear(wide, widened(w)).to(dtype)


def grouped_linear(x: Tensor | Quantised, w: Weight) -> Tensor:
    """Channels in groups, each with its own matrix: x [T, G * K], w [G, N, K] -> [T, G * N]. dtypes as in ``linear``.

    Raises ValueError where a quantised x's groups are no whole blocks of 128.
    """
    dtype = result_dtype(x, w, None)
    wide, matrix = (x, w) if isinstance(x, Tensor) and isinstance(w, Tensor) else (_float(x), widened(w))
    groups, _, width = matrix.shape
    if not isinstance(x, Tensor) and width % BLOCK:
        raise ValueError(f"groups of {width} quantised channels; a group must be whole blocks of {BLOCK}")
    parts = wide.view(-1, groups, width).transpose(0, 1)
    return torch.bmm(parts, matrix.transpose(1, 2)).transpose(0, 1).flatten(1).to(dtype)


def result_dtype(x: Tensor | Quantised, w: Weight, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a product. Raises TypeError where only one of x and w is in FP8."""
    if isinstance(x, Tensor) != isinstance(w, Tensor):
        raise TypeError("an FP8 weight takes quantised rows, and a plain one plain rows")
    return out_dtype or (x.dtype if isinstance(x, Tensor) else torch.bfloat16)


def _float(x: Tensor | Quantised) -> Tensor:
    return x.float() if isinstance(x, Tensor) else dequantise(x)


def gated(h: Tensor, limit: float | None, quantised: bool) -> Quantised | Tensor:
    """h [T, 2F], gate then up -> silu(min(gate, limit)) * clip(up, -limit, limit) [T, F], in h's dtype or quantised."""
    gate, up = h.float().chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out = functional.silu(gate) * up
    return quantise(out) if quantised else out.to(h.dtype)


def latents(
    x: Tensor, q_gain: Tensor, kv_gain: Tensor, eps: float, cos: Tensor, sin: Tensor, quantised: bool, packed: bool
) -> tuple[Quantised | Tensor, Tensor]:
    """The two latent vectors of a token from one projection: (c_q [T, q], kv [T, d]), each normalised with its gain.

    x: [T, q + d], q and d being the gains' lengths; rows may be strided. RoPE (cos, sin: float32 [T, rope / 2]) on kv's
    last channels. ``quantised``: c_q comes in FP8. ``packed``: kv is rounded as the cache's packed rows hold it.
    """
    rank = q_gain.shape[0]
    c_q = rms_norm(x[:, :rank].float(), q_gain.float(), eps)
    kv = rms_norm(x[:, rank:].float(), kv_gain.float(), eps)
    rope = 2 * cos.shape[1]
    kv[:, -rope:] = apply_interleaved(kv[:, -rope:], cos, sin)
    if packed:
        kv = roundtrip_latent(kv, rope)
    return quantise(c_q) if quantised else c_q.to(x.dtype), kv.to(x.dtype)


def turn_back(o: Tensor, cos: Tensor, sin: Tensor, quantised: bool) -> Quantised | Tensor:
    """RoPE undone on the last channels of each head: o [T, H, d] -> [T, H * d], in o's dtype or quantised."""
    rope = 2 * cos.shape[1]
    out = o.float() if o.dtype != torch.float32 else o.clone()
    out[..., -rope:] = apply_interleaved(out[..., -rope:], cos[:, None], -sin[:, None])
    return quantise(out.flatten(1)) if quantised else out.flatten(1).to(o.dtype)
