"""Between two sublayers of a model with one residual stream, in plain torch: added, normed, perhaps quantised.

Knows rows; knows no sublayer. The arithmetic is float32 and only what is stored is rounded.
"""

from typing import NamedTuple

from torch import Tensor

from longread.kernels.fp8.ref import Quantised, quantise


class Normed(NamedTuple):
    """A sublayer's input u [T, D] in the stream's dtype, and the same as FP8 or None."""

    u: Tensor
    q: Quantised | None


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, quantised: bool) -> Normed:
    """The norm, with gain [D], of x + y. x: [T, D], overwritten by the sum where y [T, D] is given."""
    if y is not None:
        x.copy_(x.float() + y.float())
    wide = x.float()
    u = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * gain.float()).to(x.dtype)
    return Normed(u, quantise(u) if quantised else None)
