"""Hyper-connections on a GPU against the reference over the same rounded streams."""

import math
import os

import pytest
import torch
from torch import Tensor

from longread.kernels.fp8.ref import quantise
from longread.kernels.hyper import ref

triton = pytest.importorskip("triton")
from longread.kernels.hyper import triton as fast  # noqa: E402

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter multiplies bfloat16 as integers and cuts it off instead of rounding: float16 stands for it there.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
ITERS, EPS, RMS_EPS = 20, 1e-6, 1e-6
TINY = [(1, 128), (3, 256), (17, 128), (40, 96)]
REAL = [(1, 4096), (8, 4096), (32, 4096), (130, 4096), (1030, 4096), (8192, 4096), (5, 7168), (2000, 256)]
SIZES = TINY + [pytest.param(*s, marks=pytest.mark.skipif(INTERPRETED, reason="a GPU's size")) for s in REAL]


def made(tokens: int, d: int, n: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    """Streams, y, post, a, (fn, base, scale), gain."""
    g = torch.Generator().manual_seed(1000 * tokens + d + n)
    fn = torch.randn(n, 4 * d, generator=g) / math.sqrt(4 * d)
    parts = (fn, torch.randn(n, generator=g), 1 + torch.rand(3 if n == 24 else 1, generator=g))
    a = ref.sinkhorn(torch.randn(tokens, 4, 4, generator=g), ITERS, EPS)
    streams = (2 * torch.randn(tokens, 4, d, generator=g)).to(HALF)
    y = torch.randn(tokens, d, generator=g).to(HALF)
    post, gain = 2 * torch.rand(tokens, 4, generator=g), (torch.rand(d, generator=g) + 0.5).to(HALF)
    every = (streams, y, post, a, gain)
    streams, y, post, a, gain = (t.to(device) for t in every)
    return streams, y, post, a, tuple(p.to(device) for p in parts), gain


def split(fn: Tensor, base: Tensor, scale: Tensor) -> ref.HyperWeights:
    w = fast.weights(fn, base, scale)
    torch.testing.assert_close(w.fn.float().sum(0), fn, rtol=2**-17, atol=2**-30)
    if not INTERPRETED:
        return w
    high = fn.to(HALF)
    return w._replace(fn=torch.stack((high, (fn - high.float()).to(HALF))))


def close(got: Tensor, want: Tensor) -> None:
    """bfloat16 results of float32 sums: they differ where a sum lies at a rounding step, by one step (2^-8)."""
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-13)
    assert (got != want).float().mean() < 0.02, "more than rounding"


@pytest.mark.parametrize("tokens, d", SIZES)
@pytest.mark.parametrize("first", [True, False])
def test_enter(tokens: int, d: int, first: bool, device: str) -> None:
    streams, y, post, a, parts, gain = made(tokens, d, 24, device)
    quantised = d % 128 == 0
    given = (None, None, None) if first else (y, post, a)
    theirs = streams.clone()
    want = ref.enter(theirs, *given, ref.weights(*parts), gain, ITERS, EPS, RMS_EPS, quantised)
    got = fast.enter(streams, *given, split(*parts), gain, ITERS, EPS, RMS_EPS, quantised)
    close(streams, theirs)
    # The mix is compared over the same streams, not over those that one rounding made different.
    want = ref.enter(streams, None, None, None, ref.weights(*parts), gain, ITERS, EPS, RMS_EPS, quantised)
    torch.testing.assert_close(got.post, want.post, atol=3e-5, rtol=3e-5)  # fn is kept to 2^-18
    torch.testing.assert_close(got.a, want.a, atol=3e-5, rtol=3e-5)
    close(got.u, want.u)
    assert (got.q is None) == (not quantised)
    if got.q is not None:
        exact = quantise(got.u)
        wrong = (got.q.values.view(torch.uint8) != exact.values.view(torch.uint8)).float().mean()
        assert wrong < 0.1 if INTERPRETED else wrong == 0  # the interpreter drops a carry when it rounds to FP8
        assert torch.equal(got.q.scales, exact.scales) and got.q.scales.stride(0) == 1


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("tokens, d", [(33, 128), (70, 192)])
def test_the_kernels_of_many_tokens(
    tokens: int, d: int, first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "MANY", 16)
    test_enter(tokens, d, first, device)


@pytest.mark.parametrize("tokens, d", SIZES)
def test_leave(tokens: int, d: int, device: str) -> None:
    streams, y, post, a, parts, gain = made(tokens, d, 4, device)
    rows = torch.tensor(sorted({0, tokens // 2, tokens - 1}, reverse=True), device=device)
    before = streams.clone()
    want = ref.leave(streams, y, post, a, rows, ref.weights(*parts), gain, EPS, RMS_EPS)
    close(fast.leave(streams, y, post, a, rows, split(*parts), gain, EPS, RMS_EPS), want)
    assert torch.equal(streams, before)
    assert fast.leave(streams, y, post, a, rows[:0], split(*parts), gain, EPS, RMS_EPS).shape == (0, d)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's, of a sigmoid that is 0
def test_far_logits_and_extreme_rows(device: str) -> None:
    """Zero streams, and logits so far apart that exp would overflow: finite, and as the reference has them."""
    streams, _, _, _, (fn, base, scale), gain = made(3, 128, 24, device)
    streams[0] = 0
    streams[1] *= 1e4
    want = ref.enter(streams, None, None, None, ref.weights(200 * fn, base, scale), gain, ITERS, EPS, RMS_EPS, True)
    got = fast.enter(streams, None, None, None, split(200 * fn, base, scale), gain, ITERS, EPS, RMS_EPS, True)
    torch.testing.assert_close(got.a, want.a, atol=2e-3, rtol=2e-2)  # a logit of 1000 has an error of 4e-3
    torch.testing.assert_close(got.u.float(), want.u.float(), atol=2e-2, rtol=2e-2)
    assert got.q is not None and got.q.scales.isfinite().all()


def test_strided_y_and_what_goes_to_the_reference(device: str) -> None:
    streams, y, post, a, parts, gain = made(3, 128, 24, device)
    wide = torch.full((3, 200), float("nan"), dtype=y.dtype, device=device)
    wide[:, :128] = y
    theirs = streams.clone()
    ref.enter(theirs, y, post, a, ref.weights(*parts), gain, ITERS, EPS, RMS_EPS, False)
    fast.enter(streams, wide[:, :128], post, a, split(*parts), gain, ITERS, EPS, RMS_EPS, False)
    close(streams, theirs)
    plain = streams.float()
    want = ref.enter(plain.clone(), y, post, a, ref.weights(*parts), gain, ITERS, EPS, RMS_EPS, False)
    got = fast.enter(plain, y, post, a, split(*parts), gain, ITERS, EPS, RMS_EPS, False)
    torch.testing.assert_close(got.u, want.u, atol=1e-4, rtol=1e-4)
