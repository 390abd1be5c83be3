"""Experts of few tokens against their reference in float64: forms of weights, ways to find pairs, poisoned memory."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.kernels.test_gpu_experts import chosen, made

from longread.kernels.counters import COUNTERS, counters
from longread.kernels.experts import few_triton as few
from longread.kernels.experts import ref
from longread.kernels.experts.few_triton import Few
from longread.kernels.fp8.ref import quantise

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real_sizes = pytest.mark.skipif(INTERPRETED, reason="real sizes need a device")
SMALL = Few(rows1=64, rows2=64, scanned=True)


def case(kind: str, t: int, k: int, e: int, d: int, f: int, device: str) -> dict:
    u, w = torch.randn(t, d, device=device).bfloat16(), made(kind, e, d, f, device)
    return {
        "u": u, "q": quantise(u), "ids": chosen(t, k, e, device), "weights": torch.rand(t, k, device=device),
        "w": w, "limit": 10.0, "shared": torch.randn(t, d, device=device),
    }  # fmt: skip


def run(c: dict, config: Few | None = None) -> Tensor:
    return few.experts(c["q"], c["ids"], c["weights"], ref.prepare(c["w"]), c["limit"], c["shared"], config=config)


def wanted(c: dict) -> Tensor:
    return ref.experts(c["u"].double(), c["q"], c["ids"], c["weights"], c["w"], c["limit"], c["shared"].double())


def check(c: dict, got: Tensor) -> None:
    want = wanted(c)
    off = (got.double() - want).norm() / (want - c["shared"].double()).norm()
    assert off < 2e-3
    nobody = (c["ids"] < 0).all(1)
    assert torch.equal(got[nobody], c["shared"][nobody])


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, rows1=32, rows2=128),
        replace(SMALL, scanned=False),
    ],
)
@pytest.mark.parametrize("t, k, e, d, f", [(1, 2, 4, 256, 128), (3, 2, 4, 128, 256), (10, 1, 1, 128, 128)])
def test_experts_of_few_tokens(device: str, kind: str, config: Few, t: int, k: int, e: int, d: int, f: int) -> None:
    c = case(kind, t, k, e, d, f, device)
    got = run(c, config)
    check(c, got)
    assert torch.equal(got, run(c, config))


@pytest.mark.parametrize("kind, k, d, limit", [("fp4", 6, 4096, 10.0), ("fp8", 8, 7168, None)])
@pytest.mark.parametrize("t", [1, 2, 3, 8, 16, 33, 64])
@real_sizes
def test_real_sizes(device: str, kind: str, k: int, d: int, limit: float | None, t: int) -> None:
    c = case(kind, t, k, 256 if t < 16 else 32, d, 2048, device) | {"limit": limit}
    got = run(c)
    check(c, got)
    assert torch.equal(got, run(c))


def test_a_tokens_bits_do_not_depend_on_the_others(device: str) -> None:
    c = case("fp4", 9, 2, 3, 128, 128, device)
    together = run(c, SMALL)
    for t in (0, 8):
        rows = slice(t, t + 1)
        alone = c | {"ids": c["ids"][rows], "weights": c["weights"][rows], "shared": c["shared"][rows]}
        alone["q"] = type(c["q"])(c["q"].values[rows], c["q"].scales[rows])
        assert torch.equal(run(alone, SMALL), together[rows])


@pytest.mark.parametrize("scanned", [True, False])
def test_nan_stays_in_its_row(device: str, scanned: bool) -> None:
    c = case("fp4", 4, 2, 3, 128, 128, device)
    clean = run(c, SMALL)
    c["q"].scales[1] = float("nan")
    got = run(c, replace(SMALL, scanned=scanned))
    assert got[1].isnan().all()
    kept = [0, 2, 3]
    assert torch.equal(got[kept], clean[kept])


def test_a_token_with_some_experts_missing(device: str) -> None:
    c = case("fp8", 3, 3, 4, 128, 128, device)
    c["ids"][0] = torch.tensor([-1, 2, -1], dtype=torch.int32)
    c["ids"][2, 1] = -1
    check(c, run(c, SMALL))


def test_counters_are_zeros_again(device: str) -> None:
    c = case("fp4", 3, 2, 4, 128, 128, device)
    run(c, SMALL)
    assert not counters(c["ids"].device, COUNTERS).any()
