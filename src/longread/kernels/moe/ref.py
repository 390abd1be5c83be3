"""SwiGLU feed-forward and routed experts in plain torch.

Knows weights as native tensors (gate and up [F, D], down [D, F]), which may be read-only views of a mapped file: they
are never copied, stacked or transposed here. Knows no router.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.linear.ref import linear, product

# Numbers of scratch up to which all (token, expert) pairs are laid out at once (16 MiB of float32); past that the
# experts take turns and only one expert's share exists.
LAID_OUT = 4 << 20


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; ``limit`` (V4) caps the gate above and ``up`` on both sides. ``gate`` is overwritten."""
    if limit is not None:
        gate, up = gate.clamp_(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate, inplace=True).mul_(up)


def mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float | None = None) -> Tensor:
    """w2(silu(w1 x) * w3 x): x [T, D], w1 (gate) and w3 (up) [F, D], w2 (down) [D, F] -> [T, D]."""
    return linear(gated(linear(x, w1), linear(x, w3), limit), w2)


def experts(
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None = None,
) -> Tensor:
    """Weighted sum of each token's experts, in x's dtype (summed in float32).

    x: [T, D]. w1, w3, w2: per expert, as in ``mlp``. ids: int64 [T, k]. weights: float32 [T, k]. Experts are added in
    ascending order, so a token's sum does not depend on the order of its ids.
    """
    pairs = ids.numel()
    if pairs == 0:
        return torch.zeros_like(x)
    if x.shape[0] == 1:
        return _one(x[0], w1, w3, w2, ids, weights, limit)[None]
    if pairs * 2 * (x.shape[1] + w1[0].shape[0]) <= LAID_OUT:
        return _laid_out(x, w1, w3, w2, ids, weights, limit)
    return _in_turn(x, w1, w3, w2, ids, weights, limit)


def _one(
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
) -> Tensor:
    """One token, x [D]: matrix-vector products only. The routing weight goes in before w2, which is linear."""
    chosen, order = ids[0].sort()
    experts_ = chosen.tolist()
    gate, up = x.new_empty(2, len(experts_), w1[0].shape[0])
    for e, g, u in zip(experts_, gate.unbind(0), up.unbind(0), strict=True):
        torch.mv(w1[e], x, out=g)
        torch.mv(w3[e], x, out=u)
    scale = weights[0][order][:, None]
    if x.dtype == torch.float32:
        out = torch.zeros_like(x)
        for e, h in zip(experts_, gated(gate, up, limit).mul_(scale).unbind(0), strict=True):
            out.addmv_(w2[e], h)
        return out
    parts = torch.stack([w2[e].mv(h) for e, h in zip(experts_, gated(gate, up, limit).unbind(0), strict=True)])
    return parts.float().mul_(scale).sum(0).to(x.dtype)


def _laid_out(
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
) -> Tensor:
    """A few tokens: all pairs sorted by expert in one buffer, so an expert is three matmuls and nothing else."""
    chosen, order = ids.flatten().sort(stable=True)
    tokens = order // ids.shape[1]
    shares = _shares(chosen, len(w1))
    rows = x.index_select(0, tokens)
    gate, up = x.new_empty(2, rows.shape[0], w1[0].shape[0])
    for e, share in shares:
        mine = rows[share]
        product(mine, w1[e], gate[share])
        product(mine, w3[e], up[share])
    hidden = gated(gate, up, limit)
    for e, share in shares:
        product(hidden[share], w2[e], rows[share])
    out = torch.zeros(x.shape, dtype=torch.float32)
    out.index_add_(0, tokens, rows * weights.flatten()[order][:, None])
    return out.to(x.dtype)


def _in_turn(
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
) -> Tensor:
    """Many tokens: scratch is one expert's share of the batch, never [T * k, D]."""
    chosen, order = ids.flatten().sort(stable=True)
    tokens = order // ids.shape[1]
    scale = weights.flatten()[order][:, None]
    out = torch.zeros(x.shape, dtype=torch.float32)
    for e, share in _shares(chosen, len(w1)):
        mine = tokens[share]
        hidden = mlp(x.index_select(0, mine), w1[e], w3[e], w2[e], limit)
        out.index_add_(0, mine, hidden.float().mul_(scale[share]))
    return out.to(x.dtype)


def _shares(chosen: Tensor, count: int) -> list[tuple[int, slice]]:
    """(expert, its rows) for every expert that occurs in the sorted ``chosen``."""
    ends = torch.bincount(chosen, minlength=count).cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(begins, ends, strict=True)) if a < b]
