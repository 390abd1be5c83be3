"""The indexer's kernels against its references: turned queries, gathered keys, the choice exact where scores are exact.

Choices are compared exactly on integer data, where every order of summing gives the same float32 and equal scores
abound. On random data two rows may change places where their scores differ by rounding only, so there the chosen
scores are compared.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

from longread.kernels.cache_rows.ref import pack_index, unpack_index
from longread.kernels.indexer import ref, topk
from longread.kernels.indexer import triton as kernels
from longread.kernels.places import Chunk, Rows

pytestmark = pytest.mark.gpu

PER_PAGE = 64
FP8 = torch.float8_e4m3fn
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
HALF = torch.float16 if interpreted else torch.bfloat16  # the interpreter multiplies bfloat16 as integers


@pytest.fixture(autouse=True)
def _loops_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes int(array of one element) of a loop's bounds, which NumPy 2.4 refuses."""
    if interpreted:
        patch = interpreter._patch_lang_tensor

        def patched(tensor: type, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _whole(shape: tuple[int, ...], high: int, g: torch.Generator) -> Tensor:
    return torch.randint(-high, high + 1, shape, generator=g).float()


def _pool(pages: int, di: int, packed: bool, exact: bool, g: torch.Generator) -> Tensor:
    """A store of one layer, its last page poisoned: NaN in every byte."""
    shape = (pages, PER_PAGE, di)
    plain = _whole(shape, 2, g) if exact else torch.randn(shape, generator=g)
    store = pack_index(plain) if packed else plain.to(HALF)
    store[-1].view(torch.uint8).fill_(0xFF)
    return store


def _table(n: int, pages: int, g: torch.Generator) -> Tensor:
    """Distinct pages for n rows, and behind them the poisoned page."""
    used = -(-n // PER_PAGE)
    return torch.cat([torch.randperm(pages - 1, generator=g)[:used], torch.tensor([pages - 1, pages - 1])]).int()


def _chunk(start: int, length: int, padded: int, table: Tensor, bound: int, device: str) -> Chunk:
    positions = torch.arange(start, start + padded, dtype=torch.int32)
    positions[length:] = -1
    meta = torch.tensor([start, length, 0, 0], dtype=torch.int32)
    return Chunk(meta.to(device), positions.to(device), table.to(device), bound)


def _queries(
    tokens: int, heads: int, di: int, dtype: torch.dtype, exact: bool, g: torch.Generator
) -> tuple[Tensor, Tensor]:
    if exact:
        return _whole((tokens, heads, di), 2, g).to(dtype), _whole((tokens, heads), 2, g)
    return torch.randn(tokens, heads, di, generator=g).to(dtype), torch.randn(tokens, heads, generator=g)


@pytest.mark.parametrize("seed, tokens, heads, di, rope", [(1, 1, 4, 32, 16), (2, 3, 8, 32, 32), (3, 17, 64, 128, 64)])
@pytest.mark.parametrize("quantised", [False, True])
def test_queries(device: str, seed: int, tokens: int, heads: int, di: int, rope: int, quantised: bool) -> None:
    g = _generator(seed)
    wide = torch.randn(tokens, heads * di + 8, generator=g).bfloat16().to(device)  # rows of a wider projection
    q, w = wide[:, : heads * di], torch.randn(tokens, heads + 3, generator=g).to(device)[:, 3:]
    q[0, :di] = 0  # a head of zeros has a scale all the same
    angles = torch.randn(tokens, rope // 2, generator=g).to(device)
    got, weights = kernels.queries(q, w, angles.cos(), angles.sin(), 0.125, quantised)
    want, want_weights = ref.queries(q.float(), w, angles.cos(), angles.sin(), 0.125, quantised)
    assert got.dtype == (FP8 if quantised else torch.bfloat16) and got.shape == want.shape
    # The rotation may round differently (fused multiply-add), so a value may fall on the neighbouring number: E4M3 has
    # 4 significant bits, bfloat16 8. A scale would change only where a peak lies within 2^-23 of 448 * 2^n.
    torch.testing.assert_close(weights, want_weights, rtol=1e-6, atol=0)
    wrong = (got.float() != want.to(got.dtype).float()).float().mean()
    if interpreted:  # it cuts bfloat16 off, and loses the carry where E4M3 rounds up to a power of two
        assert float(wrong) < (0.05 if quantised else 0.7)
        return
    torch.testing.assert_close(got.float(), want.float(), rtol=1 / 8 if quantised else 1 / 128, atol=2.0**-9)
    assert float(wrong) < 0.01


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "seed, start, length, bound", [(1, 0, 3, 8), (2, 0, 130, 1024), (3, 509, 1, 510), (4, 253, 600, 900)]
)
def test_keys(device: str, packed: bool, seed: int, start: int, length: int, bound: int) -> None:
    g = _generator(seed)
    store = _pool(9, 32, packed, False, g)
    table = torch.cat([_table((start + length) // 4, 9, g), torch.full((3,), 8, dtype=torch.int32)])
    where = _chunk(start, length, length + 2, table, bound, device)
    layers = torch.stack([store, store]).to(device)  # one layer of a state tensor
    got, want = kernels.keys(layers[1], where, 32), ref.keys(store.to(device), where, 32)
    assert got.values.shape == want.values.shape and got.values.dtype == want.values.dtype
    assert torch.equal(got.values.float(), want.values.float())
    assert (got.scales is None) == (want.scales is None) == (not packed)
    if got.scales is not None and want.scales is not None:
        assert torch.equal(got.scales, want.scales)


CHUNKS = [  # seed, start, length, padded, slack in bound
    (1, 0, 1, 1, 0),
    (2, 0, 90, 93, 5),  # some see everything, some choose
    (3, 250, 17, 17, 700),
    (4, 1021, 3, 4, 0),
    (5, 2500, 17, 18, 40),
]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("seed, start, length, padded, slack", CHUNKS)
def test_a_chunk_chooses_exactly(
    device: str,
    seed: int,
    start: int,
    length: int,
    padded: int,
    slack: int,
    pruned: bool,
    fp8: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    g, heads, di, top_k = _generator(seed), 8, 32, 16
    monkeypatch.setattr(topk, "DIRECT", () if pruned else (64,))
    monkeypatch.setattr(topk, "PRUNED", (64,))
    monkeypatch.setattr(kernels, "COLUMNS", {"chunk": 32})  # 4 queries a tile, so that tiles have few rows here
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 1)  # blocks of 16 queries
    bound = start + length + slack
    store = _pool(14, di, fp8, True, g)
    where = _chunk(start, length, padded, torch.cat([_table(bound // 4, 14, g)]), bound, device)
    q, w = _queries(padded, heads, di, FP8 if fp8 else HALF, True, g)
    q, w, store = q.to(device), w.to(device), store.to(device)
    got = kernels.choose_chunk(q, w, kernels.keys(store, where, di), where, top_k)
    want = ref.choose_chunk(q, w, ref.keys(store, where, di), where, top_k)
    assert got.dtype == torch.int32 and torch.equal(got, want)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("seed, bound", [(1, 16), (2, 300), (3, 3100)])
def test_rows_choose_exactly(
    device: str, seed: int, bound: int, pruned: bool, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    g, heads, di, top_k, pages = _generator(seed), 8, 32, 16, 60
    monkeypatch.setattr(topk, "DIRECT", () if pruned else (64,))
    monkeypatch.setattr(topk, "PRUNED", (64,))
    monkeypatch.setattr(kernels, "PROGRAMS", {"rows": 14})  # 2 a sequence: each goes through several pages
    positions = torch.tensor([bound - 1, -1, 0, 3, min(bound, 90) - 1, bound // 2, bound - 2], dtype=torch.int32)
    tables = torch.stack([torch.randperm(pages - 1, generator=g)[: bound // 256 + 2] for _ in positions]).int()
    where = Rows(positions.to(device), torch.zeros_like(positions).to(device), tables.to(device), bound)
    store = _pool(pages, di, fp8, True, g).to(device)
    q, w = _queries(len(positions), heads, di, FP8 if fp8 else HALF, True, g)
    q, w = q.to(device), w.to(device)
    got, want = kernels.choose_rows(q, w, store, where, top_k), ref.choose_rows(q, w, store, where, top_k)
    assert got.dtype == torch.int32 and torch.equal(got, want)


@pytest.mark.parametrize(
    "seed, values",
    [
        (1, "random"),
        (2, "equal"),
        (3, "zeros of both signs"),
        (4, "two levels"),
        (5, "far apart"),
        (6, "one far ahead"),
        (7, "infinities"),
    ],
)
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("top_k", [16, 24])
@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)  # the interpreter's arithmetic
def test_the_best_of_hard_rows(
    device: str, seed: int, values: str, pruned: bool, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores given, NaN behind what is visible, more than a power of two to take, maxima of partial groups missing."""
    monkeypatch.setattr(topk, "DIRECT", () if pruned else (64,))
    monkeypatch.setattr(topk, "PRUNED", (64,))
    g, n = _generator(seed), 1000
    visible = torch.tensor([0, 1, top_k, top_k + 1, 33, 500, 511, 512, 999, 1000])
    logits = {
        "random": torch.randn(10, n, generator=g) * torch.tensor([1e-30, 1, 1e30])[torch.arange(10)[:, None] % 3],
        "equal": torch.full((10, n), -3.5),
        "zeros of both signs": torch.zeros(10, n).copysign(torch.randn(10, n, generator=g)),
        "two levels": torch.randint(0, 2, (10, n), generator=g).float() - (torch.arange(n) % 7 == 0).float(),
        "far apart": torch.exp(torch.randn(10, n, generator=g) * 20),
        "one far ahead": torch.where(torch.arange(n) == 5, 1e38, torch.randn(10, n, generator=g) * 1e-3),
        "infinities": torch.randn(10, n, generator=g) / (torch.arange(n) % 3 != 0),
    }[values]
    how = topk.plan(n, top_k)
    assert how is not None and how.pruned == pruned
    given, maxima = topk.scratch(10, n, how, torch.device(device))
    given.fill_(float("nan"))
    for i, seen in enumerate(visible.tolist()):
        given[i, :seen] = logits[i, :seen].to(device)
    if maxima is not None:
        maxima.copy_(given.unflatten(1, (-1, how.size)).amax(-1))  # NaN where a group has one
    out = torch.full((12, top_k), 77, dtype=torch.int32, device=device)
    positions = torch.cat([torch.tensor([9, 9]), visible * 4 - 1]).int().to(device)
    topk.best(given, maxima, positions, None, out, 2, 10, how, 4, 1)
    want = ref._best(logits, visible, top_k)
    assert torch.equal(out[2:].cpu(), want) and out[:2].eq(77).all()


def test_plans_cover_every_length() -> None:
    for top_k in (128, 512, 1024):
        for n in (1, 2048, 2049, 8192, 8193, 131072, 262144):
            how = topk.plan(n, top_k)
            assert how is not None and how.groups * how.size >= n
            assert how.pruned or how.groups * how.size <= topk.ENTRIES
    assert topk.plan(10**9, 512) is None


def _same_quality(got: Tensor, want: Tensor, logits: Tensor, fp8: bool) -> None:
    """Both take as many, ascending, nearly the same, and what only one of them takes scores alike up to rounding.

    Hopper's FP8 products keep some 14 bits of a sum, float32 ones 24: a score is off by 1e-4 of itself or by far less.
    """
    assert torch.equal((got >= 0).sum(-1), (want >= 0).sum(-1))
    assert bool(((got[:, 1:] > got[:, :-1]) | (got[:, 1:] < 0)).all())
    shared = (got[:, :, None] == want[:, None, :]).any(-1)
    assert float(shared.float().mean()) > (0.99 if fp8 else 0.999)
    scores = [logits.gather(1, x.clamp_min(0).long()).masked_fill(x < 0, 0).sort(-1).values for x in (got, want)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3 if fp8 else 1e-5, atol=1e-3)


@pytest.mark.skipif(interpreted, reason="real sizes")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    "seed, start, length", [(1, 0, 2900), (2, 30000, 1030), (3, 130000, 130), (4, 524288 - 64, 64)]
)
def test_a_chunk_at_real_sizes(device: str, seed: int, start: int, length: int, fp8: bool) -> None:
    g, heads, di, top_k = _generator(seed), 64, 128, 512
    bound = -(-(start + length) // 256) * 256
    pages = bound // 256 + 4
    store = _pool(pages, di, fp8, False, g).to(device)
    where = _chunk(start, length, length, _table(bound // 4, pages, g), bound, device)
    q, w = _queries(length, heads, di, FP8 if fp8 else HALF, False, g)
    q, w = q.to(device), w.to(device)
    keys = kernels.keys(store, where, di)
    got, want = kernels.choose_chunk(q, w, keys, where, top_k), ref.choose_chunk(q, w, keys, where, top_k)
    assert torch.equal(got, kernels.choose_chunk(q, w, keys, where, top_k))
    some = torch.arange(0, length, max(1, length // 64), device=device)
    _same_quality(got[some], want[some], ref._scaled_scores(q[some], w[some], keys), fp8)


@pytest.mark.skipif(interpreted, reason="real sizes")
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    "seed, start, length, padded", [(1, 0, 2900, 2900), (2, 30001, 61, 64), (3, 130000, 1, 1), (4, 1040000, 9, 11)]
)
def test_a_chunk_chooses_exactly_at_real_sizes(
    device: str, seed: int, start: int, length: int, padded: int, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HOPPER", by_hand)
    g, heads, di, top_k = _generator(seed), 64, 128, 512
    bound = start + length + 37
    pages = bound // 256 + 4
    store = _pool(pages, di, True, True, g).to(device)
    where = _chunk(start, length, padded, _table(bound // 4, pages, g), bound, device)
    q, w = _queries(padded, heads, di, FP8, True, g)
    q, w = q.to(device), w.to(device)
    keys = kernels.keys(store, where, di)
    got, want = kernels.choose_chunk(q, w, keys, where, top_k), ref.choose_chunk(q, w, keys, where, top_k)
    assert torch.equal(got, want)


@pytest.mark.skipif(interpreted, reason="real sizes")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("seed, batch, bound", [(1, 1, 8192), (2, 8, 131072), (3, 1, 524288), (4, 3, 1 << 20)])
def test_rows_at_real_sizes(device: str, seed: int, batch: int, bound: int, fp8: bool) -> None:
    g, heads, di, top_k = _generator(seed), 64, 128, 512
    pages = bound // 256 + 1
    store = _pool(pages, di, fp8, False, g).to(device)
    positions = torch.randint(bound // 2, bound, (batch,), generator=g).int()
    positions[0] = bound - 1
    tables = torch.stack([torch.randperm(pages - 1, generator=g) for _ in range(batch)]).int()
    where = Rows(positions.to(device), torch.zeros_like(positions).to(device), tables.to(device), bound)
    q, w = _queries(batch, heads, di, FP8 if fp8 else HALF, False, g)
    q, w = q.to(device), w.to(device)
    got, want = kernels.choose_rows(q, w, store, where, top_k), ref.choose_rows(q, w, store, where, top_k)
    values, scales = unpack_index(store) if fp8 else (store, torch.ones(store.shape[:2], device=device))
    for b in range(batch):
        rows = (tables[b].long()[:, None] * PER_PAGE + torch.arange(PER_PAGE)).flatten().to(device)
        place = torch.full((pages * PER_PAGE,), -1, device=device)
        place[rows] = torch.arange(len(rows), device=device)
        keys = ref.Keys(values.flatten(0, 1)[rows], scales.flatten()[rows])
        chosen = [torch.where(x[b] >= 0, place[x[b].clamp_min(0).long()], -1)[None] for x in (got, want)]
        _same_quality(chosen[0], chosen[1], ref._scaled_scores(q[b : b + 1], w[b : b + 1], keys), fp8)
