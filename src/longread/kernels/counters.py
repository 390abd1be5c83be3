"""Zeros on a device by which programs of one launch count each other; whoever comes last leaves them zeros again."""

import torch
from torch import Tensor

COUNTERS = 1 << 20
ALIGNED = 4  # counters
_held: dict[torch.device, tuple[Tensor, int]] = {}


def counters(device: torch.device, count: int) -> Tensor:
    """int32 [count] zeros, in turn from a long row: two launches at once do not share any unless many lie between. Each
    begins at a multiple of 16 bytes: a kernel would be compiled anew for another alignment, maybe while the engine
    serves.

    Raises RuntimeError when the row would first be made inside a capture, which would give it to that graph.
    """
    if device not in _held:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run a step before capturing one: some kernels keep counters")
        _held[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device), 0
    row, at = _held[device]
    at = at if at + count <= COUNTERS else 0
    _held[device] = row, at + -(-count // ALIGNED) * ALIGNED
    return row[at : at + count]
