"""Device attention's reference against the formula over explicitly listed keys in float64, in poisoned memory."""

import pytest
import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import latent_bytes, pack_latent, unpack_latent
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved
from longread.kernels.sparse_attention import device_ref as ref

H, D, ROPE, WINDOW, EPS, SCALE, PAGES = 3, 96, 16, 128, 1e-6, 0.2, 9
NAN = float("nan")


def formula(q: Tensor, cos: Tensor, sin: Tensor, sink: Tensor, keys: Tensor) -> Tensor:
    """q: [H, d] raw, keys: [n, d]; float64."""
    q, keys = q.double(), keys.double()
    q = q / (q.square().mean(-1, keepdim=True) + EPS).sqrt()
    q = torch.cat([q[:, :-ROPE], apply_interleaved(q[:, -ROPE:].float(), cos, sin).double()], -1)
    weights = (q @ keys.T * SCALE).exp()
    return weights @ keys / (sink.double().exp() + weights.sum(-1))[:, None]


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, ROPE // 2) * 7
    return angle.cos(), angle.sin()


def stored(n: int, ratio: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A poisoned store of PAGES pages with n closed rows of a sequence, its table, and the rows as read."""
    per_page = 256 // ratio
    table = torch.randperm(PAGES)[: PAGES - 2].int()
    entries = torch.randn(n, D)
    row = torch.arange(n)
    flat = table[row // per_page].long() * per_page + row % per_page
    if packed:
        store = torch.full((PAGES * per_page, latent_bytes(D, ROPE)), 0xFF, dtype=torch.uint8)
        store[flat] = pack_latent(entries, ROPE)
        entries = unpack_latent(pack_latent(entries, ROPE), D, ROPE, torch.float32)
    else:
        store = torch.full((PAGES * per_page, D), NAN)
        store[flat] = entries
    return store.view(PAGES, per_page, -1), table, entries


def piece(start: int, length: int, padded: int, table: Tensor, bound: int) -> Chunk:
    positions = torch.full((padded,), -1, dtype=torch.int32)
    positions[:length] = torch.arange(start, start + length)
    return Chunk(torch.tensor([start, length, 0, 0], dtype=torch.int32), positions, table, bound)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("end", [0, 3, 1000, 1024])
def test_entries_are_the_closed_rows(packed: bool, ratio: int, end: int) -> None:
    store, table, want = stored(end // ratio, ratio, packed)
    where = piece(max(0, end - 5), min(end, 5), 8, table, 1100)
    got = ref.entries(store, where, ratio, D, ROPE, torch.float32)
    assert got.shape == (1100 // ratio, D)
    assert torch.equal(got[: end // ratio], want)
    out = torch.full((1100 // ratio + 3, D), 7.0)
    into = ref.entries(store, where, ratio, D, ROPE, torch.float32, out)
    assert into.data_ptr() == out.data_ptr() and torch.equal(into[: end // ratio], want)
    assert (out[1100 // ratio :] == 7).all()


@pytest.mark.parametrize(("start", "length", "padded"), [(0, 1, 1), (0, 150, 160), (37, 5, 9), (900, 140, 140)])
@pytest.mark.parametrize("kind", ["window", "chosen", "dense"])
def test_chunk(start: int, length: int, padded: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ref, "BLOCK_FLOATS", 1 << 12)  # several blocks of queries
    ratio = {"window": 0, "chosen": 4, "dense": 128}[kind]
    end, top_k = start + length, 20
    where = piece(start, length, padded, torch.arange(PAGES, dtype=torch.int32), 1100)
    q = torch.randn(padded, H + 1, D)[:, 1:]
    cos, sin = tables(padded)
    sink, history = torch.randn(H), torch.randn(end, D)
    slab = torch.full((WINDOW + padded, D), NAN)
    low = max(0, start - WINDOW)
    slab[low - start + WINDOW : WINDOW + length] = history[low:]
    rows = chosen = None
    if ratio:
        rows = torch.full((1100 // ratio, D), NAN)
        rows[: end // ratio] = torch.randn(end // ratio, D)
    if kind == "chosen":
        chosen = torch.full((padded, top_k), -1, dtype=torch.int32)
        for i in range(length):
            picked = torch.randperm((start + i + 1) // ratio)[:top_k].sort().values
            chosen[i, : len(picked)] = picked
        chosen[length:] = 0  # padding's choice is not looked at
    got = ref.chunk(q, EPS, cos, sin, sink, SCALE, slab, rows, chosen, ratio, where)
    for i in range(length):
        t = start + i
        keys = [history[max(0, t - WINDOW + 1) : t + 1]]
        if rows is not None:
            keys.append(rows[: (t + 1) // ratio] if chosen is None else rows[chosen[i][chosen[i] >= 0].long()])
        want = formula(q[i], cos[i], sin[i], sink, torch.cat(keys))
        torch.testing.assert_close(got[i].double(), want, atol=2e-5, rtol=2e-5)
    assert (got[length:] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["window", "chosen", "dense"])
def test_rows(packed: bool, kind: str) -> None:
    ratio = {"window": 0, "chosen": 4, "dense": 128}[kind]
    positions, top_k, dtype = [0, 126, -1, 127, 1023, 600], 20, torch.float32
    batch = len(positions)
    q = torch.randn(batch, H, D)
    cos, sin = tables(batch)
    sink = torch.randn(H)
    slots = torch.tensor([4, 2, 0, 6, 1, 3], dtype=torch.int32)
    width = latent_bytes(D, ROPE) if packed else D
    ring = torch.full((7, WINDOW, width), 0xFF, dtype=torch.uint8) if packed else torch.full((7, WINDOW, D), NAN)
    store, table, entries = stored(1024 // max(ratio, 4), max(ratio, 4), packed)
    chosen = torch.full((batch, top_k), -1, dtype=torch.int32) if kind == "chosen" else None
    seen = []
    for b, t in enumerate(positions):
        newest = torch.randn(min(WINDOW, t + 1), D)
        if packed:
            newest = unpack_latent(pack_latent(newest, ROPE), D, ROPE, dtype)
        at = torch.arange(t + 1 - len(newest), t + 1) % WINDOW
        if t >= 0:
            ring[slots[b], at] = pack_latent(newest, ROPE) if packed else newest
        keys = [newest]
        if kind == "dense":
            keys.append(entries[: (t + 1) // ratio])
        if chosen is not None:
            row = torch.randperm((t + 1) // ratio)[:top_k].sort().values
            chosen[b, : len(row)] = table[row // 64].int() * 64 + row.int() % 64
            keys.append(entries[row])
        seen.append(torch.cat(keys))
    where = Rows(torch.tensor(positions, dtype=torch.int32), slots, table.expand(batch, -1).contiguous(), 1100)
    got = ref.rows(q, EPS, cos, sin, sink, SCALE, ring, store if ratio else None, chosen, ratio, where, ROPE)
    for b, t in enumerate(positions):
        want = formula(q[b], cos[b], sin[b], sink, seen[b]) if t >= 0 else torch.zeros(H, D).double()
        torch.testing.assert_close(got[b].double(), want, atol=2e-5, rtol=2e-5)
