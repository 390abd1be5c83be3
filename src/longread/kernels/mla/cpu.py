"""Absorbed attention of decoding sequences on a CPU: one call a layer, one pass over each sequence's latent.

In plain torch a decoded token over a short context is twenty small operations, and over a longer one BLAS reads the
latent twice with few rows to multiply. Here a block of keys is read once while it is in the cache. Everything else is
the reference's: chunks, other types, models whose W_kvb is better shared by a whole batch, and contexts so long that
BLAS has work for every thread (LOG.md has the measurements behind the limits).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.mla import ref

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bits = NDArray[np.int32]
KEYS = 32  # keys of one block: its rows stay in the first-level cache for all heads
SMALL_KV_B = 1 << 20  # numbers of W_kvb up to which reading it once a sequence costs nothing much
WIDE_RANK = 256  # below it rows are short, and BLAS is as fast once there is enough to do
NARROW_KEYS, WIDE_KEYS = 2048, 4096  # keys of a step up to which this pays
RELAXED = {"reassoc", "contract", "arcp", "nsz"}  # sums in vector registers; NaN and infinity keep their meaning


def attend(q: Tensor, latent: Tensor, kv_b: Tensor, step: ref.Reading, scale: float) -> Tensor:
    """See ``ref.attend``."""
    spans = [s for group in step.absorbed for s in group.spans]
    if step.expanded or not _pays(spans, kv_b) or not (q.dtype == latent.dtype == kv_b.dtype == torch.float32):
        return ref.attend(q, latent, kv_b, step, scale)
    cache = latent.view(-1, latent.shape[-1])
    heads, both, rank = kv_b.shape
    nope = q.shape[-1] - (cache.shape[-1] - rank)
    out = torch.empty(q.shape[0], heads, both - nope)
    runs, ends = _runs(spans)
    _decode(q.contiguous().numpy(), cache.numpy(), kv_b.numpy(), nope, runs, ends, scale * ref.LOG2E, out.numpy())
    return out


def _pays(spans: Sequence[ref.Span], kv_b: Tensor) -> bool:
    if not spans or kv_b.numel() > SMALL_KV_B or not kv_b.is_contiguous() or any(s.length != 1 for s in spans):
        return False
    keys = sum(s.start + 1 for s in spans)
    if kv_b.shape[-1] < WIDE_RANK:
        return keys <= NARROW_KEYS
    return keys <= WIDE_KEYS or torch.get_num_threads() == 1


def _runs(spans: Sequence[ref.Span]) -> tuple[Ints, Ints]:
    """(row, count) of every run, and for each sequence of the batch where its runs end."""
    runs: list[tuple[int, int]] = []
    ends: list[int] = []
    for s in spans:
        runs += [(r.row, r.count) for r in ref.clip(s.runs, 0, s.start + 1)]
        ends.append(len(runs))
    return np.array(runs), np.array(ends)


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _decode(
    q: Floats, cache: Floats, kv_b: Floats, nope: int, runs: Ints, ends: Ints, scale: float, out: Floats
) -> None:
    heads, both, rank = kv_b.shape
    folded = np.empty((heads, cache.shape[1]), np.float32)
    mixed = np.empty((heads, rank), np.float32)
    scores = np.empty((heads, KEYS), np.float32)
    bits = scores.view(np.int32)
    peak, total = np.empty(heads, np.float32), np.empty(heads, np.float32)
    begin = 0
    for t in range(q.shape[0]):
        _fold(q[t], kv_b, nope, scale, folded)
        mixed[:] = 0
        peak[:] = -np.inf
        total[:] = 0
        for r in range(begin, ends[t]):
            row, last = runs[r, 0], runs[r, 0] + runs[r, 1]
            while row < last:
                block = cache[row : min(row + KEYS, last)]
                score(folded, block, scores)
                weigh(scores, bits, block.shape[0], peak, total, mixed)
                gather(scores, block, mixed)
                row += KEYS
        begin = ends[t]
        for h in range(heads):
            inverse = np.float32(1) / total[h]
            for v in range(both - nope):
                w = kv_b[h, nope + v]
                s = np.float32(0)
                for i in range(rank):
                    s += w[i] * mixed[h, i]
                out[t, h, v] = s * inverse


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _fold(q: Floats, kv_b: Floats, nope: int, scale: float, folded: Floats) -> None:
    """folded[h] = scale * (W_k^T q_nope, q_pe), for one token's q [H, nope + rope]."""
    heads, _, rank = kv_b.shape
    for h in range(heads):
        target = folded[h]
        target[:rank] = 0
        for n in range(nope):
            x, w = np.float32(q[h, n] * scale), kv_b[h, n]
            for i in range(rank):
                target[i] += x * w[i]
        for i in range(nope, q.shape[1]):
            target[rank + i - nope] = q[h, i] * scale


