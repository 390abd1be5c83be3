import poison
import pytest
import torch
from torch import Tensor

from longread.kernels.moe import ref as moe
from longread.kernels.moe.ref import LAID_OUT, experts, gated, mlp

D, F, E = 24, 20, 7
Weights = tuple[list[Tensor], list[Tensor], list[Tensor]]


def weights() -> Weights:
    return (
        [torch.randn(F, D) for _ in range(E)],
        [torch.randn(F, D) for _ in range(E)],
        [torch.randn(D, F) for _ in range(E)],
    )


def choose(tokens: int, k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k).long()
    return ids, torch.rand(tokens, k)


def by_hand(x: Tensor, w: Weights, ids: Tensor, scale: Tensor, limit: float | None) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for e, s in zip(ids[t].tolist(), scale[t].tolist(), strict=True):
            g, u = w[0][e].double() @ x[t].double(), w[1][e].double() @ x[t].double()
            if limit is not None:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            out[t] += s * (w[2][e].double() @ (g / (1 + (-g).exp()) * u))
    return out


@pytest.mark.parametrize("limit", [None, 2.0])
@pytest.mark.parametrize(("tokens", "k"), [(0, 3), (1, 1), (1, 4), (4, 4), (5, 3), (5, 4), (33, 3), (129, 1)])
def test_equals_definition(tokens: int, k: int, limit: float | None) -> None:
    x, w, (ids, scale) = torch.randn(tokens, D), weights(), choose(tokens, k)
    before = x.clone()
    with poison.poisoned_memory():
        found = experts(x, *w, ids, scale, limit)
    assert found.dtype == torch.float32 and found.shape == x.shape
    torch.testing.assert_close(found.double(), by_hand(x, w, ids, scale, limit), rtol=1e-4, atol=1e-4)
    assert x.equal(before), "the input is shared with the residual stream"


def test_limit_is_felt() -> None:
    x, w, (ids, scale) = torch.randn(3, D), weights(), choose(3, 2)
    assert (experts(x, *w, ids, scale, 0.5) - experts(x, *w, ids, scale)).abs().max() > 1


@pytest.mark.parametrize("laid_out", [0, LAID_OUT])
@pytest.mark.parametrize(("tokens", "k"), [(2, 3), (40, 3), (40, 7)])
def test_all_ways_agree(tokens: int, k: int, laid_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn, laid out, and one token at a time: a token does not depend on its neighbours."""
    monkeypatch.setattr(moe, "LAID_OUT", laid_out)
    x, w, (ids, scale) = torch.randn(tokens, D), weights(), choose(tokens, k)
    with poison.poisoned_memory():
        together = experts(x, *w, ids, scale)
    alone = torch.cat([experts(x[i : i + 1], *w, ids[i : i + 1], scale[i : i + 1]) for i in range(tokens)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_order_of_ids_does_not_matter(tokens: int) -> None:
    x, w, (ids, scale) = torch.randn(tokens, D), weights(), choose(tokens, 3)
    assert experts(x, *w, ids, scale).equal(experts(x, *w, ids.flip(1), scale.flip(1)))


def test_all_tokens_to_one_expert() -> None:
    x, w = torch.randn(50, D), weights()
    ids = torch.full((50, 1), 4)
    torch.testing.assert_close(experts(x, *w, ids, torch.ones(50, 1)), mlp(x, w[0][4], w[1][4], w[2][4]))


@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_bfloat16(tokens: int) -> None:
    x, w, (ids, scale) = torch.randn(tokens, D), weights(), choose(tokens, 3)
    half: Weights = tuple([t.bfloat16() for t in part] for part in w)  # type: ignore[assignment]
    found = experts(x.bfloat16(), *half, ids, scale)
    assert found.dtype == torch.bfloat16
    exact = by_hand(x.bfloat16(), half, ids, scale, None)
    assert (found.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_gated_caps_the_gate_above_only() -> None:
    gate, up = torch.tensor([-50.0, 1.0, 50.0]), torch.tensor([-50.0, 1.0, 50.0])
    expected = torch.tensor([0.0, 0.7310586, 10 * 10 / (1 + 4.54e-5)])
    torch.testing.assert_close(gated(gate.clone(), up, 10.0), expected, rtol=1e-4, atol=1e-4)
    assert up.tolist() == [-50.0, 1.0, 50.0]
