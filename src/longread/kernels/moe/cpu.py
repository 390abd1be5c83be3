"""Routed experts of a decode batch on a CPU: one call a layer, each weight row read once for all its tokens.

Pays where kernels/linear/cpu.py pays, and for its reason; everything else is the reference's.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear.cpu import RELAXED, narrow, product
from longread.kernels.mla.cpu import KEYS, exp2
from longread.kernels.mla.ref import LOG2E
from longread.kernels.moe import ref

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


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
    chosen = sorted(set(ids.flatten().tolist()))
    parts = [w[e] for e in chosen for w in (w1, w3, w2)]
    if not all(w.is_contiguous() for w in parts):
        return ref.experts(x, w1, w3, w2, ids, weights, limit)
    out = torch.zeros(x.shape)
    # Addresses, because a list of arrays would cost a conversion an expert, or a compilation for every count of them.
    places = np.array([w.data_ptr() for w in parts], dtype=np.int64).reshape(-1, 3)
    _experts(
        x.contiguous().numpy(), ids.numpy(), weights.numpy(), np.array(chosen, dtype=np.int64), places,
        w1[0].shape[0], math.inf if limit is None else limit, out.numpy(),
    )  # fmt: skip
    return out


def _as_pointer(typing: Any, address: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.float32)(types.int64), generate  # type: ignore[no-untyped-call]


# An address (int64) as a pointer to float32, for ``carray``.
_floats: Any = intrinsic(_as_pointer)


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _hidden(x: Floats, w1: Floats, w3: Floats, limit: float) -> Floats:
    """silu(min(w1 x, limit)) * clip(w3 x, -limit, limit): [T, F]."""
    gate, up = np.empty((x.shape[0], w1.shape[0]), np.float32), np.empty((x.shape[0], w3.shape[0]), np.float32)
    product(x, w1, gate)
    product(x, w3, up)
    cap, one, low = np.float32(limit), np.float32(1), np.float32(-87)
    wide = gate.shape[1]
    block = np.empty(KEYS, np.float32)
    bits = block.view(np.int32)
    for t in range(x.shape[0]):
        for begin in range(0, wide, KEYS):
            g, v = gate[t, begin : begin + KEYS], up[t, begin : begin + KEYS]
            for f in range(g.shape[0]):
                # Written so that NaN stays NaN, as in clamp; below -87 a gate is 0 to rounding.
                g[f] = cap if g[f] > cap else g[f]
                v[f] = cap if v[f] > cap else (-cap if v[f] < -cap else v[f])
                block[f] = (low if g[f] < low else g[f]) * np.float32(-LOG2E)
            exp2(block[: g.shape[0]], bits[: g.shape[0]], np.float32(0))
            for f in range(g.shape[0]):
                g[f] = g[f] / (one + block[f]) * v[f]
    return gate


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _experts(
    x: Floats, ids: Ints, scale: Floats, chosen: Ints, places: Ints, width: int, limit: float, sums: Floats
) -> None:
    """Add every chosen expert's share to ``sums``. places: addresses of w1, w3, w2 of each of ``chosen``.

    width: F. The arrays made from the addresses own nothing; the caller's tensors outlive this call.
    """
    tokens, k = ids.shape
    hidden = x.shape[1]
    pairs, mine = np.empty((tokens * k, 2), np.int64), np.empty((tokens * k, hidden), np.float32)
    out = np.empty((tokens * k, hidden), np.float32)
    for c in range(chosen.shape[0]):
        n = 0
        for t in range(tokens):
            for i in range(k):
                if ids[t, i] == chosen[c]:
                    pairs[n, 0], pairs[n, 1] = t, i
                    mine[n] = x[t]
                    n += 1
        w1, w3 = carray(_floats(places[c, 0]), (width, hidden)), carray(_floats(places[c, 1]), (width, hidden))
        product(_hidden(mine[:n], w1, w3, limit), carray(_floats(places[c, 2]), (hidden, width)), out[:n])
        for j in range(n):
            t, weight = pairs[j, 0], scale[pairs[j, 0], pairs[j, 1]]
            for d in range(hidden):
                sums[t, d] += weight * out[j, d]
