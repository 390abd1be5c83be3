"""RMSNorm in plain torch. Knows one row at a time; knows no model."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype.

    x: [..., D] float32 or bfloat16, D > 0. weight: [D] or None (no gain). Lower precisions are normalised in float32
    and rounded before the gain, as DeepSeek's reference does. A new tensor is returned.

    torch's own rms_norm is a dozen operations on a CPU; this makes one tensor of x's size and works in place.
    """
    wide = x if x.dtype.itemsize >= 4 else x.float()
    size = x.shape[-1]
    inverse = torch.linalg.vector_norm(wide, 2, -1, True).square_().mul_(1 / size).add_(eps).rsqrt_()
    y = (wide * inverse).to(x.dtype)
    return y if weight is None else y.mul_(weight)
