"""Routing and quantised experts of a device against the CPU model's own: same choices, same sums, same codes."""

import pytest
import torch

from longread.kernels.experts import ref
from longread.kernels.fp8.ref import dequantise, quantise
from longread.kernels.moe import ref as moe_ref
from longread.kernels.quant.ref import dequantise_fp4, dequantise_fp8, quantise_fp4, quantise_fp8
from longread.kernels.router import ref as router
from longread.spec.model import MoESpec

pytestmark = pytest.mark.cpu


def moe(routed: int = 16, top_k: int = 4, **changes: object) -> MoESpec:
    fields: dict = {
        "routed": routed, "top_k": top_k, "shared": 1, "intermediate": 128, "scoring": "sqrtsoftplus",
        "method": "noaux_tc", "groups": 1, "kept_groups": 1, "normalise": True, "scale": 1.5,
    }  # fmt: skip
    return MoESpec(**fields | changes)


def fp4(experts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed, scales, the numbers) of random weights whose rows and blocks differ in size."""
    wide = torch.randn(experts, rows, cols) * torch.exp2(torch.randint(-3, 3, (experts, rows, cols // 32)).float())[
        ..., None
    ].expand(-1, -1, -1, 32).reshape(experts, rows, cols)
    parts = [quantise_fp4(w) for w in wide]
    numbers = torch.stack([dequantise_fp4(v, s, torch.float32) for v, s in parts])
    return (
        torch.stack([v.view(torch.uint8) for v, _ in parts]),
        torch.stack([s.view(torch.uint8) for _, s in parts]),
        numbers,
    )


@pytest.mark.parametrize(
    "spec",
    [
        moe(),
        moe(scoring="sigmoid", groups=4, kept_groups=2),
        moe(scoring="softmax", method="greedy", normalise=False),
        moe(scoring="softmax", method="group_limited_greedy", groups=4, kept_groups=2),
    ],
)
def test_routes_as_the_router_does(spec: MoESpec) -> None:
    u, gate, bias = torch.randn(9, 32), torch.randn(16, 32), torch.randn(16) * 0.1
    positions = torch.arange(9, dtype=torch.int32)
    positions[5] = -1
    ids, weights = ref.route(u, gate, bias, spec, positions, None, torch.zeros(9, dtype=torch.int64))
    want_ids, want = router.route(router.router_logits(u, gate), spec, bias)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert (ids[5] == -1).all() and (weights[5] == 0).all()
    kept = positions >= 0
    assert torch.equal(ids[kept].long(), want_ids[kept]) and torch.equal(weights[kept], want[kept])


def test_table_gives_the_ids_and_scores_the_weights() -> None:
    u, gate, table = torch.randn(3, 32), torch.randn(16, 32), torch.stack([torch.randperm(16)[:4] for _ in range(7)])
    tokens = torch.tensor([6, 0, 3])
    ids, weights = ref.route(u, gate, None, moe(), torch.tensor([4, -1, 5], dtype=torch.int32), table, tokens)
    _, want = router.route_hash(router.router_logits(u, gate), moe(), table[tokens])
    assert torch.equal(ids[0].long(), table[6]) and (ids[1] == -1).all()
    assert torch.equal(weights[0], want[0]) and torch.equal(weights[2], want[2])


def test_plain_experts_sum_as_the_model_does() -> None:
    e, d, f, t = 6, 32, 24, 11
    w13, w2 = torch.randn(e, 2 * f, d) / 6, torch.randn(e, d, f) / 5
    ids = torch.stack([torch.randperm(e)[:3] for _ in range(t)]).int()
    ids[4] = -1
    weights, u, shared = torch.rand(t, 3), torch.randn(t, d), torch.randn(t, d)
    got = ref.experts(u, None, ids, weights, ref.ExpertWeights("plain", w13, None, w2, None), 1.0, shared)
    w1, w3 = w13.chunk(2, 1)
    kept = [i for i in range(t) if i != 4]
    want = moe_ref.experts(u[kept], list(w1), list(w3), list(w2), ids[kept].long(), weights[kept], 1.0)
    torch.testing.assert_close(got[kept], want + shared[kept], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[4], shared[4])


def test_fp8_scales_of_gate_and_up_lie_apart() -> None:
    e, d, f = 2, 160, 144  # halves of 144 rows: two rows of blocks each, the second partial
    gate, up, down = torch.randn(e, f, d), torch.randn(e, f, d) * 7, torch.randn(e, d, f)
    parts = [[quantise_fp8(m, (128, 128), "float32") for m in ms] for ms in (gate, up, down)]
    values = [torch.stack([v for v, _ in ps]) for ps in parts]
    scales = [torch.stack([s for _, s in ps]) for ps in parts]
    w = ref.ExpertWeights("fp8", torch.cat(values[:2], 1), torch.cat(scales[:2], 1), values[2], scales[2])
    for i in range(e):
        want = torch.cat([dequantise_fp8(*parts[h][i], (128, 128), torch.float32) for h in (0, 1)])
        assert torch.equal(ref.matrix(w, "w13", i, torch.float32), want)
        want = dequantise_fp8(*parts[2][i], (128, 128), torch.float32)
        assert torch.equal(ref.matrix(w, "w2", i, torch.float32), want)


def test_fp4_and_its_words_are_the_same_numbers() -> None:
    v13, s13, n13 = fp4(2, 64, 256)
    v2, s2, n2 = fp4(2, 256, 128)
    w = ref.ExpertWeights("fp4", v13, s13, v2, s2)
    p = ref.prepare(w)
    assert p.kind == "fp4_words" and p.w13.shape == v13.shape and p.s13 is not None
    assert p.s13.min() >= 8 and p.s13.max() == 96 and not (p.s13 & 7).any()
    for form in (w, p):
        for e in range(2):
            assert torch.equal(ref.matrix(form, "w13", e, torch.float32), n13[e])
            assert torch.equal(ref.matrix(form, "w2", e, torch.float32), n2[e])


def test_words_hold_what_their_docstring_says() -> None:
    codes = torch.randint(0, 16, (3, 256), dtype=torch.uint8)
    words = ref._words(codes).view(torch.int32).view(3, 2, 16)
    for row, group, q, i in [(0, 0, 0, 0), (1, 1, 5, 2), (2, 0, 15, 3), (2, 1, 7, 1)]:
        word = int(words[row, group, q])
        for half, sign in ((0, 8 * i + 7), (1, 8 * i + 3)):
            code = int(codes[row, 128 * group + 64 * half + 4 * q + i])
            assert (word >> (4 * (4 * half + i))) & 7 == code & 7
            assert (word >> sign) & 1 == code >> 3


def test_blocks_far_below_their_rows_largest_are_rounded_and_nan_scales_stay() -> None:
    codes = torch.full((1, 2, 64), 0x77, dtype=torch.uint8)  # every code is 6
    scales = torch.tensor([[[127, 127 - 13, 127 - 11, 127 - 40], [127, 255, 127, 127]]], dtype=torch.uint8)
    w = ref.prepare(ref.ExpertWeights("fp4", codes, scales, codes, scales))
    numbers = ref.matrix(w, "w2", 0, torch.float32)
    assert (numbers[0, :32] == 6).all() and (numbers[0, 32:64] == 1.5 * 2**-11).all()
    assert (numbers[0, 64:96] == 6 * 2**-11).all() and (numbers[0, 96:] == 0).all()
    assert numbers[1].isnan().all()


def test_quantised_input_is_what_the_experts_see() -> None:
    e, d, f, t = 4, 128, 128, 5
    v13, s13, n13 = fp4(e, 2 * f, d)
    v2, s2, n2 = fp4(e, d, f)
    u, ids, weights = torch.randn(t, d), torch.randint(0, e, (t, 1)).int(), torch.rand(t, 1)
    q = quantise(u)
    got = ref.experts(u, q, ids, weights, ref.ExpertWeights("fp4", v13, s13, v2, s2), 10.0, torch.zeros(t, d))
    w1, w3 = n13.chunk(2, 1)
    want = moe_ref.experts(dequantise(q), list(w1), list(w3), list(n2), ids.long(), weights, 10.0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4 * float(want.abs().max()))
