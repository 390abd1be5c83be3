from collections.abc import Callable

import poison
import pytest
import torch

from longread.kernels.norm import cpu, ref

Norm = Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]


@pytest.fixture(params=[ref.rms_norm, cpu.rms_norm], ids=["ref", "cpu"])
def rms_norm(request: pytest.FixtureRequest) -> Norm:
    return request.param


def formula(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 33), (0, 16), (1, 576)])
@pytest.mark.parametrize("gain", [True, False])
def test_equals_formula(shape: tuple[int, ...], gain: bool, rms_norm: Norm) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1]) if gain else None
    with poison.poisoned_memory():
        y = rms_norm(x, weight, 1e-6)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), formula(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


def test_epsilon_matters_for_small_rows(rms_norm: Norm) -> None:
    x, weight = torch.full((1, 8), 1e-4), torch.ones(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), formula(x, weight, 1e-6))
    assert rms_norm(x, weight, 1e-6).max() < 0.2
    assert rms_norm(torch.zeros(1, 8), weight, 1e-6).eq(0).all()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_normalised_in_float32(weight_dtype: torch.dtype, rms_norm: Norm) -> None:
    x, weight = torch.randn(5, 512).bfloat16() * 1e4, torch.randn(512).to(weight_dtype)
    y = rms_norm(x, weight, 1e-6)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), formula(x, weight, 1e-6), rtol=1.5e-2, atol=1e-3)


def test_reads_strided_rows_and_leaves_them(rms_norm: Norm) -> None:
    wide = torch.randn(4, 20)
    before = wide.clone()
    part, weight = wide[:, 3:14], torch.randn(11)
    torch.testing.assert_close(rms_norm(part, weight, 1e-6), rms_norm(part.contiguous(), weight, 1e-6))
    assert wide.equal(before)
