"""The window's ring on a GPU: see ``ref.py``. Bounded by memory; one program a row, or a few rows of a slab."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.cache_rows.triton import load_latent, store_latent
from longread.kernels.places import Chunk, Rows
from longread.kernels.window.ref import SIZE, rope_of

LOOSE = ("positions", "slots", "meta")  # they may lie anywhere in a step's buffer: no variant of a kernel for each
WARPS = 2  # a row of 512 channels is 8 a thread


def rows(kv: Tensor, ring: Tensor, where: Rows) -> None:
    """See ``ref.rows``."""
    if kv.shape[0]:
        _rows[(kv.shape[0],)](
            kv, ring, where.positions, where.slots, kv.stride(0), ring.stride(0), ring.stride(1),
            D=kv.shape[1], ROPE=packed_rope(kv, ring), BLOCK=_block(kv), SIZE=SIZE, num_warps=WARPS,
        )  # fmt: skip


def slab(ring: Tensor, kv: Tensor, where: Chunk, rope: int) -> Tensor:
    """See ``ref.slab``."""
    out = torch.empty(SIZE + kv.shape[0], kv.shape[1], dtype=kv.dtype, device=kv.device)
    _slab[(out.shape[0],)](
        ring, kv, out, where.meta, kv.stride(0), ring.stride(0), ring.stride(1),
        D=kv.shape[1], ROPE=rope if ring.dtype == torch.uint8 else 0, BLOCK=_block(kv), SIZE=SIZE, num_warps=WARPS,
    )  # fmt: skip
    return out


def keep(ring: Tensor, kv: Tensor, where: Chunk) -> None:
    """See ``ref.keep``."""
    if kv.shape[0]:
        _keep[(min(SIZE, kv.shape[0]),)](
            kv, ring, where.meta, kv.stride(0), ring.stride(0), ring.stride(1),
            D=kv.shape[1], ROPE=packed_rope(kv, ring), BLOCK=_block(kv), SIZE=SIZE, num_warps=WARPS,
        )  # fmt: skip


def packed_rope(kv: Tensor, ring: Tensor) -> int:
    """Rotated channels of a packed latent; 0 where the ring holds numbers."""
    return rope_of(kv.shape[1], ring.shape[2]) if ring.dtype == torch.uint8 else 0


def _block(kv: Tensor) -> int:
    return max(64, triton.next_power_of_2(kv.shape[1]))


@triton.jit
def put_row(ring, kv, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """The row at ``kv`` to the row at ``ring``."""
    c = tl.arange(0, BLOCK)
    x = tl.load(kv + c, mask=c < D, other=0.0)
    if ROPE:
        store_latent(ring, x.to(tl.float32), D, ROPE, BLOCK)
    else:
        tl.store(ring + c, x.to(ring.dtype.element_ty), mask=c < D)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _rows(
    kv, ring, positions, slots, kv_row, ring_slot, ring_row,
    D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    position = tl.load(positions + b)
    if position >= 0:
        slot = tl.load(slots + b).to(tl.int64)
        put_row(ring + slot * ring_slot + (position % SIZE) * ring_row, kv + b.to(tl.int64) * kv_row, D, ROPE, BLOCK)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _slab(
    ring, kv, out, meta, kv_row, ring_slot, ring_row,
    D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    start, length = tl.load(meta), tl.load(meta + 1)
    c = tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), tl.float32)
    if i >= SIZE:
        new = kv + (i - SIZE).to(tl.int64) * kv_row
        x = tl.load(new + c, mask=(c < D) & (i - SIZE < length), other=0.0).to(tl.float32)
    elif start + i >= SIZE:
        slot = tl.load(meta + 2).to(tl.int64)
        held = ring + slot * ring_slot + ((start + i - SIZE) % SIZE) * ring_row
        if ROPE:
            x = load_latent(held, D, ROPE, BLOCK)
        else:
            x = tl.load(held + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(out + i.to(tl.int64) * D + c, x.to(out.dtype.element_ty), mask=c < D)


@triton.jit(do_not_specialize_on_alignment=LOOSE)
def _keep(
    kv, ring, meta, kv_row, ring_slot, ring_row,
    D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    start, length, slot = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2).to(tl.int64)
    token = length - 1 - tl.program_id(0)  # of the chunk
    if token >= 0:
        put_row(
            ring + slot * ring_slot + ((start + token) % SIZE) * ring_row, kv + token.to(tl.int64) * kv_row,
            D, ROPE, BLOCK,
        )  # fmt: skip
