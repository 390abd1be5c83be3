"""The best of each query's scores, exact and in order, without reading most of them. Called by ``triton.py``.

Knows rows of float32 scores and the largest score of each group of ``G`` neighbours; knows no query and no key.

The best k elements lie in the best k groups: a group left out has k groups before it, each with an element that is
greater than all of its own, or equal and older. So one selection among n / G maxima, then one among k * G scores, both
in registers. A selection finds its cut by counting what lies above a guess; counts are integers, and what they end at
does not depend on the guesses, so every run chooses alike.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST = tl.constexpr(-(1 << 31))  # below the key of any number, -inf included
GUESSES = tl.constexpr(16)  # of a cut, before its interval is halved instead: scores as they come need 4 to 13
DIRECT = (128, 256, 512)  # groups of a row that is read whole: up to 8,192 scores
PRUNED = (2048, 4096, 8192, 16384)  # groups of a row of which the maxima are read: up to 262,144 scores
ENTRIES = 1 << 14  # elements of one selection: counts of equals are kept in 15 bits
WARPS = {2048: 4, 8192: 8, ENTRIES: 8}  # by elements of the larger selection, all in registers
REGISTERS = {2048: None, 8192: 128, ENTRIES: None}  # of a thread; 128: two programs share a multiprocessor


class Plan(NamedTuple):
    """How rows of n scores are searched: groups (a power of two that covers them), their size, whether by maxima."""

    groups: int
    size: int
    pruned: bool


def plan(n: int, top_k: int) -> Plan | None:
    """The plan for rows of up to n scores, of few kinds: each is a kernel to compile. None: no kernel serves this."""
    size = 16
    for groups in DIRECT:
        if n <= groups * size:
            return Plan(groups, size, False)
    while size <= 64 and triton.next_power_of_2(top_k) * size <= ENTRIES:
        for groups in PRUNED:
            if n <= groups * size:
                return Plan(groups, size, True)
        size *= 2
    return None


@triton.jit
def _ordered(x):
    """int32 that compare as float32 do, both zeros alike."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits == LEAST, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The float32 of an ordered int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _cut(keys, lo, hi, k):
    """Where the k largest of more than k ``keys`` end: (above, quota, least). Taken are the keys > above, and the first
    ``quota`` of those == above; none of the k is below ``least``. The k-th largest lies between lo and hi.
    """
    low, high = lo, hi
    found = tl.sum((keys >= lo).to(tl.int32))
    wanted = tl.log2(k + 0.5)
    # Counts fall about exponentially from low to high: the next trial is where a straight line through the logarithms
    # meets k; of an end that stays where it is, half the distance counts (the "Illinois" rule).
    over, under = tl.log2(found + 0.5) - wanted, -1.0 - wanted
    moved, trials = 0, 0
    while (low < high) & (found != k):
        bottom = _number(low)
        trial = _ordered(bottom + (_number(high) - bottom) * (over / (over - under)))
        middle = (low & high) + ((low ^ high) >> 1) + 1
        trial = tl.where(trials < GUESSES, trial, middle)  # equal scores, infinities: halves always end
        trial = tl.minimum(tl.maximum(trial, low + 1), high)
        count = tl.sum((keys >= trial).to(tl.int32))
        distance = tl.log2(count + 0.5) - wanted
        enough = count >= k
        over = tl.where(enough, distance, tl.where(moved < 0, over * 0.5, over))
        under = tl.where(enough, tl.where(moved > 0, under * 0.5, under), distance)
        moved = tl.where(enough, 1, -1)
        low, high = tl.where(enough, trial, low), tl.where(enough, high, trial - 1)
        found = tl.where(enough, count, found)
        trials += 1
    above = tl.where(found == k, low - 1, low)  # k keys >= low: it need not be a key itself
    return above, k - tl.sum((keys > above).to(tl.int32)), low


@triton.jit
def _places(counts, more, level, quota):
    """Which elements are taken and where they go. counts: inclusive sums of (more + (level << 16)) in order."""
    equal = counts >> 16
    taken = more | (level & (equal <= quota))
    return taken, (counts & 0xFFFF) + tl.minimum(equal, quota) - 1


