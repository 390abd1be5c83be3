"""Where a step's tokens lie, as tensors on the device: what paged kernels take beside their data.

Nothing here is read on the host, so a launch never waits for the device and can be captured in a CUDA graph; ``bound``
is what the host knows beforehand and sizes scratch by.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """One token of each of B sequences. positions: int32 [B], -1 for padding. slots: int32 [B], their ring rows.

    tables: int32 [B, P], page ids, 0 behind a sequence's last page. No position reaches ``bound``.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    bound: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """T tokens of one sequence, padded. meta: int32 [4] = start, length, slot, 0. positions: int32 [T], start + i, and
    -1 from ``length`` on. table: int32 [P], page ids. start + length does not exceed ``bound``. ``extent``: start and
    length where the host knows them, which a graph for any chunk does not.
    """

    meta: Tensor
    positions: Tensor
    table: Tensor
    bound: int
    extent: tuple[int, int] | None = None
