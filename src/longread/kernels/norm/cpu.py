"""RMSNorm of a few rows on a CPU: in plain torch it is seven operations, and a decode step has four a layer."""

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.norm import ref

Floats = NDArray[np.float32]
SMALL = 1 << 14  # numbers; past that torch's vector loops and threads win
RELAXED = {"reassoc", "contract", "arcp", "nsz"}  # sums in vector registers; NaN and infinity keep their meaning


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``ref.rms_norm``."""
    if x.numel() > SMALL or x.dim() != 2 or weight is None or not (x.dtype == weight.dtype == torch.float32):
        return ref.rms_norm(x, weight, eps)
    out = torch.empty(x.shape)
    _rows(x.numpy(), weight.numpy(), eps, out.numpy())
    return out


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _rows(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    width = x.shape[1]
    for t in range(x.shape[0]):
        total = np.float32(0)
        for i in range(width):
            total += x[t, i] * x[t, i]
        inverse = np.float32(1 / math.sqrt(total / width + eps))
        for i in range(width):
            out[t, i] = x[t, i] * inverse * weight[i]
