"""V4's compressors on a GPU: see ``device_ref.py``. All of it is bounded by reading kv and gate once.

Decode is one launch for all that a token leaves in a layer, the window's row too, a program a sequence for each. A
chunk is two: one pools its windows and one brings the rings up to date, since a window may need what the ring held
before; of ratio 128 the first pools in blocks of channels, which a window's norm must see together. A program that has
no window leaves at once, so grids depend on the batch's shape alone.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.cache_rows.triton import store_index, store_latent
from longread.kernels.compressor.device_ref import Part
from longread.kernels.places import Chunk, Rows
from longread.kernels.window.ref import SIZE
from longread.kernels.window.triton import packed_rope, put_row
from longread.kernels.window.triton import rows as window_rows

PAGE = 256  # tokens
NUMBERS, LATENT, INDEX = 0, 1, 2  # what a row of the store holds
# Channels up to -> warps of a program that pools one window of 4 (8 tokens of kv and gate in registers).
OVERLAP_WARPS = {128: 1, 256: 2, 512: 4, 1 << 30: 8}
# A window of 128 is pooled by programs of this many channels: 8 blocks of 512 channels are 520 programs at 8192 tokens.
LONG_CHANNELS = 64
LONG_WARPS = 8
FINISH_WARPS = 4
# Small tensors of a step may lie anywhere in one buffer, and tables have any width: no variant of a kernel for each.
WINDOW = tl.constexpr(SIZE)
LOOSE = ("positions", "slots", "tables", "meta", "table", "cos", "sin")
ROWS_LOOSE = ("positions", "slots", "tables", "a_cos", "a_sin", "b_cos", "b_sin")


def layer_rows(parts: Sequence[Part], latent: Tensor, ring: Tensor, eps: float, where: Rows) -> None:
    """See ``device_ref.layer_rows``; one launch, a program for each part and one for the window."""
    batch, programs = latent.shape[0], len(parts) + 1
    if not parts:
        window_rows(latent, ring, where)
        return
    if not batch:
        return
    first, second = parts[0], parts[-1]  # where there is no second, the first stands in its place and nobody looks
    shapes = [_shape(part.gain, part.cos, part.store, part.ratio, part.index_keys) for part in (first, second)]
    _rows[batch, programs](
        *_arguments(first), *_arguments(second), latent, ring, where.positions, where.slots, where.tables, eps,
        latent.stride(0), ring.stride(0), ring.stride(1), where.tables.stride(0),
        PARTS=len(parts), RATIO=first.ratio, **{"A_" + name: size for name, size in shapes[0].items()},
        **{"B_" + name: size for name, size in shapes[1].items()}, W_D=latent.shape[1],
        W_ROPE=packed_rope(latent, ring), W_BLOCK=max(64, triton.next_power_of_2(latent.shape[1])),
        num_warps=_warps(first.gain),
    )  # fmt: skip


def _arguments(part: Part) -> tuple[Tensor | int, ...]:
    first, second, last = part.rings[0], part.rings[1], part.rings[-1]
    strides = [x.stride(0) for x in (part.kv, part.gate, first, second, last, part.store)]
    return part.kv, part.gate, part.ape, first, second, last, part.gain, part.cos, part.sin, part.store, *strides


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
    """See ``device_ref.chunk``."""
    tokens = kv.shape[0]
    if not tokens:
        return
    shape = _shape(gain, cos, store, ratio, index)
    if ratio == 4:
        ring_kv, ring_score = rings
        _overlap_chunk[(tokens // 4 + 1,)](
            kv, gate, ape, ring_kv, ring_score, gain, eps, cos, sin, store, where.meta, where.table,
            kv.stride(0), gate.stride(0), ring_kv.stride(0), store.stride(0), **shape, num_warps=_warps(gain),
        )  # fmt: skip
        keep(kv, gate, ape, rings, where, ratio)
        return
    top, total, acc = rings
    d, windows = gain.shape[0], tokens // ratio + 2
    channels = min(LONG_CHANNELS, triton.next_power_of_2(d))
    pooled = torch.empty(windows, 3, d, dtype=torch.float32, device=kv.device)
    strides = (top.stride(0), total.stride(0), acc.stride(0))
    _online_chunk[(windows, triton.cdiv(d, channels))](
        kv, gate, ape, top, total, acc, pooled, where.meta, kv.stride(0), gate.stride(0), *strides,
        D=d, CHANNELS=channels, num_warps=LONG_WARPS,
    )  # fmt: skip
    _online_finish[(windows,)](
        pooled, top, total, acc, gain, eps, cos, sin, store, where.meta, where.table, *strides, store.stride(0),
        **shape, num_warps=FINISH_WARPS,
    )  # fmt: skip


def keep(kv: Tensor, gate: Tensor, ape: Tensor, rings: tuple[Tensor, ...], where: Chunk, ratio: int) -> None:
    """See ``device_ref.keep``; that a place is a multiple of 128 is not looked at here."""
    tokens, width = kv.shape
    if not tokens:
        return
    if ratio == 4:
        ring_kv, ring_score = rings
        _overlap_keep[(min(8, tokens),)](
            kv, gate, ape, ring_kv, ring_score, where.meta, kv.stride(0), gate.stride(0), ring_kv.stride(0),
            W=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        return
    top, total, acc = rings
    _online_empty[(1,)](
        top, total, acc, where.meta, top.stride(0), total.stride(0), acc.stride(0),
        D=width, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def _shape(gain: Tensor, cos: Tensor, store: Tensor, ratio: int, index: bool) -> dict[str, int]:
    """The compile-time numbers of a compressor: channels, rotated channels, what a row is and how many a page has."""
    d = gain.shape[0]
    form = NUMBERS if store.dtype != torch.uint8 else INDEX if index else LATENT
    return {
        "D": d, "ROPE": 2 * cos.shape[-1], "FORM": form, "WIDTH": store.shape[2], "PER_PAGE": PAGE // ratio,
        "BLOCK": max(64, triton.next_power_of_2(d)),
    }  # fmt: skip


def _warps(gain: Tensor) -> int:
    return next(warps for most, warps in OVERLAP_WARPS.items() if gain.shape[0] <= most)


@triton.jit
def _finish(
    pooled, gain, eps, cos, sin, row,
    D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and write one row. pooled: float32 [BLOCK], zeros behind D. cos, sin: pointers to ROPE / 2."""
    c = tl.arange(0, BLOCK)
    scale = 1.0 / tl.sqrt(tl.sum(pooled * pooled, 0) / D + eps)
    x = pooled * scale * tl.load(gain + c, mask=c < D, other=0.0)
    # Pairs of channels; those before the rotated ones turn by 0.
    pair = tl.arange(0, BLOCK // 2) - (D - ROPE) // 2
    turned = (pair >= 0) & (pair < ROPE // 2)
    co, si = tl.load(cos + pair, mask=turned, other=1.0), tl.load(sin + pair, mask=turned, other=0.0)
    even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    x = tl.reshape(tl.join(even * co - odd * si, even * si + odd * co), (BLOCK,))
    if FORM == 0:
        tl.store(row + c, x.to(row.dtype.element_ty), mask=c < D)
    elif FORM == 1:
        store_latent(row, x, D, ROPE, BLOCK)
    else:
        store_index(row, x, D, BLOCK)


@triton.jit
def _row(store, table, window, store_page, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr):
    """Where the row of a window is. table: pointer to the sequence's page ids."""
    page = tl.load(table + window // PER_PAGE).to(tl.int64)
    return store + page * store_page + (window % PER_PAGE) * WIDTH


@triton.jit
def _overlap_row(
    kv, gate, ape, ring_kv, ring_score, gain, cos, sin, store, kv_row, gate_row, ring_slot, score_slot, store_page,
    eps, b, position, slot, table,
    D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token of ratio 4. slot, and b of the token: int64."""
    c = tl.arange(0, BLOCK)
    here, phase, at = c < D, position % 4, position % 8
    kv += b * kv_row
    gate += b * gate_row
    ape += phase * 2 * D
    ring_kv += slot * ring_slot
    ring_score += slot * score_slot
    early = tl.load(kv + c, mask=here, other=0.0).to(tl.float32)
    late = tl.load(kv + D + c, mask=here, other=0.0).to(tl.float32)
    early_score = tl.load(gate + c, mask=here, other=0.0).to(tl.float32) + tl.load(ape + c, mask=here, other=0.0)
    score = tl.load(gate + D + c, mask=here, other=0.0).to(tl.float32) + tl.load(ape + D + c, mask=here, other=0.0)
    tl.store(ring_kv + at * 2 * D + c, early, mask=here)
    tl.store(ring_kv + at * 2 * D + D + c, late, mask=here)
    tl.store(ring_score + at * 2 * D + c, early_score, mask=here)
    tl.store(ring_score + at * 2 * D + D + c, score, mask=here)
    if phase == 3:
        # The newest token comes from registers; no other row that is read here has been written here.
        top, total, acc = score, tl.full((BLOCK,), 1.0, tl.float32), late
        for r in tl.static_range(7):
            if r < 4:  # the window before, first channels
                offset = (at // 4 * 4 + 4 + r) % 8 * 2 * D
            else:  # this window, second channels
                offset = (at // 4 * 4 + r - 4) * 2 * D + D
            s = tl.load(ring_score + offset + c, mask=here, other=0.0)
            x = tl.load(ring_kv + offset + c, mask=here, other=0.0)
            new = tl.maximum(top, s)
            keep, add = tl.exp(top - new), tl.exp(s - new)
            total = total * keep + add
            acc = acc * keep + x * add
            top = new
        pooled = tl.where(here, acc / total, 0.0)
        row = _row(store, table, position // 4, store_page, WIDTH, PER_PAGE)
        _finish(pooled, gain, eps, cos + b * (ROPE // 2), sin + b * (ROPE // 2), row, D, ROPE, FORM, BLOCK)


@triton.jit
def _online_row(
    kv, gate, ape, ring_top, ring_total, ring_acc, gain, cos, sin, store, kv_row, gate_row, top_slot, total_slot,
    acc_slot, store_page, eps, b, position, slot, table,
    D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token of ratio 128."""
    c = tl.arange(0, BLOCK)
    here, phase = c < D, position % 128
    tops, totals = ring_top + slot * top_slot + c, ring_total + slot * total_slot + c
    accs = ring_acc + slot * acc_slot + c
    x = tl.load(kv + b * kv_row + c, mask=here, other=0.0).to(tl.float32)
    score = tl.load(gate + b * gate_row + c, mask=here, other=0.0).to(tl.float32)
    score += tl.load(ape + phase * D + c, mask=here, other=0.0)
    old = tl.load(tops, mask=here, other=0.0)
    new = tl.maximum(old, score)
    keep, add = tl.exp(old - new), tl.exp(score - new)
    total = tl.load(totals, mask=here, other=0.0) * keep + add
    acc = tl.load(accs, mask=here, other=0.0) * keep + x * add
    closes = phase == 127
    tl.store(tops, tl.where(closes, float("-inf"), new), mask=here)
    tl.store(totals, tl.where(closes, 0.0, total), mask=here)
    tl.store(accs, tl.where(closes, 0.0, acc), mask=here)
    if closes:
        pooled = tl.where(here, acc / total, 0.0)
        row = _row(store, table, position // 128, store_page, WIDTH, PER_PAGE)
        _finish(pooled, gain, eps, cos + b * (ROPE // 2), sin + b * (ROPE // 2), row, D, ROPE, FORM, BLOCK)


@triton.jit(do_not_specialize=("table_row",), do_not_specialize_on_alignment=ROWS_LOOSE)
def _rows(
    a_kv, a_gate, a_ape, a_first, a_second, a_last, a_gain, a_cos, a_sin, a_store,
    a_kv_row, a_gate_row, a_first_slot, a_second_slot, a_last_slot, a_store_page,
    b_kv, b_gate, b_ape, b_first, b_second, b_last, b_gain, b_cos, b_sin, b_store,
    b_kv_row, b_gate_row, b_first_slot, b_second_slot, b_last_slot, b_store_page,
    latent, ring, positions, slots, tables, eps, latent_row, ring_slot, ring_row, table_row,
    PARTS: tl.constexpr, RATIO: tl.constexpr, A_D: tl.constexpr, A_ROPE: tl.constexpr, A_FORM: tl.constexpr,
    A_WIDTH: tl.constexpr, A_PER_PAGE: tl.constexpr, A_BLOCK: tl.constexpr, B_D: tl.constexpr, B_ROPE: tl.constexpr,
    B_FORM: tl.constexpr, B_WIDTH: tl.constexpr, B_PER_PAGE: tl.constexpr, B_BLOCK: tl.constexpr,
    W_D: tl.constexpr, W_ROPE: tl.constexpr, W_BLOCK: tl.constexpr,
):  # fmt: skip
    """A token of program (token, part): the first compressor (A), the second (B, of ratio 4), or the window's row."""
    part = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position >= 0:
        slot = tl.load(slots + token).to(tl.int64)
        table = tables + token * table_row
        if part == 0:
            if RATIO == 4:
                _overlap_row(
                    a_kv, a_gate, a_ape, a_first, a_second, a_gain, a_cos, a_sin, a_store, a_kv_row, a_gate_row,
                    a_first_slot, a_second_slot, a_store_page, eps, token, position, slot, table,
                    A_D, A_ROPE, A_FORM, A_WIDTH, A_PER_PAGE, A_BLOCK,
                )  # fmt: skip
            else:
                _online_row(
                    a_kv, a_gate, a_ape, a_first, a_second, a_last, a_gain, a_cos, a_sin, a_store, a_kv_row,
                    a_gate_row, a_first_slot, a_second_slot, a_last_slot, a_store_page, eps, token, position, slot,
                    table, A_D, A_ROPE, A_FORM, A_WIDTH, A_PER_PAGE, A_BLOCK,
                )  # fmt: skip
        elif part < PARTS:
            if PARTS == 2:
                _overlap_row(
                    b_kv, b_gate, b_ape, b_first, b_second, b_gain, b_cos, b_sin, b_store, b_kv_row, b_gate_row,
                    b_first_slot, b_second_slot, b_store_page, eps, token, position, slot, table,
                    B_D, B_ROPE, B_FORM, B_WIDTH, B_PER_PAGE, B_BLOCK,
                )  # fmt: skip
        else:
            place = ring + slot * ring_slot + (position % WINDOW) * ring_row
            put_row(place, latent + token * latent_row, W_D, W_ROPE, W_BLOCK)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _overlap_chunk(
    kv, gate, ape, ring_kv, ring_score, gain, eps, cos, sin, store, meta, table,
    kv_row, gate_row, ring_slot, store_page,
    D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One window: rows 0-3 of its tile are the first channels of the window before, 4-7 its own second channels."""
    i = tl.program_id(0)
    start, length, slot = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    window = start // 4 + i
    if window < (start + length) // 4:
        r, c = tl.arange(0, 8), tl.arange(0, BLOCK)
        position = (window - 1) * 4 + r
        here = (c < D)[None, :]
        column = tl.where(r < 4, 0, D)[:, None] + c[None, :]
        new = (position >= start)[:, None] & here
        token = (position - start).to(tl.int64)[:, None]
        x = tl.load(kv + token * kv_row + column, mask=new, other=0.0).to(tl.float32)
        # A token before the first one has weight 0.
        s = tl.load(gate + token * gate_row + column, mask=new, other=float("-inf")).to(tl.float32)
        s += tl.load(ape + (r % 4)[:, None] * (2 * D) + column, mask=new, other=0.0)
        if (window - 1) * 4 < start:  # one or two windows of a chunk
            held = ((position < start) & (position >= 0))[:, None] & here
            offset = slot * ring_slot + ((position + 8) % 8)[:, None] * (2 * D) + column
            x = tl.where(held, tl.load(ring_kv + offset, mask=held, other=0.0), x)
            s = tl.where(held, tl.load(ring_score + offset, mask=held, other=0.0), s)
        s = tl.where(here, s, 0.0)  # channels behind D must not become NaN
        p = tl.exp(s - tl.max(s, 0)[None, :])
        pooled = tl.where(c < D, tl.sum(p * x, 0) / tl.sum(p, 0), 0.0)
        row = _row(store, table, window, store_page, WIDTH, PER_PAGE)
        _finish(pooled, gain, eps, cos + i * (ROPE // 2), sin + i * (ROPE // 2), row, D, ROPE, FORM, BLOCK)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _overlap_keep(
    kv, gate, ape, ring_kv, ring_score, meta, kv_row, gate_row, ring_slot, W: tl.constexpr, BLOCK: tl.constexpr
):
    """One of the chunk's last 8 tokens into the ring."""
    start, length, slot = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    token = length - 1 - tl.program_id(0)
    if token >= 0:
        c = tl.arange(0, BLOCK)
        here, position = c < W, start + token
        out = slot * ring_slot + position % 8 * W + c
        x = tl.load(kv + token.to(tl.int64) * kv_row + c, mask=here, other=0.0).to(tl.float32)
        s = tl.load(gate + token.to(tl.int64) * gate_row + c, mask=here, other=0.0).to(tl.float32)
        tl.store(ring_kv + out, x, mask=here)
        tl.store(ring_score + out, s + tl.load(ape + position % 4 * W + c, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _online_empty(
    ring_top, ring_total, ring_acc, meta, top_slot, total_slot, acc_slot, D: tl.constexpr, BLOCK: tl.constexpr
):
    """What the rings hold where a window has just closed."""
    length, slot = tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    if length > 0:
        c, zeros = tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32)
        tl.store(ring_top + slot * top_slot + c, zeros + float("-inf"), mask=c < D)
        tl.store(ring_total + slot * total_slot + c, zeros, mask=c < D)
        tl.store(ring_acc + slot * acc_slot + c, zeros, mask=c < D)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _online_chunk(
    kv, gate, ape, ring_top, ring_total, ring_acc, pooled, meta, kv_row, gate_row, top_slot, total_slot, acc_slot,
    D: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A block of channels of one window: the softmax of its tokens so far, to ``pooled`` [windows, 3, D]. The rings are
    only read here: the window that reads one and the one that replaces it may be different programs.
    """
    i = tl.program_id(0)
    start, length, slot = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    window, end = start // 128 + i, start + length
    if (length > 0) & (window * 128 < end):
        r, c = tl.arange(0, 128), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        position = window * 128 + r
        here = c < D
        new = ((position >= start) & (position < end))[:, None] & here[None, :]
        token = (position - start).to(tl.int64)[:, None]
        x = tl.load(kv + token * kv_row + c[None, :], mask=new, other=0.0).to(tl.float32)
        s = tl.load(gate + token * gate_row + c[None, :], mask=new, other=float("-inf")).to(tl.float32)
        s += tl.load(ape + r[:, None] * D + c[None, :], mask=new, other=0.0)
        s = tl.where(here[None, :], s, 0.0)
        top = tl.max(s, 0)
        opened = (i == 0) & (start % 128 > 0)  # the window goes on from what the ring holds
        before = tl.load(ring_top + slot * top_slot + c, mask=here & opened, other=float("-inf"))
        top = tl.maximum(top, before)
        p = tl.exp(s - top[None, :])
        keep = tl.exp(before - top)
        total = tl.load(ring_total + slot * total_slot + c, mask=here & opened, other=0.0) * keep + tl.sum(p, 0)
        acc = tl.load(ring_acc + slot * acc_slot + c, mask=here & opened, other=0.0) * keep + tl.sum(p * x, 0)
        out = pooled + i.to(tl.int64) * (3 * D) + c
        tl.store(out, top, mask=here)
        tl.store(out + D, total, mask=here)
        tl.store(out + 2 * D, acc, mask=here)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _online_finish(
    pooled, ring_top, ring_total, ring_acc, gain, eps, cos, sin, store, meta, table,
    top_slot, total_slot, acc_slot, store_page,
    D: tl.constexpr, ROPE: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr, PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A closed window to the store; the chunk's last window, or nothing if it closed, to the rings."""
    i = tl.program_id(0)
    start, length, slot = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    window, end = start // 128 + i, start + length
    if (length > 0) & (window * 128 < end):
        c = tl.arange(0, BLOCK)
        here = c < D
        sums = pooled + i.to(tl.int64) * (3 * D) + c
        top = tl.load(sums, mask=here, other=0.0)
        total = tl.load(sums + D, mask=here, other=1.0)
        acc = tl.load(sums + 2 * D, mask=here, other=0.0)
        closed = (window + 1) * 128 <= end
        if closed:
            row = _row(store, table, window, store_page, WIDTH, PER_PAGE)
            _finish(acc / total, gain, eps, cos + i * (ROPE // 2), sin + i * (ROPE // 2), row, D, ROPE, FORM, BLOCK)
        if (window + 1) * 128 >= end:
            tl.store(ring_top + slot * top_slot + c, tl.where(closed, float("-inf"), top), mask=here)
            tl.store(ring_total + slot * total_slot + c, tl.where(closed, 0.0, total), mask=here)
            tl.store(ring_acc + slot * acc_slot + c, tl.where(closed, 0.0, acc), mask=here)
