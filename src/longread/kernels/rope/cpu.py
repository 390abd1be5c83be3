"""Rotation of a few vectors in place on a CPU: in torch it is four operations, and a V4 layer turns four times."""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear.cpu import RELAXED
from longread.kernels.rope import ref

SMALL = 1 << 13  # numbers; past that torch's vector loops and threads win


def rotate_(x: Tensor, turns: Tensor) -> Tensor:
    """See ``ref.rotate_``. Here: float32 x [T, dim] or [T, H, dim] with turns [T, dim / 2] or [T, 1, dim / 2]."""
    plain = x.dtype == torch.float32 and turns.dtype == torch.complex64 and not turns.is_conj()
    each = (x.shape[0], *(1,) * (x.dim() - 2), x.shape[-1] // 2)
    if not plain or x.numel() > SMALL or not 2 <= x.dim() <= 3 or turns.shape != each:
        return ref.rotate_(x, turns)
    vectors, by = x.numpy(), turns.numpy()
    _rotate(vectors[:, None] if x.dim() == 2 else vectors, by if x.dim() == 2 else by[:, 0])
    return x


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _rotate(x: NDArray[np.float32], turns: NDArray[np.complex64]) -> None:
    """x [T, H, dim] by turns [T, dim / 2], overwritten."""
    tokens, heads, dim = x.shape
    for t in range(tokens):
        for h in range(heads):
            for i in range(dim // 2):
                even, odd, turn = x[t, h, 2 * i], x[t, h, 2 * i + 1], turns[t, i]
                x[t, h, 2 * i] = even * turn.real - odd * turn.imag
                x[t, h, 2 * i + 1] = even * turn.imag + odd * turn.real
