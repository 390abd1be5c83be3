"""MLA against a naive expansion in float64, over shuffled pages, NaN-poisoned storage and small tiles."""

import sys
from dataclasses import replace

import poison
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.mla import cpu
from longread.kernels.mla import ref as mla
from longread.spec.batch import Segment
from longread.spec.model import MLASpec, RopeSpec
from longread.spec.state import PAGE_TOKENS

H, NOPE, ROPE, V, RANK = 3, 6, 4, 5, 12
SCALE = 0.37


class Batch:
    """Segments (start, length) over one poisoned latent with shuffled, exclusive pages."""

    def __init__(self, shapes: list[tuple[int, int]], seed: int = 0, dtype: torch.dtype = torch.float32):
        g = torch.Generator().manual_seed(seed)
        needed = [-(-(start + length) // PAGE_TOKENS) for start, length in shapes]
        ids = torch.randperm(sum(needed) + 2, generator=g).tolist()
        self.latent = torch.full((len(ids), PAGE_TOKENS, RANK + ROPE), float("nan"), dtype=dtype)
        self.kv_b = torch.randn(H, NOPE + V, RANK, generator=g).to(dtype)
        self.segments: list[Segment] = []
        self.history: list[Tensor] = []
        offset = 0
        for (start, length), count in zip(shapes, needed, strict=True):
            pages = tuple(ids.pop() for _ in range(count))
            self.segments.append(Segment(0, start, length, offset, pages))
            self.history.append(torch.randn(start + length, RANK + ROPE, generator=g).to(dtype))
            for position in range(start):
                page = pages[position // PAGE_TOKENS]
                self.latent[page, position % PAGE_TOKENS] = self.history[-1][position]
            offset += length
        self.q = torch.randn(offset, H, NOPE + ROPE, generator=g).to(dtype)

    def run(self, threshold: int, gather: int = 300) -> Tensor:
        every = mla.spans(self.segments)
        new = torch.cat([h[s.start :] for h, s in zip(self.history, self.segments, strict=True)])
        mla.write(self.latent, mla.storage_rows(every), new[:, :RANK], new[:, RANK:])
        with poison.poisoned_memory():
            return mla.attend(self.q, self.latent, self.kv_b, mla.reading(every, mla.Policy(threshold, gather)), SCALE)

    def naive(self) -> Tensor:
        out = []
        for history, s in zip(self.history, self.segments, strict=True):
            q = self.q[s.offset : s.offset + s.length].double()
            c, k_pe = history.double().split([RANK, ROPE], -1)
            k_nope, v = torch.einsum("hdr,sr->hsd", self.kv_b.double(), c).split([NOPE, V], -1)
            scores = torch.einsum("nhd,hsd->hns", q[..., :NOPE], k_nope)
            scores = (scores + torch.einsum("nhd,sd->hns", q[..., NOPE:], k_pe)) * SCALE
            later = torch.arange(s.end) > torch.arange(s.start, s.end)[:, None]
            p = scores.masked_fill(later, float("-inf")).softmax(-1)
            out.append(torch.einsum("hns,hsd->nhd", p, v))
        return torch.cat(out)


def check(batch: Batch, threshold: int) -> None:
    torch.testing.assert_close(batch.run(threshold).double(), batch.naive(), rtol=1e-4, atol=1e-5)


SHAPES = [
    [(0, 1)],
    [(255, 1)],
    [(256, 1)],
    [(700, 1)],
    [(0, 256)],
    [(100, 300)],
    [(300, 1), (0, 7), (511, 2), (5, 1)],
    [(0, 1), (270, 1), (255, 1), (700, 1), (9, 1), (10, 1), (4, 2)],
    [(0, 40), (777, 1), (10, 33), (0, 1), (256, 256)],
]


@pytest.mark.parametrize("threshold", [1, 20, sys.maxsize])
@pytest.mark.parametrize("shapes", SHAPES)
def test_equals_naive(shapes: list[tuple[int, int]], threshold: int) -> None:
    check(Batch(shapes), threshold)


@pytest.mark.parametrize("threshold", [1, sys.maxsize])
@pytest.mark.parametrize("shapes", SHAPES)
def test_small_tiles(shapes: list[tuple[int, int]], threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of odd sizes that end inside pages and across runs: the online softmax and the causal trimming."""
    monkeypatch.setattr(mla, "SCORES", 900)
    monkeypatch.setattr(mla, "QUERY_BLOCK", 13)
    monkeypatch.setattr(mla, "KEY_BLOCK", 61)
    monkeypatch.setattr(mla, "SPLIT_ROWS", 17)
    check(Batch(shapes), threshold)


def test_long_contiguous_run_is_split_over_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "SPLIT_ROWS", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    batch = Batch([(0, 1)])
    batch.latent = torch.full((6, PAGE_TOKENS, RANK + ROPE), float("nan"))
    batch.history = [torch.randn(1001, RANK + ROPE)]
    batch.latent.view(-1, RANK + ROPE)[256 : 256 + 1000] = batch.history[0][:1000]
    batch.segments = [Segment(0, 1000, 1, 0, (1, 2, 3, 4))]
    check(batch, sys.maxsize)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 60)), min_size=1, max_size=5),
    threshold=st.integers(1, 61),
    seed=st.integers(0, 1000),
)
def test_any_batch(shapes: list[tuple[int, int]], threshold: int, seed: int) -> None:
    check(Batch(shapes, seed), threshold)


@pytest.mark.parametrize("threshold", [1, sys.maxsize])
def test_bfloat16(threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "WIDE_KEYS", 70)
    batch = Batch([(300, 1), (20, 50)], dtype=torch.bfloat16)
    found = batch.run(threshold)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), batch.naive(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shapes", [[(0, 1)], [(255, 1)], [(700, 1)], [(31, 1), (0, 1), (300, 1), (256, 1), (64, 1)]])
def test_decode_in_one_pass(shapes: list[tuple[int, int]]) -> None:
    batch = Batch(shapes)
    expected = batch.run(sys.maxsize)
    step = mla.reading(mla.spans(batch.segments), mla.Policy(sys.maxsize, 300))
    with poison.poisoned_memory():
        found = cpu.attend(batch.q, batch.latent, batch.kv_b, step, SCALE)
    assert not found.equal(expected), "the reference answered: nothing was tested"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.double(), batch.naive(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gain", [1e3, 1e5])
def test_decode_in_one_pass_with_huge_scores(gain: float) -> None:
    batch = Batch([(300, 1)])
    batch.run(sys.maxsize)
    batch.q *= gain
    step = mla.reading(mla.spans(batch.segments), mla.Policy(sys.maxsize, 300))
    found = cpu.attend(batch.q, batch.latent, batch.kv_b, step, SCALE)
    torch.testing.assert_close(found.double(), batch.naive(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shapes", [[(3000, 1)], [(5, 2)], [(5, 1), (0, 40)]])
def test_what_the_one_pass_leaves_to_the_reference(shapes: list[tuple[int, int]]) -> None:
    batch = Batch(shapes)
    expected = batch.run(30)
    step = mla.reading(mla.spans(batch.segments), mla.Policy(30, 300))
    assert cpu.attend(batch.q, batch.latent, batch.kv_b, step, SCALE).equal(expected)


def testexp2() -> None:
    x = torch.cat((torch.linspace(-30, 0, 20), torch.tensor([-0.5, -1.5, -124.0, -1e9, float("-inf")]))).numpy()
    expected = torch.from_numpy(x.copy()).double().exp2()
    cpu.exp2(x, x.view("int32"), x.dtype.type(0))
    torch.testing.assert_close(torch.from_numpy(x).double(), expected, rtol=3e-7, atol=1e-30)


def test_gathered_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "BATCH", 2)
    batch = Batch([(n, 1) for n in (5, 9, 300, 0, 17)])
    step = mla.reading(mla.spans(batch.segments), mla.Policy(9, 1000))
    assert [(len(g.spans), g.gathered is not None) for g in step.absorbed] == [(2, True), (2, True), (1, False)]
    torch.testing.assert_close(batch.run(9, 1000).double(), batch.naive(), rtol=1e-4, atol=1e-5)


def test_huge_scores_do_not_overflow() -> None:
    batch = Batch([(300, 40)])
    batch.q *= 1e3
    for threshold in (1, sys.maxsize):
        torch.testing.assert_close(batch.run(threshold).double(), batch.naive(), rtol=1e-2, atol=1e-2)


def test_write_touches_its_rows_only() -> None:
    batch = Batch([(250, 10), (0, 3)])
    batch.run(sys.maxsize)
    assert int(batch.latent.isfinite().all(-1).sum()) == 260 + 3
    page, row = batch.segments[0].pages[1], 3
    assert batch.latent[page, row].equal(batch.history[0][259])


def test_no_segments() -> None:
    every = mla.spans([Segment(0, 5, 0, 0, (1,))])
    assert every == () and mla.storage_rows(every).shape == (0,)
    latent, q = torch.full((2, PAGE_TOKENS, RANK + ROPE), float("nan")), torch.empty(0, H, NOPE + ROPE)
    assert mla.attend(q, latent, torch.randn(H, NOPE + V, RANK), mla.reading(every, mla.Policy(9, 9)), SCALE).shape == (
        0,
        H,
        V,
    )


def test_runs_merge_neighbouring_pages() -> None:
    assert mla.runs((7, 8, 9), 600) == (mla.Run(7 * 256, 0, 600),)
    assert mla.runs((3, 9, 10, 2), 1000) == (
        mla.Run(3 * 256, 0, 256),
        mla.Run(9 * 256, 256, 512),
        mla.Run(2 * 256, 768, 232),
    )
    assert mla.runs((5, 6, 7), 256) == (mla.Run(5 * 256, 0, 256),), "pages beyond the end are not read"
    assert mla.runs((), 0) == ()


def test_select_keeps_neighbours_together() -> None:
    every = mla.spans([Segment(0, 10, 4, 0, (1,)), Segment(1, 0, 3, 4, (2,))])
    picked = mla.select(every, [2, 3, 4, 6, 6])
    assert [(s.offset, s.length, s.start) for s in picked] == [(0, 2, 12), (2, 1, 0), (3, 1, 2), (4, 1, 2)]


V3 = MLASpec(1536, 512, 128, 64, 128)


def test_crossover() -> None:
    assert mla.crossover(V3) == 171
    assert mla.crossover(replace(V3, kv_lora_rank=128)) == sys.maxsize


@pytest.mark.parametrize("spec", [V3, MLASpec(64, 64, 16, 16, 32)])
def test_crossover_is_where_the_multiplications_cross(spec: MLASpec) -> None:
    def absorbed(n: int) -> int:
        return n * (2 * spec.kv_lora_rank + spec.qk_rope_head_dim)

    def expanded(n: int) -> int:
        head = spec.qk_nope_head_dim + spec.v_head_dim
        return n * (head + spec.qk_rope_head_dim) + spec.kv_lora_rank * head

    n = mla.crossover(spec)
    assert expanded(n) < absorbed(n) and expanded(n - 1) >= absorbed(n - 1)


def test_policy_of_v3() -> None:
    assert mla.policy(V3) == mla.Policy(171, 227)


def test_softmax_scale() -> None:
    v3 = RopeSpec(10000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert mla.softmax_scale(V3, v3) == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)
    assert mla.softmax_scale(V3, RopeSpec(10000.0)) == pytest.approx(192**-0.5)
