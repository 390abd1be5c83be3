"""Added, normed and quantised in one pass on a GPU: one program a token. Same signature as device_ref.py."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from longread.kernels.fallback import fallback
from longread.kernels.fp8.ref import BLOCK, FP8, Quantised
from longread.kernels.norm import device_ref
from longread.kernels.norm.device_ref import Normed

WARPS = 8


@triton.jit
def to_fp8(x, BLOCKS: tl.constexpr):
    """float32 [BLOCKS * 128] -> FP8 values and one scale a 128: 2^ceil(log2(max(amax, 1e-4) / 448))."""
    wide = tl.reshape(x, (BLOCKS, 128))
    peak = tl.maximum(tl.max(tl.abs(wide), 1), 1e-4)
    power = ((peak.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2^8
    inverse = ((254 - power) << 23).to(tl.float32, bitcast=True)
    values = tl.reshape((wide * inverse[:, None]).to(tl.float8e4nv), (BLOCKS * 128,))
    return values, (power << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["scale_stride"])  # one kernel for all numbers of tokens
def _add_norm(
    x_ptr, y_ptr, gain_ptr, u_ptr, q_ptr, s_ptr, hidden, y_stride, scale_stride, eps,
    ADD: tl.constexpr, QUANTISE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BD)
    inside = d < hidden
    gain = tl.load(gain_ptr + d, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + t * hidden + d, mask=inside, other=0.0)
    if ADD:
        y = tl.load(y_ptr + t * y_stride + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + t * hidden + d, x, mask=inside)
    wide = x.to(tl.float32)
    u = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps) * gain).to(u_ptr.dtype.element_ty)
    tl.store(u_ptr + t * hidden + d, u, mask=inside)
    if QUANTISE:
        values, scales = to_fp8(u.to(tl.float32), BD // 128)
        block = tl.arange(0, BD // 128)
        tl.store(q_ptr + t * hidden + d, values, mask=inside)
        tl.store(s_ptr + block * scale_stride + t, scales, mask=block * 128 < hidden)


def add_norm(x: Tensor, y: Tensor | None, gain: Tensor, eps: float, quantised: bool) -> Normed:
    """See ``device_ref.add_norm``."""
    tokens, hidden = x.shape
    if not x.is_contiguous() or (y is not None and y.stride(1) != 1) or (quantised and hidden % BLOCK):
        fallback("norm.add_norm", f"rows of {hidden} numbers, or strided ones")
        return device_ref.add_norm(x, y, gain, eps, quantised)
    u, q = x.new_empty(tokens, hidden), None
    if quantised:
        scales = x.new_empty(hidden // BLOCK, tokens, dtype=torch.float32)
        q = Quantised(x.new_empty(tokens, hidden, dtype=FP8), scales.t())
    if tokens:
        values, places = (u, u) if q is None else q
        _add_norm[(tokens,)](
            x, y, gain, u, values, places, hidden, 0 if y is None else y.stride(0), places.stride(1), eps,
            ADD=y is not None, QUANTISE=quantised, BD=max(128, triton.next_power_of_2(hidden)), num_warps=WARPS,
        )  # fmt: skip
    return Normed(u, q)
