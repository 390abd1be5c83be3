# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""What ``many_gluon`` wants around its products: the list of its tiles' blocks, and rows in its order of columns.

Of each 128 columns, place 32 j + 16 h + 4 t + i holds column 64 h + 16 t + 4 j + i: a thread t of four then finds the
columns of its 16 bytes of words (ref.prepare) where the tensor core's operands j want them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.cache_rows.triton import exponents, powers
from longread.kernels.experts.slots_triton import Slots, rescaled

BLOCK = tl.constexpr(128)  # slots of the widest tile
SPARE = tl.constexpr(32)  # what a last block must exceed, or the one before gives it as many


@triton.jit(do_not_specialize=["most"])
def _blocks(ends, out, most, E: tl.constexpr, EXPERTS: tl.constexpr, P: tl.constexpr):
    every = tl.arange(0, EXPERTS)
    upto = tl.load(ends + every, mask=every < E, other=0)
    since = tl.load(ends + every - 1, mask=(every > 0) & (every < E), other=0)
    last = tl.cumsum((upto - since + BLOCK - 1) // BLOCK, 0)  # the block behind an expert's last
    block = tl.program_id(0) * P + tl.arange(0, P)
    before = last[:, None] <= block[None, :]
    expert = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, last[:, None], 0), 0)
    there = expert < E
    start = tl.load(ends + expert - 1, mask=there & (expert > 0), other=0)
    end = tl.load(ends + expert, mask=there, other=0)
    count = (end - start + BLOCK - 1) // BLOCK
    moved = tl.where((count > 1) & (end - start - (count - 1) * BLOCK <= SPARE), SPARE, 0)
    begin = start + (block - first) * BLOCK
    stop = tl.minimum(begin + BLOCK - tl.where(block - first == count - 2, moved, 0), end)
    at = out + 4 * (1 + block)
    tl.store(at, expert, mask=there & (block < most))
    tl.store(at + 1, begin - tl.where(block - first == count - 1, moved, 0), mask=there & (block < most))
    tl.store(at + 2, stop, mask=there & (block < most))
    tl.store(out + tl.arange(0, 1), tl.max(last, 0), mask=tl.program_id(0) + tl.arange(0, 1) == 0)


def blocks_of(slots: Slots) -> Tensor:
    """int32 [1 + most, 4]: first how many blocks there are, then of each its expert, first slot and slot behind it.

    At most 128 slots each; a narrow last block takes 32 slots of the one before, since 96 + 64 cost less than 128 + 32.
    """
    pairs, experts = slots.where.numel(), slots.ends.numel()
    most = min(pairs, experts) + pairs // BLOCK.value
    out = slots.ends.new_empty(1 + most, 4)
    _blocks[(triton.cdiv(most, 32),)](
        slots.ends, out, most, E=experts, EXPERTS=triton.next_power_of_2(experts), P=32, num_warps=4
    )
    return out


@triton.jit
def _placed(row, WIDE: tl.constexpr):
    """A row [WIDE] with its columns in this file's order."""
    parts = tl.reshape(row, (WIDE // 128, 2, 4, 4, 4))  # group, h, t, j, i
    return tl.reshape(tl.permute(parts, (0, 3, 1, 2, 4)), (WIDE,))


@triton.jit
def _spread(values, scales, where, out, factors, value_row, scale_row, scale_group,
            K: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, PLACED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    x, peak = rescaled(values, scales, token, value_row, scale_row, scale_group, K, WIDE)
    row = tl.reshape(x, (WIDE,))
    if PLACED:
        row = _placed(row, WIDE)
    to = tl.arange(0, WIDE)
    for k in tl.static_range(TOP_K):
        slot = tl.load(where + token * TOP_K + k).to(tl.int64)
        tl.store(out + slot * K + to, row, mask=(to < K) & (slot >= 0))
        tl.store(factors + slot, peak, mask=slot >= 0)


def spread(values: Tensor, scales: Tensor, slots: Slots, top_k: int, placed: bool) -> tuple[Tensor, Tensor]:
    """Tokens' rows e4m3 [T, K] with scales per 128 columns -> e4m3 [slots, K] and one scale a row, float32 [slots].

    placed: columns in this file's order. A slot without a pair stays unwritten.
    """
    width = values.shape[1]
    out = torch.empty(slots.count, width, dtype=values.dtype, device=values.device)
    factors = scales.new_empty(slots.count)
    _spread[(values.shape[0],)](
        values, scales, slots.where, out, factors, values.stride(0), scales.stride(0), scales.stride(1),
        K=width, WIDE=triton.next_power_of_2(width), TOP_K=top_k, PLACED=placed, num_warps=4,
    )  # fmt: skip
    return out, factors


@triton.jit
def _hidden_to_fp8(h, ends, out, factors, E: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr,
                   PLACED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(ends + E - 1):
        return
    at = tl.arange(0, WIDE)
    x = tl.load(h + row * F + at, mask=at < F, other=0.0).to(tl.float32)
    scale = powers(exponents(tl.max(tl.abs(x), 0)))
    narrow = (x / scale).to(tl.float8e4nv)
    if PLACED:
        narrow = _placed(narrow, WIDE)
    tl.store(out + row * F + at, narrow, mask=at < F)
    tl.store(factors + row, scale)


def hidden_to_fp8(h: Tensor, slots: Slots, placed: bool) -> tuple[Tensor, Tensor]:
    """Rows [slots, F] -> e4m3 [slots, F], placed or not, and float32 [slots]. Slots not in use stay unwritten."""
    count, width = h.shape
    out = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=h.device)
    factors = torch.empty(count, dtype=torch.float32, device=h.device)
    _hidden_to_fp8[(count,)](
        h, slots.ends, out, factors,
        E=slots.ends.shape[0], F=width, WIDE=triton.next_power_of_2(width), PLACED=placed, num_warps=4,
    )  # fmt: skip
    return out, factors
