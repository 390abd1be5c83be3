"""The indexer on a GPU: the functions of ``ref.py`` with the same signatures. ``topk.py`` chooses among their scores.

Scoring is the dominating cost of a long prefill: heads * di * 2 operations for every query and visible row. A tile's
accumulator has index rows down and (query, head) across, so that the sum over heads runs inside a thread, with its
share of the head weights held in registers; queries stay in shared memory while rows stream by. Several programs share
a multiprocessor: while one sums, another's product runs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.cache_rows.triton import exponents, powers
from longread.kernels.fallback import fallback
from longread.kernels.indexer import ref, score_gluon, topk
from longread.kernels.indexer.ref import RATIO, Keys
from longread.kernels.places import Chunk, Rows

FP8 = torch.float8_e4m3fn
COLUMNS = {"chunk": 256}  # queries times heads of a tile
ROWS = {"chunk": 64}  # index rows of a tile
WARPS = {"queries": 4, "keys": 4, "chunk": 4, "rows": 4}
STAGES = {"chunk": 3, "chunk16": 2, "rows": 3}  # 16-bit tiles: two programs just fit a multiprocessor's shared memory
PROGRAMS = {"chunk": 2112, "rows": 792}  # of a launch, about: some waves of what 132 multiprocessors hold at once
SCRATCH_BYTES = 256 << 20  # of logits
HOPPER = True  # whether ``score_gluon`` takes what it can; False: this file's kernel, to compare


@triton.jit(do_not_specialize_on_alignment=["q", "w", "cos", "sin"])
def _queries(
    q,
    w,
    cos,
    sin,
    out,
    weights,
    q_stride,
    w_stride,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    x = tl.load(q + t * q_stride + h[:, None] * D + d[None, :]).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (H, D // 2, 2)))
    turned = pair - (D - ROPE) // 2
    c = tl.load(cos + t * (ROPE // 2) + turned, mask=turned >= 0, other=1.0)[None, :]
    s = tl.load(sin + t * (ROPE // 2) + turned, mask=turned >= 0, other=0.0)[None, :]
    even, odd = even * c - odd * s, even * s + odd * c
    weight = tl.load(w + t * w_stride + h) * scale
    if QUANTISED:
        exponent = exponents(tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1))
        weight = weight * powers(exponent)
        inverse = powers(254 - exponent)[:, None]
        even, odd = even * inverse, odd * inverse
    x = tl.reshape(tl.join(even, odd), (H, D))
    tl.store(out + t * (H * D) + h[:, None] * D + d[None, :], x.to(out.dtype.element_ty))
    tl.store(weights + t * H + h, weight)


def queries(q: Tensor, w: Tensor, cos: Tensor, sin: Tensor, scale: float, quantised: bool) -> tuple[Tensor, Tensor]:
    tokens, heads = w.shape
    di, rope = q.shape[1] // heads, 2 * cos.shape[1]
    if not (_power(heads) and _power(di) and di >= 2 and q.stride(1) == 1 and w.stride(1) == 1 and rope <= di):
        fallback("indexer.queries", f"{heads} heads of {di} channels")
        return ref.queries(q, w, cos, sin, scale, quantised)
    out = torch.empty(tokens, heads, di, dtype=FP8 if quantised else q.dtype, device=q.device)
    weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        _queries[(tokens,)](
            q,
            w,
            cos.contiguous(),
            sin.contiguous(),
            out,
            weights,
            q.stride(0),
            w.stride(0),
            scale,
            H=heads,
            D=di,
            ROPE=rope,
            QUANTISED=quantised,
            num_warps=WARPS["queries"],
        )
    return out, weights


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["meta", "table"])
def _keys(
    store,
    store_scales,
    meta,
    table,
    values,
    scales,
    n,
    page_stride,
    D: tl.constexpr,
    ROW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    RATIO: tl.constexpr,
    PACKED: tl.constexpr,
):
    """One page of a program. store: elements of the values' dtype, ROW of them a row; store_scales: the same memory as
    float32, ROW / 4 of them a row.
    """
    p = tl.program_id(0)
    closed = tl.minimum((tl.load(meta) + tl.load(meta + 1)) // RATIO, n)
    r = tl.arange(0, PER_PAGE)
    d = tl.arange(0, D)
    out = p * PER_PAGE + r
    page = tl.load(table + p).to(tl.int64)
    used = out < closed
    x = tl.load(store + page * page_stride + (r[:, None] * ROW + d[None, :]), mask=used[:, None], other=0.0)
    tl.store(values + out[:, None].to(tl.int64) * D + d[None, :], x, mask=(out < n)[:, None])
    if PACKED:
        place = store_scales + page * (page_stride // 4) + (r * (ROW // 4) + D // 4)
        tl.store(scales + out, tl.load(place, mask=used, other=0.0), mask=out < n)


def keys(store: Tensor, where: Chunk, di: int) -> Keys:
    n, per_page = where.bound // RATIO, store.shape[1]
    packed = store.dtype == torch.uint8
    if not (_power(di) and _power(per_page) and (di % 4 == 0 or not packed) and store[0].is_contiguous()):
        fallback("indexer.keys", f"{di} channels, {per_page} rows a page")
        return ref.keys(store, where, di)
    values = torch.empty(n, di, dtype=FP8 if packed else store.dtype, device=store.device)
    scales = torch.empty(n, dtype=torch.float32, device=store.device) if packed else None
    if n:
        elements, floats = _views(store)
        _keys[(-(-n // per_page),)](
            elements,
            floats,
            where.meta,
            where.table,
            values,
            values if scales is None else scales,
            n,
            elements.stride(0),
            D=di,
            ROW=store.shape[2],
            PER_PAGE=per_page,
            RATIO=RATIO,
            PACKED=packed,
            num_warps=WARPS["keys"],
        )
    return Keys(values, scales)


@triton.jit
def _summed(acc, weights, M: tl.constexpr, NQ: tl.constexpr, H: tl.constexpr):
    """float32 [M, NQ]: the weighted sum over heads of one tile's products [M, NQ * H]."""
    return tl.sum(tl.reshape(tl.maximum(acc, 0.0) * weights[None, :], (M, NQ, H)), 2)


