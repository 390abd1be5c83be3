"""A product with one weight matrix, in plain torch."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O], in x's dtype (which is weight's)."""
    return functional.linear(x, weight)
