import math

import poison
import pytest
import torch

from longread.kernels.rope import cpu
from longread.kernels.rope.ref import apply_interleaved, cos_sin, frequencies, mscale, rotate_, turn
from longread.spec.model import RopeSpec

YARN = RopeSpec(10000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)


def test_plain_frequencies() -> None:
    expected = [10000.0 ** (-2 * i / 64) for i in range(32)]
    assert frequencies(RopeSpec(10000.0), 64).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("rope", [YARN, RopeSpec(160000.0, 16.0, 65536)])
@pytest.mark.parametrize("dim", [64, 16])
def test_yarn_frequencies_follow_the_written_formula(rope: RopeSpec, dim: int) -> None:
    assert rope.factor is not None and rope.original_max_position is not None

    def corrected(r: float) -> float:
        return dim * math.log(rope.original_max_position / (2 * math.pi * r)) / (2 * math.log(rope.theta))

    low = max(math.floor(corrected(rope.beta_fast)), 0)
    high = min(math.ceil(corrected(rope.beta_slow)), dim - 1)
    expected = []
    for i in range(dim // 2):
        f, ramp = rope.theta ** (-2 * i / dim), min(max((i - low) / (high - low), 0), 1)
        expected.append(f / rope.factor * ramp + f * (1 - ramp))
    found = frequencies(rope, dim)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_yarn_without_its_original_length_is_refused() -> None:
    with pytest.raises(ValueError, match="original_max_position"):
        frequencies(RopeSpec(10000.0, 40.0), 64)


def test_mscale() -> None:
    assert mscale(None, 1.0) == 1.0
    assert mscale(1.0, 1.0) == 1.0
    assert mscale(40.0, 1.0) ** 2 == pytest.approx(1.874, abs=5e-4)
    assert mscale(40.0, 0.707) ** 2 == pytest.approx(1.590, abs=5e-4)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8), (1, 2), (0, 4, 8)])
def test_rotation_of_each_pair(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    cos, sin = cos_sin(frequencies(RopeSpec(10000.0), shape[-1]), torch.arange(shape[0]) * 1000)
    if len(shape) == 3:
        cos, sin = cos[:, None], sin[:, None]
    with poison.poisoned_memory():
        y = apply_interleaved(x, cos, sin)
    expected = torch.empty(shape)
    expected[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    expected[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(apply_interleaved(y, cos, -sin), x)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(64), torch.randn(64)
    freqs = frequencies(YARN, 64).double()

    def score(i: int, j: int) -> float:
        cos, sin = cos_sin(freqs, torch.tensor([i, j]))
        cos, sin = (torch.tensor([i, j])[:, None] * freqs).cos().float(), (torch.tensor([i, j])[:, None] * freqs).sin()
        rotated = apply_interleaved(torch.stack((q, k)), cos, sin.float())
        return float(rotated[0] @ rotated[1])

    assert score(7, 3) == pytest.approx(score(100_007, 100_003), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_strided_and_bfloat16_inputs() -> None:
    wide = torch.randn(6, 4, 24)
    cos, sin = cos_sin(frequencies(YARN, 16), torch.arange(6))
    part = wide[..., 8:]
    whole = apply_interleaved(part.contiguous(), cos[:, None], sin[:, None])
    assert apply_interleaved(part, cos[:, None], sin[:, None]).equal(whole)
    half = apply_interleaved(part.bfloat16(), cos[:, None], sin[:, None])
    assert half.dtype == torch.bfloat16
    assert half.equal(apply_interleaved(part.bfloat16().float(), cos[:, None], sin[:, None]).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("begin", [8, 7])
def test_in_place_touches_its_channels_only(begin: int, dtype: torch.dtype) -> None:
    """``begin`` 7: pairs that do not lie as complex numbers."""
    wide = torch.randn(6, 4, 24).to(dtype)
    before = wide.clone()
    cos, sin = cos_sin(frequencies(YARN, 16), torch.arange(6))
    rotate_(wide[..., begin : begin + 16], turn(cos, sin)[:, None])
    expected = before.clone()
    expected[..., begin : begin + 16] = apply_interleaved(before[..., begin : begin + 16], cos[:, None], sin[:, None])
    assert wide.equal(expected)


@pytest.mark.parametrize("shape", [(0, 4), (1, 2), (3, 18), (4, 3, 32), (5, 1, 6), (600, 16)])
def test_compiled_rotation_equals_the_reference(shape: tuple[int, ...]) -> None:
    wide = torch.randn(*shape[:-1], shape[-1] + 9)
    other = wide.clone()
    turns = turn(*cos_sin(frequencies(RopeSpec(10000.0), shape[-1]), torch.arange(shape[0]) * 1000))
    by = turns[:, None] if len(shape) == 3 else turns
    for each in (by, by.conj()):
        found = cpu.rotate_(wide[..., 3 : 3 + shape[-1]], each)
        rotate_(other[..., 3 : 3 + shape[-1]], each)
        assert found.data_ptr() == wide[..., 3:].data_ptr()
        torch.testing.assert_close(wide, other)


def test_magnitude_scales_both_tables() -> None:
    freqs, positions = frequencies(YARN, 16), torch.arange(3)
    plain, scaled = cos_sin(freqs, positions), cos_sin(freqs, positions, 1.5)
    for a, b in zip(plain, scaled, strict=True):
        torch.testing.assert_close(a * 1.5, b)