@triton.jit(do_not_specialize=["first", "tokens", "n"], do_not_specialize_on_alignment=["positions"])
def _score_chunk(
    q,
    w,
    keys,
    scales,
    positions,
    logits,
    maxima,
    first,
    tokens,
    n,
    logits_stride,
    maxima_stride,
    span,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    NQ: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    SCALED: tl.constexpr,
    PRUNED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """NQ queries against ``span`` rows. A launch's programs run through the same rows at about the same time, so that
    these come from the L2 cache. Queries that need no choice are not scored.
    """
    local = tl.program_id(0) * NQ + tl.arange(0, NQ)
    position = tl.load(positions + first + local, mask=first + local < tokens, other=-1)
    limit = tl.max((position + 1) // RATIO, 0)
    lo = tl.program_id(1) * span
    hi = tl.minimum(lo + span, limit)
    if (limit > TOP_K) & (lo < hi):
        c = tl.arange(0, NQ * H)
        d = tl.arange(0, D)
        row = tl.minimum(first + tl.program_id(0) * NQ + c // H, tokens - 1) * H + c % H
        query = tl.load(q + row.to(tl.int64)[:, None] * D + d[None, :])
        weights = tl.load(w + row)
        m = tl.arange(0, M)
        g = tl.arange(0, M // G)
        for k in tl.range(lo, hi, M, num_stages=STAGES):
            r = tl.minimum(k + m, n - 1)
            if SCALED:
                scale = tl.load(scales + r)
            tile = tl.load(keys + r[:, None] * D + d[None, :])
            s = _summed(tl.dot(tile, tl.trans(query)), weights, M, NQ, H)
            if SCALED:
                s = s * scale[:, None]
            tl.store(logits + local[None, :] * logits_stride + (k + m)[:, None], s)
            if PRUNED:
                peak = tl.max(tl.reshape(s, (M // G, G, NQ)), 1)
                tl.store(maxima + local[None, :] * maxima_stride + (k // G + g)[:, None], peak)


def choose_chunk(q: Tensor, w: Tensor, keys: Keys, where: Chunk, top_k: int) -> Tensor:
    tokens, heads, di = q.shape
    n = where.bound // RATIO
    out = torch.empty(tokens, top_k, dtype=torch.int32, device=q.device)
    if not tokens:
        return out
    if n <= top_k:
        topk.best(None, None, where.positions, None, out, 0, tokens, None, RATIO, 1)
        return out
    how = topk.plan(n, top_k)
    if how is None or not _served(q, keys.values):
        fallback("indexer.choose_chunk", f"{heads} heads of {di} channels, {top_k} of {n}, {q.dtype}")
        return ref.choose_chunk(q, w, keys, where, top_k)
    q, w = q.contiguous(), w.contiguous()
    nq = max(1, COLUMNS["chunk"] // heads)
    blocks = -(-tokens // max(1, SCRATCH_BYTES // (4 * n)))
    size = -(-tokens // (blocks * 16)) * 16  # of a block of queries, in whole tiles
    logits, maxima = topk.scratch(-(-size // nq) * nq, n, how, q.device)
    for first in range(0, tokens, size):
        count = min(size, tokens - first)
        _scored_chunk(q, w, keys, where.positions, logits, maxima, first, count, n, nq, top_k, how)
        topk.best(logits, maxima, where.positions, None, out, first, count, how, RATIO, 1)
    return out


def _scored_chunk(
    q: Tensor,
    w: Tensor,
    keys: Keys,
    positions: Tensor,
    logits: Tensor,
    maxima: Tensor | None,
    first: int,
    count: int,
    n: int,
    nq: int,
    top_k: int,
    how: topk.Plan,
) -> None:
    by_hand = HOPPER and keys.scales is not None and nq == score_gluon.QUERIES and score_gluon.serves(q)
    rows, tiles = max(score_gluon.STEP if by_hand else ROWS["chunk"], how.size), -(-count // nq)
    pieces = max(1, min(-(-PROGRAMS["chunk"] // tiles), n // 1024))
    span = -(-n // (pieces * rows)) * rows
    grid = (tiles, -(-n // span))
    if by_hand and keys.scales is not None:
        score_gluon.launch(
            grid, q, w, keys.values, keys.scales, positions, logits, maxima, first, n, span, RATIO, top_k, how.size
        )
        return
    _score_chunk[grid](
        q,
        w,
        keys.values,
        w if keys.scales is None else keys.scales,
        positions,
        logits,
        logits if maxima is None else maxima,
        first,
        q.shape[0],
        n,
        logits.stride(0),
        logits.stride(0) if maxima is None else maxima.stride(0),
        span,
        RATIO=RATIO,
        TOP_K=top_k,
        H=q.shape[1],
        D=q.shape[2],
        NQ=nq,
        M=rows,
        G=how.size,
        SCALED=keys.scales is not None,
        PRUNED=how.pruned,
        STAGES=STAGES["chunk"] if q.element_size() == 1 else STAGES["chunk16"],
        num_warps=WARPS["chunk"],
    )


@triton.jit(
    do_not_specialize=["splits", "table_stride"],
    do_not_specialize_on_alignment=["positions", "tables"],
)
def _score_rows(
    q,
    w,
    store,
    store_scales,
    positions,
    tables,
    logits,
    maxima,
    splits,
    table_stride,
    page_stride,
    logits_stride,
    maxima_stride,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    ROW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    G: tl.constexpr,
    PACKED: tl.constexpr,
    PRUNED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One query against every splits-th page of its sequence, read where it lies; ``store`` as in ``_keys``."""
    b = tl.program_id(1)
    limit = (tl.load(positions + b) + 1) // RATIO
    pages = (limit + PER_PAGE - 1) // PER_PAGE
    if (limit > TOP_K) & (tl.program_id(0) < pages):
        h = tl.arange(0, H)
        d = tl.arange(0, D)
        r = tl.arange(0, PER_PAGE)
        g = tl.arange(0, PER_PAGE // G)
        query = tl.load(q + b * (H * D) + h[:, None] * D + d[None, :])
        weights = tl.load(w + b * H + h)
        for p in tl.range(tl.program_id(0), pages, splits, num_stages=STAGES):
            page = tl.load(tables + b * table_stride + p).to(tl.int64)
            if PACKED:
                scale = tl.load(store_scales + page * (page_stride // 4) + (r * (ROW // 4) + D // 4))
            tile = tl.load(store + page * page_stride + (r[:, None] * ROW + d[None, :]))
            s = _summed(tl.dot(tile, tl.trans(query)), weights, PER_PAGE, 1, H)
            if PACKED:
                s = s * scale[:, None]
            tl.store(logits + b * logits_stride + p * PER_PAGE + r[:, None], s)
            if PRUNED:
                peak = tl.max(tl.reshape(s, (PER_PAGE // G, G)), 1)
                tl.store(maxima + b * maxima_stride + p * (PER_PAGE // G) + g, peak)


def choose_rows(q: Tensor, w: Tensor, store: Tensor, where: Rows, top_k: int) -> Tensor:
    batch, heads, di = q.shape
    n, per_page = where.bound // RATIO, store.shape[1]
    out = torch.empty(batch, top_k, dtype=torch.int32, device=q.device)
    if not batch:
        return out
    if n <= top_k:
        topk.best(None, None, where.positions, where.tables, out, 0, batch, None, RATIO, per_page)
        return out
    how = topk.plan(n, top_k)
    packed = store.dtype == torch.uint8
    elements, floats = _views(store)
    fits = _power(per_page) and per_page >= 64 and store[0].is_contiguous()
    if how is None or not fits or not _served(q, elements):
        fallback("indexer.choose_rows", f"{heads} heads of {di} channels, {top_k} of {n}, {q.dtype}")
        return ref.choose_rows(q, w, store, where, top_k)
    logits, maxima = topk.scratch(batch, n, how, q.device)
    splits = max(1, min(-(-n // per_page), PROGRAMS["rows"] // batch))
    _score_rows[(splits, batch)](
        q.contiguous(),
        w.contiguous(),
        elements,
        floats,
        where.positions,
        where.tables,
        logits,
        logits if maxima is None else maxima,
        splits,
        where.tables.stride(0),
        elements.stride(0),
        logits.stride(0),
        logits.stride(0) if maxima is None else maxima.stride(0),
        RATIO=RATIO,
        TOP_K=top_k,
        H=heads,
        D=di,
        ROW=store.shape[2],
        PER_PAGE=per_page,
        G=how.size,
        PACKED=packed,
        PRUNED=how.pruned,
        STAGES=STAGES["rows"],
        num_warps=WARPS["rows"],
    )
    topk.best(logits, maxima, where.positions, where.tables, out, 0, batch, how, RATIO, per_page)
    return out


def _views(store: Tensor) -> tuple[Tensor, Tensor]:
    """A store as elements of its values' dtype, and, if packed, as float32, of which a row's last is its scale."""
    return (store.view(FP8), store.view(torch.float32)) if store.dtype == torch.uint8 else (store, store)


def _served(q: Tensor, values: Tensor) -> bool:
    """Whether the tensor cores take these: 8- or 16-bit numbers of one type, sizes that are powers of two."""
    heads, di = q.shape[1:]
    return (
        q.dtype == values.dtype and q.element_size() <= 2 and _power(heads) and _power(di) and di >= 32 and heads <= 256
    )


def _power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
