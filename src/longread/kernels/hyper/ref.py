"""Manifold-constrained hyper-connections (mHC) in plain torch: mixing weights, stream update, final collapse.

Knows residual streams (float32 throughout, whatever the model's dtype); knows no sublayer. The mixing matrix is made
doubly stochastic by Sinkhorn-Knopp. Sources: arXiv 2512.24880, DeepSeek-V4 inference/model.py.
"""

import torch
from torch import Tensor
from torch.nn import functional


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """softmax over the last axis + eps, then columns, then (iters - 1) times rows and columns divided by their sums.

    logits: float32 [T, m, m]; returns the same shape. The first matrix index is the source stream.
    """
    a = logits.softmax(-1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a


def mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A sublayer's input and the weights that take its output back.

    streams: float32 [T, m, D]. fn: float32 [2m + m*m, m*D], base: float32 [2m + m*m], scale: float32 [3].
    Returns (input float32 [T, D], post [T, m], A [T, m, m]), for ``update``.
    """
    tokens, m, _ = streams.shape
    logits = _projected(streams, fn, rms_eps)
    pre, post, a = torch.split_with_sizes(logits, [m, m, m * m], -1)
    pre = torch.sigmoid(pre * scale[0] + base[:m]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base[m : 2 * m])
    a = sinkhorn((a * scale[2] + base[2 * m :]).view(tokens, m, m), iters, eps)
    return torch.bmm(pre[:, None], streams)[:, 0], post, a


def update(streams: Tensor, y: Tensor, post: Tensor, a: Tensor) -> Tensor:
    """X'_k = post_k y + sum_j A[j, k] X_j. ``streams`` [T, m, D] is overwritten and returned; y: [T, D], any float."""
    mixed = torch.bmm(a.transpose(1, 2), streams)
    return streams.copy_(mixed.addcmul_(post[:, :, None], y.float()[:, None]))


def head(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, rms_eps: float) -> Tensor:
    """The last collapse of the streams: fn float32 [m, m*D], base [m], scale [1]; float32 [T, m, D] -> [T, D]."""
    pre = torch.sigmoid(_projected(streams, fn, rms_eps) * scale + base) + eps
    return torch.bmm(pre[:, None], streams)[:, 0]


def _projected(streams: Tensor, fn: Tensor, rms_eps: float) -> Tensor:
    """fn . rms(vec X): the norm runs over all m*D numbers of a token and has no gain, so it commutes with fn."""
    flat = streams.flatten(1)
    inverse = (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()
    return functional.linear(flat, fn) * inverse
