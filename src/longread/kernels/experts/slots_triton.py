# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""Slots: a step's (token, expert) pairs sorted by expert, each expert's share padded to whole blocks; and what is done
to rows of slots besides products.

Knows ids, counts and rows; knows no weights. A counting sort without atomics: pairs keep their order within an expert,
so every run gives the same slots, and a token's sum is taken over its pairs in their order. Numbers that follow the
number of tokens are not specialised on: another number must not compile another kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

SORTED = 256  # pairs ranked by one program
AT_ONCE = 512  # pairs up to which one program does everything (a decode step: one launch instead of three)


@triton.jit
def _ranked(ids, first, count, mine, index, P: tl.constexpr, STEP: tl.constexpr):
    """How many of the pairs first .. first + P that come before ``index`` have ``mine``'s expert."""
    rank = tl.zeros_like(mine)
    for at in range(0, P, STEP):
        other = first + at + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < count, other=-1)
        rank += tl.sum(((theirs[None, :] == mine[:, None]) & (other[None, :] < index[:, None])).to(tl.int32), 1)
    return rank


@triton.jit
def _histogram(ids, first, count, P: tl.constexpr, STEP: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 [EXPERTS]: pairs first .. first + P of each expert."""
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for at in range(0, P, STEP):
        other = first + at + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < count, other=-1)
        total += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), 1)
    return total


@triton.jit(do_not_specialize=["count", "blocks", "slots"])
def _all_at_once(ids, order, where, block_expert, ends, count, blocks, slots,
                 P: tl.constexpr, EXPERTS: tl.constexpr, E: tl.constexpr, BT: tl.constexpr,
                 STEP: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    index = tl.arange(0, P)
    mine = tl.load(ids + index, mask=index < count, other=-1)
    for at in range(0, SLOTS, P):
        tl.store(order + at + index, tl.full((P,), -1, tl.int32), mask=at + index < slots)
    for at in range(0, SLOTS // BT, P):
        tl.store(block_expert + at + index, tl.full((P,), -1, tl.int32), mask=at + index < blocks)
    padded = (_histogram(ids, 0, count, P, STEP, EXPERTS) + BT - 1) // BT * BT
    end = tl.cumsum(padded, 0)
    expert = tl.arange(0, EXPERTS)
    tl.store(ends + expert, end, mask=expert < E)
    rank = _ranked(ids, 0, count, mine, index, P, STEP)
    # All of -1 above must lie in memory before what follows, and the ends before they are read.
    tl.debug_barrier()
    real = mine >= 0
    slot = tl.load(ends + mine - 1, mask=mine > 0, other=0) + rank
    tl.store(order + slot, index, mask=real)
    tl.store(where + index, tl.where(real, slot, -1), mask=index < count)
    tl.store(block_expert + slot // BT, mine, mask=real & (rank % BT == 0))


@triton.jit(do_not_specialize=["count", "blocks", "slots"])
def _count(ids, counts, order, block_expert, count, blocks, slots,
           EXPERTS: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr, CLEARED: tl.constexpr):  # fmt: skip
    """counts int32 [parts, EXPERTS]: pairs of each part of each expert. What _place may leave out becomes -1."""
    part = tl.program_id(0)
    nothing = tl.full((CLEARED,), -1, tl.int32)
    for at in range(part * CLEARED, slots, tl.num_programs(0) * CLEARED):
        index = at + tl.arange(0, CLEARED)
        tl.store(order + index, nothing, mask=index < slots)
        tl.store(block_expert + index, nothing, mask=index < blocks)
    total = _histogram(ids, part * P, count, P, STEP, EXPERTS)
    tl.store(counts + part * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit(do_not_specialize=["parts"])
def _starts(counts, ends, parts, E: tl.constexpr, EXPERTS: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):
    """counts int32 [parts, EXPERTS] -> the first slot of each part's share of each expert, in place; ends [E]."""
    expert = tl.arange(0, EXPERTS)
    part = tl.arange(0, STEP)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for at in range(0, parts, STEP):
        here = counts + (at + part)[:, None] * EXPERTS + expert[None, :]
        total += tl.sum(tl.load(here, mask=(at + part < parts)[:, None], other=0), 0)
    padded = (total + BT - 1) // BT * BT
    end = tl.cumsum(padded, 0)
    tl.store(ends + expert, end, mask=expert < E)
    start = end - padded
    for at in range(0, parts, STEP):
        here = counts + (at + part)[:, None] * EXPERTS + expert[None, :]
        some = tl.load(here, mask=(at + part < parts)[:, None], other=0)
        tl.store(here, start[None, :] + tl.cumsum(some, 0) - some, mask=(at + part < parts)[:, None])
        start += tl.sum(some, 0)


@triton.jit(do_not_specialize=["count"])
def _place(ids, starts, ends, order, where, block_expert, count,
           EXPERTS: tl.constexpr, P: tl.constexpr, BT: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    first = tl.program_id(0) * P
    index = first + tl.arange(0, P)
    mine = tl.load(ids + index, mask=index < count, other=-1)
    rank = _ranked(ids, first, count, mine, index, P, STEP)
    real = mine >= 0
    slot = tl.load(starts + tl.program_id(0) * EXPERTS + mine, mask=real, other=0) + rank
    tl.store(order + slot, index, mask=real)
    tl.store(where + index, tl.where(real, slot, -1), mask=index < count)
    # An expert's share starts at a multiple of BT, so a slot that is one begins a block of this expert.
    tl.store(block_expert + slot // BT, mine, mask=real & (slot % BT == 0))


class Slots:
    """order: int32 [slots], the pair of each slot or -1. where: int32 [pairs], each pair's slot or -1. block_expert:
    int32 [blocks], -1 behind the last block in use. ends: int32 [E], where each expert's share ends. All on the device.
    """

    def __init__(self, ids: Tensor, experts: int, block: int) -> None:
        """ids: int32 [T, k], -1 for none. ``block`` slots belong to one expert. Sizes are upper bounds."""
        pairs = ids.numel()
        self.block = block
        self.blocks = min(pairs, experts) + pairs // block
        self.count = self.blocks * block
        self.order = ids.new_empty(self.count)
        self.where = ids.new_empty(pairs)
        self.block_expert = ids.new_empty(self.blocks)
        self.ends = ids.new_empty(experts)
        wide = triton.next_power_of_2(experts)
        ids = ids.contiguous()
        if pairs <= AT_ONCE:
            _all_at_once[(1,)](
                ids, self.order, self.where, self.block_expert, self.ends, pairs, self.blocks, self.count,
                P=max(16, triton.next_power_of_2(pairs)), EXPERTS=wide, E=experts, BT=block, STEP=16,
                SLOTS=triton.next_power_of_2(self.count), num_warps=8,
            )  # fmt: skip
            return
        parts = triton.cdiv(pairs, SORTED)
        counts = ids.new_empty(parts, wide)
        _count[(parts,)](
            ids, counts, self.order, self.block_expert, pairs, self.blocks, self.count,
            EXPERTS=wide, P=SORTED, STEP=16, CLEARED=1024, num_warps=4,
        )  # fmt: skip
        _starts[(1,)](counts, self.ends, parts, E=experts, EXPERTS=wide, BT=block, STEP=32, num_warps=8)
        _place[(parts,)](
            ids, counts, self.ends, self.order, self.where, self.block_expert, pairs,
            EXPERTS=wide, P=SORTED, BT=block, STEP=16, num_warps=8,
        )  # fmt: skip


@triton.jit
def rescaled(values, scales, row, value_row, scale_row, scale_group, K: tl.constexpr, WIDE: tl.constexpr):
    """A row quantised per 128 columns, with the largest of its scales for all: e4m3 [WIDE / 128, 128], that scale."""
    group = tl.arange(0, WIDE // 128)
    scale = tl.load(scales + row * scale_row + group * scale_group, mask=group < K // 128, other=0.0)
    peak = tl.max(scale, 0)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(values + row * value_row + at, mask=at < K, other=0.0).to(tl.float32)
    # Both are powers of two, and none is above the peak: only values far below the row's largest lose digits.
    return (x * (scale / peak)[:, None]).to(tl.float8e4nv), peak


@triton.jit(do_not_specialize=["scale_group"])
def _one_scale(values, scales, out, factors, value_row, scale_row, scale_group, K: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x, peak = rescaled(values, scales, row, value_row, scale_row, scale_group, K, WIDE)
    at = tl.arange(0, WIDE // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + row * K + at, x, mask=at < K)
    tl.store(factors + row, peak)


def one_scale(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows quantised in groups of 128 columns, with one scale a row instead: (e4m3 [T, K], float32 [T])."""
    tokens, width = values.shape
    out = torch.empty_like(values, memory_format=torch.contiguous_format)
    factors = scales.new_empty(tokens)
    _one_scale[(tokens,)](
        values, scales, out, factors, values.stride(0), scales.stride(0), scales.stride(1),
        K=width, WIDE=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return out, factors


@triton.jit
def _combine(y, where, weights, shared, out, shared_row, D: tl.constexpr, TOP_K: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = tl.load(shared + token * shared_row + at, mask=at < D, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(where + token * TOP_K + k).to(tl.int64)
        there = slot >= 0
        weight = tl.load(weights + token * TOP_K + k)
        value = tl.load(y + tl.maximum(slot, 0) * D + at, mask=(at < D) & there, other=0.0).to(tl.float32)
        total += tl.where(there, weight * value, 0.0)
    tl.store(out + token * D + at, total.to(out.dtype.element_ty), mask=at < D)


def combine(y: Tensor, slots: Slots, weights: Tensor, shared: Tensor) -> Tensor:
    """shared [T, D] + each token's pairs' rows of y [slots, D] by weight, in the order of its ids."""
    tokens, width = shared.shape
    out = torch.empty_like(shared, memory_format=torch.contiguous_format)
    # Few tokens are spread over more programs.
    part = min(1024 if tokens >= 64 else 256, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, part))](
        y, slots.where, weights.contiguous(), shared, out, shared.stride(0),
        D=width, TOP_K=weights.shape[1], WIDE=part, num_warps=4 if part >= 1024 else 2,
    )  # fmt: skip
    return out
