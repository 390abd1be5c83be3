"""Hyper-connections on a CPU: everything but the projection in one pass over the tokens.

Same signatures and results (up to rounding) as ref.py, which spends some 90 tiny operations a sublayer, most of them
Sinkhorn's; at batch 1 these are half of a decode step. Compiled by numba at the first call and kept on disk. Knows four
streams (every V4 model); other counts go to the reference.
"""

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.hyper import ref
from longread.kernels.linear.cpu import RELAXED, linear

Floats = NDArray[np.float32]


def mix(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float, rms_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ref.mix``."""
    tokens, m, hidden = streams.shape
    if m != 4:
        return ref.mix(streams, fn, base, scale, iters, eps, rms_eps)
    logits = linear(streams.view(tokens, m * hidden), fn)
    u, post, a = torch.empty(tokens, hidden), torch.empty(tokens, m), torch.empty(tokens, m, m)
    _mix(
        streams.numpy(), logits.numpy(), base.numpy(), scale.numpy(), iters, eps, rms_eps,
        u.numpy(), post.numpy(), a.numpy(),
    )  # fmt: skip
    return u, post, a


def update(streams: Tensor, y: Tensor, post: Tensor, a: Tensor) -> Tensor:
    """See ``ref.update``."""
    if streams.shape[1] != 4:
        return ref.update(streams, y, post, a)
    _update(streams.numpy(), y.float().contiguous().numpy(), post.numpy(), a.numpy())
    return streams


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _mix(
    streams: Floats, logits: Floats, base: Floats, scale: Floats, iters: int, eps: float, rms_eps: float,
    u: Floats, post: Floats, a: Floats,
) -> None:  # fmt: skip
    tokens, m, hidden = streams.shape
    one, tiny = np.float32(1), np.float32(eps)
    pre = np.empty(m, np.float32)
    for t in range(tokens):
        total = np.float32(0)
        for i in range(m):
            for d in range(hidden):
                total += streams[t, i, d] * streams[t, i, d]
        inverse = one / np.float32(math.sqrt(total / np.float32(m * hidden) + np.float32(rms_eps)))
        for i in range(m):
            pre[i] = one / (one + math.exp(-(logits[t, i] * inverse * scale[0] + base[i]))) + tiny
            post[t, i] = np.float32(2) / (one + math.exp(-(logits[t, m + i] * inverse * scale[1] + base[m + i])))
        _sinkhorn(logits[t, 2 * m :], inverse * scale[2], base[2 * m :], iters, tiny, a[t])
        for d in range(hidden):
            u[t, d] = (
                pre[0] * streams[t, 0, d]
                + pre[1] * streams[t, 1, d]
                + pre[2] * streams[t, 2, d]
                + pre[3] * streams[t, 3, d]
            )


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _sinkhorn(logits: Floats, scale: np.float32, base: Floats, iters: int, eps: np.float32, a: Floats) -> None:
    m = a.shape[0]
    one = np.float32(1)
    for j in range(m):
        top = np.float32(-np.inf)
        for k in range(m):
            a[j, k] = logits[j * m + k] * scale + base[j * m + k]
            top = max(top, a[j, k])
        total = np.float32(0)
        for k in range(m):
            a[j, k] = math.exp(a[j, k] - top)
            total += a[j, k]
        for k in range(m):
            a[j, k] = a[j, k] / total + eps
    for i in range(iters):
        if i:
            for j in range(m):
                inverse = one / (a[j, 0] + a[j, 1] + a[j, 2] + a[j, 3] + eps)
                for k in range(m):
                    a[j, k] *= inverse
        for k in range(m):
            inverse = one / (a[0, k] + a[1, k] + a[2, k] + a[3, k] + eps)
            for j in range(m):
                a[j, k] *= inverse


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _update(streams: Floats, y: Floats, post: Floats, a: Floats) -> None:
    tokens, _, hidden = streams.shape
    for t in range(tokens):
        p0, p1, p2, p3 = post[t, 0], post[t, 1], post[t, 2], post[t, 3]
        w = a[t]
        for d in range(hidden):
            x0, x1, x2, x3, new = streams[t, 0, d], streams[t, 1, d], streams[t, 2, d], streams[t, 3, d], y[t, d]
            streams[t, 0, d] = p0 * new + w[0, 0] * x0 + w[1, 0] * x1 + w[2, 0] * x2 + w[3, 0] * x3
            streams[t, 1, d] = p1 * new + w[0, 1] * x0 + w[1, 1] * x1 + w[2, 1] * x2 + w[3, 1] * x3
            streams[t, 2, d] = p2 * new + w[0, 2] * x0 + w[1, 2] * x1 + w[2, 2] * x2 + w[3, 2] * x3
            streams[t, 3, d] = p3 * new + w[0, 3] * x0 + w[1, 3] * x1 + w[2, 3] * x2 + w[3, 3] * x3
