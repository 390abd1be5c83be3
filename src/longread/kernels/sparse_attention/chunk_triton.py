# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""V4's prefill attention: a program a token and block of heads, which are the M of its products.

A tile of 64 keys is read once for both products; first the window, of which neighbouring programs share all but a row,
then the entries. Scores are powers of two; the sink is the running maximum's start and enters the sum at the end.
"""

from typing import TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fallback import fallback
from longread.kernels.fp8.ref import Quantised
from longread.kernels.fp8.triton import turn_back
from longread.kernels.places import Chunk
from longread.kernels.sparse_attention import chunk_gluon, chunk_roles_gluon
from longread.kernels.sparse_attention import device_ref as ref
from longread.kernels.sparse_attention.prologue_triton import LOG2E, normalised
from longread.kernels.sparse_attention.results import parts, result


class Config(TypedDict):
    """BN: keys of a tile, a divisor of the window."""

    BN: int
    num_warps: int
    num_stages: int


CONFIGS: dict[int, Config] = {  # by D
    512: {"BN": 64, "num_warps": 8, "num_stages": 2},
    128: {"BN": 64, "num_warps": 4, "num_stages": 3},
}
MAX_HEADS = 64  # of a program
HOPPER = True  # whether ``chunk_gluon`` takes what it can; False: this file's kernel, to compare
BY_ROLES = False  # whether ``chunk_roles_gluon`` does it then


def chunk_turned(
    q: Tensor, eps: float, cos: Tensor, sin: Tensor, sink: Tensor, scale: float, slab: Tensor,
    rows: Tensor | None, chosen: Tensor | None, ratio: int, where: Chunk, quantised: bool,
) -> Quantised | Tensor:  # fmt: skip
    """See ``device_ref.chunk_turned``. Where ``chunk_gluon`` does not run, turning back is a launch of its own."""
    tokens, heads, d = q.shape
    window = slab.shape[0] - tokens
    config = CONFIGS.get(d)
    if config is None or q.dtype != torch.bfloat16 or window % config["BN"] or q.stride()[1:] != (d, 1):
        fallback("sparse_attention.chunk_turned", f"head_dim {d}, window {window}, {q.dtype} or heads apart")
        return ref.chunk_turned(q, eps, cos, sin, sink, scale, slab, rows, chosen, ratio, where, quantised)
    if rows is None or not rows.shape[0]:
        rows, chosen, ratio = slab, None, 0
    cos, sin = cos.contiguous(), sin.contiguous()
    chosen = None if chosen is None else chosen.contiguous()
    if HOPPER and _hopper(q, window):
        out = result(q, quantised)
        by_hand = chunk_roles_gluon if BY_ROLES and window >= chunk_roles_gluon.LEAST_WINDOW else chunk_gluon
        by_hand.launch(q, eps, cos, sin, sink, scale, slab, rows, chosen, ratio, where.positions, *parts(out))
        return out
    o = q.new_empty(tokens, heads, d)
    block = max(16, min(MAX_HEADS, triton.next_power_of_2(heads)))
    _chunk[(tokens, triton.cdiv(heads, block))](
        q, q.stride(0), cos, sin, sink, slab, rows, where.positions if chosen is None else chosen, where.positions, o,
        heads, 0 if chosen is None else chosen.shape[1], eps, scale,
        window, d, cos.shape[-1], ratio, chosen is not None, block, **config,
    )  # fmt: skip
    return turn_back(o, cos, sin, quantised)


def _hopper(q: Tensor, window: int) -> bool:
    _, heads, d = q.shape
    fits = d == chunk_gluon.D and heads % chunk_gluon.BM == 0 and window % chunk_gluon.BN == 0
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


@triton.jit
def _chunk(
    q, q_token, cos, sin, sink, slab, rows, chosen, positions, out, heads, top_k, eps, scale,
    WINDOW: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, RATIO: tl.constexpr, CHOSEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    position = tl.load(positions + token)
    head = tl.program_id(1) * BM + tl.arange(0, BM)
    wide = token.to(tl.int64)
    mine = out + wide * heads * D
    angles = token * PAIRS
    query = normalised(q + wide * q_token, cos + angles, sin + angles, mine, head, heads, eps, scale, D, PAIRS)
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
        if CHOSEN:
            count = tl.minimum(count, top_k)
    tiles = WINDOW // BN + tl.cdiv(count, BN)
    if position < 0:
        tiles = 0
    drain = tl.load(sink + head, mask=head < heads, other=0.0) * LOG2E
    peak = drain
    total = tl.zeros((BM, BN), tl.float32)  # summed over keys at the end: no exchange between warps a tile
    acc = tl.zeros((BM, D), tl.float32)
    channel = tl.arange(0, D)
    for tile in range(tiles):
        place = tile * BN + tl.arange(0, BN)
        recent = tile < WINDOW // BN
        entry = place - WINDOW
        listed = (entry >= 0) & (entry < count)
        if CHOSEN:
            entry = tl.load(chosen + wide * top_k + entry, mask=listed, other=-1)
        row = tl.where(recent, token + 1 + place, entry)
        seen = tl.where(recent, position - WINDOW + 1 + place >= 0, listed & (entry >= 0))
        source = tl.where(recent, slab, rows)
        k = tl.load(source + row.to(tl.int64)[:, None] * D + channel[None, :], mask=seen[:, None], other=0.0)
        logits = tl.where(seen[None, :], tl.dot(query, tl.trans(k)), float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        shrink = tl.exp2(peak - higher)
        p = tl.exp2(logits - higher[:, None])
        total = total * shrink[:, None] + p
        acc = tl.dot(p.to(tl.bfloat16), k, acc * shrink[:, None])
        peak = higher
    weight = tl.sum(total, 1) + tl.exp2(drain - peak)
    at = head[:, None] * D + channel[None, :]
    tl.store(mine + at, (acc / weight[:, None]).to(tl.bfloat16), mask=head[:, None] < heads)
