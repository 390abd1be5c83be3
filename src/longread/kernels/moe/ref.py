"""SwiGLU feed-forward and routed experts in plain torch.

Knows weights as native tensors (gate and up [F, D], down [D, F]), which may be read-only views of a mapped file: they
are never copied, stacked or transposed here. Knows no router.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

# Up to this many (token, expert) pairs each pair is a matrix-vector product: no sort, no gather, no scatter.
FEW_PAIRS = 16


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up; ``limit`` (V4) caps the gate above and ``up`` on both sides. ``gate`` is overwritten."""
    if limit is not None:
        gate, up = gate.clamp_(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate, inplace=True).mul_(up)


def mlp(x: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float | None = None) -> Tensor:
    """w2(silu(w1 x) * w3 x): x [T, D], w1 (gate) and w3 (up) [F, D], w2 (down) [D, F] -> [T, D]."""
    return functional.linear(gated(functional.linear(x, w1), functional.linear(x, w3), limit), w2)


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
    out = torch.zeros(x.shape, dtype=torch.float32)
    pairs = ids.numel()
    if pairs == 0:
        return out.to(x.dtype)
    if pairs <= FEW_PAIRS:
        _few(out, x, w1, w3, w2, ids.tolist(), weights.tolist(), limit)
    else:
        _many(out, x, w1, w3, w2, ids, weights, limit)
    return out.to(x.dtype)


def _few(
    out: Tensor,
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: list[list[int]],
    weights: list[list[float]],
    limit: float | None,
) -> None:
    for token, (row, mine) in enumerate(zip(x.unbind(0), ids, strict=True)):
        chosen = sorted(zip(mine, weights[token], strict=True))
        gate = torch.stack([w1[e].mv(row) for e, _ in chosen])
        up = torch.stack([w3[e].mv(row) for e, _ in chosen])
        hidden = gated(gate, up, limit)
        total = out[token]
        for (e, weight), h in zip(chosen, hidden.unbind(0), strict=True):
            total.add_(w2[e].mv(h), alpha=weight)


def _many(
    out: Tensor,
    x: Tensor,
    w1: Sequence[Tensor],
    w3: Sequence[Tensor],
    w2: Sequence[Tensor],
    ids: Tensor,
    weights: Tensor,
    limit: float | None,
) -> None:
    """Tokens sorted by expert; scratch is one expert's share of the batch, never [T * k, D]."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(w1)).tolist()
    tokens = order // ids.shape[1]
    scale = weights.flatten()[order][:, None]
    begin = 0
    for e, count in enumerate(counts):
        if count == 0:
            continue
        share = tokens[begin : begin + count]
        hidden = mlp(x.index_select(0, share), w1[e], w3[e], w2[e], limit)
        out.index_add_(0, share, hidden.float().mul_(scale[begin : begin + count]))
        begin += count
