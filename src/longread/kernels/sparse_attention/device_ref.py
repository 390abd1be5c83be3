"""V4's attention as a device runs it: caches read where they lie, queries taken as their projection leaves them.

What ``kernels/sparse_attention/triton.py`` computes, in plain torch on the inputs' device. Knows the layout of caches
(pages, rings, packed rows) and where a step's tokens lie; knows no layer and no projection. ``chunk`` and ``rows``
leave their results rotated; kernels compute ``chunk_turned`` and ``rows_turned``, which are ready for the next
projection. Nothing is read on the host: shapes depend on shapes and ``bound`` alone.
"""

import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import unpack_latent
from longread.kernels.fp8.ref import Quantised, turn_back
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved
from longread.kernels.sparse_attention.ref import attend
from longread.spec.state import PAGE_TOKENS

BLOCK_FLOATS = 1 << 24  # rows gathered and scores of one block of queries: 64 MB each


def entries(
    store: Tensor, where: Chunk, ratio: int, d: int, rope: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """The sequence's closed rows, contiguous and unpacked: ``dtype`` [bound // ratio, d].

    store: one layer's rows [pages, 256 // ratio, W], uint8 (packed latents) or any float dtype with W = d. Row i covers
    positions i * ratio .. i * ratio + ratio - 1 and is closed if the last of them lies below start + length; rows that
    are not closed hold anything. out: [at least bound // ratio, d] to write into; a view of it is returned.
    """
    per_page, n = PAGE_TOKENS // ratio, where.bound // ratio
    row = torch.arange(n, device=store.device)
    pages = where.table[(row // per_page).clamp(max=where.table.shape[0] - 1)].long()
    got = _unpacked(store.flatten(0, 1)[pages * per_page + row % per_page], d, rope, dtype)
    if out is None:
        return got
    return out[:n].copy_(got)


def chunk(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, slab: Tensor,
    rows: Tensor | None, chosen: Tensor | None, ratio: int, where: Chunk,
) -> Tensor:  # fmt: skip
    """Attention of T tokens of one sequence over their windows and over rows of ``entries``; [T, H, d] in q's dtype.

    q: [T, H, d] raw queries (heads contiguous, tokens at any stride): each head is divided by its root mean square and
    its last channels are rotated by cos, sin (float32 [T, rope / 2]). sink: float32 [H]. slab: [window + T, d], row i
    being position start - window + i; the query at position t sees the last ``window`` positions up to its own that
    are not negative. rows: [N, d] or None. chosen: int32 [T, k] numbers of rows, -1 behind the last; None: the query
    sees all rows < (t + 1) // ratio. What is not seen may hold anything. Padding gives zeros.
    """
    tokens, heads, d = q.shape
    size = slab.shape[0] - tokens
    queries = _queries(q, eps, cos, sin)
    start, length = where.meta[0], where.meta[1]
    place = torch.arange(slab.shape[0], device=q.device)
    real = (place >= size - start) & (place < size + length)
    keys = slab.float().masked_fill(~real[:, None], 0.0)
    active = torch.arange(tokens, device=q.device) < length
    if rows is not None and not rows.shape[0]:
        rows = chosen = None
    closed = 0 if rows is None else rows.shape[0]
    if rows is not None and chosen is None:
        entry = torch.arange(closed, device=q.device)
        visible = entry < torch.div(where.positions[:, None] + 1, max(ratio, 1), rounding_mode="floor")
        rows = rows.float().masked_fill(~(visible & active[:, None]).any(0)[:, None], 0.0)
    out = torch.empty_like(queries)
    wide = closed * heads if chosen is None else chosen.shape[1] * max(heads, d)
    block = max(1, min(256, BLOCK_FLOATS // max(1, wide)))
    for begin in range(0, tokens, block):
        end = min(tokens, begin + block)
        part = slice(begin, end)
        run = place[begin + 1 : end + size]
        distance = torch.arange(begin, end, device=q.device)[:, None] + size - run
        seen = (distance >= 0) & (distance < size) & real[run] & active[part, None]
        shared: list[tuple[Tensor, Tensor | None]] = [(keys[begin + 1 : end + size], seen)]
        own: list[tuple[Tensor, Tensor | None]] = []
        if rows is not None and chosen is not None:
            held = chosen[part]
            own.append((rows[held.clamp(0, closed - 1).long()], (held >= 0) & active[part, None]))
        elif rows is not None:
            shared.append((rows, visible[part] & active[part, None]))
        out[part] = attend(queries[part], sink, scale, shared, own)
    return out.to(q.dtype)


def rows(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, ring: Tensor,
    store: Tensor | None, chosen: Tensor | None, ratio: int, where: Rows, rope: int,
) -> Tensor:  # fmt: skip
    """Attention of one token of each of B sequences, the newest of each; [B, H, d] in q's dtype.

    q, cos, sin, sink: as in ``chunk``, T = B. ring: one layer's [slots, window, W]; position p lies at row p % window
    and the token itself is in it. store: [pages, 256 // ratio, W] or None. Both uint8 (packed latents) or float of
    width d. chosen: int32 [B, k] rows of the flat store, -1 behind the last; None: all closed rows of ``where.tables``.
    What is not seen may hold anything. Padding gives zeros.
    """
    batch, _, d = q.shape
    queries = _queries(q, eps, cos, sin)
    length = where.positions.long() + 1
    held = torch.arange(ring.shape[1], device=q.device) < length[:, None]
    keys = [(_unpacked(ring[where.slots.long()], d, rope, torch.float32), held)]
    if store is not None:
        if chosen is None:
            per_page, n = PAGE_TOKENS // ratio, where.bound // ratio
            row = torch.arange(n, device=q.device)
            pages = where.tables[:, (row // per_page).clamp(max=where.tables.shape[1] - 1)].long()
            flat, seen = (
                pages * per_page + row % per_page,
                row < torch.div(length, ratio, rounding_mode="floor")[:, None],
            )
        else:
            seen = (chosen >= 0) & (length > 0)[:, None]
            flat = chosen.masked_fill(~seen, 0).long()
        keys.append((_unpacked(store.flatten(0, 1)[flat], d, rope, torch.float32), seen))
    return attend(queries, sink, scale, (), keys).to(q.dtype).view(batch, -1, d)


def chunk_turned(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, slab: Tensor,
    rows: Tensor | None, chosen: Tensor | None, ratio: int, where: Chunk, quantised: bool,
) -> Quantised | Tensor:  # fmt: skip
    """``chunk`` with RoPE undone: [T, H * d] in q's dtype, or quantised by 128 channels (fp8/ref.py)."""
    o = chunk(q, eps, cos, sin, sink, scale, slab, rows, chosen, ratio, where)
    return turn_back(o, cos, sin, quantised)


def rows_turned(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, ring: Tensor,
    store: Tensor | None, chosen: Tensor | None, ratio: int, where: Rows, rope: int, quantised: bool,
) -> Quantised | Tensor:  # fmt: skip
    """``rows`` with RoPE undone: [B, H * d] in q's dtype, or quantised by 128 channels (fp8/ref.py)."""
    o = rows(q, eps, cos, sin, sink, scale, ring, store, chosen, ratio, where, rope)
    return turn_back(o, cos, sin, quantised)


def _queries(q: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Normalised and rotated queries, float32 [T, H, d]."""
    wide = q.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    nope = q.shape[-1] - 2 * cos.shape[-1]
    return torch.cat([wide[..., :nope], apply_interleaved(wide[..., nope:], cos[:, None], sin[:, None])], -1)


def _unpacked(rows: Tensor, d: int, rope: int, dtype: torch.dtype) -> Tensor:
    return unpack_latent(rows, d, rope, dtype) if rows.dtype == torch.uint8 else rows.to(dtype)
