"""Routing and routed experts over quantised weights in plain torch, on any device.

Knows the device forms of a layer's expert weights and what each means; knows no checkpoint, no shared expert's weights
(its output comes in) and no launch. The arithmetic is kernels/router/ref.py's and kernels/moe/ref.py's. Sources:
DeepSeek-V3 and DeepSeek-V4 inference/model.py; OCP Microscaling 1.0 for E2M1 and E8M0.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.fp8.ref import Quantised, dequantise
from longread.kernels.moe.ref import gated
from longread.kernels.quant.ref import E2M1, FP4_GROUP, decode_scale
from longread.kernels.router import ref as router
from longread.spec.model import MoESpec

Kind = Literal["fp4", "fp4_words", "fp8", "plain"]
BLOCK = 128  # rows and columns that share an FP8 weight's scale; columns of one group of words
# The largest shift of a code's exponent that still fits e4m3: 6 becomes 1.5 * 2^8.
TOP_SHIFT = 12


class ExpertWeights(NamedTuple):
    """One layer's routed experts. w13: [E, 2F, D], gate rows first, then up; w2: [E, D, F].

    - plain: float weights, no scales.
    - fp8: float8_e4m3fn; scales float32 [E, ceil(rows / 128), ceil(cols / 128)], for w13 those of gate and of up apart
      and stacked ([E, 2 * ceil(F / 128), ...]).
    - fp4: uint8 [E, rows, cols / 2], the low nibble is the even column; scales uint8 (E8M0) [E, rows, cols / 32].
    - fp4_words: what ``prepare`` makes of fp4 for the kernels; ``r13`` and ``r2`` are there only.
    """

    kind: Kind
    w13: Tensor
    s13: Tensor | None
    w2: Tensor
    s2: Tensor | None
    r13: Tensor | None = None
    r2: Tensor | None = None


def route(
    u: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    moe: MoESpec,
    positions: Tensor,
    table: Tensor | None,
    token_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]); a padding row (position < 0) gets ids -1 and weights 0.

    u: [T, D]. gate: [E, D]. bias: float32 [E] or None. table: int64 [vocabulary, k] gives the ids instead of the scores
    (V4's hash layers), by token_ids int64 [T].
    """
    logits = router.router_logits(u, gate)
    if table is not None:
        ids, weights = router.route_hash(logits, moe, table[token_ids.clamp(0, table.shape[0] - 1)])
    else:
        ids, weights = router.route(logits, moe, bias)
    real = (positions >= 0)[:, None]
    return torch.where(real, ids, -1).to(torch.int32), torch.where(real, weights, 0.0).float()


def experts(
    u: Tensor,
    q: Quantised | None,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights,
    limit: float | None,
    shared: Tensor,
) -> Tensor:
    """shared + sum over k of weights_k * expert_k(x): [T, D] in shared's dtype, summed in float32 (or u's float64).

    u: [T, D]; q: the same quantised, which then is what the experts see. ids: int32 [T, k], -1 for none. Experts are
    added in ascending order. Kernels round hidden activations to FP8 where the weights are quantised; this does not.
    """
    dtype = torch.promote_types(u.dtype, torch.float32)
    x = u.to(dtype) if q is None or w.kind == "plain" else dequantise(q).to(dtype)
    total = shared.to(dtype, copy=True)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[tokens], matrix(w, "w13", expert, dtype)).chunk(2, dim=-1)
        out = functional.linear(gated(gate.clone(), up, limit), matrix(w, "w2", expert, dtype))
        total.index_add_(0, tokens, out * weights[tokens, place, None].to(dtype))
    return total.to(shared.dtype)


