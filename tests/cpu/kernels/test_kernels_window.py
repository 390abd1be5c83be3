"""The window's ring in plain torch: after any steps it holds the last 128 tokens, and a slab is what a query sees."""

import pytest
import torch
from device_steps import one_chunk, one_row, padded, spread
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.cache_rows.ref import latent_bytes, pack_latent, roundtrip_latent
from longread.kernels.window import ref

D, ROPE, SLOT = 24, 8, 2
TABLE = torch.zeros(1, dtype=torch.int32)


def series(n: int) -> Tensor:
    return roundtrip_latent(torch.randn(n, D, generator=torch.Generator().manual_seed(n)), ROPE)


@pytest.mark.parametrize("packed", [False, True])
@given(
    steps=st.lists(st.one_of(st.integers(-1, 20), st.integers(100, 300)), min_size=1, max_size=8),
    padding=st.integers(0, 3),
)
def test_any_steps(packed: bool, steps: list[int], padding: int) -> None:
    kv = series(sum(abs(k) for k in steps))
    ring = torch.full((4, 128, D), 7.5)
    if packed:
        ring = torch.full((4, 128, latent_bytes(D, ROPE)), 0xFF, dtype=torch.uint8)
    fresh = ring.clone()
    for at, n in spread(steps):
        if n < 0:
            ref.rows(padded(kv[at : at + 1], padding, before=True), ring, one_row(at, SLOT, TABLE, padding))
            continue
        here, new = one_chunk(at, n, SLOT, TABLE, n + padding), padded(kv[at : at + n], padding, before=False)
        slab = ref.slab(ring, new, here, ROPE)
        whole = torch.cat((torch.zeros(128, D), kv[: at + n], torch.zeros(padding, D)))
        assert torch.equal(slab, whole[at : at + 128 + n + padding])
        ref.keep(ring, new, here)
    held = range(max(0, len(kv) - 128), len(kv))
    for p in held:
        expected = pack_latent(kv[p], ROPE) if packed else kv[p]
        assert torch.equal(ring[SLOT, p % 128], expected)
    rest = [r for r in range(128) if r not in {p % 128 for p in held}]
    assert torch.equal(ring[SLOT, rest], fresh[SLOT, rest])
    others = [0, 1, 3]
    assert torch.equal(ring[others], fresh[others])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start", [0, 1, 128])
def test_another_ring_row_keeps_a_place_inside_a_chunk(packed: bool, start: int) -> None:
    """A chunk's length may be less than its rows: the ring is that of a chunk which ends there, bit for bit."""
    kv, width = series(600), latent_bytes(D, ROPE)
    rings = [torch.full((4, 128, D), 7.5) for _ in range(2)]
    if packed:
        rings = [torch.full((4, 128, width), 0xFF, dtype=torch.uint8) for _ in range(2)]
    for place in (256, 512):
        ref.keep(rings[0], kv[start:], one_chunk(start, place - start, SLOT, TABLE, 600 - start))
        ref.keep(rings[1], kv[start:place], one_chunk(start, place - start, SLOT, TABLE, place - start))
        assert torch.equal(rings[0], rings[1])


@pytest.mark.parametrize(("d", "rope"), [(512, 64), (128, 32), (24, 8), (64, 16)])
def test_a_packed_width_tells_the_rotated_channels(d: int, rope: int) -> None:
    assert ref.rope_of(d, latent_bytes(d, rope)) == rope


def test_a_width_that_no_latent_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no packed latent of 512 channels has 585 bytes"):
        ref.rope_of(512, 585)
