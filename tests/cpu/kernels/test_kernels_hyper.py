"""Hyper-connections: the reference against scalar loops, the CPU kernel against the reference."""

import math

import pytest
import torch
from torch import Tensor

from longread.kernels.dispatch import kernel
from longread.kernels.hyper import cpu, ref

ITERS, EPS, RMS_EPS = 20, 1e-6, 1e-6


def make(tokens: int, m: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = 2 * m + m * m
    return (
        2 * torch.randn(tokens, m, d, generator=g),
        torch.randn(n, m * d, generator=g) / math.sqrt(m * d),
        torch.randn(n, generator=g),
        1 + 0.1 * torch.randn(3, generator=g),
    )


def by_hand(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, list[float], list[list[float]]]:
    """One token, in Python floats, as facts and paper write it."""
    m, _ = streams.shape
    flat = streams.double().flatten()
    logits = (fn.double() @ (flat / (flat.square().mean() + RMS_EPS).sqrt())).tolist()
    b, s = base.tolist(), scale.tolist()
    pre = [1 / (1 + math.exp(-(s[0] * logits[i] + b[i]))) + EPS for i in range(m)]
    post = [2 / (1 + math.exp(-(s[1] * logits[m + i] + b[m + i]))) for i in range(m)]
    a = []
    for j in range(m):
        row = [s[2] * logits[2 * m + j * m + k] + b[2 * m + j * m + k] for k in range(m)]
        total = sum(math.exp(v) for v in row)
        a.append([math.exp(v) / total + EPS for v in row])

    def columns() -> None:
        for k in range(m):
            total = sum(a[j][k] for j in range(m)) + EPS
            for j in range(m):
                a[j][k] /= total

    columns()
    for _ in range(ITERS - 1):
        for j in range(m):
            total = sum(a[j]) + EPS
            a[j] = [v / total for v in a[j]]
        columns()
    u = sum(p * x for p, x in zip(pre, streams.double(), strict=True))
    assert isinstance(u, Tensor)
    return u.float(), post, a


@pytest.mark.parametrize("m", [1, 2, 4])
def test_mix_is_the_papers(m: int) -> None:
    streams, fn, base, scale = make(3, m, 7)
    u, post, a = ref.mix(streams, fn, base, scale, ITERS, EPS, RMS_EPS)
    for t in range(3):
        want_u, want_post, want_a = by_hand(streams[t], fn, base, scale)
        torch.testing.assert_close(u[t], want_u, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(post[t], torch.tensor(want_post), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a[t], torch.tensor(want_a), atol=1e-5, rtol=1e-5)


def test_update_takes_the_first_index_as_source() -> None:
    streams, y = torch.randn(2, 3, 4), torch.randn(2, 4)
    post, a = torch.rand(2, 3), torch.rand(2, 3, 3)
    want = torch.empty_like(streams)
    for t in range(2):
        for k in range(3):
            want[t, k] = post[t, k] * y[t] + sum(a[t, j, k] * streams[t, j] for j in range(3))
    got = ref.update(streams, y, post, a)
    assert got.data_ptr() == streams.data_ptr()
    torch.testing.assert_close(got, want)


def test_sinkhorn_is_doubly_stochastic() -> None:
    a = ref.sinkhorn(3 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)), ITERS, EPS)
    torch.testing.assert_close(a.sum(-2), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(a.sum(-1), torch.ones(50, 4), atol=5e-2, rtol=0)  # rows converge last


def test_head_collapses() -> None:
    streams, fn, base, _ = make(3, 4, 6)
    scale = torch.tensor([0.7])
    got = ref.head(streams, fn[:4], base[:4], scale, EPS, RMS_EPS)
    for t in range(3):
        flat = streams[t].flatten()
        pre = torch.sigmoid(0.7 * fn[:4] @ (flat / (flat.square().mean() + RMS_EPS).sqrt()) + base[:4]) + EPS
        torch.testing.assert_close(got[t], pre @ streams[t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("m, tokens, d", [(4, 0, 8), (4, 1, 1), (4, 1, 257), (4, 3, 64), (4, 37, 13), (2, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_kernel_is_the_reference(m: int, tokens: int, d: int, dtype: torch.dtype) -> None:
    streams, fn, base, scale = make(tokens, m, d, seed=tokens)
    y = torch.randn(tokens, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.inference_mode():
        want = ref.mix(streams, fn, base, scale, ITERS, EPS, RMS_EPS)
        got = cpu.mix(streams, fn, base, scale, ITERS, EPS, RMS_EPS)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)
        after = cpu.update(streams.clone(), y, want[1], want[2])
        torch.testing.assert_close(after, ref.update(streams.clone(), y, want[1], want[2]), atol=5e-6, rtol=1e-5)


def test_the_cpu_kernel_survives_large_streams() -> None:
    """Logits far apart: exp must not overflow, and one NaN token stays alone."""
    streams, fn, base, scale = make(3, 4, 16)
    streams[0] *= 1e6
    streams[1, 2, 3] = float("nan")
    want = ref.mix(streams, 50 * fn, base, scale, ITERS, EPS, RMS_EPS)
    got = cpu.mix(streams, 50 * fn, base, scale, ITERS, EPS, RMS_EPS)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, atol=1e-3, rtol=1e-3)
        assert not ours[2].isnan().any()


def test_the_table_picks_the_cpu_kernel() -> None:
    assert kernel(ref.mix, "cpu") is cpu.mix
    assert kernel(ref.update, "cpu") is cpu.update
