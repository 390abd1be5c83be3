"""RMSNorm of a few rows on a CPU: in plain torch it is seven operations, and a decode step has four a layer."""

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.norm import ref

Floats = NDArray[np.float32]
NO_GAIN = np.empty(0, np.float32)
SMALL = 1 << 14  # numbers; past that torch's vector loops and threads win
RELAXED = {"reassoc", "contract", "arcp", "nsz"}  # sums in vector registers; NaN and infinity keep their meaning


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``ref.rms_norm``."""
    plain = x.dtype == torch.float32 and (weight is None or weight.dtype == torch.float32)
    if x.numel() > SMALL or not 2 <= x.dim() <= 3 or not plain:
        return ref.rms_norm(x, weight, eps)
    out = torch.empty(x.shape)
    rows, results = (x.numpy(), out.numpy()) if x.dim() == 3 else (x.numpy()[:, None], out.numpy()[:, None])
    _rows(rows, NO_GAIN if weight is None else weight.numpy(), eps, results)
    return out


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _rows(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """x, out: [T, H, D]; weight [D], or [0] for no gain."""
    tokens, heads, width = x.shape
    for t in range(tokens):
        for h in range(heads):
            total = np.float32(0)
            for i in range(width):
                total += x[t, h, i] * x[t, h, i]
            inverse = np.float32(1 / math.sqrt(total / width + eps))
            if weight.shape[0]:
                for i in range(width):
                    out[t, h, i] = x[t, h, i] * inverse * weight[i]
            else:
                for i in range(width):
                    out[t, h, i] = x[t, h, i] * inverse
