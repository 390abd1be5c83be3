"""V4's decode attention on a CPU: one call a layer, every row read where it lies, once for all heads.

In plain torch the rows of a batch are gathered into one block first, and BLAS gets small products. Here a sequence's
ring is read in place and its chosen rows in blocks that stay in the cache. Many wide heads are BLAS's, whose blocking
and threads win there.
"""

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear.cpu import RELAXED
from longread.kernels.mla.cpu import KEYS, Bits, gather, score, weigh
from longread.kernels.mla.ref import LOG2E
from longread.kernels.sparse_attention import ref

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
WIDE = 1 << 13  # numbers of one token's queries; past that each row has enough heads to be worth gathering


def decode(
    q: Tensor, sink: Tensor, scale: float, window: Tensor, slots: Tensor, held: Tensor,
    store: Tensor | None = None, rows: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See ``ref.decode``."""
    plain = q.dtype == window.dtype == torch.float32 and (store is None or store.dtype == torch.float32)
    if not plain or q.shape[1] * q.shape[2] > WIDE:
        return ref.decode(q, sink, scale, window, slots, held, store, rows, counts)
    out = torch.empty(q.shape)
    if store is None or rows is None or counts is None:
        store, rows = window.view(-1, window.shape[-1]), slots.new_empty(q.shape[0], 0)
        counts = torch.zeros_like(slots)
    _decode(
        q.contiguous().numpy(), sink.numpy(), scale * LOG2E, window.numpy(), slots.numpy(), held.numpy(),
        store.numpy(), rows.numpy(), counts.numpy(), out.numpy(),
    )  # fmt: skip
    return out


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _decode(
    q: Floats, sink: Floats, scale: float, window: Floats, slots: Ints, held: Ints,
    store: Floats, rows: Ints, counts: Ints, out: Floats,
) -> None:  # fmt: skip
    batch, heads, d = q.shape
    scaled, mixed = np.empty((heads, d), np.float32), np.empty((heads, d), np.float32)
    block, scores = np.empty((KEYS, d), np.float32), np.empty((heads, KEYS), np.float32)
    bits = scores.view(np.int32)
    peak, total = np.empty(heads, np.float32), np.empty(heads, np.float32)
    for b in range(batch):
        for h in range(heads):
            peak[h], total[h] = sink[h] * np.float32(LOG2E), 1
            for i in range(d):
                scaled[h, i] = np.float32(q[b, h, i] * scale)
        mixed[:] = 0
        ring = window[slots[b]]
        for begin in range(0, held[b], KEYS):
            _take(scaled, ring[begin : min(begin + KEYS, held[b])], scores, bits, peak, total, mixed)
        for begin in range(0, counts[b], KEYS):
            n = min(KEYS, counts[b] - begin)
            for j in range(n):
                block[j] = store[rows[b, begin + j]]
            _take(scaled, block[:n], scores, bits, peak, total, mixed)
        for h in range(heads):
            inverse = np.float32(1) / total[h]
            for i in range(d):
                out[b, h, i] = mixed[h, i] * inverse


@njit(cache=True, fastmath=RELAXED, nogil=True)
def _take(
    scaled: Floats, block: Floats, scores: Floats, bits: Bits, peak: Floats, total: Floats, mixed: Floats
) -> None:
    """Add one block of rows [n, d] to the running softmax of all heads."""
    score(scaled, block, scores)
    weigh(scores, bits, block.shape[0], peak, total, mixed)
    gather(scores, block, mixed)
