"""What V4's attention kernels write: rows of all heads side by side, in the queries' dtype or in FP8 with scales."""

from torch import Tensor, float32

from longread.kernels.fp8.ref import BLOCK, FP8, Quantised


def result(q: Tensor, quantised: bool) -> Quantised | Tensor:
    """Unwritten [T, H * d] for queries [T, H, d]; d is a multiple of 128 where it is to be quantised."""
    tokens, width = q.shape[0], q.shape[1] * q.shape[2]
    if not quantised:
        return q.new_empty(tokens, width)
    scales = q.new_empty(width // BLOCK, tokens, dtype=float32).t()  # column after column, as products want them
    return Quantised(q.new_empty(tokens, width, dtype=FP8), scales)


def parts(out: Quantised | Tensor) -> tuple[Tensor, Tensor | None]:
    """Values, and scales if there are any."""
    return (out, None) if isinstance(out, Tensor) else (out.values, out.scales)
