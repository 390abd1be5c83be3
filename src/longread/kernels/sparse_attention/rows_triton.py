# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's decode attention: keys split over programs, read where they lie; then the parts are combined.

Program (b, g, s) takes heads of group g and tiles s, s + splits, … of sequence b's keys: its ring first, then its
chosen or closed rows. Tiles are dealt in turn, so that a sequence far shorter than ``bound`` still fills all programs.
Parts are kept in bfloat16, their sums and peaks in float32; the sink enters once, when they are combined. Few keys in
all are taken by few heads at a time, since latency counts and not traffic; many by ``rows_gluon``, 64 heads at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.cache_rows.triton import exponents, powers
from longread.kernels.fallback import fallback
from longread.kernels.fp8.ref import BLOCK, Quantised
from longread.kernels.overlap import begin, overlap, ready
from longread.kernels.places import Rows
from longread.kernels.sparse_attention import device_ref as ref
from longread.kernels.sparse_attention import rows_gluon
from longread.kernels.sparse_attention.prologue_triton import LOG2E, turned, unpacked
from longread.kernels.sparse_attention.results import parts as values_and_scales
from longread.kernels.sparse_attention.results import result
from longread.spec.state import PAGE_TOKENS

HEADS, PROGRAMS = 16, 264  # of ``_part``: heads a program, programs that keys are split for
FEW, MORE = (16, 8), (32, 4)  # keys at once and warps of ``_part``, of fewer than MANY tiles and of more
HOPPER = True  # whether ``rows_gluon`` takes what it can; False: this file's kernel, to compare
MANY = 8  # tiles of 64 keys, of all sequences together, from which ``rows_gluon`` is the faster
PARTS = 16  # parts of a head that are read at once
WIDE_BATCH = 8  # from how many sequences on a program combines all channels of a head, and not 128


