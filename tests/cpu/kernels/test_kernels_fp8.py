"""FP8 rows and the operations around them, against float64 and against the parts of the CPU model they stand for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longread.kernels.cache_rows.ref import roundtrip_latent
from longread.kernels.fp8 import ref
from longread.kernels.fp8.ref import Fp8Weight, Quantised
from longread.kernels.moe.ref import gated
from longread.kernels.norm.ref import rms_norm
from longread.kernels.quant.ref import dequantise_fp8, quantise_fp8
from longread.kernels.rope.ref import apply_interleaved


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("width", [64, 128, 200, 384])
def test_a_quantised_row_is_within_a_step_of_itself(width: int) -> None:
    x = made(7, width) * torch.exp2(torch.arange(7.0) * 5 - 20)[:, None]
    q = ref.quantise(x)
    assert q.values.shape == x.shape and q.scales.shape == (7, -(-width // 128)) and q.scales.stride() == (1, 7)
    mantissa, _ = q.scales.frexp()
    assert bool((mantissa == 0.5).all())  # powers of two
    error = (ref.dequantise(q) - x).abs()
    steps = q.scales.repeat_interleave(128, 1)[:, :width] * 2**-10  # half of the finest step
    assert bool((error <= torch.maximum(x.abs() / 16, steps)).all())


def test_a_scale_is_the_least_power_of_two_that_reaches() -> None:
    peaks = torch.cat([made(2000, seed=1).abs() * torch.exp2(made(2000, seed=2) * 8), torch.tensor([448.0, 0, 1e-5])])
    want = torch.exp2((peaks.double().clamp(min=1e-4) / 448).log2().ceil()).float()
    assert torch.equal(ref.power_above(peaks), want)
    assert ref.power_above(torch.tensor([448.0, 448.00003]))[1] == 2


def test_the_least_amax_and_a_row_of_zeros() -> None:
    q = ref.quantise(torch.zeros(2, 128))
    assert bool((q.values.float() == 0).all()) and bool((q.scales == 2.0**-22).all())


@pytest.mark.parametrize(("height", "width"), [(256, 256), (100, 200), (16, 384)])
def test_a_product_in_fp8_is_that_of_the_widened_matrices(height: int, width: int) -> None:
    matrix, x = made(height, width), ref.quantise(made(5, width, seed=1))
    w = Fp8Weight(*quantise_fp8(matrix, (128, 128), "float32_pow2"))
    wide = dequantise_fp8(w.values, w.scales, (128, 128), torch.float32)
    assert torch.equal(ref.widened(w), wide)
    want = ref.dequantise(x).double() @ wide.double().t()
    torch.testing.assert_close(ref.linear(x, w, torch.float32).double(), want, rtol=1e-5, atol=1e-5)
    assert ref.linear(x, w).dtype == torch.bfloat16


def test_plain_products_keep_their_dtype_or_take_the_one_asked_for() -> None:
    x, w = made(3, 64), made(48, 64, seed=1)
    assert torch.equal(ref.linear(x, w), functional.linear(x, w))
    low = ref.linear(x.bfloat16(), w.bfloat16())
    high = ref.linear(x.bfloat16(), w.bfloat16(), torch.float32)
    assert low.dtype == torch.bfloat16 and high.dtype == torch.float32
    torch.testing.assert_close(high, x.bfloat16().float() @ w.bfloat16().float().t())


def test_a_pair_that_does_not_go_together_is_refused() -> None:
    x, w = made(3, 128), made(128, 128)
    packed = Fp8Weight(*quantise_fp8(w, (128, 128), "float32_pow2"))
    with pytest.raises(TypeError, match="quantised rows"):
        ref.linear(x, packed)
    with pytest.raises(TypeError, match="quantised rows"):
        ref.linear(ref.quantise(x), w)
    with pytest.raises(ValueError, match="groups of 64"):
        ref.grouped_linear(ref.quantise(x), Fp8Weight(made(2, 8, 64).to(ref.FP8), torch.ones(2, 1, 1)))


@pytest.mark.parametrize("quantised", [False, True])
def test_groups_are_products_side_by_side(quantised: bool) -> None:
    x, matrices = made(5, 3 * 128), [made(40, 128, seed=g) for g in range(3)]
    if quantised:
        q, packed = ref.quantise(x), [Fp8Weight(*quantise_fp8(m, (128, 128), "float32_pow2")) for m in matrices]
        whole = Fp8Weight(torch.stack([p.values for p in packed]), torch.stack([p.scales for p in packed]))
        parts = [
            ref.linear(Quantised(q.values[:, 128 * g : 128 * g + 128], q.scales[:, g : g + 1]), w)
            for g, w in enumerate(packed)
        ]
        torch.testing.assert_close(ref.grouped_linear(q, whole), torch.cat(parts, 1))
    else:
        parts = [x[:, 128 * g : 128 * g + 128] @ m.t() for g, m in enumerate(matrices)]
        torch.testing.assert_close(ref.grouped_linear(x, torch.stack(matrices)), torch.cat(parts, 1))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_the_gate_is_the_expert_s(limit: float | None) -> None:
    h = made(4, 192) * 3
    gate, up = h.chunk(2, -1)
    want = gated(gate.clone(), up, limit)
    torch.testing.assert_close(ref.gated(h, limit, False), want)
    got = ref.gated(h, limit, True)
    assert isinstance(got, Quantised)
    torch.testing.assert_close(ref.dequantise(got), ref.dequantise(ref.quantise(want)))


@pytest.mark.parametrize("packed", [False, True])
def test_latents_are_the_model_s_norms_and_turn(packed: bool) -> None:
    x, q_gain, kv_gain = made(5, 96 + 128 + 8)[:, : 96 + 128], made(96, seed=1), made(128, seed=2)
    angles = made(5, 16, seed=3)
    c_q, kv = ref.latents(x, q_gain, kv_gain, 1e-6, angles.cos(), angles.sin(), False, packed)
    assert torch.equal(c_q, rms_norm(x[:, :96], q_gain, 1e-6))
    want = rms_norm(x[:, 96:], kv_gain, 1e-6)
    want[:, -32:] = apply_interleaved(want[:, -32:], angles.cos(), angles.sin())
    assert torch.equal(kv, roundtrip_latent(want, 32) if packed else want)
    low = ref.latents(x.bfloat16(), q_gain, kv_gain, 1e-6, angles.cos(), angles.sin(), True, packed)
    assert isinstance(low[0], Quantised) and low[1].dtype == torch.bfloat16


def test_turning_back_undoes_the_turn() -> None:
    o, angles = made(5, 3, 64), made(5, 8, seed=1)
    turned = o.clone()
    turned[..., -16:] = apply_interleaved(turned[..., -16:], angles.cos()[:, None], angles.sin()[:, None])
    before = turned.clone()
    back = ref.turn_back(turned, angles.cos(), angles.sin(), False)
    torch.testing.assert_close(back, o.flatten(1))
    assert torch.equal(turned, before)
    q = ref.turn_back(turned, angles.cos(), angles.sin(), True)
    assert isinstance(q, Quantised)
    torch.testing.assert_close(ref.dequantise(q), ref.dequantise(ref.quantise(back)))
