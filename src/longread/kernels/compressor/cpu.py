"""Compressor steps of decoding sequences on a CPU: one call where torch needs a dozen operations on a few rows."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.compressor import ref

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
RATIO, NEG_INF = ref.RATIO, ref.NEG_INF


def overlap_step(
    ring_kv: Tensor, ring_score: Tensor, kv: Tensor, score: Tensor, slots: Tensor, at: Tensor, closing: Sequence[int]
) -> Tensor:
    """See ``ref.overlap_step``."""
    if not ring_kv.dtype == ring_score.dtype == kv.dtype == score.dtype == torch.float32:
        return ref.overlap_step(ring_kv, ring_score, kv, score, slots, at, closing)
    pooled = torch.empty(len(closing), kv.shape[1] // 2)
    _overlap_step(
        ring_kv.numpy(), ring_score.numpy(), kv.numpy(), score.numpy(), slots.numpy(), at.numpy(),
        np.array(closing, dtype=np.int64), pooled.numpy(),
    )  # fmt: skip
    return pooled


def online_step(
    top: Tensor, total: Tensor, acc: Tensor, kv: Tensor, score: Tensor, slots: Tensor, closing: Sequence[int]
) -> Tensor:
    """See ``ref.online_step``."""
    if not top.dtype == total.dtype == acc.dtype == kv.dtype == score.dtype == torch.float32:
        return ref.online_step(top, total, acc, kv, score, slots, closing)
    pooled = torch.empty(len(closing), kv.shape[1])
    _online_step(
        top.numpy(), total.numpy(), acc.numpy(), kv.numpy(), score.numpy(), slots.numpy(),
        np.array(closing, dtype=np.int64), pooled.numpy(),
    )  # fmt: skip
    return pooled


@njit(cache=True, nogil=True)
def _overlap_step(
    ring_kv: Floats, ring_score: Floats, kv: Floats, score: Floats, slots: Ints, at: Ints, closing: Ints, pooled: Floats
) -> None:
    for b in range(slots.shape[0]):
        ring_kv[slots[b], at[b]] = kv[b]
        ring_score[slots[b], at[b]] = score[b]
    d = pooled.shape[1]
    for n in range(closing.shape[0]):
        values, scores = ring_kv[slots[closing[n]]], ring_score[slots[closing[n]]]
        now = at[closing[n]] // RATIO * RATIO  # the window that closes: this half of the ring, second channels
        before = RATIO - now
        for c in range(d):
            top = scores[now, d + c]
            for r in range(RATIO):
                top = max(top, scores[before + r, c], scores[now + r, d + c])
            total = mixed = np.float32(0)
            for r in range(RATIO):
                old, new = math.exp(scores[before + r, c] - top), math.exp(scores[now + r, d + c] - top)
                total += old + new
                mixed += old * values[before + r, c] + new * values[now + r, d + c]
            pooled[n, c] = mixed / total


@njit(cache=True, nogil=True)
def _online_step(
    top: Floats, total: Floats, acc: Floats, kv: Floats, score: Floats, slots: Ints, closing: Ints, pooled: Floats
) -> None:
    one = np.float32(1)
    for b in range(slots.shape[0]):
        s = slots[b]
        for c in range(kv.shape[1]):
            # One of the two weights is 1, so one exponential is enough.
            if score[b, c] > top[s, c]:
                keep = math.exp(top[s, c] - score[b, c])
                total[s, c] = total[s, c] * keep + one
                acc[s, c] = acc[s, c] * keep + kv[b, c]
                top[s, c] = score[b, c]
            else:
                add = math.exp(score[b, c] - top[s, c])
                total[s, c] += add
                acc[s, c] += add * kv[b, c]
    for n in range(closing.shape[0]):
        s = slots[closing[n]]
        pooled[n] = acc[s] / total[s]
        top[s], total[s], acc[s] = NEG_INF, 0, 0
