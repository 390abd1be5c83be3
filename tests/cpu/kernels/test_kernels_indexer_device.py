"""The indexer's device form against the formula and the CPU model's own functions: pages, padding, FP8."""

import pytest
import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import pack_index, unpack_index
from longread.kernels.indexer import ref
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved

PER_PAGE = 64


def _store(pages: int, di: int, packed: bool, g: torch.Generator) -> Tensor:
    plain = torch.randn(pages, PER_PAGE, di, generator=g)
    return pack_index(plain) if packed else plain


def _values(store: Tensor) -> Tensor:
    """float32 [pages, rows, di], whatever the form."""
    if store.dtype != torch.uint8:
        return store
    values, scales = unpack_index(store)
    return values.float() * scales[..., None]


def _chunk(start: int, length: int, padded: int, table: Tensor, slack: int = 0) -> Chunk:
    positions = torch.arange(start, start + padded, dtype=torch.int32)
    positions[length:] = -1
    return Chunk(torch.tensor([start, length, 0, 0], dtype=torch.int32), positions, table, start + length + slack)


def _want(logits: Tensor, visible: int, top_k: int) -> list[int]:
    order = sorted(range(visible), key=lambda i: (-float(logits[i]), i))[:top_k]
    return sorted(order) + [-1] * (top_k - min(visible, top_k))


@pytest.mark.parametrize("quantised", [False, True])
def test_queries_are_turned_and_scaled(quantised: bool) -> None:
    g = torch.Generator().manual_seed(1)
    tokens, heads, di, rope = 5, 3, 32, 16
    q, w = torch.randn(tokens, heads * di, generator=g), torch.randn(tokens, heads, generator=g)
    angles = torch.randn(tokens, rope // 2, generator=g)
    got, weights = ref.queries(q, w, angles.cos(), angles.sin(), 0.25, quantised)
    want = q.view(tokens, heads, di).clone()
    want[..., di - rope :] = apply_interleaved(want[..., di - rope :], angles.cos()[:, None], angles.sin()[:, None])
    if not quantised:
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(weights, w * 0.25)
        return
    power = weights / (w * 0.25)
    assert torch.equal(power.log2(), power.log2().round())
    assert got.dtype == torch.float8_e4m3fn
    assert float(got.float().abs().amax(-1).min()) > 224 and float(got.float().abs().max()) <= 448
    # E4M3 keeps 4 significant bits: half a unit is 1/16 of a value, or of its least normal number.
    torch.testing.assert_close(got.float() * power[..., None], want, rtol=1 / 16, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start, length", [(0, 3), (0, 700), (509, 1), (256, 770)])
def test_keys_are_the_sequences_rows(packed: bool, start: int, length: int) -> None:
    g = torch.Generator().manual_seed(2)
    store, table = _store(9, 32, packed, g), torch.tensor([7, 2, 5, 1, 0, 0], dtype=torch.int32)
    where = _chunk(start, length, length + 3, table, slack=9)
    keys = ref.keys(store, where, 32)
    closed = (start + length) // 4
    assert keys.values.shape == (where.bound // 4, 32)
    assert (keys.scales is None) != packed
    got = keys.values.float() * (1.0 if keys.scales is None else keys.scales[:, None])
    assert torch.equal(got[:closed], _values(store)[table.long()].flatten(0, 1)[:closed])
    assert got.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start, length", [(0, 40), (0, 130), (253, 300)])
def test_a_chunk_chooses_as_sorting_does(packed: bool, start: int, length: int) -> None:
    g = torch.Generator().manual_seed(3)
    heads, di, top_k, padded = 4, 32, 16, length + 2
    store, table = _store(4, di, packed, g), torch.tensor([3, 1, 2], dtype=torch.int32)
    q, w = torch.randn(padded, heads, di, generator=g), torch.randn(padded, heads, generator=g)
    where = _chunk(start, length, padded, table, slack=5)
    got = ref.choose_chunk(q, w, ref.keys(store, where, di), where, top_k)
    every = _values(store)[table.long()].flatten(0, 1)
    logits = ref.scores(q, w, [every])
    for t in range(padded):
        visible = (start + t + 1) // 4 if t < length else 0
        assert got[t].tolist() == _want(logits[t], visible, top_k)


def test_equal_scores_take_the_oldest_and_short_sequences_take_all() -> None:
    store = torch.ones(2, PER_PAGE, 32)
    q, w = torch.ones(6, 2, 32), torch.ones(6, 2)
    where = _chunk(100, 6, 6, torch.tensor([1], dtype=torch.int32))
    got = ref.choose_chunk(q, w, ref.keys(store, where, 32), where, 8)
    assert got.tolist() == [list(range(8))] * 6
    where = _chunk(0, 6, 6, torch.tensor([1], dtype=torch.int32))
    got = ref.choose_chunk(q, w, ref.keys(store, where, 32), where, 8)
    assert got[:, 0].tolist() == [-1, -1, -1, 0, 0, 0] and got[:, 1:].eq(-1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_rows_choose_flat_store_rows(packed: bool) -> None:
    g = torch.Generator().manual_seed(4)
    heads, di, top_k = 4, 32, 24
    store = _store(9, di, packed, g)
    positions = torch.tensor([700, -1, 2, 3, 90, 95, 511], dtype=torch.int32)
    tables = torch.zeros(7, 3, dtype=torch.int32)
    for b, pages in enumerate([[8, 2, 5], [], [1], [7], [3], [4], [6, 1]]):
        tables[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    where = Rows(positions, torch.zeros(7, dtype=torch.int32), tables, 768)
    q, w = torch.randn(7, heads, di, generator=g), torch.randn(7, heads, generator=g)
    got = ref.choose_rows(q, w, store, where, top_k)
    for b in range(7):
        every = _values(store)[tables[b].long()].flatten(0, 1)
        best = _want(ref.scores(q[b : b + 1], w[b : b + 1], [every])[0], (int(positions[b]) + 1) // 4, top_k)
        flat = [int(tables[b, row // PER_PAGE]) * PER_PAGE + row % PER_PAGE if row >= 0 else -1 for row in best]
        assert got[b].tolist() == flat
