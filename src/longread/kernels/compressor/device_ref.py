"""V4's compressors over a paged store in plain torch: pooled, normalised, rotated and written where a row belongs.

Knows where a step's tokens lie (``kernels.places``), pages of 256 tokens and the bytes of a row; knows no projection
and no attention. What the kernels of ``triton.py`` are compared with, on any device; ``ref.py`` has the pooling.

Rings, of all slots. Ratio 4: (kv, score), float32 [slots, 8, 2d], token p at row p mod 8. Ratio 128: (max, sum, acc),
float32 [slots, d], an online softmax of the open window. A score already contains its position bias ``ape``.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import pack_index, pack_latent
from longread.kernels.compressor import ref
from longread.kernels.norm.ref import rms_norm
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved
from longread.kernels.window import ref as window

PAGE = 256  # tokens


class Part(NamedTuple):
    """One compressor of a layer and what one token of each of B sequences brings to it.

    kv, gate: float32 [B, w], w = 2d at ratio 4 and d at 128, rows may be strided. ape: float32 [ratio, w]. gain:
    float32 [d]. cos, sin: float32 [B, rope / 2], at the first position of each token's window. store: [pages,
    256 / ratio, W], one layer's; uint8 holds packed rows, index keys if ``index_keys`` and latents if not.
    """

    kv: Tensor
    gate: Tensor
    ape: Tensor
    rings: tuple[Tensor, ...]
    gain: Tensor
    cos: Tensor
    sin: Tensor
    store: Tensor
    ratio: int
    index_keys: bool


def layer_rows(parts: Sequence[Part], latent: Tensor, ring: Tensor, eps: float, where: Rows) -> None:
    """All that one token of each of B sequences leaves in a layer: it goes into the rings of each of up to two
    compressors (two only of ratio 4), whose windows that close are written to their stores, and its latent [B, d] into
    the window's ring (window.ref). Padding (position -1) touches nothing.
    """
    live = (where.positions >= 0).nonzero().flatten()
    if not len(live):
        return
    for part in parts:
        _part_rows(part, live, eps, where)
    window.rows(latent, ring, where)


def _part_rows(part: Part, live: Tensor, eps: float, where: Rows) -> None:
    """live: int64, the rows of the batch that are not padding."""
    rings, ratio = part.rings, part.ratio
    positions, slots = where.positions[live].long(), where.slots[live].long()
    values, score = part.kv[live].float(), part.gate[live].float() + part.ape[positions % ratio]
    ends = ((positions + 1) % ratio == 0).nonzero().flatten()
    closing = ends.tolist()
    if ratio == ref.RATIO:
        pooled = ref.overlap_step(rings[0], rings[1], values, score, slots, positions % (2 * ref.RATIO), closing)
    else:
        pooled = ref.online_step(rings[0], rings[1], rings[2], values, score, slots, closing)
    if closing:
        windows, done = positions[ends] // ratio, live[ends]
        pages, at = where.tables[done, windows // (PAGE // ratio)].long(), windows % (PAGE // ratio)
        _write(pooled, part.gain, eps, part.cos[done], part.sin[done], part.store, pages, at, part.index_keys)


def chunk(
    kv: Tensor,
    gate: Tensor,
    ape: Tensor,
    rings: tuple[Tensor, ...],
    gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: Tensor,
    where: Chunk,
    ratio: int,
    index: bool,
) -> None:
    """What a chunk of one sequence, which begins and ends anywhere, leaves in one compressor: see ``Part``.

    kv, gate: float32 [T, w]. cos, sin: float32 [T // ratio + 2, rope / 2], row i at the first position of window
    start // ratio + i.
    """
    start, length, slot = (int(n) for n in where.meta[:3].tolist())
    phases = torch.arange(start, start + length, device=kv.device) % ratio
    values, score = kv[:length].float(), gate[:length].float() + ape[phases]
    if ratio == ref.RATIO:
        pooled = ref.overlap_chunk(rings[0][slot], rings[1][slot], values, score, start)
    else:
        pooled = ref.online_chunk(rings[0][slot], rings[1][slot], rings[2][slot], values, score, start)
    n = len(pooled)
    if n:
        windows = torch.arange(start // ratio, start // ratio + n, device=kv.device)
        pages = where.table[windows // (PAGE // ratio)].long()
        _write(pooled, gain, eps, cos[:n], sin[:n], store, pages, windows % (PAGE // ratio), index)


def keep(kv: Tensor, gate: Tensor, ape: Tensor, rings: tuple[Tensor, ...], where: Chunk, ratio: int) -> None:
    """The ring state that a chunk leaves which ends at where's start + length, to where's slot: any ring row.

    For states kept at places inside a longer chunk, whose kv and gate these are; nothing is pooled. Ratio 4: the last
    8 tokens. Ratio 128: the place must be a multiple of 128, where the open window is empty.
    """
    start, length, slot = (int(n) for n in where.meta[:3].tolist())
    end = start + length
    if ratio == ref.RATIO:
        kept = min(length, 2 * ref.RATIO)
        positions = torch.arange(end - kept, end, device=kv.device)
        at, new = positions % (2 * ref.RATIO), slice(length - kept, length)
        rings[0][slot, at] = kv[new].float()
        rings[1][slot, at] = gate[new].float() + ape[positions % ratio]
    elif end % ratio:
        raise ValueError(f"a window of {ratio} is open at position {end}")
    elif length:
        for ring, empty in zip(rings, (ref.NEG_INF, 0.0, 0.0), strict=True):
            ring[slot] = empty


def _write(
    pooled: Tensor,
    gain: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    store: Tensor,
    pages: Tensor,
    at: Tensor,
    index: bool,
) -> None:
    """pooled: float32 [n, d] to rows ``at`` of ``pages`` (int64 [n])."""
    entries = rms_norm(pooled, gain.float(), eps)
    rope = 2 * cos.shape[-1]
    entries[:, -rope:] = apply_interleaved(entries[:, -rope:], cos, sin)
    if store.dtype == torch.uint8:
        store[pages, at] = pack_index(entries) if index else pack_latent(entries, rope)
    else:
        store[pages, at] = entries.to(store.dtype)
