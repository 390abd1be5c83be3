"""Routing of a few tokens without groups on a CPU: in torch it is ten operations a layer for a handful of numbers.

V4's routing, and V3's where experts have no groups. Everything else is the reference's.
"""

import math

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from longread.kernels.linear.cpu import linear
from longread.kernels.router import ref
from longread.spec.model import MoESpec

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
FEW = 16  # tokens; past that torch's vector loops win


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """See ``ref.router_logits``."""
    return linear(x.float(), weight.float())


def route(logits: Tensor, moe: MoESpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``ref.route``."""
    if logits.shape[0] > FEW or moe.method != "noaux_tc" or moe.groups > 1 or moe.scoring == "softmax":
        return ref.route(logits, moe, bias)
    ids = torch.empty(logits.shape[0], moe.top_k, dtype=torch.int64)
    weights = torch.empty(ids.shape)
    moved = np.zeros(moe.routed, np.float32) if bias is None else bias.numpy()
    scores = _affinity(logits.numpy(), moe.scoring == "sigmoid")
    _choose(scores, moved, ids.numpy())
    _weigh(scores, ids.numpy(), moe.normalise, moe.scale, weights.numpy())
    return ids, weights


def route_hash(logits: Tensor, moe: MoESpec, ids: Tensor) -> tuple[Tensor, Tensor]:
    """See ``ref.route_hash``."""
    if logits.shape[0] > FEW or moe.scoring == "softmax":
        return ref.route_hash(logits, moe, ids)
    weights = torch.empty(ids.shape)
    scores = _affinity(logits.numpy(), moe.scoring == "sigmoid")
    _weigh(scores, ids.numpy(), moe.normalise, moe.scale, weights.numpy())
    return ids, weights


@njit(cache=True, nogil=True)
def _affinity(logits: Floats, sigmoid: bool) -> Floats:
    """Sigmoid, or the root of softplus (which is the identity past 20, as in torch)."""
    scores, one = np.empty(logits.shape, np.float32), np.float32(1)
    for t in range(logits.shape[0]):
        for e in range(logits.shape[1]):
            x = logits[t, e]
            if sigmoid:
                scores[t, e] = one / (one + math.exp(-x))
            else:
                scores[t, e] = math.sqrt(x if x > np.float32(20) else math.log1p(math.exp(x)))
    return scores


@njit(cache=True, nogil=True)
def _choose(scores: Floats, bias: Floats, ids: Ints) -> None:
    """The top-k of scores + bias. Always k different experts, NaN or not: the ids are used as addresses."""
    for t in range(ids.shape[0]):
        choice, free = scores[t] + bias, np.ones(scores.shape[1], np.bool_)
        for i in range(ids.shape[1]):
            best = -1
            for e in range(choice.shape[0]):
                if free[e] and (best < 0 or choice[e] > choice[best]):
                    best = e
            free[best] = False
            ids[t, i] = best


@njit(cache=True, nogil=True)
def _weigh(scores: Floats, ids: Ints, normalise: bool, scale: float, weights: Floats) -> None:
    for t in range(ids.shape[0]):
        total = np.float32(0)
        for i in range(ids.shape[1]):
            weights[t, i] = scores[t, ids[t, i]]
            total += weights[t, i]
        by = np.float32(scale) / (total + np.float32(1e-20)) if normalise else np.float32(scale)
        for i in range(ids.shape[1]):
            weights[t, i] *= by
