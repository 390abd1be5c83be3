"""Cached rows of one sequence in tiles that depend on positions only, not on where the pages lie in the pool.

How a sum is cut decides its rounding. Cut at the ends of page runs, the same sequence would have other logits once its
pages lie elsewhere: after a hit, a load or a copy on write. Knows runs of rows; knows no pages and no arithmetic.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def tiles(runs: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The rows of ``runs`` ([n_i, d] each, in order of position) in tiles of ``size`` rows; the last may be shorter.

    A tile within one run is a view of it, any other a copy with the same strides: runs are rows of one store, so a
    product sees no difference between the two. One tile is made at a time, which bounds what is copied.
    """
    parts: list[Tensor] = []
    missing = size
    for run in runs:
        at = 0
        while at < run.shape[0]:
            parts.append(run[at : at + missing])
            at += parts[-1].shape[0]
            missing -= parts[-1].shape[0]
            if not missing:
                yield _joined(parts)
                parts, missing = [], size
    if parts:
        yield _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
