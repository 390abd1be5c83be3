from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from longread.kernels.router import cpu, ref
from longread.kernels.router.ref import affinity, route, route_hash, router_logits
from longread.spec.model import MoESpec

V3 = MoESpec(32, 6, 1, 8, "sigmoid", "noaux_tc", 8, 4, True, 2.5)
V2 = MoESpec(32, 6, 2, 8, "softmax", "group_limited_greedy", 8, 3, False, 16.0)
LITE = MoESpec(32, 6, 2, 8, "softmax", "greedy", 1, 1, False, 1.0)
V4 = MoESpec(32, 6, 1, 8, "sqrtsoftplus", "noaux_tc", 1, 1, True, 1.5)


def by_hand(scores: list[float], bias: list[float], moe: MoESpec) -> dict[int, float]:
    """One token, from the definition: {expert: weight}."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = moe.routed // moe.groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(moe.groups)]
    best = 2 if moe.method == "noaux_tc" else 1
    order = sorted(range(moe.groups), key=lambda g: -sum(groups[g][:best]))
    kept = order[: moe.kept_groups] if moe.method != "greedy" else order
    allowed = [e for e in range(moe.routed) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.top_k]
    total = sum(scores[e] for e in chosen) if moe.normalise else 1.0
    return {e: scores[e] / total * moe.scale for e in chosen}


@pytest.mark.parametrize("moe", [V3, V2, LITE, V4, replace(V2, normalise=True), replace(V3, groups=1, kept_groups=1)])
@pytest.mark.parametrize("tokens", [1, 17])
def test_equals_the_definition(moe: MoESpec, tokens: int) -> None:
    logits = torch.randn(tokens, moe.routed)
    bias = torch.randn(moe.routed) if moe.method == "noaux_tc" else None
    ids, weights = route(logits, moe, bias)
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    scores = affinity(logits, moe)
    flat = [0.0] * moe.routed if bias is None else bias.tolist()
    for row, mine, given in zip(scores.tolist(), ids.tolist(), weights.tolist(), strict=True):
        expected = by_hand(row, flat, moe)
        assert dict(zip(mine, given, strict=True)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("moe", [V3, V2, LITE, V4])
def test_no_tokens(moe: MoESpec) -> None:
    ids, weights = route(torch.empty(0, 32), moe, torch.zeros(32))
    assert ids.shape == weights.shape == (0, 6)


@pytest.mark.parametrize(
    ("scoring", "expected"),
    [
        ("sigmoid", lambda x: 1 / (1 + (-x).exp())),
        ("softmax", lambda x: x.exp() / x.exp().sum(-1, keepdim=True)),
        ("sqrtsoftplus", lambda x: (1 + x.exp()).log().sqrt()),
    ],
)
def test_affinity(scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"], expected: object) -> None:
    logits = torch.randn(5, 32) * 3
    found = affinity(logits, replace(V3, scoring=scoring))
    assert callable(expected)
    torch.testing.assert_close(found.double(), expected(logits.double()), rtol=1e-5, atol=1e-6)


def test_bias_moves_the_choice_and_never_the_weights() -> None:
    logits = torch.zeros(1, 32)
    bias = torch.arange(32.0)
    ids, weights = route(logits, replace(V4, normalise=False, scale=1.0), bias)
    assert sorted(ids[0].tolist()) == [26, 27, 28, 29, 30, 31]
    torch.testing.assert_close(weights, torch.full((1, 6), 0.5 + 0.3325546), atol=1e-5, rtol=0)


def test_hash_takes_the_given_experts() -> None:
    logits, table = torch.randn(3, 32), torch.randint(0, 32, (3, 6))
    ids, weights = route_hash(logits, V4, table)
    assert ids is table
    scores = affinity(logits, V4).gather(1, table)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True) * 1.5)


def test_logits_are_float32_whatever_the_input() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64)
    logits: Tensor = router_logits(x, weight)
    torch.testing.assert_close(logits, x.float() @ weight.t())
    assert router_logits(x, weight.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("moe", [V4, replace(V4, normalise=False), replace(V4, scoring="sigmoid"), V3, LITE])
@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_compiled_routing_equals_the_reference(moe: MoESpec, tokens: int) -> None:
    """Sorted by expert, since the order is free. Large logits: softplus's identity (they saturate sigmoid)."""
    large = 15 if moe.scoring == "sqrtsoftplus" else 1
    logits, bias = torch.randn(tokens, moe.routed) * large, torch.randn(moe.routed)
    for given in (bias, None) if moe.method == "noaux_tc" else (None,):
        wanted, found = ref.route(logits, moe, given), cpu.route(logits, moe, given)
        orders = wanted[0].argsort(), found[0].argsort()
        assert wanted[0].gather(1, orders[0]).equal(found[0].gather(1, orders[1]))
        torch.testing.assert_close(found[1].gather(1, orders[1]), wanted[1].gather(1, orders[0]))
    table = torch.randint(0, moe.routed, (tokens, moe.top_k))
    torch.testing.assert_close(cpu.route_hash(logits, moe, table), ref.route_hash(logits, moe, table))
    x, weight = torch.randn(tokens, 40), torch.randn(moe.routed, 40)
    torch.testing.assert_close(cpu.router_logits(x, weight), ref.router_logits(x, weight))


def test_nan_logits_still_choose_different_experts() -> None:
    ids, weights = cpu.route(torch.full((2, 32), float("nan")), V4)
    assert ids.tolist() == [list(range(6))] * 2
    assert weights.isnan().all()
