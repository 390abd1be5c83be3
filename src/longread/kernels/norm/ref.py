"""RMSNorm in plain torch. Knows one row at a time; knows no model."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype.

    x: [..., D] float32 or bfloat16, D > 0. weight: [D] or None (no gain). Lower precisions are normalised in float32
    and rounded before the gain, as DeepSeek's reference does. A new tensor is returned.
    """
    if x.dtype.itemsize >= 4:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    y = functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
    return y if weight is None else y * weight.to(x.dtype)
