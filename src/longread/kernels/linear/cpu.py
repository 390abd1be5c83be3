"""Few rows times a narrow weight matrix on a CPU: decode of a small model.

Such a product costs what reading the weight costs. BLAS walks many rows of the matrix side by side, which the
prefetcher does not follow when rows are short: 6 GB/s where one row after the other gives 16 to 20 (LOG.md). Wide
matrices, longer batches and other types are BLAS's, whose blocking wins there.
"""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear import ref

Floats = NDArray[np.float32]
MAX_ROWS = 8
MAX_WIDTH = 1024
# Reassociation lets the sums run in vector registers. NaN and infinity keep their meaning.
RELAXED = {"reassoc", "contract", "arcp", "nsz"}


def narrow(x: Tensor, weight: Tensor) -> bool:
    """Whether the row-by-row kernel applies and pays: at most 8 float32 rows, weight rows of at most 1024 numbers."""
    return (
        x.shape[0] <= MAX_ROWS
        and x.shape[1] <= MAX_WIDTH
        and x.dtype == weight.dtype == torch.float32
        and weight.is_contiguous()
    )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ref.linear``."""
    if not narrow(x, weight):
        return ref.linear(x, weight)
    out = torch.empty(x.shape[0], weight.shape[0])
    product(x.contiguous().numpy(), weight.numpy(), out.numpy())
    return out


@njit(cache=True, fastmath=RELAXED, nogil=True)
def product(x: Floats, weight: Floats, out: Floats) -> None:
    """out[t, o] = sum_i x[t, i] weight[o, i]; every weight row is read once for all t."""
    rows, width = x.shape
    for o in range(weight.shape[0]):
        w = weight[o]
        t = 0
        while t + 4 <= rows:
            s0 = s1 = s2 = s3 = np.float32(0)
            for i in range(width):
                v = w[i]
                s0 += v * x[t, i]
                s1 += v * x[t + 1, i]
                s2 += v * x[t + 2, i]
                s3 += v * x[t + 3, i]
            out[t, o], out[t + 1, o], out[t + 2, o], out[t + 3, o] = s0, s1, s2, s3
            t += 4
        while t < rows:
            s = np.float32(0)
            for i in range(width):
                s += w[i] * x[t, i]
            out[t, o] = s
            t += 1
