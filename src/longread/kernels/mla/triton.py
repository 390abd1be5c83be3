"""MLA on Hopper: rows of the cache made in one pass, absorbed attention split over keys, expanded attention by cuDNN.

Absorbed (``attend_rows``): a program takes 64 heads of one row, so that the latent is read H / 64 times, the second
time from the L2 cache; both products of a key block use the same tile in shared memory. Keys are split so that the
programs fill the device once, and the parts are put together in their order. Expanded (``attend_chunk``): the context
in blocks of ``KEYS`` keys, each expanded by two batched products and attended to by torch's fused attention; parts are
merged by their log-sum-exp, so scratch does not grow with the context.

Knows device_ref.py's signatures and stores; what does not fit the tiles goes to the reference.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from longread.kernels.fallback import fallback
from longread.kernels.fp8.ref import BLOCK, FP8, Quantised
from longread.kernels.mla import device_ref, rows_gluon
from longread.kernels.mla.device_ref import KEYS, LEAST_KEYS, PAGE, packed_bytes
from longread.kernels.mla.ref import LOG2E
from longread.kernels.norm.triton import to_fp8
from longread.kernels.places import Chunk, Rows

SMS = 132
MOST_SPLITS = 64
SPLIT_COST = 4  # what beginning a part and putting it together cost, in key blocks


class Tile(NamedTuple):
    """Keys of a block, warps, stages."""

    keys: int
    warps: int
    stages: int


# By heads of a program and whether rows are packed: unpacked they need shared memory of their own.
TILES: dict[tuple[int, bool], Tile] = {
    (16, False): Tile(32, 4, 3),
    (16, True): Tile(32, 4, 3),
    (64, False): Tile(64, 8, 2),
    (64, True): Tile(32, 8, 2),
}
INTERPRETED: bool = triton.knobs.runtime.interpret  # which Gluon has not
BY_HAND = {False: True, True: True}  # whether the model's own sizes go to rows_gluon.py, by whether rows are packed
WARPS = {"latents": 4, "rotate": 4, "combine": 4, "merge": 4}


@triton.jit(do_not_specialize=["scale_stride", "table_stride"])
def _latents(
    q_ptr, kv_ptr, q_gain_ptr, kv_gain_ptr, cos_ptr, sin_ptr, c_ptr, s_ptr, store_ptr, positions_ptr, table_ptr,
    q_stride, kv_stride, scale_stride, table_stride, eps,
    QL: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    PACKED: tl.constexpr, QUANTISE: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """A token: its cache row, and (QL > 0) its query's latent."""
    t = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + t)
    if position >= 0:
        page = tl.load(table_ptr + t * table_stride + position // 256).to(tl.int64)
        row = store_ptr + (page * 256 + position % 256) * WIDTH
        r = tl.arange(0, RANK)
        c = tl.load(kv_ptr + t * kv_stride + r).to(tl.float32)
        c = c * tl.rsqrt(tl.sum(c * c, 0) / RANK + eps) * tl.load(kv_gain_ptr + r).to(tl.float32)
        pair = tl.arange(0, ROPE // 2)
        turned = kv_ptr + t * kv_stride + RANK + 2 * pair
        even = tl.load(turned).to(tl.float32)
        odd = tl.load(turned + 1).to(tl.float32)
        cos = tl.load(cos_ptr + t * (ROPE // 2) + pair)
        sin = tl.load(sin_ptr + t * (ROPE // 2) + pair)
        if PACKED:
            values, scales = to_fp8(c, RANK // 128)
            tl.store(row + r, values.to(tl.uint8, bitcast=True))
            tl.store((row + RANK).to(tl.pointer_type(tl.float32)) + tl.arange(0, RANK // 128), scales)
            tail = (row + RANK + RANK // 32).to(tl.pointer_type(tl.bfloat16))
        else:
            tl.store(row + r, c.to(store_ptr.dtype.element_ty))
            tail = row + RANK
        tl.store(tail + 2 * pair, (even * cos - odd * sin).to(tail.dtype.element_ty))
        tl.store(tail + 2 * pair + 1, (even * sin + odd * cos).to(tail.dtype.element_ty))
    if QL > 0:
        n = tl.arange(0, BQ)
        inside = n < QL
        q = tl.load(q_ptr + t * q_stride + n, mask=inside, other=0.0).to(tl.float32)
        gain = tl.load(q_gain_ptr + n, mask=inside, other=0.0).to(tl.float32)
        q = (q * tl.rsqrt(tl.sum(q * q, 0) / QL + eps) * gain).to(q_ptr.dtype.element_ty)
        if QUANTISE:
            values, scales = to_fp8(q.to(tl.float32), BQ // 128)
            tl.store(c_ptr + t * QL + n, values, mask=inside)
            block = tl.arange(0, BQ // 128)
            tl.store(s_ptr + block * scale_stride + t, scales, mask=block * 128 < QL)
        else:
            tl.store(c_ptr + t * QL + n, q, mask=inside)


@triton.jit
def _rotate(
    q_ptr, cos_ptr, sin_ptr, heads, token_stride, head_stride, ROPE: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """The rotated channels of one token's heads; q_ptr points at the first head's."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BH)
    n = tl.arange(0, ROPE)
    at = q_ptr + t * token_stride + h[:, None] * head_stride + n[None, :]
    inside = (h < heads)[:, None]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (BH, ROPE // 2, 2)))
    pair = tl.arange(0, ROPE // 2)
    cos = tl.load(cos_ptr + t * (ROPE // 2) + pair)[None, :]
    sin = tl.load(sin_ptr + t * (ROPE // 2) + pair)[None, :]
    turned = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BH, ROPE))
    tl.store(at, turned.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "splits", "table_stride"])  # one kernel for all batches and contexts
def _attend(
    q_ptr, pe_ptr, store_ptr, table_ptr, positions_ptr, out_ptr, lse_ptr, rows, heads, scale, splits,
    q_head, pe_row, pe_head, table_stride,
    WHOLE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BH heads of a row over one of ``splits`` parts of its keys. scale is to base 2.

    q [H, B, RANK]; out: [B, H, splits, RANK] float32 with lse [B, H, splits] (base 2; -inf: a part without keys, whose
    out is not written), or WHOLE, with one part, [H, B, RANK].
    """
    b = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    h = tl.program_id(0) * BH + tl.arange(0, BH)
    known = h < heads
    r = tl.arange(0, RANK)
    e = tl.arange(0, ROPE)
    q = tl.load(q_ptr + h[:, None] * q_head + b * RANK + r[None, :], mask=known[:, None], other=0.0)
    pe = tl.load(pe_ptr + b * pe_row + h[:, None] * pe_head + e[None, :], mask=known[:, None], other=0.0)
    length = tl.load(positions_ptr + b) + 1
    blocks = tl.cdiv(length, BN)
    each = tl.cdiv(blocks, splits)
    first = part * each
    last = tl.minimum(first + each, blocks)
    peak = tl.full((BH,), float("-inf"), tl.float32)
    total = tl.zeros((BH,), tl.float32)
    mixed = tl.zeros((BH, RANK), tl.float32)
    table = table_ptr + b * table_stride
    n = tl.arange(0, BN)
    page = tl.load(table + first * BN // 256, mask=first < last, other=0)
    for i in range(first, last):
        key = i * BN + n
        row = page.to(tl.int64) * 256 + (i * BN) % 256 + n
        page = tl.load(table + (i + 1) * BN // 256, mask=i + 1 < last, other=0)  # one block ahead of its rows
        there = (key < length)[:, None]  # what lies behind a sequence's end may be NaN
        if PACKED:
            at = store_ptr + row[:, None] * WIDTH
            codes = tl.load(at.to(tl.pointer_type(tl.float8e4nv)) + r[None, :], mask=there, other=0.0)
            block = tl.arange(0, RANK // 128)
            powers = tl.load((at + RANK).to(tl.pointer_type(tl.float32)) + block[None, :], mask=there, other=0.0)
            wide = tl.reshape(codes.to(tl.float32), (BN, RANK // 128, 128)) * powers[:, :, None]
            c = tl.reshape(wide, (BN, RANK)).to(q.dtype)
            tail = (at + RANK + RANK // 32).to(tl.pointer_type(tl.bfloat16))
            k_pe = tl.load(tail + e[None, :], mask=there, other=0.0).to(q.dtype)
        else:
            c = tl.load(store_ptr + row[:, None] * WIDTH + r[None, :], mask=there, other=0.0)
            k_pe = tl.load(store_ptr + row[:, None] * WIDTH + RANK + e[None, :], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(c), tl.dot(pe, tl.trans(k_pe))) * scale
        scores = tl.where((key < length)[None, :], scores, float("-inf"))
        raised = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - raised)
        weights = tl.exp2(scores - raised[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(c.dtype), c, mixed * shrink[:, None])
        peak = raised
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    if WHOLE:
        tl.store(
            out_ptr + (h[:, None] * rows + b) * RANK + r[None, :],
            mixed.to(out_ptr.dtype.element_ty),
            mask=known[:, None],
        )
    else:
        place = (b * heads + h) * splits + part
        tl.store(
            lse_ptr + place,
            tl.where(total > 0, peak + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf")),
            mask=known,
        )
        if first < last:
            tl.store(out_ptr + place[:, None] * RANK + r[None, :], mixed, mask=known[:, None])


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine(
    part_ptr, lse_ptr, out_ptr, rows, heads, splits, MOST: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """The parts of one row and head; none has keys for padding, whose result is zeros."""
    b, h = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place = (b * heads + h) * splits
    s = tl.arange(0, MOST)
    peak = tl.max(tl.load(lse_ptr + place + s, mask=s < splits, other=float("-inf")), 0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    r = tl.arange(0, RANK)
    few = tl.arange(0, 16)
    sums = tl.zeros((16,), tl.float32)
    mixed = tl.zeros((RANK,), tl.float32)
    for first in range(0, splits, 16):
        now = first + few
        lse = tl.load(lse_ptr + place + now, mask=now < splits, other=float("-inf"))
        there = (lse > float("-inf"))[:, None]
        part = tl.load(part_ptr + (place + now)[:, None] * RANK + r[None, :], mask=there, other=0.0)
        weights = tl.exp2(lse - peak)
        sums += weights
        mixed += tl.sum(part * weights[:, None], 0)
    total = tl.sum(sums, 0)
    mixed = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + (h * rows + b) * RANK + r, mixed.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens"])
def _merge(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, out_lse_ptr, tokens,
    a_token, a_head, b_token, b_head, HEADS: tl.constexpr, V: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Two parts of a token's heads, each a mean under its own weights; lse: [H, T], natural. out: [T, H, V]."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    known = h < HEADS
    a_lse = tl.load(a_lse_ptr + h * tokens + t, mask=known, other=0.0)
    b_lse = tl.load(b_lse_ptr + h * tokens + t, mask=known, other=0.0)
    peak = tl.maximum(a_lse, b_lse)
    a_weight = tl.exp(a_lse - peak)
    b_weight = tl.exp(b_lse - peak)
    total = a_weight + b_weight
    n = tl.arange(0, V)[None, :]
    inside = known[:, None]
    a = tl.load(a_ptr + t * a_token + h[:, None] * a_head + n, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + t * b_token + h[:, None] * b_head + n, mask=inside, other=0.0).to(tl.float32)
    mixed = a * (a_weight / total)[:, None] + b * (b_weight / total)[:, None]
    tl.store(out_ptr + (t * HEADS + h[:, None]) * V + n, mixed.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_lse_ptr + h * tokens + t, peak + tl.log(total), mask=known)


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
    """See ``device_ref.latents``."""
    tokens, rank, rope = kv.shape[0], kv_gain.shape[0], 2 * cos.shape[1]
    width, packed = 0 if q is None else q.shape[1], store.dtype == torch.uint8
    if not (_power(rank) and _power(rope)) or (packed and rank % BLOCK) or (quantised and width % BLOCK):
        fallback("mla.latents", f"a latent of {rank} + {rope}, queries of {width}")
        return device_ref.latents(q, kv, q_gain, kv_gain, eps, cos, sin, quantised, store, where)
    c_q: Quantised | Tensor | None = None
    values, scales = kv, kv  # without q, or with plain results: not written
    if q is not None and quantised:
        scales = q.new_empty(width // BLOCK, tokens, dtype=torch.float32).t()
        c_q = Quantised(q.new_empty(tokens, width, dtype=FP8), scales)
        values = c_q.values
    elif q is not None:
        values = c_q = q.new_empty(tokens, width)
    if tokens:
        rows = isinstance(where, Rows)
        table = where.tables if isinstance(where, Rows) else where.table
        _latents[(tokens,)](
            kv if q is None else q, kv, kv_gain if q_gain is None else q_gain, kv_gain, cos, sin, values, scales,
            store, where.positions, table,
            0 if q is None else q.stride(0), kv.stride(0), scales.stride(1), table.stride(0) if rows else 0, eps,
            QL=width, RANK=rank, ROPE=rope, WIDTH=store.shape[2], PACKED=packed, QUANTISE=quantised,
            BQ=max(128, triton.next_power_of_2(width)), num_warps=WARPS["latents"],
        )  # fmt: skip
    return c_q


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See ``device_ref.rotate``."""
    tokens, heads, width = q.shape
    rope = 2 * cos.shape[1]
    if not _power(rope) or rope < 4 or q.stride(2) != 1:
        fallback("mla.rotate", f"{rope} rotated channels")
        device_ref.rotate(q, cos, sin)
    elif tokens:
        _rotate[(tokens,)](
            q[..., width - rope :], cos, sin, heads, q.stride(0), q.stride(1),
            ROPE=rope, BH=triton.next_power_of_2(heads), num_warps=WARPS["rotate"],
        )  # fmt: skip


def attend_rows(q: Tensor, store: Tensor, kv_b: Tensor, scale: float, where: Rows) -> Tensor:
    """See ``device_ref.attend_rows``."""
    rows, heads, width = q.shape
    rank, packed = kv_b.shape[2], store.dtype == torch.uint8
    rope = (store.shape[2] - packed_bytes(rank, 0)) // 2 if packed else store.shape[2] - rank
    nope = width - rope
    reason = _refused(q, store, kv_b, rope, nope)
    if reason:
        fallback("mla.attend_rows", reason)
        return device_ref.attend_rows(q, store, kv_b, scale, where)
    out = q.new_empty(rows, heads, kv_b.shape[1] - nope)
    if not rows:
        return out
    folded = torch.bmm(q[..., :nope].transpose(0, 1), kv_b[:, :nope])  # [H, B, rank]
    mixed = _absorbed(folded, q[..., nope:], store, scale, where, packed)
    torch.bmm(mixed, kv_b[:, nope:].transpose(1, 2), out=out.transpose(0, 1))
    return out


def _refused(q: Tensor, store: Tensor, kv_b: Tensor, rope: int, nope: int) -> str:
    rank = kv_b.shape[2]
    if not (_power(rank) and _power(rope)) or rank < 16 or rope < 16 or (rank % BLOCK and store.dtype == torch.uint8):
        return f"a latent of {rank} + {rope}"
    if q.dtype.itemsize != 2 or kv_b.dtype != q.dtype or store.dtype not in (q.dtype, torch.uint8):
        return f"queries in {q.dtype}, a cache in {store.dtype}"
    return ""


def _power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _absorbed(folded: Tensor, pe: Tensor, store: Tensor, scale: float, where: Rows, packed: bool) -> Tensor:
    """Queries [H, B, rank] and pe [B, H, rope] over the latents -> [H, B, rank]."""
    heads, rows, rank = folded.shape
    few = 64 if heads > 16 else 16
    sizes = heads % rows_gluon.HEADS == 0 and (rank, pe.shape[2]) == (rows_gluon.RANK, rows_gluon.ROPE)
    by_hand = sizes and folded.dtype == torch.bfloat16 and BY_HAND[packed] and not INTERPRETED
    tile = TILES[few, packed]
    splits = _splits(
        rows * triton.cdiv(heads, few), triton.cdiv(where.bound, rows_gluon.KEYS if by_hand else tile.keys)
    )
    out = torch.empty_like(folded)
    part, lse = out, out
    if splits > 1:
        part = folded.new_empty(rows, heads, splits, rank, dtype=torch.float32)
        lse = folded.new_empty(rows, heads, splits, dtype=torch.float32)
    scale *= LOG2E
    if by_hand:
        rows_gluon.launch(folded, pe, store, where.tables, where.positions, part, lse, scale, splits)
    else:
        _attend[(triton.cdiv(heads, few), rows, splits)](
            folded, pe, store, where.tables, where.positions, part, lse, rows, heads, scale, splits,
            folded.stride(0), pe.stride(0), pe.stride(1), where.tables.stride(0),
            WHOLE=splits == 1, RANK=rank, ROPE=pe.shape[2], WIDTH=store.shape[2], PACKED=packed,
            BH=few, BN=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if splits > 1:
        _combine[(heads, rows)](
            part, lse, out, rows, heads, splits, MOST=MOST_SPLITS, RANK=rank, num_warps=WARPS["combine"]
        )
    return out


@cache
def _splits(programs: int, blocks: int) -> int:
    """Parts of the keys for which the device is done soonest, by whole waves of programs."""

    def cost(splits: int) -> int:
        return triton.cdiv(programs * splits, SMS) * (triton.cdiv(blocks, splits) + (SPLIT_COST if splits > 1 else 1))

    return min(range(1, max(1, min(MOST_SPLITS, blocks)) + 1), key=cost)


def attend_chunk(q: Tensor, store: Tensor, kv_b: Tensor, scale: float, where: Chunk, start: int, length: int) -> Tensor:
    """See ``device_ref.attend_chunk``."""
    tokens, heads, width = q.shape
    rank, packed = kv_b.shape[2], store.dtype == torch.uint8
    rope = (store.shape[2] - packed_bytes(rank, 0)) // 2 if packed else store.shape[2] - rank
    nope = width - rope
    v = kv_b.shape[1] - nope
    reason = _refused(q, store, kv_b, rope, nope) or ("" if _power(v) and v <= width else f"values of {v} channels")
    if reason:
        fallback("mla.attend_chunk", reason)
        return device_ref.attend_chunk(q, store, kv_b, scale, where, start, length)
    # Blocks are whole pages, so that the diagonal one may begin with queries that nobody asked for.
    first = start // PAGE * PAGE
    lead = start - first
    size = tokens if lead == 0 else tokens + PAGE
    queries = q
    if lead:
        queries = q.new_zeros(size, heads, width)
        queries[lead : lead + length] = q[:length]
    merged: tuple[Tensor, Tensor] | None = None
    for begin, count in _pieces(first):
        latent = _gathered(store, where.table, begin, count, count, rank, rope, q.dtype)
        part = _part(queries, latent, kv_b, nope, scale, causal=False)
        merged = part if merged is None else _merged(merged, part, torch.float32)
        del latent, part
    latent = _gathered(store, where.table, first, lead + length, size, rank, rope, q.dtype)
    own = _part(queries, latent, kv_b, nope, scale, causal=True)
    out = own[0] if merged is None else _merged(merged, own, q.dtype)[0]
    if lead == 0:
        return out
    asked = q.new_zeros(tokens, heads, v)
    asked[:length] = out[lead : lead + length]
    return asked


def _pieces(keys: int) -> Iterator[tuple[int, int]]:
    """(begin, count) of a context of whole pages: KEYS at a time, then powers of two."""
    begin = 0
    while begin < keys:
        count = KEYS
        while count > max(LEAST_KEYS, keys - begin):
            count //= 2
        yield begin, count
        begin += count


def _gathered(
    store: Tensor, table: Tensor, begin: int, count: int, size: int, rank: int, rope: int, dtype: torch.dtype
) -> Tensor:
    """Plain rows of positions begin .. begin + count - 1, with zeros up to ``size`` rows: [size, rank + rope]."""
    pages = table[begin // PAGE : -(-(begin + count) // PAGE)].long()
    rows = store.index_select(0, pages).view(-1, store.shape[2])[:count]
    if store.dtype == torch.uint8:
        rows = device_ref.unpack(rows, rank, rope, dtype)
    return rows if size == count else functional.pad(rows, (0, 0, 0, size - count))


def _part(q: Tensor, latent: Tensor, kv_b: Tensor, nope: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries [T, H, nope + rope] over expanded latents [n, rank + rope]: ([T, H, v], log-sum-exp float32 [H, T])."""
    heads, _, rank = kv_b.shape
    count, width, v = latent.shape[0], q.shape[2], kv_b.shape[1] - nope
    c = latent[:, :rank].expand(heads, -1, -1)
    keys, values = q.new_empty(count, heads, width), q.new_empty(count, heads, v)
    torch.bmm(c, kv_b[:, :nope].transpose(1, 2), out=keys[..., :nope].transpose(0, 1))
    torch.bmm(c, kv_b[:, nope:].transpose(1, 2), out=values.transpose(0, 1))
    keys[..., nope:] = latent[:, None, rank:]
    return _fused(q, keys, values, scale, causal)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of [T, H, d] over [n, H, d] and [n, H, v]: ([T, H, v], log-sum-exp float32 [H, T], contiguous)."""
    aten: Any = torch.ops.aten
    tokens, heads, width = q.shape
    given = [x.transpose(0, 1)[None] for x in (q, k, v)]
    if q.is_cuda and _cudnn_takes(width, v.shape[2], q.dtype, q.device):
        out, lse = aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, causal, False, scale=scale)[:2]
    else:
        given[2] = functional.pad(given[2], (0, width - v.shape[2]))  # flash has one width
        if q.is_cuda:
            out, lse = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)[:2]
        else:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, causal, scale=scale)
    return out[0].transpose(0, 1)[..., : v.shape[2]], lse.reshape(heads, -1)[:, :tokens].contiguous()


@cache
def _cudnn_takes(width: int, v: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN attends to keys and values of these widths; tried once."""
    q, k = (torch.zeros(1, 1, PAGE, n, dtype=dtype, device=device) for n in (width, v))
    try:
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, q, k, None, True, 0.0, True, False, scale=1.0)
    except RuntimeError as error:
        fallback("mla.attend_chunk's cuDNN attention", f"widths {width} and {v}: {error}")
        return False
    return True


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two parts over different keys as one, in ``dtype``; a float32 ``a`` is overwritten where it is to be float32."""
    tokens, heads, v = b[0].shape
    in_place = a[0].dtype == dtype == torch.float32
    out = a[0] if in_place else a[0].new_empty(tokens, heads, v, dtype=dtype)
    lse = torch.empty_like(b[1])
    each = min(16, triton.next_power_of_2(heads))
    _merge[(tokens, triton.cdiv(heads, each))](
        a[0], a[1], b[0], b[1], out, lse, tokens, *a[0].stride()[:2], *b[0].stride()[:2],
        HEADS=heads, V=v, BH=each, num_warps=WARPS["merge"],
    )  # fmt: skip
    return out, lse
