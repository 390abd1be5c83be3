"""Manifold-constrained hyper-connections (mHC) in plain torch: mixing weights, stream update, final collapse.

Knows residual streams (float32 in ``mix``, ``update`` and ``head``, whatever the model's dtype); knows no sublayer. The
mixing matrix is made doubly stochastic by Sinkhorn-Knopp. ``enter`` and ``leave`` are what a device does in one go
between two sublayers, over streams kept in the model's dtype; their arithmetic is float32 and only what is stored is
rounded. Sources: arXiv 2512.24880, DeepSeek-V4 inference/model.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.fp8.ref import Quantised, quantise


class HyperWeights(NamedTuple):
    """One hyper-connection as a device keeps it. fn: float32 [n, m*D], or bfloat16 [2, n, m*D], two parts whose sum it
    is; base: float32 [n]; scale: float32 [3], or [1] of the last collapse. n: 2m + m*m, or m of the last collapse.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


class Entered(NamedTuple):
    """A sublayer's input u [T, D] in the streams' dtype, the same as FP8 or None, and what takes its output back:
    post float32 [T, m], a float32 [T, m, m].
    """

    u: Tensor
    q: Quantised | None
    post: Tensor
    a: Tensor


def weights(fn: Tensor, base: Tensor, scale: Tensor) -> HyperWeights:
    """The device's form, made once at load. fn: float32 [n, m*D]."""
    return HyperWeights(fn.float(), base.float(), scale.float())


def enter(
    streams: Tensor,
    y: Tensor | None,
    post: Tensor | None,
    a: Tensor | None,
    w: HyperWeights,
    gain: Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
    quantised: bool,
) -> Entered:
    """Take the last sublayer's output into the streams, then make the next one's input: mixed, normed, with gain.

    streams: [T, m, D], overwritten where ``y`` [T, D] is given, with its post [T, m] and a [T, m, m]. gain: [D].
    """
    x = streams.float()
    if y is not None:
        if post is None or a is None:
            raise ValueError("y comes with post and a")
        x = streams.copy_(update(x, y, post, a)).float()
    u, post, a = mix(x, w.fn, w.base, w.scale, iters, eps, rms_eps)
    normed = _normed(u, gain, rms_eps, streams.dtype)
    return Entered(normed, quantise(normed) if quantised else None, post, a)


def leave(
    streams: Tensor,
    y: Tensor,
    post: Tensor,
    a: Tensor,
    rows: Tensor,
    w: HyperWeights,
    gain: Tensor,
    eps: float,
    rms_eps: float,
) -> Tensor:
    """What the head reads: rows (int64 [R]) of the streams with the last output taken in, collapsed, normed, with gain.

    The streams stay as they are. Returns [R, D] in their dtype.
    """
    x = update(streams[rows].float(), y[rows], post[rows], a[rows]).to(streams.dtype).float()
    return _normed(head(x, w.fn, w.base, w.scale, eps, rms_eps), gain, rms_eps, streams.dtype)


def _normed(u: Tensor, gain: Tensor, rms_eps: float, dtype: torch.dtype) -> Tensor:
    return (u * (u.square().mean(-1, keepdim=True) + rms_eps).rsqrt() * gain.float()).to(dtype)


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
