"""Records in pinned main memory spread over a storage on a GPU, which reads them over the link by itself.

No staging and no copy engine: a few programs keep enough loads in flight for the link's rate, and leave the rest of the
GPU to the model that computes beside them. See ``ref.py``.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# On an H200 48 GB/s of the link's 55 from 16 programs on (staged copies: 37, and 25 where neighbours are rare). Beside
# a chain of small products 16, 24, 32 and 64 bring 43, 46, 46 and 42 GB/s and cost it 5, 4, 4 and 9 ms in 41.
PROGRAMS = 24
VECTORS = 1024  # of up to 16 bytes, a program at once: 16 KiB of it in flight
WARPS = 8
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def spread(
    memory: Tensor,
    starts: Tensor,
    places: Tensor,
    storage: Tensor,
    at: int,
    layers: tuple[int, int],
    aligned: int,
    *,
    programs: int = PROGRAMS,
    vectors: int = VECTORS,
    warps: int = WARPS,
) -> None:
    """See ``ref.spread``. Copied 16 bytes at a time, or what divides all of ``aligned``, ``at`` and a layer's bytes."""
    flat = storage.view(torch.uint8).flatten(2)
    (first, stop), width = layers, flat.shape[2]
    vector = math.gcd(16, aligned, at, width, flat.data_ptr(), memory.data_ptr())
    unit = min(vector, 8)
    count = starts.shape[0]
    if not count or stop == first:
        return
    whole = memory[: memory.shape[0] // unit * unit]  # behind the records there may be others of odd sizes
    given = whole.view(UNITS[vector]), flat.view(UNITS[vector])
    _spread[(programs,)](
        *given, starts, places,
        count * (stop - first) * (width // vector), (stop - first) * (width // vector), width // vector,
        (at + first * width) // unit, first, flat.shape[1],
        UNIT=unit, VECTOR=vector // unit, BLOCK=vectors, num_warps=warps,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["total", "of_record", "of_row", "at", "first", "count"],
    do_not_specialize_on_alignment=["starts", "places"],
)
def _spread(
    memory, storage, starts, places, total, of_record, of_row, at, first, count,
    UNIT: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """memory, storage: of units; starts in bytes. total: vectors of all records together; of_record, of_row: of what is
    wanted of one record, and of one layer of it. at: units from a record's start to that. first: its first layer.
    """
    e = tl.arange(0, VECTOR)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), tl.num_programs(0)):
        v = tile * BLOCK + tl.arange(0, BLOCK)
        inside = v < total
        record = v // of_record
        within = v - record * of_record
        layer = within // of_row
        start = tl.load(starts + record, mask=inside, other=0) // UNIT
        place = tl.load(places + record, mask=inside, other=0)
        source = start + at + within.to(tl.int64) * VECTOR
        target = (((layer + first).to(tl.int64) * count + place) * of_row + within - layer * of_row) * VECTOR
        source = tl.multiple_of(source, VECTOR)[:, None] + e
        target = tl.multiple_of(target, VECTOR)[:, None] + e
        x = tl.load(memory + source, mask=inside[:, None], other=0, eviction_policy="evict_first")
        tl.store(storage + target, x, mask=inside[:, None], eviction_policy="evict_first")