def matrix(w: ExpertWeights, which: Literal["w13", "w2"], expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's w13 [2F, D] or w2 [D, F] as numbers."""
    values, scales = (w.w13, w.s13) if which == "w13" else (w.w2, w.s2)
    values = values[expert]
    if scales is None:
        return values.to(dtype)
    scales = scales[expert]
    if w.kind == "fp8":
        halves = 2 if which == "w13" else 1
        rows = values.shape[0] // halves
        wide = scales.to(dtype).repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        tall = [half.repeat_interleave(BLOCK, 0)[:rows] for half in wide.chunk(halves)]
        return values.to(dtype) * torch.cat(tall)
    if w.kind == "fp4":
        codes = torch.stack([values & 15, values >> 4], -1).flatten(1)
        factors = decode_scale(scales.view(torch.float8_e8m0fnu)).to(dtype)
        return _numbers(codes, dtype) * factors.repeat_interleave(FP4_GROUP, 1)
    rows_ = w.r13 if which == "w13" else w.r2
    assert rows_ is not None  # prepare made both
    shifts = _power((scales >> 3).to(torch.int32) - 6, dtype)
    return _numbers(_codes(values), dtype) * shifts.repeat_interleave(FP4_GROUP, 1) * rows_[expert, :, None].to(dtype)


def prepare(w: ExpertWeights) -> ExpertWeights:
    """fp4 in the form that kernels decode in registers (fp4_words); anything else, or columns not in 128s, as it is.

    Codes: of each 128 columns, the four-byte word q holds the magnitudes of columns 4q..4q+3 and 64+4q..64+4q+3 as its
    eight nibbles' low three bits; bit 8i+7 is the sign of column 4q+i, bit 8i+3 that of column 64+4q+i. A word's half
    is then a byte permutation's selector, and gives four e4m3 values at once.
    Scales: byte = 8 * shift, shift 1..12, and r13/r2 float32 [E, rows] one factor a row: value = E2M1(code) *
    2^(shift - 6) * factor, whose first two factors are an e4m3 number. Exact while the exponents of a row's blocks span
    at most 11 octaves; a block further below the row's largest is rounded to multiples of 2^-13 of the largest block's
    unit. A NaN scale (byte 255) makes its row NaN. Sizes and bytes are the native ones' plus 4 bytes a row.
    """
    if w.kind != "fp4" or w.w13.shape[2] % 64 or w.w2.shape[2] % 64:
        return w
    assert w.s13 is not None and w.s2 is not None
    w13, s13, r13 = _prepared(w.w13, w.s13)
    w2, s2, r2 = _prepared(w.w2, w.s2)
    return ExpertWeights("fp4_words", w13, s13, w2, s2, r13, r2)


def _prepared(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One expert at a time: the temporaries are several times an expert's bytes."""
    words, shifts = torch.empty_like(values), torch.empty_like(scales)
    factors = torch.empty(values.shape[:2], dtype=torch.float32, device=values.device)
    for e in range(values.shape[0]):
        exponents = scales[e].to(torch.int32)
        top = torch.where(exponents == 255, 0, exponents).amax(1, keepdim=True)
        shift = exponents - top + TOP_SHIFT
        codes = torch.stack([values[e] & 15, values[e] >> 4], -1).flatten(1)
        # Blocks below shift 1 are stored with shift 1 and codes of the values that many octaves smaller.
        below = (1 - shift).clamp(min=0).repeat_interleave(FP4_GROUP, 1)
        words[e] = _words(_lowered(codes, below))
        shifts[e] = (shift.clamp(1, TOP_SHIFT) << 3).to(torch.uint8)
        unit = _power(top[:, 0] - (127 + TOP_SHIFT - 6), torch.float32)
        factors[e] = torch.where((exponents == 255).any(1), float("nan"), unit)
    return words, shifts, factors


def _lowered(codes: Tensor, octaves: Tensor) -> Tensor:
    """Codes of the values divided by 2^octaves (0: unchanged), to the nearest code, ties to the lower."""
    table = torch.tensor(E2M1, device=codes.device)
    wanted = table[(codes & 7).long()] * _power(-octaves, torch.float32)
    nearest = torch.bucketize(wanted, (table[1:] + table[:-1]) / 2).to(torch.uint8)
    return torch.where(octaves == 0, codes, nearest | (codes & 8))


def _words(codes: Tensor) -> Tensor:
    """uint8 codes [rows, cols] -> bytes [rows, cols / 2] of words as ``prepare`` describes them."""
    rows, cols = codes.shape
    c = codes.view(rows, cols // BLOCK, 2, 16, 4)  # group, half, word, column of the word
    magnitude, sign = c & 7, c & 8
    # Byte b of a word: nibbles 2b and 2b + 1 are columns 2b, 2b + 1 of the first half (b < 2) or of the second.
    low, high = magnitude[..., 0::2], magnitude[..., 1::2]  # [rows, groups, 2, 16, 2]
    bytes_ = (low | (high << 4)).permute(0, 1, 3, 2, 4).reshape(rows, cols // BLOCK, 16, 4)
    return (bytes_ | (sign[:, :, 0] << 4) | sign[:, :, 1]).reshape(rows, cols // 2)


def _codes(words: Tensor) -> Tensor:
    """The inverse of ``_words``."""
    rows, cols = words.shape[0], words.shape[1] * 2
    b = words.view(rows, cols // BLOCK, 16, 4)
    magnitude = torch.stack([b & 7, (b >> 4) & 7], -1).view(rows, cols // BLOCK, 16, 2, 4).permute(0, 1, 3, 2, 4)
    sign = torch.stack([(b >> 4) & 8, b & 8], 2)
    return (magnitude | sign).reshape(rows, cols)


def _power(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponents, exactly."""
    return torch.ldexp(torch.ones_like(exponents, dtype=dtype), exponents)


def _numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=dtype, device=codes.device)
    return values[codes.long()]
