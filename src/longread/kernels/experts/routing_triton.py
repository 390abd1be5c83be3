# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
"""From tokens to experts and weights: the router's product and, in one kernel, all of kernels/router/ref.py's methods.

The product of many tokens is torch's; that of few is cut in parts of K, which the choosing kernel adds in their order,
so that the gate is read by many programs at once. A choice never depends on the order
of a search: equal scores go to the expert of the lower number, and NaN ranks last, so k different experts come out
whatever comes in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.experts import ref
from longread.kernels.fallback import fallback
from longread.kernels.overlap import INTERPRETED, begin, overlap, ready
from longread.spec.model import MoESpec

LEAST = tl.constexpr(-2147483648)
FEW = 64  # tokens up to which the router's product is cut
PART = 256  # columns of a part


@triton.jit
def _keys(score):
    """Scores as integers of the same order, all above LEAST; NaN as -inf."""
    bits = tl.where(score != score, float("-inf"), score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _softplus(x):
    # log(1 + y) that keeps a small y: the error of 1 + y is divided out again.
    y = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + y
    lost = one == 1.0
    return tl.where(x > 20.0, x, tl.where(lost, y, tl.log(one) * (y / tl.where(lost, 1.0, one - 1.0))))


@triton.jit
def _best_of_groups(choice, R: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, KEPT: tl.constexpr,
                    BEST: tl.constexpr):  # fmt: skip
    """bool [R, GROUPS, EACH]: whether the group of an expert is among the KEPT best."""
    grouped = tl.reshape(choice, (R, GROUPS, EACH))
    inside = tl.arange(0, EACH)[None, None, :]
    best = tl.max(grouped, 2)
    score = best
    if BEST == 2:
        first = tl.min(tl.where(grouped == best[:, :, None], inside, EACH), 2)
        score += tl.max(tl.where(inside == first[:, :, None], float("-inf"), grouped), 2)
    keys = _keys(score)
    group = tl.arange(0, GROUPS)[None, :]
    kept = group < 0
    for _ in tl.static_range(KEPT):
        left = tl.where(kept, LEAST, keys)
        top = tl.max(left, 1)
        at = tl.min(tl.where((left == top[:, None]) & (kept == 0), group, GROUPS), 1)
        kept = kept | (group == at[:, None])
    return tl.broadcast_to(kept[:, :, None], (R, GROUPS, EACH))


@triton.jit(do_not_specialize=["tokens", "vocabulary"])
def _route(
    logits, bias, positions, table, token_ids, ids, weights, tokens, vocabulary, scale,
    E: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, SCORING: tl.constexpr,
    BIASED: tl.constexpr, TABLE: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BEST: tl.constexpr, DROPPED: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    ready(PDL)
    row = tl.program_id(0) * R + tl.arange(0, R)
    expert = tl.arange(0, WIDE)[None, :]
    known = expert < E
    inside = (row < tokens)[:, None] & known
    at = logits + row.to(tl.int64)[:, None] * E + expert
    x = tl.load(at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * tokens * E, mask=inside, other=0.0)
    if SCORING == "softmax":
        x = tl.where(known, x, float("-inf"))
        power = tl.exp(x - tl.max(x, 1)[:, None])
        score = power / tl.sum(power, 1)[:, None]
    elif SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.sqrt(_softplus(x))
    place = tl.arange(0, KW)[None, :]
    chosen = tl.full((R, KW), 0, tl.int32)
    weight = tl.zeros((R, KW), tl.float32)
    if TABLE:
        token = tl.load(token_ids + row, mask=row < tokens, other=0)
        token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
        for k in tl.static_range(K):
            chose = tl.load(table + token * K + k).to(tl.int32)
            here = tl.sum(tl.where(expert == chose[:, None], score, 0.0), 1)
            chosen = tl.where(place == k, chose[:, None], chosen)
            weight = tl.where(place == k, here[:, None], weight)
    else:
        choice = score
        if BIASED:
            choice += tl.load(bias + expert, mask=known, other=0.0)
        if GROUPS > 1:
            kept = _best_of_groups(choice, R, GROUPS, WIDE // GROUPS, KEPT, BEST)
            choice = tl.where(tl.reshape(kept, (R, WIDE)), choice, DROPPED)
            if BEST == 1:
                score = choice
        keys = tl.where(known, _keys(choice), LEAST)
        for k in tl.static_range(K):
            top = tl.max(keys, 1)
            best = tl.min(tl.where(keys == top[:, None], expert, WIDE), 1)
            taken = expert == best[:, None]
            here = tl.sum(tl.where(taken, score, 0.0), 1)
            chosen = tl.where(place == k, best[:, None], chosen)
            weight = tl.where(place == k, here[:, None], weight)
            keys = tl.where(taken, LEAST, keys)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    real = (tl.load(positions + row, mask=row < tokens, other=-1) >= 0)[:, None]
    out = row.to(tl.int64)[:, None] * K + place
    stored = (row < tokens)[:, None] & (place < K)
    tl.store(ids + out, tl.where(real, chosen, -1), mask=stored)
    tl.store(weights + out, tl.where(real, weight * scale, 0.0), mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def _logits(u, gate, out, tokens, u_row, E: tl.constexpr, D: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
            BK: tl.constexpr, WIDEN: tl.constexpr):  # fmt: skip
    """Products of BK columns of BT tokens and BE experts, into out float32 [D / BK, tokens, E]."""
    first, part, token = tl.program_id(0) * BE, tl.program_id(1), tl.program_id(2) * BT + tl.arange(0, BT)
    column = part * BK + tl.arange(0, BK)
    expert = first + tl.arange(0, BE)
    w = tl.load(gate + tl.minimum(expert, E - 1)[:, None] * D + column[None, :])
    x = tl.load(u + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * u_row + column[None, :])
    if WIDEN:  # the interpreter would multiply bfloat16's bits
        w, x = w.to(tl.float32), x.to(tl.float32)
    total = tl.dot(w, tl.trans(x), input_precision="ieee")
    at = out + (part * tokens + token).to(tl.int64)[None, :] * E + expert[:, None]
    tl.store(at, total, mask=(token < tokens)[None, :] & (expert < E)[:, None])


def logits(u: Tensor, gate: Tensor) -> Tensor:
    """float32 [parts, T, E], to be added: products of bfloat16 are exact; anything else is widened first."""
    tokens, width = u.shape
    cut = 0 < tokens <= FEW and width % PART == 0 and u.stride(1) == 1
    if cut and u.dtype == gate.dtype and gate.is_contiguous():
        experts, block = gate.shape[0], 8 if tokens <= 8 else 16
        out = torch.empty(width // PART, tokens, experts, dtype=torch.float32, device=u.device)
        grid = triton.cdiv(experts, 16), width // PART, triton.cdiv(tokens, block)
        _logits[grid](
            u, gate, out, tokens, u.stride(0), E=experts, D=width, BE=16, BT=block, BK=PART,
            WIDEN=INTERPRETED, num_warps=1,
        )  # fmt: skip
        return out
    if u.is_cuda and u.dtype == gate.dtype == torch.bfloat16:
        return torch.mm(u, gate.t(), out_dtype=torch.float32)[None]
    return (u.float() @ gate.float().t())[None]


def route(
    u: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    moe: MoESpec,
    positions: Tensor,
    table: Tensor | None,
    token_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``ref.route``; ids come best first."""
    tokens, count = u.shape[0], gate.shape[0]
    grouped = table is None and moe.groups > 1 and moe.method != "greedy"
    wide = triton.next_power_of_2(count)
    if grouped and (wide != count or moe.groups & (moe.groups - 1) or count // moe.groups < 2):
        fallback("experts.route", "groups of experts that are not a power of two")
        return ref.route(u, gate, bias, moe, positions, table, token_ids)
    scores = logits(u, gate)
    ids = torch.empty(tokens, moe.top_k, dtype=torch.int32, device=u.device)
    weights = torch.empty(tokens, moe.top_k, dtype=torch.float32, device=u.device)
    biased = bias is not None and moe.method == "noaux_tc" and table is None
    rows = 1 if tokens <= 1024 else 4
    _route[(triton.cdiv(tokens, rows),)](
        scores, bias if biased else scores, positions, table if table is not None else ids, token_ids, ids, weights,
        tokens, table.shape[0] if table is not None else 0, moe.scale,
        E=count, WIDE=wide, K=moe.top_k, KW=triton.next_power_of_2(moe.top_k), R=rows, SCORING=moe.scoring,
        BIASED=biased, TABLE=table is not None, NORMALISE=moe.normalise, GROUPS=moe.groups if grouped else 1,
        KEPT=moe.kept_groups, BEST=2 if moe.method == "noaux_tc" else 1,
        DROPPED=float("-inf") if moe.method == "noaux_tc" else 0.0, PARTS=scores.shape[0],
        num_warps=4 if rows > 1 else 1, **overlap(tokens, tokens),
    )  # fmt: skip
    return ids, weights
