"""Sparse attention against the formula over explicit row lists, in float64."""

import pytest
import torch
from torch import Tensor

from longread.kernels.dispatch import kernel
from longread.kernels.sparse_attention import cpu, ref
from longread.kernels.sparse_attention.ref import attend

NAN = float("nan")


def expected(q: Tensor, sink: Tensor, scale: float, rows: list[Tensor]) -> Tensor:
    """rows[i]: the rows that query i sees."""
    out = []
    for one, seen in zip(q.double(), rows, strict=True):
        weights = (one @ seen.double().T * scale).exp()
        out.append(weights @ seen.double() / (sink.double().exp() + weights.sum(-1))[:, None])
    return torch.stack(out).float()


def make(queries: int, heads: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, torch.Generator]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(queries, heads, d, generator=g), torch.randn(heads, generator=g), g


@pytest.mark.parametrize("queries, heads, d", [(1, 1, 2), (5, 3, 16), (2, 8, 64)])
@pytest.mark.parametrize("lengths", [[], [1], [3, 0, 7]])
@pytest.mark.parametrize("k", [None, 0, 5])
def test_shared_and_own_rows(queries: int, heads: int, d: int, lengths: list[int], k: int | None) -> None:
    q, sink, g = make(queries, heads, d)
    runs = [torch.randn(n, d, generator=g) for n in lengths]
    masks = [None if i % 2 else torch.rand(queries, n, generator=g) < 0.5 for i, n in enumerate(lengths)]
    own = None if k is None else torch.randn(queries, k, d, generator=g)
    own_mask = None if k is None else torch.rand(queries, k, generator=g) < 0.5
    seen = []
    for i in range(queries):
        parts = [run if mask is None else run[mask[i]] for run, mask in zip(runs, masks, strict=True)]
        if own is not None and own_mask is not None:
            parts.append(own[i][own_mask[i]])
        seen.append(torch.cat([*parts, torch.empty(0, d)]))
    if own is not None and own_mask is not None:
        own[~own_mask] = NAN  # padding may be unwritten memory
    got = attend(q, sink, 0.3, list(zip(runs, masks, strict=True)), () if own is None else [(own, own_mask)])
    assert got.shape == q.shape
    torch.testing.assert_close(got, expected(q, sink, 0.3, seen))


def test_nothing_visible_is_zero() -> None:
    """All weight goes to the sink, which has no value."""
    q, sink, _ = make(2, 3, 4)
    hidden = torch.zeros(2, 4, dtype=torch.bool)
    assert torch.equal(attend(q, sink, 1.0, [(torch.ones(4, 4), hidden)]), torch.zeros(2, 3, 4))
    own = torch.full((2, 4, 4), NAN)
    assert torch.equal(attend(q, sink, 1.0, (), [(own, hidden)]), torch.zeros(2, 3, 4))


def test_arguments_are_left_alone() -> None:
    q, sink, g = make(2, 3, 4)
    run, own = torch.randn(5, 4, generator=g), torch.randn(2, 3, 4, generator=g)
    own_mask = torch.tensor([[True, False, True]]).expand(2, 3)
    before = [t.clone() for t in (q, sink, run, own)]
    attend(q, sink, 0.5, [(run, None)], [(own, own_mask)])
    assert all(torch.equal(a, b) for a, b in zip(before, (q, sink, run, own), strict=True))


def test_bfloat16_rows_are_used_exactly() -> None:
    q, sink, g = make(3, 4, 8)
    run, own = torch.randn(9, 8, generator=g).bfloat16(), torch.randn(3, 2, 8, generator=g).bfloat16()
    got = attend(q.bfloat16(), sink, 0.3, [(run, None)], [(own, None)])
    want = attend(q.bfloat16().float(), sink, 0.3, [(run.float(), None)], [(own.float(), None)])
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


def decode_case(batch: int, heads: int, d: int, size: int, k: int) -> tuple[list[Tensor], list[Tensor]]:
    """Arguments of ``decode`` in NaN-poisoned memory, with what each sequence sees."""
    q, sink, g = make(batch, heads, d)
    slots = torch.randperm(batch + 2, generator=g)[:batch]
    window, store = torch.full((batch + 2, size, d), NAN), torch.full((3 * k + 1, d), NAN)
    held, counts = torch.randint(1, size + 1, (batch,), generator=g), torch.randint(0, k + 1, (batch,), generator=g)
    rows = torch.stack([torch.randperm(3 * k + 1, generator=g)[:k] for _ in range(batch)])
    seen = []
    for b in range(batch):
        window[slots[b], : held[b]] = torch.randn(int(held[b]), d, generator=g)
        mine = rows[b, : counts[b]]
        store[mine] = torch.randn(len(mine), d, generator=g)
    for b in range(batch):
        seen.append(torch.cat((window[slots[b], : held[b]], store[rows[b, : counts[b]]])))
    return [q, sink, window, slots, held, store, rows, counts], seen


@pytest.mark.parametrize("implementation", [ref.decode, cpu.decode])
@pytest.mark.parametrize("batch, heads, d", [(1, 1, 2), (5, 3, 17), (2, 9, 64), (8, 8, 32)])
@pytest.mark.parametrize("size, k", [(1, 0), (5, 3), (32, 33), (40, 100)])
def test_decode(implementation: object, batch: int, heads: int, d: int, size: int, k: int) -> None:
    (q, sink, *places), seen = decode_case(batch, heads, d, size, k)
    got = implementation(q, sink, 0.3, *places)  # type: ignore[operator]
    assert got.dtype == torch.float32 and got.shape == q.shape
    torch.testing.assert_close(got, expected(q, sink, 0.3, seen), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [ref.decode, cpu.decode])
def test_decode_of_the_ring_alone(implementation: object) -> None:
    (q, sink, window, slots, held, *_), _ = decode_case(4, 3, 17, 40, 0)
    seen = [window[slot, :n] for slot, n in zip(slots, held, strict=True)]
    got = implementation(q * 100, sink, 0.3, window, slots, held)  # type: ignore[operator]
    torch.testing.assert_close(got, expected(q * 100, sink, 0.3, seen), rtol=1e-3, atol=1e-3)


def test_decode_gathers_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, sink, *places), _ = decode_case(5, 3, 17, 5, 3)
    want = ref.decode(q, sink, 0.3, *places)
    monkeypatch.setattr(ref, "GATHER_FLOATS", 1)
    torch.testing.assert_close(ref.decode(q, sink, 0.3, *places), want)


def test_what_decode_leaves_to_the_reference() -> None:
    assert kernel(ref.decode, "cpu") is cpu.decode
    (q, sink, *places), _ = decode_case(2, 130, 64, 5, 3)
    assert cpu.decode(q, sink, 0.3, *places).equal(ref.decode(q, sink, 0.3, *places)), "many heads"
    (q, sink, *places), _ = decode_case(2, 3, 64, 5, 3)
    places[0], places[3] = places[0].bfloat16(), places[3].bfloat16()
    assert cpu.decode(q, sink, 0.3, *places).equal(ref.decode(q, sink, 0.3, *places)), "bfloat16"