@triton.jit
def _row(e, table, taken, FLAT: tl.constexpr, PER_PAGE: tl.constexpr):
    """The output for row number ``e`` of the sequence: itself, or the row of the store laid flat."""
    if FLAT:
        page = tl.load(table + e // PER_PAGE, mask=taken, other=0)
        e = page * PER_PAGE + e % PER_PAGE
    return e


@triton.jit(
    do_not_specialize=["first", "table_stride"],
    do_not_specialize_on_alignment=["positions", "tables"],
)
def _best(
    logits,
    maxima,
    positions,
    tables,
    out,
    first,
    table_stride,
    logits_stride,
    maxima_stride,
    RATIO: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    G: tl.constexpr,
    SCORED: tl.constexpr,
    PRUNED: tl.constexpr,
    FLAT: tl.constexpr,
    PER_PAGE: tl.constexpr,
):
    """Query first + i of a program i. logits, maxima: its row i. Rows with at most TOP_K visible take them all."""
    i = tl.program_id(0)
    visible = (tl.load(positions + first + i) + 1) // RATIO
    out += (first + i) * TOP_K
    table = tables + (first + i) * table_stride
    k = tl.arange(0, WIDTH)
    if visible <= TOP_K:
        row = _row(k, table, k < visible, FLAT, PER_PAGE)
        tl.store(out + k, tl.where(k < visible, row, -1), mask=k < TOP_K)
    elif SCORED:
        logits += i * logits_stride
        g = tl.arange(0, G)
        least = LEAST
        if PRUNED:
            # The group that ends beyond what is visible: its maximum is taken anew, of what is visible.
            full = visible // G
            x = tl.load(logits + full * G + g, mask=full * G + g < visible, other=float("-inf"))
            groups = tl.arange(0, GROUPS)
            peak = _ordered(tl.load(maxima + i * maxima_stride + groups, mask=groups < full, other=0.0))
            peak = tl.where(groups < full, peak, LEAST)
            count = (visible + G - 1) // G
            peak = tl.where((groups == full) & (full < count), tl.max(_ordered(x), 0), peak)
            kept = tl.minimum(count, TOP_K)
            lo = tl.min(tl.where(groups < count, peak, 0x7FFFFFFF), 0)
            above, quota, t = _cut(peak, lo, tl.max(peak, 0), kept)
            more, level = peak > above, (peak == above) & (groups < count)
            sums = tl.cumsum(more.to(tl.int32) + (level.to(tl.int32) << 16), 0)
            taken, place = _places(sums, more, level, quota)
            tl.store(out + place, groups, mask=taken)  # the output's own row holds them for the moment
            tl.debug_barrier()
            group = tl.load(out + k, mask=k < kept, other=-1)
            tl.debug_barrier()
            least = tl.where(kept == TOP_K, t, LEAST)
        else:
            group = tl.arange(0, GROUPS)
        e = group[:, None] * G + g[None, :]
        seen = (group >= 0)[:, None] & (e < visible)
        keys = _ordered(tl.load(logits + e, mask=seen, other=0.0))
        lo = tl.maximum(tl.min(tl.where(seen, keys, 0x7FFFFFFF)), least)
        keys = tl.where(seen, keys, LEAST)
        above, quota, t = _cut(keys, lo, tl.max(keys), TOP_K)
        more, level = keys > above, (keys == above) & seen
        ones = more.to(tl.int32) + (level.to(tl.int32) << 16)
        each = tl.sum(ones, 1)
        sums = tl.cumsum(ones, 1) + (tl.cumsum(each, 0) - each)[:, None]
        taken, place = _places(sums, more, level, quota)
        tl.store(out + place, _row(e, table, taken, FLAT, PER_PAGE), mask=taken)


def best(
    logits: Tensor | None,
    maxima: Tensor | None,
    positions: Tensor,
    tables: Tensor | None,
    out: Tensor,
    first: int,
    count: int,
    how: Plan | None,
    ratio: int,
    per_page: int,
) -> None:
    """Write int32 out[first : first + count]: what each query takes, ascending, -1 behind the last.

    logits: float32 [count, >= n]; maxima: float32 [count, >= n / group size], where ``how`` is by maxima; of both, what
    lies beyond a query's visible rows is not used. logits None: nobody sees more than top_k. tables: int32 [.., P]
    where rows of the store are wanted, not of the sequence.
    """
    top_k = out.shape[1]
    width = triton.next_power_of_2(top_k)
    how = how or Plan(1, 1, False)  # nothing is searched
    entries = max(how.groups, width * how.size) if how.pruned else how.groups * how.size
    kind = min(size for size in WARPS if entries <= size)
    empty = out if tables is None else tables
    logits_ = out if logits is None else logits
    maxima_ = out if maxima is None else maxima
    _best[(count,)](
        logits_,
        maxima_,
        positions,
        empty,
        out,
        first,
        empty.stride(0),
        0 if logits is None else logits.stride(0),
        0 if maxima is None else maxima.stride(0),
        RATIO=ratio,
        TOP_K=top_k,
        WIDTH=width,
        GROUPS=how.groups,
        G=how.size,
        SCORED=logits is not None,
        PRUNED=how.pruned,
        FLAT=tables is not None,
        PER_PAGE=per_page,
        num_warps=WARPS[kind],
        maxnreg=REGISTERS[kind] if tables is None else None,  # a decode step has no two for one multiprocessor
    )


def scratch(count: int, n: int, how: Plan, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(logits, maxima) for ``count`` queries of n scores, uninitialised; rows padded so that strides divide by 16."""
    width = -(-n // 1024) * 1024
    logits = torch.empty(count, width, dtype=torch.float32, device=device)
    maxima = torch.empty(count, width // how.size, dtype=torch.float32, device=device) if how.pruned else None
    return logits, maxima