@njit(cache=True, fastmath=RELAXED, nogil=True)
def score(folded: Floats, block: Floats, scores: Floats) -> None:
    heads, width = folded.shape
    for j in range(block.shape[0]):
        key = block[j]
        h = 0
        while h + 4 <= heads:
            s0 = s1 = s2 = s3 = np.float32(0)
            for i in range(width):
                k = key[i]
                s0 += k * folded[h, i]
                s1 += k * folded[h + 1, i]
                s2 += k * folded[h + 2, i]
                s3 += k * folded[h + 3, i]
            scores[h, j], scores[h + 1, j], scores[h + 2, j], scores[h + 3, j] = s0, s1, s2, s3
            h += 4
        while h < heads:
            s = np.float32(0)
            for i in range(width):
                s += key[i] * folded[h, i]
            scores[h, j] = s
            h += 1


@njit(cache=True, fastmath=RELAXED, nogil=True)
def weigh(scores: Floats, bits: Bits, keys: int, peak: Floats, total: Floats, mixed: Floats) -> None:
    """Scores to weights relative to the running maximum; what was summed before is rescaled when it rises."""
    for h in range(scores.shape[0]):
        highest = peak[h]
        for j in range(keys):
            highest = max(highest, scores[h, j])
        if highest > peak[h]:
            shrink = np.float32(2) ** (peak[h] - highest)
            total[h] *= shrink
            for i in range(mixed.shape[1]):
                mixed[h, i] *= shrink
            peak[h] = highest
        exp2(scores[h, :keys], bits[h, :keys], highest)
        s = np.float32(0)
        for j in range(keys):
            s += scores[h, j]
        total[h] += s


@njit(cache=True, fastmath=RELAXED, nogil=True)
def exp2(x: Floats, bits: Bits, highest: np.float32) -> None:
    """x = 2^(x - highest) in place; ``bits`` is x's memory as int32. The library's exp2 would be a call a number.

    2^n is added to the exponent; 2^f, |f| <= 1/2, is the Taylor series of exp(f ln 2), good to 1e-8.
    """
    half, ln2 = np.float32(0.5), np.float32(0.6931471805599453)
    c2, c3, c4 = np.float32(1 / 2), np.float32(1 / 6), np.float32(1 / 24)
    c5, c6, c7 = np.float32(1 / 120), np.float32(1 / 720), np.float32(1 / 5040)
    one, low = np.float32(1), np.float32(-125)
    exponents = np.empty(KEYS, np.int32)
    for j in range(x.shape[0]):
        y = x[j] - highest
        y = low if y < low else y
        n = np.floor(y + half)
        f = (y - n) * ln2
        x[j] = ((((((c7 * f + c6) * f + c5) * f + c4) * f + c3) * f + c2) * f + one) * f + one
        exponents[j] = np.int32(n)
    for j in range(x.shape[0]):  # a loop of its own: x and bits are one memory, and the loop above must not know
        bits[j] += exponents[j] << 23


@njit(cache=True, fastmath=RELAXED, nogil=True)
def gather(weights: Floats, block: Floats, mixed: Floats) -> None:
    """mixed[h] += weights[h] x the block's latents, four keys at a time."""
    heads, rank = mixed.shape
    keys = block.shape[0]
    for h in range(heads):
        target = mixed[h]
        j = 0
        while j + 4 <= keys:
            w0, w1, w2, w3 = weights[h, j], weights[h, j + 1], weights[h, j + 2], weights[h, j + 3]
            c0, c1, c2, c3 = block[j], block[j + 1], block[j + 2], block[j + 3]
            for i in range(rank):
                target[i] += w0 * c0[i] + w1 * c1[i] + w2 * c2[i] + w3 * c3[i]
            j += 4
        while j < keys:
            w, c = weights[h, j], block[j]
            for i in range(rank):
                target[i] += w * c[i]
            j += 1
