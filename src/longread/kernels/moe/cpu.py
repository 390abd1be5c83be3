"""Routed experts of a decode batch on a CPU: one call an expert, each weight row read once for all its tokens.

Pays where kernels/linear/cpu.py pays, and for its reason; everything else is the reference's.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear.cpu import RELAXED, narrow, product
from longread.kernels.moe import ref

Floats = NDArray[np.float32]


def mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float | None = None) -> Tensor:
    """See ``ref.mlp``."""
    if not (narrow(x, w1) and w3.is_contiguous() and w2.is_contiguous() and w2.shape[1] <= 1024):
        return ref.mlp(x, w1, w3, w2, limit)
    out = torch.empty(x.shape[0], w2.shape[0])
    cap = math.inf if limit is None else limit
    product(_hidden(x.contiguous().numpy(), w1.numpy(), w3.numpy(), cap), w2.numpy(), out.numpy())
    return out


def experts(
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
) -> Tensor:
    """See ``ref.experts``; experts are added in ascending order here too."""
    if not (narrow(x, w1[0]) and w2[0].shape[1] <= 1024):
        return ref.experts(x, w1, w3, w2, ids, weights, limit)
    out, rows, k = torch.zeros(x.shape), x.contiguous().numpy(), ids.shape[1]
    sums, scale = out.numpy(), weights.numpy()
    cap = math.inf if limit is None else limit
    chosen: dict[int, list[int]] = {}
    for pair, e in enumerate(ids.flatten().tolist()):
        chosen.setdefault(e, []).append(pair)
    for e, pairs in sorted(chosen.items()):
        _expert(rows, np.array(pairs), k, scale, w1[e].numpy(), w3[e].numpy(), w2[e].numpy(), cap, sums)
    return out


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _hidden(x: Floats, w1: Floats, w3: Floats, limit: float) -> Floats:
    """silu(min(w1 x, limit)) * clip(w3 x, -limit, limit): [T, F]."""
    gate, up = np.empty((x.shape[0], w1.shape[0]), np.float32), np.empty((x.shape[0], w3.shape[0]), np.float32)
    product(x, w1, gate)
    product(x, w3, up)
    cap, one = np.float32(limit), np.float32(1)
    for t in range(x.shape[0]):
        for f in range(w1.shape[0]):
            g, v = gate[t, f], up[t, f]
            # Written so that NaN stays NaN, as in clamp.
            if g > cap:
                g = cap
            if v > cap:
                v = cap
            elif v < -cap:
                v = -cap
            gate[t, f] = g / (one + math.exp(-g)) * v
    return gate


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _expert(
    x: Floats, pairs: NDArray[np.int64], k: int, scale: Floats,
    w1: Floats, w3: Floats, w2: Floats, limit: float, sums: Floats,
) -> None:  # fmt: skip
    """Add one expert's share to ``sums``. pairs: its places in the flattened ids [T * k]."""
    mine = np.empty((pairs.shape[0], x.shape[1]), np.float32)
    for n in range(pairs.shape[0]):
        mine[n] = x[pairs[n] // k]
    out = np.empty((pairs.shape[0], w2.shape[0]), np.float32)
    product(_hidden(mine, w1, w3, limit), w2, out)
    for n in range(pairs.shape[0]):
        t = pairs[n] // k
        weight = scale[t, pairs[n] % k]
        for d in range(out.shape[1]):
            sums[t, d] += weight * out[n, d]
