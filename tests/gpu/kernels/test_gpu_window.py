"""The window's ring on a GPU against its reference, bit for bit."""

import os

import pytest
import torch
from device_steps import one_chunk, one_row, padded, spread
from interpreter_casts import exact_casts  # noqa: F401

from longread.kernels.cache_rows.ref import latent_bytes, roundtrip_latent
from longread.kernels.places import Rows
from longread.kernels.window import ref

pytest.importorskip("triton")
from longread.kernels.window import triton as fast

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real = pytest.mark.skipif(INTERPRETED, reason="a GPU's size")
SLOT = 2


def ring_of(slots: int, d: int, rope: int, packed: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
    if packed:
        return torch.full((slots, 128, latent_bytes(d, rope)), 0xFF, dtype=torch.uint8, device=device)
    return torch.full((slots, 128, d), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("d", "rope", "steps"),
    [
        (24, 8, [3, -1, 0, 17]),
        (128, 32, [130, -1, -1, 5, 128]),
        pytest.param(512, 64, [1, -1, 127, -1, 0, 300, 17, 8192, -1, 3], marks=real),
    ],
)
def test_any_steps(d: int, rope: int, steps: list[int], packed: bool, dtype: torch.dtype, device: str) -> None:
    n, padding = sum(abs(k) for k in steps), 2
    kv = roundtrip_latent(torch.randn(n, d, generator=torch.Generator().manual_seed(n)), rope).to(device, dtype)
    table = torch.zeros(1, dtype=torch.int32, device=device)
    got, want = (ring_of(4, d, rope, packed, dtype, device) for _ in range(2))
    for at, k in spread(steps):
        if k < 0:
            new = padded(kv[at : at + 1], padding, before=True)
            for op, ring in ((fast, got), (ref, want)):
                op.rows(new, ring, one_row(at, SLOT, table, padding))
            continue
        here, new = one_chunk(at, k, SLOT, table, k + padding), padded(kv[at : at + k], padding, before=False)
        assert torch.equal(fast.slab(got, new, here, rope), ref.slab(want, new, here, rope))
        for op, ring in ((fast, got), (ref, want)):
            op.keep(ring, new, here)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch", [1, 5, pytest.param(130, marks=real)])
def test_rows_of_many_sequences(batch: int, packed: bool, device: str) -> None:
    g = torch.Generator().manual_seed(batch)
    kv = torch.randn(batch, 128, generator=g).to(device, torch.bfloat16)
    positions = torch.randint(0, 1 << 20, (batch,), generator=g).int()
    positions[1::3] = -1
    slots = torch.randperm(batch, generator=g).int() + 1
    slots[1::3] = 0
    where = Rows(
        positions.to(device), slots.to(device), torch.zeros(batch, 1, dtype=torch.int32, device=device), 1 << 20
    )
    got, want = (ring_of(batch + 1, 128, 32, packed, torch.bfloat16, device) for _ in range(2))
    fast.rows(kv, got, where)
    ref.rows(kv, want, where)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
