"""V4's lightning indexer in plain torch: scores of compressed entries, and the choice of the best.

Knows index queries, head weights and index keys given as contiguous runs of rows; knows no projection and no cache.
I(t, w) = sum_h weight[t, h] * relu(q[t, h] . k[w]). Source: DeepSeek-V4 inference/model.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longread.kernels.tiles import tiles

SCRATCH_FLOATS = 1 << 20  # per-head scores held at once: 4 MB, so that they stay in the cache between the two products
BLOCK_ROWS = 1 << 12  # and index keys: a block with a break between its pages is copied


def scores(q: Tensor, weights: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Index scores in float32.

    q: [Q, Hi, di]. weights: [Q, Hi], any scale already applied. keys: runs [n_i, di] in order of position, any float
    dtype. Returns [Q, sum n_i]; the caller bounds Q so that this fits. Per-head scores are never held whole. Where one
    run ends and the next begins changes no bit.
    """
    queries, heads, dim = q.shape
    total = sum(run.shape[0] for run in keys)
    out = torch.empty(queries, total, dtype=torch.float32)
    flat, weights = q.float().reshape(queries * heads, dim), weights.float()[:, None]
    size = min(BLOCK_ROWS, max(128, SCRATCH_FLOATS // max(1, queries * heads)))
    at = 0
    for block in tiles(keys, size):
        n = block.shape[0]
        per_head = torch.mm(flat, block.float().T).relu_().view(queries, heads, n)
        out[:, at : at + n] = torch.bmm(weights, per_head)[:, 0]
        at += n
    return out


def chosen(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Which entries each query attends to: bool [Q, n], the best min(top_k, visible) of its first ``visible``.

    scores: float32 [Q, n], entries at or beyond visible[q] are overwritten with -inf. visible: int64 [Q]. Among equal
    scores the oldest entries win, so the choice does not depend on blocks or layout.
    """
    n = scores.shape[1]
    unseen = torch.arange(n) >= visible[:, None]
    if n <= top_k:
        return unseen.logical_not_()
    scores.masked_fill_(unseen, float("-inf"))
    cut = scores.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    mask = scores >= cut
    if bool((mask.sum(-1) > top_k).any()):
        # Ties at the cut (or fewer than top_k visible, where the cut is -inf).
        above, level = scores > cut, scores == cut
        room = top_k - above.sum(-1, keepdim=True)
        mask = above | (level & (level.cumsum(-1) <= room))
    return mask.logical_and_(unseen.logical_not_())


def chosen_rows(scores: Tensor, visible: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The same choice as indices: (int64 [Q, k], bool valid [Q, k]) with k = min(top_k, n), ascending per query.

    Invalid places hold index 0. Arguments as in ``chosen``.
    """
    mask = chosen(scores, visible, top_k)
    width = min(top_k, mask.shape[1])
    counts = mask.sum(-1)
    valid = torch.arange(width) < counts[:, None]
    rows = torch.zeros(mask.shape[0], width, dtype=torch.int64)
    rows[valid] = mask.nonzero()[:, 1]
    return rows, valid
