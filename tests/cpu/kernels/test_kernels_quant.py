"""FP8 tiles, FP4 pairs and their scales against hand-computed values and transformers' own decoder."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from longread.kernels.quant import ref


def e8m0(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def test_scale_bytes_at_their_extremes():
    decoded = ref.decode_scale(e8m0(0, 1, 126, 127, 128, 254, 255))
    assert decoded[:6].tolist() == [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert math.isnan(decoded[6])


def test_scale_bytes_agree_with_torch():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(ref.decode_scale(every).nan_to_num(-1), every.float().nan_to_num(-1))


def test_scales_round_up_to_a_power_of_two_and_stay_in_range():
    given_values = torch.tensor([1.0, 1.0001, 0.75, 2.0, 3e-39, 2.0**-140, 3.4e38])
    stored = ref.encode_ue8m0(given_values).view(torch.uint8).tolist()
    assert stored == [127, 128, 127, 128, 0, 0, 254]  # 3e-39 < 2^-127 = 5.9e-39; 3.4e38 would need 2^128


def test_a_scale_of_another_type_is_refused():
    with pytest.raises(TypeError, match="float16"):
        ref.decode_scale(torch.ones(1, dtype=torch.float16))


def test_all_sixteen_fp4_codes_low_nibble_first():
    # Byte i holds code i in the low nibble (even column) and code 15 - i in the high one.
    packed = torch.tensor([i | (15 - i) << 4 for i in range(16)], dtype=torch.uint8).view(torch.int8)[None]
    out = ref.dequantise_fp4(packed, e8m0(128)[None], torch.float32)
    codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert out[0, 0::2].tolist() == [2 * c for c in codes]
    assert out[0, 1::2].tolist() == [2 * c for c in reversed(codes)]
    assert math.copysign(1, out[0, 16]) == -1  # code 8 is minus zero


def test_fp4_scale_belongs_to_a_row_and_32_columns():
    packed = torch.full((2, 20), 0x22, dtype=torch.int8)  # every value 1.0; 40 columns, so the second group has 8
    scale = e8m0(127, 128, 129, 130).view(torch.uint8).view(2, 2).view(torch.float8_e8m0fnu)
    out = ref.dequantise_fp4(packed, scale, torch.float32)
    assert out.shape == (2, 40)
    assert [out[0, 31], out[0, 32], out[1, 0], out[1, 39]] == [1.0, 2.0, 4.0, 8.0]


def test_fp8_blocks_of_odd_sizes():
    weight = torch.ones(130, 5).to(torch.float8_e4m3fn)
    out = ref.dequantise_fp8(weight, torch.tensor([[2.0], [3.0]]), (128, 128), torch.float32)
    assert out[:128].unique().tolist() == [2.0] and out[128:].unique().tolist() == [3.0]
    weight = torch.ones(33, 65).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 7.0).view(2, 3)
    out = ref.dequantise_fp8(weight, scale, (32, 32), torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert [out[0, 0], out[31, 31], out[0, 32], out[32, 0], out[32, 64]] == [1, 1, 2, 4, 6]


def test_fp8_rounds_the_product_once():
    weight = torch.linspace(-2, 2, 64)[None].to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.0123456]])
    out = ref.dequantise_fp8(weight, scale, (128, 128), torch.bfloat16)
    assert torch.equal(out, (weight.float() * scale).bfloat16())
    assert not torch.equal(out, weight.bfloat16() * scale.bfloat16())  # the example can tell the two apart


@pytest.mark.parametrize("strip", [1, 64, 1000])
def test_strips_do_not_change_the_result(monkeypatch, strip):
    weight, block = torch.randn(70, 50), (16, 32)
    codes, scale = ref.quantise_fp8(weight, block, "float32")
    pairs, exponents = ref.quantise_fp4(weight)
    whole = ref.dequantise_fp8(codes, scale, block, torch.float32), ref.dequantise_fp4(pairs, exponents, torch.float32)
    monkeypatch.setattr(ref, "_STRIP", strip)
    assert torch.equal(ref.dequantise_fp8(codes, scale, block, torch.float32), whole[0])
    assert torch.equal(ref.dequantise_fp4(pairs, exponents, torch.float32), whole[1])


def test_empty_and_wrongly_scaled_matrices():
    empty = torch.empty(0, 5).to(torch.float8_e4m3fn)
    assert ref.dequantise_fp8(empty, torch.empty(0, 1), (128, 128), torch.float32).shape == (0, 5)
    with pytest.raises(ValueError, match=r"\(1, 1\), expected \(2, 1\)"):
        ref.dequantise_fp8(torch.ones(130, 5).to(torch.float8_e4m3fn), torch.ones(1, 1), (128, 128), torch.float32)
    with pytest.raises(ValueError, match=r"expected \(1, 2\)"):
        ref.dequantise_fp4(torch.zeros(1, 20, dtype=torch.int8), e8m0(127)[None], torch.float32)
    with pytest.raises(ValueError, match="even"):
        ref.quantise_fp4(torch.ones(1, 3))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    cols=st.integers(1, 70),
    block=st.sampled_from([(128, 128), (32, 32), (1, 16)]),
    form=st.sampled_from(["float32", "float32_pow2", "ue8m0"]),
    magnitude=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_fp8_error_is_half_a_step(rows, cols, block, form, magnitude, seed):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * magnitude
    codes, scale = ref.quantise_fp8(weight, block, form)
    back = ref.dequantise_fp8(codes, scale, block, torch.float32)
    assert scale.dtype == (torch.float8_e8m0fnu if form == "ue8m0" else torch.float32)
    if form != "float32":
        assert (torch.frexp(ref.decode_scale(scale)).mantissa == 0.5).all()
    # E4M3 has 3 mantissa bits: half a step is 1/16 of the value, or half the least subnormal (2^-9) times the scale.
    wide = ref.decode_scale(scale).repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, wide * 2**-10) * 1.001).all()


def test_zeros_stay_zeros():
    codes, scale = ref.quantise_fp8(torch.zeros(3, 3), (128, 128), "float32")
    assert scale.tolist() == [[1.0]] and not codes.float().any()
    pairs, exponents = ref.quantise_fp4(torch.zeros(2, 32))
    assert not pairs.any() and ref.decode_scale(exponents).tolist() == [[1.0], [1.0]]


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), half=st.integers(1, 40), seed=st.integers(0, 99))
def test_fp4_takes_the_nearest_code(rows, half, seed):
    weight = torch.randn(rows, 2 * half, generator=torch.Generator().manual_seed(seed))
    pairs, scale = ref.quantise_fp4(weight)
    back = ref.dequantise_fp4(pairs, scale, torch.float32)
    wide = ref.decode_scale(scale).repeat_interleave(32, dim=1)[:, : 2 * half]
    codes = torch.tensor([s * v for v in ref.E2M1 for s in (1, -1)])
    best = (weight[..., None] - codes * wide[..., None]).abs().amin(-1)
    assert torch.equal((weight - back).abs(), best)


def test_fp4_ties_go_to_the_even_code():
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5, 6.0])
    pairs, scale = ref.quantise_fp4(row)
    assert ref.decode_scale(scale).item() == 1.0
    out = ref.dequantise_fp4(pairs, scale, torch.float32)
    assert out[0, :9].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -2.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_transformers(dtype):
    theirs = Fp8Dequantize(SimpleNamespace(quantization_config=None))
    weight = torch.randn(256, 384)
    for block in ((128, 128), (32, 32)):
        for form in ("float32", "ue8m0"):
            codes, scale = ref.quantise_fp8(weight, block, form)
            ours = ref.dequantise_fp8(codes, scale, block, dtype)
            assert torch.equal(ours, theirs._dequantize_one(codes, scale, dtype))
    pairs, scale = ref.quantise_fp4(weight)
    assert torch.equal(ref.dequantise_fp4(pairs, scale, dtype), theirs._dequantize_one(pairs, scale, dtype))
