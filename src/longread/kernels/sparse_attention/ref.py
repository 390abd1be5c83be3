"""V4's attention in plain torch: one shared key-value vector a position, an attention sink, any choice of rows.

Knows queries and rows (each row is key and value at once); knows no cache, page or rotation. Softmax in float32:
p_s = exp(q . k_s * scale) / (exp(sink_h) + sum exp(...)); the sink has no value.
Source: DeepSeek-V4 inference/model.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

NEG_INF = float("-inf")
GATHER_FLOATS = 1 << 22  # rows gathered for one block of sequences: 16 MB


def attend(
    q: Tensor,
    sink: Tensor,
    scale: float,
    shared: Sequence[tuple[Tensor, Tensor | None]],
    own: Sequence[tuple[Tensor, Tensor | None]] = (),
) -> Tensor:
    """Attention of Q queries over rows they share and rows of their own; float32 [Q, H, d].

    q: [Q, H, d]. sink: float32 [H]. shared: runs ([n_i, d], mask) that every query may see, where mask (bool [Q, n_i],
    True = seen) None means all; rows must be finite, masked ones too. own: parts ([Q, k_i, d], mask bool [Q, k_i] or
    None) whose masked rows may hold anything. Any float dtype; scratch is Q * H * (1 + rows) float32. A sum is taken
    run by run, so its rounding depends on how the caller cuts them.
    """
    queries, heads, d = q.shape
    counts = [run.shape[0] for run, _ in shared]
    counts += [rows.shape[1] for rows, _ in own]
    q = q.float() * scale
    flat = q.reshape(queries * heads, d)
    logits = q.new_empty(queries, heads, 1 + sum(counts))
    wide = logits.view(queries * heads, -1)
    logits[..., 0] = sink
    runs = [run.float() for run, _ in shared]
    at = 1
    for run, (_, mask) in zip(runs, shared, strict=True):
        n = run.shape[0]
        torch.mm(flat, run.T, out=wide[:, at : at + n])
        if mask is not None:
            logits[..., at : at + n].masked_fill_(~mask[:, None], NEG_INF)
        at += n
    parts = []
    for rows, mask in own:
        rows, n = rows.float(), rows.shape[1]
        torch.bmm(q, rows.transpose(1, 2), out=logits[..., at : at + n])
        if mask is not None:
            hidden = ~mask
            logits[..., at : at + n].masked_fill_(hidden[:, None], NEG_INF)
            rows = rows.masked_fill(hidden[..., None], 0.0)
        parts.append(rows)
        at += n
    p = torch.softmax(wide, -1)
    out = torch.zeros_like(flat)
    at = 1
    for run in runs:
        out.addmm_(p[:, at : at + run.shape[0]], run)
        at += run.shape[0]
    out = out.view(queries, heads, d)
    for rows in parts:
        out.baddbmm_(p.view(queries, heads, -1)[..., at : at + rows.shape[1]], rows)
        at += rows.shape[1]
    return out


def decode(
    q: Tensor, sink: Tensor, scale: float, window: Tensor, slots: Tensor, held: Tensor,
    store: Tensor | None = None, rows: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One query for each of B sequences over its ring and over chosen rows of a paged store; float32 [B, H, d].

    q: [B, H, d]. sink: float32 [H]. window: [slots, size, d], of which sequence b sees the first held[b] (int64 [B])
    rows of slots[b]. store: [n, d], of which it sees rows[b, : counts[b]] (int64 [B, k], [B]). What is not seen may
    hold anything. Sequences are gathered in blocks of GATHER_FLOATS.
    """
    out = q.new_empty(q.shape, dtype=torch.float32)
    width = window.shape[1] + (0 if rows is None else rows.shape[1])
    size = max(1, GATHER_FLOATS // (width * q.shape[2]))
    for begin in range(0, q.shape[0], size):
        part = slice(begin, begin + size)
        own = [(window.index_select(0, slots[part]), torch.arange(window.shape[1], device=q.device) < held[part, None])]
        if store is not None and rows is not None and counts is not None:
            chosen = store.index_select(0, rows[part].flatten()).view(*rows[part].shape, store.shape[1])
            own.append((chosen, torch.arange(rows.shape[1], device=q.device) < counts[part, None]))
        out[part] = attend(q[part], sink, scale, (), own)
    return out