def rows_turned(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, ring: Tensor,
    store: Tensor | None, chosen: Tensor | None, ratio: int, where: Rows, rope: int, quantised: bool,
) -> Quantised | Tensor:  # fmt: skip
    """See ``device_ref.rows_turned``. Scratch is splits * B * H * (d / 2 + 2) float32."""
    batch, heads, d = q.shape
    window, width, packed = ring.shape[1], ring.shape[2], ring.dtype == torch.uint8
    plain = d & (d - 1) == 0 and 64 <= d <= 512 and window % MORE[0] == 0 and q.stride()[1:] == (d, 1)
    if not plain or q.dtype != torch.bfloat16 or not (packed or ring.dtype == q.dtype) or (quantised and d % BLOCK):
        fallback(
            "sparse_attention.rows_turned", f"head_dim {d}, window {window}, {q.dtype}, {ring.dtype} or heads apart"
        )
        return ref.rows_turned(q, eps, cos, sin, sink, scale, ring, store, chosen, ratio, where, rope, quantised)
    most = 0 if store is None else where.bound // ratio
    if chosen is not None:
        most = min(most, chosen.shape[1])
    if store is None or not most:
        store, chosen, ratio, most = ring, None, 0, 0
    many = batch * (window + most) >= MANY * rows_gluon.BN
    hopper = HOPPER and packed and many and _hopper(q, ring, rope)
    tile, warps = MORE if many else FEW
    block, tile = (rows_gluon.BM, rows_gluon.BN) if hopper else (HEADS, tile)
    groups, tiles = triton.cdiv(heads, block), window // tile + triton.cdiv(most, tile)
    splits = min(tiles, max(1, (rows_gluon.PROGRAMS if hopper else PROGRAMS) // (batch * groups)))
    splits = triton.cdiv(tiles, triton.cdiv(tiles, splits))
    parts = torch.empty(splits, batch, heads, d, dtype=torch.bfloat16, device=q.device)
    sums = torch.empty(2, splits, batch, heads, dtype=torch.float32, device=q.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    places = where.tables if chosen is None else chosen
    given = (
        q, q.stride(0), cos, sin, ring, store, places, places.stride(0), where.positions, where.slots,
        parts, sums[0], sums[1], heads, places.shape[1], eps, scale, splits,
    )  # fmt: skip
    sizes = window, d, rope, width, ratio, chosen is not None, PAGE_TOKENS // ratio if ratio else 1
    if hopper:
        rows_gluon.launch((batch, groups, splits), given, sizes)
    else:
        _part[(batch, groups, splits)](
            *given, *sizes, packed, HEADS, tile, num_warps=warps, num_stages=1,
        )  # fmt: skip
    out = result(q, quantised)
    values, scales = values_and_scales(out)
    channels = d if batch >= WIDE_BATCH or d < BLOCK else BLOCK
    _combine[(batch, heads, d // channels)](
        parts, sums[0], sums[1], sink, cos, sin, values, cos if scales is None else scales, splits,
        0 if scales is None else scales.stride(1), d, rope // 2, scales is not None, channels, PARTS, num_warps=4,
        **overlap(batch, batch * heads * (d // channels)),
    )  # fmt: skip
    return out


def _hopper(q: Tensor, ring: Tensor, rope: int) -> bool:
    _, heads, d = q.shape
    fits = d == rows_gluon.D and heads % rows_gluon.BM == 0 and ring.shape[1] % rows_gluon.BN == 0
    same = rope == rows_gluon.ROPE and ring.shape[2] == rows_gluon.WIDTH
    return fits and same and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


@triton.jit
def _keys(
    ring, store, places, slot, tile, tiles, position, count, WINDOW: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
    WIDTH: tl.constexpr, RATIO: tl.constexpr, CHOSEN: tl.constexpr, PER_PAGE: tl.constexpr, PACKED: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A tile's keys [BN, D] in bfloat16, zeros where there is none, and which there are. places: the sequence's."""
    place = tile * BN + tl.arange(0, BN)
    recent = tile < WINDOW // BN
    entry = place - WINDOW
    seen = tl.where(recent, place <= position, (entry >= 0) & (entry < count)) & (tile < tiles)
    flat = slot.to(tl.int64) * WINDOW + place
    source = tl.where(recent, ring, store)
    if RATIO > 0:
        if CHOSEN:
            chosen = tl.load(places + entry, mask=seen & (entry >= 0), other=-1).to(tl.int64)
        else:
            page = tl.load(places + entry // PER_PAGE, mask=seen & (entry >= 0), other=0)
            chosen = page.to(tl.int64) * PER_PAGE + entry % PER_PAGE
        seen = seen & (recent | (chosen >= 0))
        flat = tl.where(recent, flat, chosen)
    if PACKED:
        k = unpacked(source, flat, seen, D, ROPE, WIDTH)
    else:
        k = tl.load(source + flat[:, None] * D + tl.arange(0, D)[None, :], mask=seen[:, None], other=0.0)
    return k, seen


# Numbers that follow the context's length and the batch are not specialised on: that would compile while serving.
@triton.jit(do_not_specialize=["places_token", "most", "splits"])
def _part(
    q, q_token, cos, sin, ring, store, places, places_token, positions, slots, parts, peaks, totals, heads, most,
    eps, scale, splits, WINDOW: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    RATIO: tl.constexpr, CHOSEN: tl.constexpr, PER_PAGE: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """places: int32 [B, most] at stride places_token, chosen rows or page tables."""
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
    # The first keys are asked for before the queries: both come from far.
    mine = places + wide * places_token
    k, seen = _keys(
        ring, store, mine, slot, split, tiles, position, count, WINDOW, D, ROPE, WIDTH, RATIO, CHOSEN, PER_PAGE, PACKED,
        BN,
    )  # fmt: skip
    angles = token * (ROPE // 2)
    query, factor = turned(q + wide * q_token, cos + angles, sin + angles, head, heads, eps, scale, D, ROPE // 2)
    peak = tl.full((BM,), -1e30, tl.float32)  # finite, so that a tile without keys is no NaN
    total = tl.zeros((BM, BN), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for tile in range(split, tiles, splits):
        logits = tl.where(seen[None, :], tl.dot(query, tl.trans(k)) * factor[:, None], float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - higher)
        p = tl.exp2(logits - higher[:, None])
        total = total * shrink[:, None] + p
        acc = tl.dot(p.to(tl.bfloat16), k, acc * shrink[:, None])
        peak = higher
        k, seen = _keys(
            ring, store, mine, slot, tile + splits, tiles, position, count, WINDOW, D, ROPE, WIDTH, RATIO, CHOSEN,
            PER_PAGE, PACKED, BN,
        )  # fmt: skip
    part = (split * tl.num_programs(0) + token).to(tl.int64) * heads
    tl.store(peaks + part + head, peak, mask=head < heads)
    tl.store(totals + part + head, tl.sum(total, 1), mask=head < heads)
    if split < tiles:  # otherwise nothing was summed, and the part is not read
        at = head[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(parts + part * D + at, acc.to(tl.bfloat16), mask=head[:, None] < heads)


@triton.jit(do_not_specialize=["splits", "scale_stride"])
def _combine(
    parts, peaks, totals, sink, cos, sin, out, scales, splits, scale_stride, D: tl.constexpr, PAIRS: tl.constexpr,
    QUANTISED: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """C channels of one head: the parts in proportion to their sums, the sink among them; rotated back, stored."""
    begin(PDL)
    token, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, heads = tl.num_programs(0), tl.num_programs(1)
    channel = piece * C + tl.arange(0, C)
    drain = tl.load(sink + head) * LOG2E
    ready(PDL)
    pair = piece * (C // 2) + tl.arange(0, C // 2) - (D // 2 - PAIRS)
    c = tl.load(cos + token * PAIRS + pair, mask=pair >= 0, other=1.0)
    s = tl.load(sin + token * PAIRS + pair, mask=pair >= 0, other=0.0)
    peak = drain
    total = 1.0
    acc = tl.zeros((C,), tl.float32)
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        at = (split * batch + token).to(tl.int64) * heads + head
        # Parts without keys were never written: what lies there is dropped, not masked, so that nobody waits to ask.
        part = tl.load(parts + at[:, None] * D + channel[None, :], mask=(split < splits)[:, None], other=0.0)
        mass = tl.load(totals + at, mask=split < splits, other=0.0)
        top = tl.load(peaks + at, mask=split < splits, other=0.0)
        held = mass > 0
        top = tl.where(held, top, float("-inf"))
        higher = tl.maximum(peak, tl.max(top, 0))
        shrink = tl.exp2(peak - higher)
        weight = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight * mass, 0)
        wide = tl.where(held[:, None], part.to(tl.float32), 0.0)
        acc = acc * shrink + tl.sum(weight[:, None] * wide, 0)
        peak = higher
    even, odd = tl.split(tl.reshape(acc / total, (C // 2, 2)))
    back = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (C,))
    row = token.to(tl.int64) * heads + head
    if QUANTISED:
        groups = tl.reshape(back, (C // 128, 128))
        exponent = exponents(tl.max(tl.abs(groups), 1))
        groups = groups * powers(254 - exponent)[:, None]
        block = head * (D // 128) + piece * (C // 128) + tl.arange(0, C // 128)
        tl.store(scales + block.to(tl.int64) * scale_stride + token, powers(exponent))
        tl.store(out + row * D + channel, tl.reshape(groups, (C,)).to(out.dtype.element_ty))
    else:
        tl.store(out + row * D + channel, back.to(out.dtype.element_ty))
