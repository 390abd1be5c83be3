# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""A sequence's closed rows gathered from its pages, unpacked and contiguous: memory-bound, once a layer and chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fallback import fallback
from longread.kernels.places import Chunk
from longread.kernels.sparse_attention import device_ref as ref
from longread.kernels.sparse_attention.prologue_triton import unpacked
from longread.spec.state import PAGE_TOKENS

ROWS, WARPS = 16, 4  # rows of a program


def entries(
    store: Tensor, where: Chunk, ratio: int, d: int, rope: int, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """See ``device_ref.entries``. Rows that are not closed are left as they are."""
    packed = store.dtype == torch.uint8
    if d & (d - 1) or d < 64 or dtype != torch.bfloat16 or not (packed or store.dtype == dtype):
        fallback("sparse_attention.entries", f"head_dim {d} or {store.dtype} to {dtype}")
        return ref.entries(store, where, ratio, d, rope, dtype, out)
    n = where.bound // ratio
    out = torch.empty(n, d, dtype=dtype, device=store.device) if out is None else out[:n]
    if n:
        _entries[(triton.cdiv(n, ROWS),)](
            store, where.meta, where.table, out, ratio, PAGE_TOKENS // ratio, d, rope, store.shape[-1], packed, ROWS,
            num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _entries(
    store, meta, table, out,
    RATIO: tl.constexpr, PER_PAGE: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr,
    PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    closed = (tl.load(meta) + tl.load(meta + 1)) // RATIO
    if first < closed:
        row = first + tl.arange(0, ROWS)
        seen = row < closed
        page = tl.load(table + row // PER_PAGE, mask=seen, other=0)
        flat = page.to(tl.int64) * PER_PAGE + row % PER_PAGE
        channel = tl.arange(0, D)
        if PACKED:
            values = unpacked(store, flat, seen, D, ROPE, WIDTH)
        else:
            values = tl.load(store + flat[:, None] * D + channel[None, :], mask=seen[:, None], other=0.0)
        tl.store(out + row.to(tl.int64)[:, None] * D + channel[None, :], values, mask=seen[:, None])
