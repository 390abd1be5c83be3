"""Experts' kernels against their reference in float64: slots, routing, every regime and form of weights."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from interpreter_casts import exact_casts  # noqa: F401, an autouse fixture
from interpreter_gaps import filled_gaps  # noqa: F401, an autouse fixture

from longread.kernels.experts import ref
from longread.kernels.experts import triton as dev
from longread.kernels.experts.many_slots_triton import blocks_of, hidden_to_fp8, spread
from longread.kernels.experts.routing_triton import route
from longread.kernels.experts.slots_triton import Slots, combine, one_scale
from longread.kernels.fp8.ref import dequantise, power_above, quantise
from longread.spec.model import MoESpec

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real_sizes = pytest.mark.skipif(INTERPRETED, reason="real sizes need a device")
ROUNDING = 0.066  # a hidden number is rounded to e4m3 by at most 1/16, and a few can be all of a sum


def moe(routed: int = 16, top_k: int = 4, **changes: object) -> MoESpec:
    fields: dict = {
        "routed": routed, "top_k": top_k, "shared": 1, "intermediate": 128, "scoring": "sqrtsoftplus",
        "method": "noaux_tc", "groups": 1, "kept_groups": 1, "normalise": True, "scale": 1.5,
    }  # fmt: skip
    return MoESpec(**fields | changes)


def made(kind: str, e: int, d: int, f: int, device: str) -> ref.ExpertWeights:
    """Random weights whose products with unit activations have the size of one."""

    def drawn(rows: int, columns: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        """One expert at a time: several processes test on one device, and all experts in float32 are 26 GB."""
        out = torch.empty(e, rows, columns, dtype=dtype, device=device)
        for expert in out:
            expert.copy_(torch.randn(rows, columns, device=device) * size)
        return out

    if kind == "plain":
        dtype = torch.float32 if INTERPRETED else torch.bfloat16
        w13, w2 = drawn(2 * f, d, dtype, d**-0.5), drawn(d, f, dtype, f**-0.5)
        return ref.ExpertWeights("plain", w13, None, w2, None)
    if kind == "fp8":
        w13, w2 = drawn(2 * f, d, torch.float8_e4m3fn), drawn(d, f, torch.float8_e4m3fn)
        s13 = (torch.rand(e, 2 * (f // 128), d // 128, device=device) + 0.5) * d**-0.5
        s2 = (torch.rand(e, d // 128, f // 128, device=device) + 0.5) * f**-0.5
        return ref.ExpertWeights("fp8", w13, s13, w2, s2)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    def scales(*shape: int, width: int) -> Tensor:
        middle = 126 - round(torch.tensor(float(width)).log2().item() / 2)
        return torch.randint(middle - 4, middle + 1, shape, dtype=torch.uint8, device=device)

    return ref.ExpertWeights(
        "fp4", codes(e, 2 * f, d // 2), scales(e, 2 * f, d // 32, width=d),
        codes(e, d, f // 2), scales(e, d, f // 32, width=f),
    )  # fmt: skip


def chosen(t: int, k: int, e: int, device: str) -> Tensor:
    ids = torch.stack([torch.randperm(e, device=device)[:k] for _ in range(t)]).int()
    if t > 1:
        ids[t // 2] = -1  # a padding row
    return ids


@pytest.mark.parametrize("t, k, e, block", [(1, 6, 16, 16), (3, 2, 5, 16), (17, 4, 16, 32), (130, 6, 40, 64)])
def test_slots_are_the_pairs_sorted_by_expert(device: str, t: int, k: int, e: int, block: int) -> None:
    ids = chosen(t, min(k, e), e, device)
    slots = Slots(ids, e, block)
    flat = ids.flatten().tolist()
    order, blocks, want, expert_of = slots.order.tolist(), slots.block_expert.tolist(), [], []
    for expert in range(e):
        mine = [i for i, x in enumerate(flat) if x == expert]
        mine += [-1] * (-len(mine) % block)
        want += mine
        expert_of += [expert] * (len(mine) // block)
        assert slots.ends[expert] == len(want)
    assert order[: len(want)] == want and set(order[len(want) :]) <= {-1}
    assert blocks[: len(expert_of)] == expert_of and set(blocks[len(expert_of) :]) <= {-1}
    where = slots.where.tolist()
    assert all(where[i] == (-1 if x < 0 else want.index(i)) for i, x in enumerate(flat))


def test_slots_of_one_expert_only_and_of_none(device: str) -> None:
    ids = torch.full((40, 1), 7, dtype=torch.int32, device=device)
    assert Slots(ids, 9, 16).block_expert.tolist() == [7] * 3 + [-1] * 8
    assert set(Slots(ids * 0 - 1, 9, 16).order.tolist()) == {-1}


@pytest.mark.parametrize(
    "spec",
    [
        moe(),
        moe(routed=24, top_k=3),
        moe(scoring="sigmoid", groups=4, kept_groups=2),
        moe(scoring="softmax", method="greedy", normalise=False),
        moe(scoring="softmax", method="group_limited_greedy", groups=4, kept_groups=2),
        pytest.param(moe(routed=256, top_k=6), marks=real_sizes),
        pytest.param(moe(routed=256, top_k=8, scoring="sigmoid", groups=8, kept_groups=4), marks=real_sizes),
    ],
)
@pytest.mark.parametrize("t, d", [(1, 64), (17, 64), (1, 512), (17, 256)])
def test_routes_as_the_reference(device: str, spec: MoESpec, t: int, d: int) -> None:
    u, gate = torch.randn(t, d, device=device), torch.randn(spec.routed, d, device=device)
    if not INTERPRETED:
        u, gate = u.bfloat16(), gate.bfloat16()
    bias = torch.randn(spec.routed, device=device) * 0.1
    positions = torch.arange(t, dtype=torch.int32, device=device)
    positions[t // 2 :: 5] = -1
    tokens = torch.zeros(t, dtype=torch.int64, device=device)
    ids, weights = route(u, gate, bias, spec, positions, None, tokens)
    want_ids, want = ref.route(u, gate, bias, spec, positions, None, tokens)
    ids, order = ids.sort(-1)
    want_ids, want_order = want_ids.sort(-1)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order), rtol=1e-5, atol=1e-6)


def test_table_gives_the_ids(device: str) -> None:
    spec, u, gate = moe(), torch.randn(5, 64, device=device), torch.randn(16, 64, device=device)
    table = torch.stack([torch.randperm(16)[:4] for _ in range(9)]).to(device)
    tokens, positions = torch.tensor([8, 0, 3, 3, 1]).to(device), torch.tensor([0, 1, -1, 5, 6]).int().to(device)
    ids, weights = route(u, gate, None, spec, positions, table, tokens)
    want_ids, want = ref.route(u, gate, None, spec, positions, table, tokens)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)


def test_nan_and_ties_still_give_different_experts(device: str) -> None:
    u, gate = torch.ones(2, 256, device=device), torch.zeros(16, 256, device=device)
    u[1] = float("nan")
    positions = torch.zeros(2, dtype=torch.int32, device=device)
    ids, _ = route(u, gate, None, moe(), positions, None, torch.zeros(2, dtype=torch.int64, device=device))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


CONFIGS = [
    dev.Config(block=16),
    dev.Config(block=32),
    dev.WIDE,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["fp4", "fp8", "plain"])
@pytest.mark.parametrize(
    "t, k, e, d, f",
    [
        (5, 2, 4, 256, 128),
        pytest.param(1, 6, 256, 4096, 2048, marks=real_sizes),
        pytest.param(17, 6, 256, 4096, 2048, marks=real_sizes),
        pytest.param(700, 6, 64, 4096, 2048, marks=real_sizes),
    ],
)
def test_stages(device: str, config: dev.Config, kind: str, t: int, k: int, e: int, d: int, f: int) -> None:
    """First product: off by the rounding of its result. Second, from what the first gave: by float32 sums and bf16."""
    w = made(kind, e, d, f, device)
    u, ids = torch.randn(t, d, device=device), chosen(t, k, e, device)
    u = u.to(w.w13.dtype) if kind == "plain" else u.bfloat16()
    q = quantise(u)
    p, slots = dev.prepare(w), Slots(ids, e, config.block)
    hidden, scales = dev.first(u, q, slots, k, p, 10.0, config)
    numbers = hidden.double()
    if scales is not None:
        numbers = numbers * (scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(64, 1)).double()
    y = dev.second(hidden, scales, slots, p, config, torch.float32)
    x = (u if kind == "plain" else dequantise(q)).double()
    off, size, off2, size2 = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(4))
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        tokens, place = (ids == expert).nonzero(as_tuple=True)
        at = slots.where.view(t, k)[tokens, place].long()
        gate, up = functional.linear(x[tokens], ref.matrix(w, "w13", expert, torch.float64)).chunk(2, -1)
        want = functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
        off, size = off + (numbers[at] - want).square().sum(), size + want.square().sum()
        want = functional.linear(numbers[at], ref.matrix(w, "w2", expert, torch.float64))
        off2, size2 = off2 + (y[at].double() - want).square().sum(), size2 + want.square().sum()
    assert (off / size).sqrt() < (0.004 if kind == "plain" else ROUNDING)
    # The tensor core adds FP8 products with 14 bits.
    assert (off2 / size2).sqrt() < (1e-5 if INTERPRETED else 1e-3)


@pytest.mark.parametrize(
    "kind, t, k, e, d, f, limit",
    [
        ("fp4", 3, 2, 4, 128, 128, 10.0),
        ("fp8", 3, 2, 4, 128, 128, None),
        ("plain", 3, 2, 4, 128, 128, 0.5),
        pytest.param("fp4", 1, 6, 256, 4096, 2048, 10.0, marks=real_sizes),
        pytest.param("fp4", 130, 6, 256, 4096, 2048, 10.0, marks=real_sizes),
        pytest.param("fp4", 3000, 6, 64, 4096, 2048, 10.0, marks=real_sizes),
        pytest.param("fp8", 70, 8, 64, 7168, 2048, None, marks=real_sizes),
    ],
)
def test_experts(device: str, kind: str, t: int, k: int, e: int, d: int, f: int, limit: float | None) -> None:
    w, ids = made(kind, e, d, f, device), chosen(t, k, e, device)
    u = torch.randn(t, d, device=device)
    u = u.to(w.w13.dtype) if kind == "plain" else u.bfloat16()
    q, weights, shared = quantise(u), torch.rand(t, k, device=device), torch.randn(t, d, device=device).to(u.dtype)
    got = dev.experts(u, q, ids, weights, dev.prepare(w), limit, shared)
    again = dev.experts(u, q, ids, weights, dev.prepare(w), limit, shared)
    want = ref.experts(u.double(), q, ids, weights, w, limit, shared.double())
    assert got.dtype == shared.dtype and torch.equal(got, again)
    off = (got.double() - want).norm() / (want - shared.double()).norm()
    # A plain sum is rounded to bfloat16 (2^-9 of it in the mean) with the shared part, which may be the larger.
    rounded = 2**-9 * float(want.norm() / (want - shared.double()).norm())
    assert off < (0.01 + rounded if kind == "plain" else ROUNDING)
    assert torch.equal(got[t // 2], shared[t // 2]) or t == 1  # the padding row: what was shared, nothing else


def test_scales_of_a_row_become_one(device: str) -> None:
    x = torch.randn(3, 256, device=device) * torch.tensor([1.0, 30.0], device=device).repeat_interleave(128)
    q = quantise(x)
    values, factors = one_scale(*q)
    # At most half of e4m3's least step, 2^-9, is lost.
    off = (values.float() * factors[:, None] - dequantise(q)).abs() / factors[:, None]
    assert off.max() <= 2.0**-10 and (off[:, 128:] == 0).all()


def test_combine_reads_no_slot_it_was_not_given(device: str) -> None:
    ids = torch.tensor([[1, 0], [-1, -1], [0, 2]], dtype=torch.int32, device=device)
    slots = Slots(ids, 3, 16)
    y = torch.full((slots.count, 128), float("nan"), device=device)
    y[slots.where[slots.where >= 0].long()] = 1.0
    shared = torch.zeros(3, 128, device=device)
    weights = torch.tensor([[0.5, 0.25], [0.0, 0.0], [1.0, 2.0]], device=device)
    assert combine(y, slots, weights, shared)[:, 0].tolist() == [0.75, 0.0, 3.0]


@pytest.mark.parametrize("shares", [[16], [0, 300, 0, 17, 129], [128, 160, 161, 288, 256, 1], [700] * 3])
def test_blocks_cover_each_share_once(device: str, shares: list[int]) -> None:
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(shares)]).int()
    slots = Slots(ids[torch.randperm(len(ids))][:, None].to(device), len(shares), 16)
    table = blocks_of(slots)
    count = int(table[0, 0])
    ends, at = [0, *slots.ends.tolist()], 0
    assert count < len(table)
    for expert, first, stop in table[1 : 1 + count, :3].tolist():
        assert first == at and ends[expert] <= first < stop <= ends[expert + 1] and stop - first <= 128
        assert stop - first > 32 or ends[expert + 1] - ends[expert] <= 32  # none is narrow beside a whole one
        at = stop
    assert at == ends[-1]


def placed(x: Tensor) -> Tensor:
    """Columns as many_slots_triton orders them."""
    return x.view(len(x), -1, 2, 4, 4, 4).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def test_rows_are_spread_and_placed(device: str) -> None:
    ids = chosen(20, 3, 9, device)
    slots = Slots(ids, 9, 16)
    q = quantise(
        torch.randn(20, 384, device=device) * torch.tensor([1.0, 9.0, 0.1], device=device).repeat_interleave(128)
    )
    values, factors = one_scale(*q)
    real = slots.order >= 0
    for order in (False, True):
        rows, scales = spread(*q, slots, 3, order)
        want = values.view(torch.uint8)[slots.order[real].long() // 3]
        assert torch.equal(rows.view(torch.uint8)[real], placed(want) if order else want)
        assert torch.equal(scales[real], factors[slots.order[real].long() // 3])
    n = int(slots.ends[-1])
    h = torch.randn(slots.count, 256, device=device).bfloat16()
    (rows, scales), (moved, same) = (hidden_to_fp8(h, slots, order) for order in (False, True))
    assert torch.equal(moved.view(torch.uint8)[:n], placed(rows.view(torch.uint8)[:n]))
    assert torch.equal(scales[:n], power_above(h[:n].float().abs().amax(1))) and torch.equal(scales[:n], same[:n])
    off = (rows[:n].float() * scales[:n, None] - h[:n].float()).abs()
    assert (off <= h[:n].float().abs() / 16 + scales[:n, None] * 2**-10).all()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter knows no Gluon")
@pytest.mark.parametrize(
    "kind, d, f, limit",
    [("fp4", 512, 256, 10.0), ("fp4", 4096, 2048, 10.0), ("fp8", 512, 256, None), ("fp8", 7168, 2048, 10.0)],
)
def test_persistent(device: str, kind: str, d: int, f: int, limit: float | None) -> None:
    """Shares of every width; the same bits again and in another batch; one row's NaN stays in it."""
    shares = [300, 17, 0, 129, 90, 700]
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(shares)])[torch.randperm(sum(shares))]
    ids = torch.stack([ids, (ids + 1) % len(shares)], 1).int().to(device)
    ids[::3, 1], ids[5] = -1, -1
    t = len(ids)
    w, config = made(kind, len(shares), d, f, device), dev.Config(block=16, per_row=True, persistent=True)
    p, u = dev.prepare(w), torch.randn(t, d, device=device).bfloat16()
    q, weights, shared = quantise(u), torch.rand(t, 2, device=device), torch.randn(t, d, device=device).bfloat16()
    got = dev.experts(u, q, ids, weights, p, limit, shared, config=config)
    want = ref.experts(u.double(), q, ids, weights, w, limit, shared.double())
    assert (got.double() - want).norm() / (want - shared.double()).norm() < ROUNDING
    assert torch.equal(got[5], shared[5])
    assert torch.equal(got, dev.experts(u, q, ids, weights, p, limit, shared, config=config))
    part = [x[:50].contiguous() for x in (u, ids, weights, shared)]
    few = dev.experts(part[0], quantise(part[0]), part[1], part[2], p, limit, part[3], config=config)
    assert torch.equal(few, got[:50])
    q.scales[9] = float("nan")
    hurt = (dev.experts(u, q, ids, weights, p, limit, shared, config=config) == got).all(1)
    assert not hurt[9] and hurt.sum() == t - 1
