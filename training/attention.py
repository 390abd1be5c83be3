"""Attention of one V4 layer for training: a causal window and the visible compressed entries, one softmax.

Knows shapes and visibility; knows no projection. Query t of a row sees tokens t - window + 1 .. t and entries w with
(w + 1) * ratio <= t + 1. ``eager`` is the plain form; ``flex`` runs torch's flex_attention over 128 x 128 blocks of
which only the visible ones are computed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
EAGER_BLOCK = 512


def eager(
    q: Tensor, keys: Tensor, window: int, ratio: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, T, d]; keys [B, T + C, d], key and value in one, shared by the heads; chosen bool [B, T, C].

    Returns (out [B, H, T, d], natural log of the sum of exponentials [B, H, T]). Queries go in blocks, each with the
    keys that any of them may see: a long row fits on a CPU.
    """
    length = q.shape[2]
    parts = []
    for begin in range(0, length, EAGER_BLOCK):
        at = torch.arange(begin, min(begin + EAGER_BLOCK, length), device=q.device)
        low, end = max(0, begin - window + 1), begin + len(at)
        distance = at[:, None] - torch.arange(low, end, device=q.device)
        seen = ((distance >= 0) & (distance < window)).expand(q.shape[0], -1, -1)
        near = keys[:, low:end]
        count = end // ratio if ratio else 0
        if count:
            entries = torch.arange(count, device=q.device) < ((at + 1) // ratio)[:, None]
            own = entries.expand(q.shape[0], -1, -1) if chosen is None else entries & chosen[:, begin:end, :count]
            seen, near = torch.cat((seen, own), -1), torch.cat((near, keys[:, length : length + count]), 1)
        near = near[:, None]
        scores = (q[:, :, begin:end] @ near.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        parts.append((scores.softmax(-1).to(keys.dtype) @ near, scores.logsumexp(-1)))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def flex(
    q: Tensor, keys: Tensor, window: int, ratio: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``eager`` on a GPU; T a multiple of 128, bfloat16 inside."""
    length, count = q.shape[2], keys.shape[1] - q.shape[2]
    padding = -count % BLOCK  # whole blocks; padded entries are never visible
    keys = functional.pad(keys, (0, 0, 0, padding)).to(torch.bfloat16)[:, None]
    mask = _block_mask(length, count + padding, window, ratio, q.device)
    if chosen is not None:
        mask = _with_chosen(mask, functional.pad(chosen, (0, padding)), length, window, ratio)
    out, lse = _compiled()(
        q.to(torch.bfloat16), keys, keys, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True
    )
    return out, lse


@cache
def _compiled() -> Any:
    # One compilation for each length and ratio, far more than the limit at which torch gives up and runs it unfused.
    torch._dynamo.config.recompile_limit = 256
    return torch.compile(flex_attention, dynamic=False)


@cache
def _block_mask(length: int, count: int, window: int, ratio: int, device: torch.device) -> BlockMask:
    """Which blocks hold visible pairs, from geometry alone: no [T, T + C] mask is ever made."""
    blocks, entry_blocks = length // BLOCK, count // BLOCK
    query = torch.arange(blocks)[:, None] * BLOCK
    key = torch.arange(blocks) * BLOCK
    near = (key <= query + BLOCK - 1) & (key + BLOCK - 1 > query - window)
    entry = torch.arange(entry_blocks) * BLOCK
    some = (entry + 1) * ratio <= query + BLOCK
    every = (entry + BLOCK) * ratio <= query + 1
    partial = torch.cat((near, some & ~every), 1)
    full = torch.cat((torch.zeros_like(near), every), 1)

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_window = (k <= q) & (q - k < window)
        return torch.where(k < length, in_window, (k - length + 1) * ratio <= q + 1)

    return BlockMask.from_kv_blocks(
        *_listed(partial, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length + count),
    )


def _with_chosen(mask: BlockMask, chosen: Tensor, length: int, window: int, ratio: int) -> BlockMask:
    """The same blocks, each entry of which must also be chosen: bool [B, T, C]. No block is full any more."""
    table = mask.to_dense()[0, 0].bool()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in_window = (k <= q) & (q - k < window)
        picked = chosen[b, q, (k - length).clamp(min=0)] & ((k - length + 1) * ratio <= q + 1)
        return torch.where(k < length, in_window, picked)

    return BlockMask.from_kv_blocks(
        *_listed(table, chosen.device),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length + chosen.shape[-1]),
    )


def _listed(table: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """bool [Q, K] -> (blocks per query block int32 [1, 1, Q], their numbers int32 [1, 1, Q, K], used ones first)."""
    numbers = table.int().argsort(dim=1, descending=True, stable=True)
    return table.sum(1, dtype=torch.int32)[None, None].to(device), numbers.int()[None, None].to(device)
