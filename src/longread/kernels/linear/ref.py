"""A product with one weight matrix, in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

FEW_ROWS = 16  # so many and fewer are one product: cutting them would read the weight again for little work


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, I], weight [O, I] -> [T, O], in x's dtype (which is weight's)."""
    if x.dtype == torch.float32 or x.shape[0] <= FEW_ROWS:
        return functional.linear(x, weight)
    return product(x, weight, x.new_empty(x.shape[0], weight.shape[0]))


def product(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """``linear`` into ``out`` [T, O]. Rows that are not float32 are multiplied in blocks of 2^n rows, and the rest.

    oneDNN, which multiplies bfloat16 on a CPU, compiles code for every number of rows and keeps it: about half a MiB
    and ten milliseconds each, where the tokens of a step and of an expert take every number. In blocks there are few.
    """
    rows, at = x.shape[0], 0
    if x.dtype != torch.float32:
        while rows - at > FEW_ROWS:
            block = 1 << (rows - at).bit_length() - 1
            torch.mm(x[at : at + block], weight.t(), out=out[at : at + block])
            at += block
    if at < rows:
        torch.mm(x[at:], weight.t(), out=out[at:])
    return out
