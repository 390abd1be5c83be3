"""Paged compressors in plain torch: whatever the cuts, the rows of the whole sequence, where its pages are."""

import pytest
import torch
from device_steps import PAGE, Compressed, compressed, spread, turns
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.cache_rows.ref import index_bytes, latent_bytes, pack_index, pack_latent
from longread.kernels.compressor import device_ref
from longread.kernels.places import Rows

D, ROPE, PAGES, SLOT = 16, 4, 6, 2


def whole(s: Compressed, n: int) -> Tensor:
    """float32 [n // ratio, d]: every closed row of a sequence of n tokens, from the formulas."""
    d, r = len(s.gain), s.ratio
    score = s.gate[:n] + s.ape[torch.arange(n) % r]
    out = []
    for w in range(n // r):
        now, before = slice(r * w, r * w + r), slice(max(0, r * w - r), r * w)
        if r == 4:
            values = torch.cat((s.kv[before, :d], s.kv[now, d:]))
            weights = torch.cat((score[before, :d], score[now, d:])).softmax(0)
        else:
            values, weights = s.kv[now], score[now].softmax(0)
        out.append((weights * values).sum(0))
    if not out:
        return torch.empty(0, d)
    x = torch.stack(out)
    x = x / (x.square().mean(-1, keepdim=True) + s.eps).sqrt() * s.gain
    cos, sin = turns(torch.arange(n // r) * r, s.rope)
    even, odd = x[:, -s.rope :: 2].clone(), x[:, -s.rope + 1 :: 2].clone()
    x[:, -s.rope :: 2], x[:, -s.rope + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
    return x


def walk(s: Compressed, steps: list[int], store: Tensor, table: Tensor, padding: int) -> tuple[Tensor, ...]:
    rings = s.rings(4)
    for at, n in spread(steps):
        s.step(device_ref, rings, store, table, SLOT, at, n, padding)  # type: ignore[arg-type]
    return rings


def placed(store: Tensor, table: Tensor, n: int, ratio: int) -> Tensor:
    return store[table.long()].flatten(0, 1)[: n // ratio]


@pytest.mark.parametrize("ratio", [4, 128])
@given(
    steps=st.lists(st.one_of(st.integers(-1, 40), st.integers(100, 300)), min_size=1, max_size=8).filter(
        lambda steps: sum(abs(n) for n in steps) <= 4 * PAGE
    ),
    padding=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_any_cuts_write_the_rows_of_the_whole_sequence(ratio: int, steps: list[int], padding: int, seed: int) -> None:
    n = sum(abs(k) for k in steps)
    s = compressed(n, D, ROPE, ratio, index=False, seed=seed)
    store = torch.full((PAGES, PAGE // ratio, D), float("nan"))
    table = torch.tensor([5, 1, 3, 2, 0, 0], dtype=torch.int32)
    rings = walk(s, steps, store, table, padding)
    torch.testing.assert_close(placed(store, table, n, ratio), whole(s, n), rtol=1e-5, atol=1e-5)
    used = torch.zeros(PAGES, PAGE // ratio, dtype=torch.bool)
    for w in range(n // ratio):
        used[table[w // (PAGE // ratio)], w % (PAGE // ratio)] = True
    assert store[~used].isnan().all()  # nothing else was written
    for ring in rings:
        assert (ring[0] == 7.5).all()  # padding's slot
        assert ring[SLOT].isfinite().all() or n < 8 or (ratio == 128 and n % 128 == 0)


@pytest.mark.parametrize(("ratio", "index"), [(4, False), (4, True), (128, False)])
@pytest.mark.parametrize("steps", [[300], [3, -1, 130, -1, -1, 121]])
def test_packed_rows_are_the_packed_numbers(ratio: int, index: bool, steps: list[int]) -> None:
    n = sum(abs(k) for k in steps)
    s = compressed(n, D, ROPE, ratio, index, seed=n)
    table = torch.tensor([1, 0], dtype=torch.int32)
    wide = torch.full((2, PAGE // ratio, D), float("nan"))
    width = index_bytes(D) if index else latent_bytes(D, ROPE)
    narrow = torch.full((2, PAGE // ratio, width), 0xFF, dtype=torch.uint8)
    walk(s, steps, wide, table, padding=2)
    walk(s, steps, narrow, table, padding=2)
    rows = placed(wide, table, n, ratio)
    expected = pack_index(rows) if index else pack_latent(rows, ROPE)
    assert torch.equal(placed(narrow, table, n, ratio), expected)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("start", [0, 1, 127, 128])
def test_a_kept_state_is_that_of_a_chunk_which_ends_there(ratio: int, start: int) -> None:
    """Bit for bit, whatever the ring row held; nothing but that row is touched."""
    s = compressed(600, D, ROPE, ratio, index=False, seed=start)
    store, table = torch.zeros(PAGES, PAGE // ratio, D), torch.tensor([5, 1, 3], dtype=torch.int32)
    for place in (256, 384, 512):
        ends, kept = s.rings(4), s.rings(4)
        for at, n in ((0, start), (start, place - start)):
            s.step(device_ref, ends, store, table, SLOT, at, n, 0)  # type: ignore[arg-type]
        for ring in kept:
            ring[1:] = 3.25
        s.keep(device_ref, kept, 1, start, 600 - start, place - start, 2)  # type: ignore[arg-type]
        for got, want in zip(kept, ends, strict=True):
            assert torch.equal(got[1], want[SLOT])
            assert (got[2:] == 3.25).all()
            assert (got[0] == 7.5).all()


def test_a_state_is_not_kept_where_a_long_window_is_open() -> None:
    s = compressed(300, D, ROPE, 128, index=False, seed=1)
    with pytest.raises(ValueError, match="a window of 128 is open at position 200"):
        s.keep(device_ref, s.rings(2), 1, 0, 300, 200, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("ratio", [4, 128])
def test_rows_of_several_sequences_at_once(ratio: int) -> None:
    """Sequences at different places of their windows, padding among them."""
    lengths = [128, 131, 7, 256]
    store = torch.full((8, PAGE // ratio, D), float("nan"))
    tables = torch.tensor([[0, 0], [1, 0], [2, 0], [3, 7]], dtype=torch.int32)
    each = [compressed(n, D, ROPE, ratio, index=False, seed=n) for n in lengths]
    shared = each[0]
    rings = shared.rings(5)
    each = [Compressed(s.kv, s.gate, shared.ape, shared.gain, ROPE, ratio, False) for s in each]
    for b, (s, n) in enumerate(zip(each, lengths, strict=True)):
        s.step(device_ref, rings, store, tables[b], b + 1, 0, n - 1, 0)  # type: ignore[arg-type]
    order = [2, -1, 0, 3, 1, -1]
    positions = torch.tensor([lengths[b] - 1 if b >= 0 else -1 for b in order], dtype=torch.int32)
    where = Rows(
        positions,
        torch.tensor([b + 1 for b in order], dtype=torch.int32),
        torch.stack([tables[max(b, 0)] for b in order]),
        256,
    )
    kv, gate = (torch.stack([getattr(each[max(b, 0)], name)[-1] for b in order]) for name in ("kv", "gate"))
    cos, sin = turns(positions.clamp(min=0) // ratio * ratio, ROPE)
    part = device_ref.Part(kv, gate, shared.ape, rings, shared.gain, cos, sin, store, ratio, False)
    latent, ring = torch.randn(6, D), torch.full((5, 128, D), 7.5)
    device_ref.layer_rows((part,), latent, ring, 1e-6, where)
    for b, (s, n) in enumerate(zip(each, lengths, strict=True)):
        torch.testing.assert_close(placed(store, tables[b], n, ratio), whole(s, n), rtol=1e-5, atol=1e-5)
        assert torch.equal(ring[b + 1, (n - 1) % 128], latent[order.index(b)])
    assert (ring[0] == 7.5).all()
