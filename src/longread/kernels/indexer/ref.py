"""V4's lightning indexer in plain torch: scores of compressed entries, and the choice of the best.

Knows index queries, head weights, index keys and how pages hold them; knows no projection and no sequence.
I(t, w) = sum_h weight[t, h] * relu(q[t, h] . k[w]). Source: DeepSeek-V4 inference/model.py.

``scores``, ``chosen`` and ``chosen_rows`` serve the CPU model, which hands over contiguous runs of keys. ``queries``,
``keys``, ``choose_chunk`` and ``choose_rows`` are the form a GPU runs: pages and positions as tensors on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import exponents, powers, unpack_index
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved
from longread.kernels.tiles import tiles

RATIO = 4  # tokens an index row stands for: only layers of this ratio have an indexer

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
    out = torch.empty(queries, total, dtype=torch.float32, device=q.device)
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
    unseen = torch.arange(n, device=scores.device) >= visible[:, None]
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
    valid = torch.arange(width, device=mask.device) < counts[:, None]
    rows = torch.zeros(mask.shape[0], width, dtype=torch.int64, device=mask.device)
    rows[valid] = mask.nonzero()[:, 1]
    return rows, valid


class Keys(NamedTuple):
    """One sequence's index keys, contiguous. values: [n, di]; scales: float32 [n] where values are FP8, else None."""

    values: Tensor
    scales: Tensor | None


def queries(q: Tensor, w: Tensor, cos: Tensor, sin: Tensor, scale: float, quantised: bool) -> tuple[Tensor, Tensor]:
    """Index queries as they meet the keys: turned, and in FP8 if ``quantised``.

    q: [T, Hi * di] from its projection; w: float32 [T, Hi]; cos, sin: float32 [T, rope / 2], for the last rope channels
    of each head. Returns (q [T, Hi, di] in float8_e4m3fn or q's dtype, w * scale float32 [T, Hi]). An FP8 query has one
    power of two per token and head, and w takes it up.
    """
    heads = w.shape[1]
    x = q.reshape(q.shape[0], heads, -1)
    rope = 2 * cos.shape[1]
    plain, turned = x[..., : x.shape[-1] - rope].float(), x[..., x.shape[-1] - rope :].float()
    x = torch.cat([plain, apply_interleaved(turned, cos[:, None], sin[:, None])], dim=-1)
    w = w.float() * scale
    if not quantised:
        return x.to(q.dtype), w
    power = powers(exponents(x.abs().amax(-1)))
    return (x / power[..., None]).to(torch.float8_e4m3fn), w * power


def keys(store: Tensor, where: Chunk, di: int) -> Keys:
    """The sequence's closed index rows, contiguous: [bound // 4, di]; zeros behind the last closed one.

    store: [pages, rows per page, W], of numbers (W = di) or packed bytes (uint8: FP8 and a float32 scale).
    """
    n, per_page = where.bound // RATIO, store.shape[1]
    table = where.table[: -(-n // per_page)].long()
    rows = store[table].reshape(-1, store.shape[2])[:n]
    closed = torch.arange(n, device=store.device) < (where.meta[0] + where.meta[1]) // RATIO
    values, scales = _unpacked(rows)
    values = torch.where(closed[:, None], values.float(), 0.0).to(values.dtype)
    return Keys(values, None if scales is None else torch.where(closed, scales, 0.0))


def choose_chunk(q: Tensor, w: Tensor, keys: Keys, where: Chunk, top_k: int) -> Tensor:
    """Which rows each query of a chunk attends to: int32 [T, top_k], the sequence's row numbers, ascending, then -1.

    q: [T, Hi, di]; w: float32 [T, Hi]. The query at position t sees rows < (t + 1) // 4; all of them are taken if there
    are at most top_k, else the best, the oldest first among equals. Padding (position -1) takes none.
    """
    visible = (where.positions.long() + 1) // RATIO
    n = where.bound // RATIO
    out = torch.empty(q.shape[0], top_k, dtype=torch.int32, device=q.device)
    block = max(1, (64 << 20) // max(1, n))  # the logits of so many queries at once
    for lo in range(0, q.shape[0], block):
        span = slice(lo, lo + block)
        found = _scaled_scores(q[span], w[span], Keys(keys.values[:n], keys.scales))
        out[span] = _best(found, visible[span], top_k)
    return out


def choose_rows(q: Tensor, w: Tensor, store: Tensor, where: Rows, top_k: int) -> Tensor:
    """The same for one token of each of B sequences: int32 [B, top_k], rows of the store laid flat (page * rows a page
    + row), ascending by position, then -1. q: [B, Hi, di]; w: float32 [B, Hi]; store as in ``keys``.
    """
    n, per_page = where.bound // RATIO, store.shape[1]
    visible = (where.positions.long() + 1) // RATIO
    pages = where.tables[:, : -(-n // per_page)].long()
    found = torch.empty(q.shape[0], n, dtype=torch.float32, device=q.device)
    for b in range(q.shape[0]):
        rows = store[pages[b]].reshape(-1, store.shape[2])[:n]
        found[b] = _scaled_scores(q[b : b + 1], w[b : b + 1], Keys(*_unpacked(rows)))[0]
    best = _best(found, visible, top_k).long()
    taken = best >= 0
    row = torch.where(taken, best, 0)
    if not n:
        return best.to(torch.int32)
    flat = pages.gather(1, row // per_page) * per_page + row % per_page
    return torch.where(taken, flat, -1).to(torch.int32)


def _scaled_scores(q: Tensor, w: Tensor, keys: Keys) -> Tensor:
    found = scores(q, w, [keys.values])
    return found if keys.scales is None else found * keys.scales[: found.shape[1]]


def _best(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """int32 [Q, top_k]: columns of the best visible scores, ascending, then -1. Waits for no device."""
    queries, n = scores.shape
    unseen = torch.arange(n, device=scores.device) >= visible[:, None]
    order = scores.masked_fill(unseen, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    rank = torch.arange(order.shape[1], device=scores.device)
    order = torch.where(rank < visible[:, None], order, n).sort(dim=-1).values
    out = torch.full((queries, top_k), -1, dtype=torch.int32, device=scores.device)
    out[:, : order.shape[1]] = torch.where(order < n, order, -1)
    return out


def _unpacked(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """(values [n, di], scales float32 [n] or None) of index rows as a store holds them."""
    return unpack_index(rows) if rows.dtype == torch.uint8 else (rows, None)
