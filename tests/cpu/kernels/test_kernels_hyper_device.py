"""Hyper-connections in one go, as a device computes them: ``enter`` and ``leave`` against their parts."""

import math

import pytest
import torch
from torch import Tensor

from longread.kernels.fp8.ref import dequantise
from longread.kernels.hyper import ref
from longread.kernels.norm.ref import rms_norm

ITERS, EPS, RMS_EPS = 20, 1e-6, 1e-6


def made(tokens: int, d: int, dtype: torch.dtype, n: int = 24) -> tuple[Tensor, Tensor, ref.HyperWeights, Tensor]:
    """Streams, a sublayer's output, one connection's weights, a norm's gain."""
    g = torch.Generator().manual_seed(tokens)
    return (
        (2 * torch.randn(tokens, 4, d, generator=g)).to(dtype),
        torch.randn(tokens, d, generator=g).to(dtype),
        ref.weights(
            torch.randn(n, 4 * d, generator=g) / math.sqrt(4 * d),
            torch.randn(n, generator=g),
            1 + torch.rand(3 if n == 24 else 1, generator=g),
        ),
        torch.rand(d, generator=g) + 0.5,
    )


@pytest.mark.parametrize("tokens", [1, 5])
def test_enter_is_update_mix_and_norm(tokens: int) -> None:
    streams, y, w, gain = made(tokens, 96, torch.float32)
    first = ref.enter(streams, None, None, None, w, gain, ITERS, EPS, RMS_EPS, quantised=False)
    u, post, a = ref.mix(streams, *w, ITERS, EPS, RMS_EPS)
    torch.testing.assert_close(first.u, rms_norm(u, gain, RMS_EPS), atol=1e-6, rtol=1e-5)
    assert first.q is None and torch.equal(first.post, post) and torch.equal(first.a, a)

    want = ref.update(streams.clone(), y, post, a)
    second = ref.enter(streams, y, post, a, w, gain, ITERS, EPS, RMS_EPS, quantised=False)
    assert torch.equal(streams, want), "the streams are overwritten"
    torch.testing.assert_close(second.u, rms_norm(ref.mix(want, *w, ITERS, EPS, RMS_EPS)[0], gain, RMS_EPS))


def test_only_what_is_stored_is_rounded() -> None:
    """bfloat16 streams: the mix sees the rounded streams, everything between is float32."""
    streams, y, w, gain = made(3, 256, torch.bfloat16)
    _, post, a = ref.mix(streams.float(), *w, ITERS, EPS, RMS_EPS)
    want = ref.update(streams.float(), y, post, a).bfloat16()
    got = ref.enter(streams, y, post, a, w, gain.bfloat16(), ITERS, EPS, RMS_EPS, quantised=True)
    assert torch.equal(streams, want)
    u, *_ = ref.mix(want.float(), *w, ITERS, EPS, RMS_EPS)
    expected = rms_norm(u, gain.bfloat16().float(), RMS_EPS)
    torch.testing.assert_close(got.u.float(), expected, rtol=2**-8, atol=1e-6)
    assert got.u.dtype == torch.bfloat16 and got.q is not None
    torch.testing.assert_close(dequantise(got.q), got.u.float(), rtol=2**-4, atol=2**-10 * float(got.u.abs().max()))


def test_y_comes_with_its_weights() -> None:
    streams, y, w, gain = made(1, 8, torch.float32)
    with pytest.raises(ValueError, match="post and a"):
        ref.enter(streams, y, None, None, w, gain, ITERS, EPS, RMS_EPS, quantised=False)


def test_leave_collapses_some_rows_and_leaves_the_streams() -> None:
    streams, y, w, gain = made(4, 64, torch.float32, n=4)
    g = torch.Generator().manual_seed(9)
    post, a, rows = torch.rand(4, 4, generator=g), torch.rand(4, 4, 4, generator=g), torch.tensor([3, 0, 3])
    before = streams.clone()
    got = ref.leave(streams, y, post, a, rows, w, gain, EPS, RMS_EPS)
    assert torch.equal(streams, before)
    full = ref.update(streams.clone(), y, post, a)[rows]
    want = rms_norm(ref.head(full, *w, EPS, RMS_EPS), gain, RMS_EPS)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert ref.leave(streams, y, post, a, rows[:0], w, gain, EPS, RMS_EPS).shape == (0, 64)
