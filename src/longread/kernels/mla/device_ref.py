"""MLA over a paged latent as a device computes it, in plain torch: what triton.py's kernels are compared with.

Knows where a step's tokens lie (``kernels.places``) and the bytes of a row; knows no weights but W_kvb, no layers.
store: [pages, 256, W], one layer's: rank + rope numbers a token, or uint8 rows of

    rank FP8 E4M3 values | one float32 scale, a power of two, a 128 of them | rope bfloat16

ref.py describes the two forms of attention; here ``attend_rows`` is the absorbed one and ``attend_chunk`` the expanded.
"""

import torch
from torch import Tensor

from longread.kernels.fp8.ref import BLOCK, FP8, Quantised, quantise
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved

PAGE = 256  # tokens
KEYS = 16384  # keys that kernels expand at once: 1.3 GB at 128 heads
LEAST_KEYS = 256  # what is left of a context is cut into powers of two from here: few shapes, each planned once


def packed_bytes(rank: int, rope: int) -> int:
    """Bytes of a packed row: 656 for V3."""
    return rank + 4 * -(-rank // BLOCK) + 2 * rope


def pack(c: Tensor, k_pe: Tensor) -> Tensor:
    """c [T, rank], k_pe [T, rope] of any float dtype -> uint8 [T, packed_bytes]."""
    q = quantise(c)
    parts = q.values.view(torch.uint8), q.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat((*parts, k_pe.bfloat16().contiguous().view(torch.uint8)), -1)


def unpack(rows: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    """uint8 [..., packed_bytes] -> [..., rank + rope]; exact in bfloat16 and float32."""
    scales = rows[..., rank : -2 * rope].contiguous().view(torch.float32)
    values = rows[..., :rank].contiguous().view(FP8).float() * scales.repeat_interleave(BLOCK, -1)[..., :rank]
    return torch.cat((values.to(dtype), rows[..., -2 * rope :].contiguous().view(torch.bfloat16).to(dtype)), -1)


def latents(
    q: Tensor | None,
    kv: Tensor,
    q_gain: Tensor | None,
    kv_gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    quantised: bool,
    store: Tensor,
    where: Rows | Chunk,
) -> Quantised | Tensor | None:
    """Write a step's cache rows; the query's normalised latent [T, q_lora], None without ``q``.

    q: [T, q_lora] or None; kv: [T, rank + rope], rows may be strided. Both latents are normalised with their gains; the
    rotated key is kv's last channels (cos, sin: float32 [T, rope / 2]). Padding writes nothing.
    """
    rank = kv_gain.shape[0]
    c, k_pe = _normed(kv[:, :rank], kv_gain, eps), apply_interleaved(kv[:, rank:].float(), cos, sin)
    live = (where.positions >= 0).nonzero().flatten()
    positions = where.positions[live].long()
    pages = where.tables[live, positions // PAGE] if isinstance(where, Rows) else where.table[positions // PAGE]
    rows = torch.cat((c, k_pe), -1).to(store.dtype) if store.dtype != torch.uint8 else pack(c, k_pe)
    store[pages.long(), positions % PAGE] = rows[live]
    if q is None or q_gain is None:
        return None
    c_q = _normed(q, q_gain, eps).to(q.dtype)
    return quantise(c_q) if quantised else c_q


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE on the last channels of each head, in place. q: [T, H, d]; cos, sin: float32 [T, rope / 2]."""
    part = q[..., -2 * cos.shape[1] :]
    part.copy_(apply_interleaved(part, cos[:, None], sin[:, None]))


def attend_rows(q: Tensor, store: Tensor, kv_b: Tensor, scale: float, where: Rows) -> Tensor:
    """Each row's query over its own sequence up to its own position. q: [B, H, nope + rope], rotated; kv_b:
    [H, nope + v, rank]. Returns [B, H, v] in q's dtype; padding rows are zeros. Rows may share a table.
    """
    rank = kv_b.shape[2]
    rope = _rope(store, rank)
    nope = q.shape[2] - rope
    folded = torch.einsum("bhn,hnr->bhr", q[..., :nope].float(), kv_b[:, :nope].float())
    out = q.new_zeros(q.shape[0], q.shape[1], kv_b.shape[1] - nope)
    for i, position in enumerate(where.positions.tolist()):
        if position < 0:
            continue
        rows = _rows(store, where.tables[i], 0, position + 1, rank).float()
        weights = torch.cat((folded[i], q[i, :, nope:].float()), -1) @ rows.t() * scale
        mixed = weights.softmax(-1) @ rows[:, :rank]
        out[i] = torch.einsum("hr,hvr->hv", mixed, kv_b[:, nope:].float()).to(q.dtype)
    return out


def attend_chunk(q: Tensor, store: Tensor, kv_b: Tensor, scale: float, where: Chunk, start: int, length: int) -> Tensor:
    """A chunk's queries, causal, over the sequence whose rows hold the chunk's own too. q: [T, H, nope + rope],
    rotated. ``start``, ``length``: of ``where``, on the host. Returns [T, H, v] in q's dtype; padding rows are finite.
    """
    rank = kv_b.shape[2]
    rows = _rows(store, where.table, 0, start + length, rank).float()
    nope = q.shape[2] - (rows.shape[1] - rank)
    expanded = torch.einsum("sr,hdr->shd", rows[:, :rank], kv_b.float())
    keys, values = expanded[..., :nope], expanded[..., nope:]
    out = q.new_zeros(q.shape[0], q.shape[1], values.shape[2])
    later = (
        torch.arange(start + length, device=q.device) > torch.arange(start, start + length, device=q.device)[:, None]
    )
    for h in range(q.shape[1]):  # a head at a time bounds the scores
        own = q[:length, h].float()
        scores = own[:, :nope] @ keys[:, h].t() + own[:, nope:] @ rows[:, rank:].t()
        weights = (scores * scale).masked_fill_(later, float("-inf")).softmax(-1)
        out[:length, h] = (weights @ values[:, h]).to(q.dtype)
    return out


def _normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.float()


def _rope(store: Tensor, rank: int) -> int:
    """How many rotated channels a row of ``store`` has."""
    width = store.shape[2]
    return (width - packed_bytes(rank, 0)) // 2 if store.dtype == torch.uint8 else width - rank


def _rows(store: Tensor, table: Tensor, begin: int, end: int, rank: int) -> Tensor:
    """Rows of positions begin .. end - 1, plain: [end - begin, rank + rope]."""
    positions = torch.arange(begin, end, device=store.device)
    found = store[table[positions // PAGE].long(), positions % PAGE]
    return unpack(found, rank, _rope(store, rank), torch.bfloat16) if store.dtype == torch.uint8 else found
