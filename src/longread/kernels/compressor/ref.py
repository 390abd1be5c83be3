"""V4's KV compressors in plain torch: overlapping windows of 4 (CSA), online windows of 128 (HCA).

Knows pooled inputs ``kv`` and scores ``score`` (float32, the position bias already added) and the rings that carry an
open window from one step to the next; knows no projection, norm, rotation or page. A fresh ring holds kv 0 and score
-inf, so what lies before the first token has weight 0. Sources: DeepSeek-V4 inference/model.py, SGLang's online HCA.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

RATIO = 4  # CSA's window; its ring holds 2 * RATIO tokens
LONG = 128  # HCA's window
NEG_INF = float("-inf")


def pool(kv: Tensor, score: Tensor) -> Tensor:
    """Softmax-weighted mean per channel: kv, score float32 [W, n, d] -> [W, d]. -inf scores have weight 0."""
    return (score.softmax(1).mul_(kv)).sum(1)


def overlap_step(
    ring_kv: Tensor, ring_score: Tensor, kv: Tensor, score: Tensor, slots: Tensor, at: Tensor, closing: Sequence[int]
) -> Tensor:
    """One new token for each of B sequences: stores it, and pools the windows that it closes.

    ring_kv, ring_score: float32 [slots, 8, 2d], token p at row p mod 8. kv, score: float32 [B, 2d]. slots, at: int64
    [B] (at = position mod 8). closing: which of the B have position mod 4 == 3, ascending. Returns [len(closing), d].
    """
    ring_kv[slots, at] = kv
    ring_score[slots, at] = score
    if not closing:
        return kv.new_empty(0, kv.shape[1] // 2)
    # A window closes at row 3 or row 7 of the ring: it is one half, and the window before it is the other.
    d = kv.shape[1] // 2
    done = torch.tensor(closing)
    slot, half = slots[done], at[done] // RATIO
    pair_kv, pair_score = ring_kv.view(-1, 2, RATIO, 2 * d), ring_score.view(-1, 2, RATIO, 2 * d)
    return pool(
        torch.cat((pair_kv[slot, 1 - half, :, :d], pair_kv[slot, half, :, d:]), 1),
        torch.cat((pair_score[slot, 1 - half, :, :d], pair_score[slot, half, :, d:]), 1),
    )


def overlap_chunk(ring_kv: Tensor, ring_score: Tensor, kv: Tensor, score: Tensor, start: int) -> Tensor:
    """A chunk of one sequence, beginning anywhere: pools the windows that close inside it, then updates the ring.

    ring_kv, ring_score: float32 [8, 2d] of this sequence, overwritten. kv, score: float32 [n, 2d]. Returns
    [(start + n) // 4 - start // 4, d].
    """
    n, d = kv.shape[0], kv.shape[1] // 2
    first, end = start // RATIO, start + n
    closed = end // RATIO - first
    if closed:
        # Tokens from the beginning of window first-1: 4 to 7 of them in the ring, the rest new.
        held = torch.arange(RATIO * (first - 1), start) % (2 * RATIO)
        used = RATIO * (first + closed) - start
        kv_all = torch.cat((ring_kv[held], kv[:used])).view(closed + 1, RATIO, 2 * d)
        score_all = torch.cat((ring_score[held], score[:used])).view(closed + 1, RATIO, 2 * d)
        pooled = pool(
            torch.cat((kv_all[:-1, :, :d], kv_all[1:, :, d:]), 1),
            torch.cat((score_all[:-1, :, :d], score_all[1:, :, d:]), 1),
        )
    else:
        pooled = kv.new_empty(0, d)
    kept = min(n, 2 * RATIO)
    rows = torch.arange(end - kept, end) % (2 * RATIO)
    ring_kv[rows] = kv[n - kept :]
    ring_score[rows] = score[n - kept :]
    return pooled


def online_step(
    top: Tensor, total: Tensor, acc: Tensor, kv: Tensor, score: Tensor, slots: Tensor, closing: Sequence[int]
) -> Tensor:
    """One new token for each of B sequences into its open window of 128, kept as an online softmax per channel.

    top (running max, -inf when empty), total, acc (weighted sum): float32 [slots, d]. kv, score: float32 [B, d].
    slots: int64 [B]. closing: which of the B have position mod 128 == 127; their windows are returned [len(closing), d]
    and emptied.
    """
    old = top[slots]
    new = torch.maximum(old, score)
    keep, add = (old - new).exp_(), (score - new).exp_()
    sums = total[slots].mul_(keep).add_(add)
    accs = acc[slots].mul_(keep).addcmul_(add, kv)
    if not closing:
        top[slots], total[slots], acc[slots] = new, sums, accs
        return kv.new_empty(0, kv.shape[1])
    done = torch.tensor(closing)
    pooled = accs[done] / sums[done]
    new[done], sums[done], accs[done] = NEG_INF, 0.0, 0.0
    top[slots], total[slots], acc[slots] = new, sums, accs
    return pooled


def online_chunk(top: Tensor, total: Tensor, acc: Tensor, kv: Tensor, score: Tensor, start: int) -> Tensor:
    """A chunk of one sequence, beginning anywhere. top, total, acc: float32 [d] of this sequence, overwritten.

    kv, score: float32 [n, d]. Returns the windows that close inside the chunk, [(start + n) // 128 - start // 128, d].
    """
    n, d = kv.shape
    if n == 0:
        return kv.new_empty(0, d)
    before = start % LONG
    windows = -(-(before + n) // LONG)
    # Padding to whole windows: padded scores are -inf, so their weight is 0 and the padded kv (0) never counts.
    after = windows * LONG - before - n
    scores = functional.pad(score, (0, 0, before, after), value=NEG_INF).view(windows, LONG, d)
    values = functional.pad(kv, (0, 0, before, after)).view(windows, LONG, d)
    tops = scores.amax(1)
    tops[0] = torch.maximum(tops[0], top)
    weights = (scores - tops[:, None]).exp_()
    totals, accs = weights.sum(1), weights.mul_(values).sum(1)
    keep = (top - tops[0]).exp_()
    totals[0].addcmul_(total, keep)
    accs[0].addcmul_(acc, keep)
    closed = windows - (after > 0)
    if after:
        top.copy_(tops[-1])
        total.copy_(totals[-1])
        acc.copy_(accs[-1])
    else:
        top.fill_(NEG_INF)
        total.zero_()
        acc.zero_()
    return accs[:closed] / totals[:closed]
