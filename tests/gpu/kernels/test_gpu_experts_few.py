"""Experts of few tokens against their reference in float64: forms of weights, ways to find pairs, poisoned memory."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.gpu.kernels.test_gpu_experts import chosen, made

from longread.kernels.counters import COUNTERS, counters
from longread.kernels.experts import few_gluon, ref
from longread.kernels.experts import few_triton as few
from longread.kernels.experts.few_gluon import Tile
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


@pytest.mark.parametrize("t, k, e", [(1, 1, 1), (3, 2, 4), (8, 6, 256), (21, 6, 7), (16, 8, 2), (40, 6, 9)])
def test_blocks_hold_every_pair_once(device: str, t: int, k: int, e: int) -> None:
    ids = torch.stack([torch.randperm(max(e, k))[:k] for _ in range(t)]).to(torch.int32)
    ids = torch.where((ids >= e) | (torch.rand(t, k) < 0.2), -1, ids).to(device)
    torch.full((1 << 12,), 77, dtype=torch.int32, device=device)  # what new memory may hold
    order, experts, count = few.blocks_of(ids, e)
    flat, found, filled = ids.flatten().tolist(), [], {}
    for expert, block in zip(experts.tolist(), order.view(count, few.PAIRS).tolist(), strict=True):
        pairs = [pair for pair in block if pair >= 0]
        assert all(flat[pair] == expert for pair in pairs) and bool(pairs) == (expert >= 0)
        assert block[: len(pairs)] == sorted(pairs)
        found += pairs
        filled.setdefault(expert, []).append(len(pairs))
    assert sorted(found) == [pair for pair, expert in enumerate(flat) if expert >= 0]
    assert all(size == few.PAIRS for sizes in filled.values() for size in sizes[:-1] if sizes[-1])


@pytest.mark.parametrize("kind, k, d, limit", [("fp4", 6, 4096, 10.0), ("fp8", 8, 7168, None)])
@pytest.mark.parametrize("t", [1, 2, 3, 8, 16, 33, 64])
@real_sizes
def test_real_sizes(device: str, kind: str, k: int, d: int, limit: float | None, t: int) -> None:
    c = case(kind, t, k, 256 if t < 16 else 32, d, 2048, device) | {"limit": limit}
    got = run(c)
    check(c, got)
    assert torch.equal(got, run(c))


@pytest.mark.parametrize("t", [4, 9])
@real_sizes
def test_weights_by_way_of_shared_memory(device: str, t: int) -> None:
    """The kernels of few_gluon: experts missing, a token without any, NaN in its row, tiles of both kinds."""
    c = case("fp4", t, 6, 16, 4096, 2048, device)
    c["ids"][0, 2] = -1
    c["ids"][3] = -1
    w, pairs = ref.prepare(c["w"]), c["ids"].numel()
    assert few_gluon.fits(c["q"], w)
    check(c, run(c))
    for first, second in ((Tile(64, 4), Tile(64, 4)), (Tile(16, 4, 4, 1, 5), Tile(32, 4, 4, 1, 4))):
        order, experts, count = few.blocks_of(c["ids"], 16)
        y = few_gluon.products(c["q"], order, experts, count, pairs, w, c["limit"], (first, second))
        check(c, few.summed(y, c["ids"], c["weights"], c["shared"]))
    clean = run(c)
    c["q"].scales[1] = float("nan")
    got = run(c)
    assert got[1].isnan().all()
    kept = [i for i in range(t) if i != 1]
    assert torch.equal(got[kept], clean[kept])


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
