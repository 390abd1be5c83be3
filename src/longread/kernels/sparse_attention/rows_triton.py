# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's decode attention: keys split over programs, read where they lie; then the parts are combined.

Program (b, g, s) takes heads of group g and tiles s, s + splits, … of sequence b's keys: its ring first, then its
chosen or closed rows. Tiles are dealt in turn, so that a sequence far shorter than ``bound`` still fills all programs.
Parts are kept in float32; the sink enters once, when they are combined.
"""

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fallback import fallback
from longread.kernels.places import Rows
from longread.kernels.sparse_attention import device_ref as ref
from longread.kernels.sparse_attention.prologue_triton import LOG2E, ready, unpacked
from longread.spec.state import PAGE_TOKENS


class Config(TypedDict):
    """block: heads of a program. tile: its keys at once. programs: how many the keys are split for."""

    block: int
    tile: int
    programs: int
    warps: int
    stages: int


# One sequence: few heads a program, since latency counts and not traffic. Many: all heads share a tile's bytes.
FEW: Config = {"block": 16, "tile": 32, "programs": 264, "warps": 4, "stages": 1}
MANY: Config = {"block": 64, "tile": 64, "programs": 132, "warps": 8, "stages": 1}
FEW_SEQUENCES = 2
PARTS = 16  # parts of a head that are read at once


def rows(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, ring: Tensor,
    store: Tensor | None, chosen: Tensor | None, ratio: int, where: Rows, rope: int,
) -> Tensor:  # fmt: skip
    """See ``device_ref.rows``."""
    config = FEW if q.shape[0] <= FEW_SEQUENCES or q.shape[1] <= 16 else MANY
    return launch(q, eps, cos, sin, sink, scale, ring, store, chosen, ratio, where, rope, config)


def launch(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, ring: Tensor,
    store: Tensor | None, chosen: Tensor | None, ratio: int, where: Rows, rope: int, config: Config,
) -> Tensor:  # fmt: skip
    """``rows`` by one configuration. Scratch is splits * B * H * (d + 2) float32."""
    batch, heads, d = q.shape
    window, width, packed = ring.shape[1], ring.shape[2], ring.dtype == torch.uint8
    tile, block = config["tile"], config["block"]
    plain = d & (d - 1) == 0 and 64 <= d <= 512 and window % tile == 0 and q.stride()[1:] == (d, 1)
    if not plain or q.dtype != torch.bfloat16 or not (packed or ring.dtype == q.dtype):
        fallback("sparse_attention.rows", f"head_dim {d}, window {window}, {q.dtype}, {ring.dtype} or heads apart")
        return ref.rows(q, eps, cos, sin, sink, scale, ring, store, chosen, ratio, where, rope)
    most = 0 if store is None else where.bound // ratio
    if chosen is not None:
        most = min(most, chosen.shape[1])
    if store is None or not most:
        store, chosen, ratio, most = ring, None, 0, 0
    groups, tiles = triton.cdiv(heads, block), window // tile + triton.cdiv(most, tile)
    splits = min(tiles, max(1, config["programs"] // (batch * groups)))
    splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))
    parts = torch.empty(splits, batch, heads, d, dtype=torch.float32, device=q.device)
    peaks = torch.empty(2, splits, batch, heads, dtype=torch.float32, device=q.device)
    out = q.new_empty(batch, heads, d)
    places = where.tables if chosen is None else chosen
    _part[(batch, groups, splits)](
        q, q.stride(0), cos.contiguous(), sin.contiguous(), ring, store, places, places.stride(0), where.positions,
        where.slots, out, parts, peaks[0], peaks[1], heads, places.shape[1], eps, scale,
        splits, window, d, rope, width, ratio, chosen is not None, packed, PAGE_TOKENS // ratio if ratio else 1,
        block, tile, num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip
    _combine[(batch, heads)](parts, peaks[0], peaks[1], sink, out, splits, d, PARTS, num_warps=4)
    return out


# Numbers that follow the context's length and the batch are not specialised on: that would compile while serving.
@triton.jit(do_not_specialize=["places_token", "most", "splits"])
def _part(
    q, q_token, cos, sin, ring, store, places, places_token, positions, slots, out, parts, peaks, totals, heads, most,
    eps, scale, splits, WINDOW: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    RATIO: tl.constexpr, CHOSEN: tl.constexpr, PACKED: tl.constexpr, PER_PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """places: int32 [B, most] at stride places_token, chosen rows or page tables. out: scratch here, for queries."""
    token, split = tl.program_id(0), tl.program_id(2)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * BM + tl.arange(0, BM)
    wide = token.to(tl.int64)
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if CHOSEN:
            count = tl.minimum(count, most)
    tiles = WINDOW // BN + tl.cdiv(count, BN)
    if position < 0:
        tiles = 0
    # Programs of one group write the same bytes here, whichever comes first.
    angles = token * (ROPE // 2)
    mine = out + wide * heads * D
    query = ready(q + wide * q_token, cos + angles, sin + angles, mine, head, heads, eps, scale, D, ROPE // 2)
    peak = tl.full((BM,), -1e30, tl.float32)  # finite, so that a tile without keys is no NaN
    total = tl.zeros((BM, BN), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    channel = tl.arange(0, D)
    for tile in range(split, tiles, splits):
        place = tile * BN + tl.arange(0, BN)
        recent = tile < WINDOW // BN
        entry = place - WINDOW
        seen = tl.where(recent, place <= position, (entry >= 0) & (entry < count))
        flat = slot.to(tl.int64) * WINDOW + place
        source = tl.where(recent, ring, store)
        if RATIO > 0:
            if CHOSEN:
                chosen = tl.load(places + wide * places_token + entry, mask=seen & (entry >= 0), other=-1).to(tl.int64)
            else:
                page = tl.load(places + wide * places_token + entry // PER_PAGE, mask=seen & (entry >= 0), other=0)
                chosen = page.to(tl.int64) * PER_PAGE + entry % PER_PAGE
            seen = seen & (recent | (chosen >= 0))
            flat = tl.where(recent, flat, chosen)
        if PACKED:
            k = unpacked(source, flat, seen, D, ROPE, WIDTH)
        else:
            k = tl.load(source + flat[:, None] * D + channel[None, :], mask=seen[:, None], other=0.0)
        logits = tl.where(seen[None, :], tl.dot(query, tl.trans(k)), float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - higher)
        p = tl.exp2(logits - higher[:, None])
        total = total * shrink[:, None] + p
        acc = tl.dot(p.to(tl.bfloat16), k, acc * shrink[:, None])
        peak = higher
    part = (split * tl.num_programs(0) + token).to(tl.int64) * heads
    tl.store(peaks + part + head, peak, mask=head < heads)
    tl.store(totals + part + head, tl.sum(total, 1), mask=head < heads)
    if split < tiles:  # otherwise nothing was summed, and the part is not read
        tl.store(parts + part * D + head[:, None] * D + channel[None, :], acc, mask=head[:, None] < heads)


@triton.jit(do_not_specialize=["splits"])
def _combine(parts, peaks, totals, sink, out, splits, D: tl.constexpr, PARTS: tl.constexpr):
    """One head: the parts in proportion to their sums, the sink among them."""
    token, head = tl.program_id(0), tl.program_id(1)
    batch, heads = tl.num_programs(0), tl.num_programs(1)
    channel = tl.arange(0, D)
    drain = tl.load(sink + head) * LOG2E
    peak = drain
    total = 1.0
    acc = tl.zeros((D,), tl.float32)
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        at = (split * batch + token).to(tl.int64) * heads + head
        mass = tl.load(totals + at, mask=split < splits, other=0.0)
        held = mass > 0
        part = tl.load(parts + at[:, None] * D + channel[None, :], mask=held[:, None], other=0.0)
        top = tl.load(peaks + at, mask=held, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(top, 0))
        shrink = tl.exp2(peak - higher)
        weight = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight * mass, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * part, 0)
        peak = higher
    tl.store(out + (token.to(tl.int64) * heads + head) * D + channel, (acc / total).to(tl.bfloat16))
