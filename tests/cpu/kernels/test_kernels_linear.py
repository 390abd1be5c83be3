"""The narrow product and the decode experts on a CPU against their references, at every row count around the limits."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longread.kernels.dispatch import kernel
from longread.kernels.linear import cpu, ref
from longread.kernels.moe import cpu as moe_cpu
from longread.kernels.moe import ref as moe


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 9, 33])
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (17, 5), (128, 33), (1024, 3), (1025, 3)])
def test_linear(rows: int, inputs: int, outputs: int) -> None:
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, inputs, generator=g), torch.randn(outputs, inputs, generator=g)
    got = cpu.linear(x, weight)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, ref.linear(x, weight), atol=1e-4, rtol=1e-5)


class Products(TorchDispatchMode):
    """The row counts of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.linear):
            self.rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hidden", [8, 40_000])  # all pairs laid out at once; experts in turn
def test_bfloat16_meets_few_row_counts(hidden: int) -> None:
    """Each is code that oneDNN compiles and keeps; the tokens of a step and of an expert take every number."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(300, 8, generator=g).bfloat16()
    weight = torch.randn(8, 8, generator=g).bfloat16()
    w1, w2 = torch.randn(hidden, 8, generator=g).bfloat16(), torch.randn(8, hidden, generator=g).bfloat16()
    found: dict[int, torch.Tensor] = {}
    with torch.inference_mode(), Products() as seen:
        for rows in range(1, 300, 1 if hidden == 8 else 37):
            found[rows] = ref.linear(x[:rows], weight)
            ids = torch.zeros(rows, 1, dtype=torch.int64)
            moe.experts(x[:rows], [w1], [w1], [w2], ids, torch.ones(rows, 1))
    for rows, got in found.items():
        torch.testing.assert_close(got, x[:rows] @ weight.T, atol=0.05, rtol=0.02)
    assert {count for count in seen.rows if count > ref.FEW_ROWS} <= {32, 64, 128, 256}


def test_linear_of_slices_and_other_types() -> None:
    """Columns of a wider result, rows of a wider weight, a transposed weight, bfloat16; a NaN stays in its row."""
    x, weight = torch.randn(3, 40)[:, 4:20], torch.randn(7, 16)
    torch.testing.assert_close(cpu.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(cpu.linear(x, weight[2:5]), x @ weight[2:5].T)
    turned = torch.randn(16, 7).T
    torch.testing.assert_close(cpu.linear(x, turned), x @ turned.T)
    assert cpu.linear(x.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    x = x.clone()
    x[1, 2] = float("nan")
    got = cpu.linear(x, weight)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_experts_and_mlp(tokens: int, limit: float | None) -> None:
    g = torch.Generator().manual_seed(tokens)
    d, f, count, k = 20, 12, 5, 3
    x = torch.randn(tokens, d, generator=g) / 2
    w1, w3 = ([torch.randn(f, d, generator=g) for _ in range(count)] for _ in range(2))
    w2 = [torch.randn(d, f, generator=g) for _ in range(count)]
    ids = torch.rand(tokens, count, generator=g).argsort(1)[:, :k]
    weights = torch.rand(tokens, k, generator=g)
    want = moe.experts(x, w1, w3, w2, ids, weights, limit)
    got = moe_cpu.experts(x, w1, w3, w2, ids, weights, limit)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        moe_cpu.mlp(x, w1[0], w3[0], w2[0], limit), moe.mlp(x, w1[0], w3[0], w2[0], limit), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("limit", [None, 2.0])
def test_experts_keep_extremes(limit: float | None) -> None:
    """Huge gates saturate; a NaN token stays NaN and alone."""
    x = torch.tensor([[1e4, -1e4], [float("nan"), 1.0], [0.5, 0.25]])
    w = [torch.eye(2)]
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    want = moe.experts(x, w, w, w, ids, weights, limit)
    got = moe_cpu.experts(x, w, w, w, ids, weights, limit)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got[1, 0].isnan()


def test_the_table_picks_the_cpu_kernels() -> None:
    assert kernel(ref.linear, "cpu") is cpu.linear
    assert kernel(moe.experts, "cpu") is moe_cpu.experts
    assert kernel(moe.mlp, "cpu") is moe_cpu.mlp
