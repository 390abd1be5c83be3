"""The device form of MLA against the CPU's ops, over shuffled pages and poisoned storage."""

import pytest
import torch
from torch import Tensor

from longread.kernels.fp8.ref import Quantised, dequantise, quantise
from longread.kernels.mla import device_ref as device
from longread.kernels.mla import ref as mla
from longread.kernels.norm import device_ref as between
from longread.kernels.norm.ref import rms_norm
from longread.kernels.places import Chunk, Rows
from longread.kernels.rope.ref import apply_interleaved
from longread.spec.batch import Segment

H, NOPE, ROPE, V, RANK = 3, 6, 4, 5, 128
SCALE, EPS = 0.37, 1e-6
PAGES = [4, 1, 6]


def made(tokens: int, packed: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """store, rows' raw numbers, gain, cos, sin, W_kvb."""
    g = torch.Generator().manual_seed(tokens)
    store = torch.full((8, 256, RANK + ROPE), float("nan"))
    if packed:
        store = torch.full((8, 256, device.packed_bytes(RANK, ROPE)), 255, dtype=torch.uint8)
    angle = torch.rand(tokens, ROPE // 2, generator=g)
    raw, gain = torch.randn(tokens, RANK + ROPE, generator=g), torch.rand(RANK, generator=g) + 0.5
    return store, raw, gain, angle.cos(), angle.sin(), torch.randn(H, NOPE + V, RANK, generator=g) / 8


def chunk(start: int, length: int, padded: int) -> Chunk:
    positions = torch.full((padded,), -1, dtype=torch.int32)
    positions[:length] = torch.arange(start, start + length)
    meta = torch.tensor((start, length, 0, 0), dtype=torch.int32)
    return Chunk(meta, positions, torch.tensor([*PAGES, 0], dtype=torch.int32), 1024)


@pytest.mark.parametrize("packed", [False, True])
def test_latents_are_normed_rotated_and_written(packed: bool) -> None:
    store, raw, gain, cos, sin, _ = made(300, packed)
    before, where = store.clone(), chunk(100, 290, 300)
    q, q_gain = torch.randn(300, 256), torch.rand(256)
    c_q = device.latents(q, raw, q_gain, gain, EPS, cos, sin, False, store, where)
    assert isinstance(c_q, Tensor)
    torch.testing.assert_close(c_q, rms_norm(q, q_gain, EPS), atol=1e-6, rtol=1e-5)
    want = torch.cat((rms_norm(raw[:, :RANK], gain, EPS), apply_interleaved(raw[:, RANK:], cos, sin)), -1)[:290]
    got = torch.cat([store[p] for p in PAGES])[100:390]
    if packed:
        got = device.unpack(got, RANK, ROPE, torch.float32)
        want = torch.cat((dequantise(quantise(want[:, :RANK])), want[:, RANK:].bfloat16().float()), -1)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2**-4 if packed else 1e-5)  # a last bit may flip a code
    untouched = torch.ones(8, 256, dtype=torch.bool)
    for p in range(100, 390):
        untouched[PAGES[p // 256], p % 256] = False
    assert torch.equal(store[untouched].nan_to_num(7), before[untouched].nan_to_num(7))
    assert device.latents(None, raw, None, gain, EPS, cos, sin, False, store, where) is None
    assert isinstance(device.latents(q, raw, q_gain, gain, EPS, cos, sin, True, store, where), Quantised)


def test_rotation_in_place() -> None:
    _, _, _, cos, sin, _ = made(3)
    q = torch.randn(3, H, NOPE + ROPE)
    want = torch.cat((q[..., :NOPE], apply_interleaved(q[..., NOPE:], cos[:, None], sin[:, None])), -1)
    device.rotate(q, cos, sin)
    torch.testing.assert_close(q, want)


@pytest.mark.parametrize("start, length", [(0, 1), (0, 300), (255, 2), (411, 100)])
def test_both_forms_are_the_cpus(start: int, length: int) -> None:
    """A chunk in the expanded form, and each of its tokens as a row of the absorbed one, beside padding."""
    end = start + length
    store, raw, gain, cos, sin, kv_b = made(end)
    device.latents(None, raw, None, gain, EPS, cos, sin, False, store, chunk(0, end, end))
    q = torch.randn(length + 3, H, NOPE + ROPE, generator=torch.Generator().manual_seed(1))
    span = mla.spans([Segment(0, start, length, 0, tuple(PAGES))])
    want = mla.attend(q[:length], store, kv_b, mla.reading(span, mla.Policy(1 << 30, 0)), SCALE)
    where = chunk(start, length, length + 3)
    got = device.attend_chunk(q, store, kv_b, SCALE, where, start, length)
    torch.testing.assert_close(got[:length], want, atol=1e-5, rtol=1e-5)
    assert got[length:].isfinite().all()
    rows = Rows(where.positions, where.positions, where.table.expand(length + 3, -1), 1024)
    got = device.attend_rows(q, store, kv_b, SCALE, rows)
    torch.testing.assert_close(got[:length], want, atol=1e-5, rtol=1e-5)
    assert not got[length:].any()


def test_packed_rows_are_read_as_they_unpack() -> None:
    store, raw, gain, cos, sin, kv_b = made(260, packed=True)
    where = chunk(0, 260, 260)
    device.latents(None, raw, None, gain, EPS, cos, sin, False, store, where)
    plain = torch.full((8, 256, RANK + ROPE), float("nan"))
    for page in PAGES[:2]:
        plain[page] = device.unpack(store[page], RANK, ROPE, torch.float32)
    q = torch.randn(260, H, NOPE + ROPE)
    want = device.attend_chunk(q, plain, kv_b, SCALE, where, 0, 260)
    assert torch.equal(device.attend_chunk(q, store, kv_b, SCALE, where, 0, 260), want)
    rows = Rows(where.positions[-2:], where.positions[-2:], where.table.expand(2, -1), 1024)
    torch.testing.assert_close(device.attend_rows(q[-2:], store, kv_b, SCALE, rows), want[-2:], atol=1e-5, rtol=1e-5)


def test_add_norm() -> None:
    x, y, gain = torch.randn(3, 256), torch.randn(3, 256), torch.rand(256)
    total = x + y
    got = between.add_norm(x, y, gain, EPS, quantised=True)
    assert torch.equal(x, total)
    torch.testing.assert_close(got.u, rms_norm(total, gain, EPS), atol=1e-6, rtol=1e-5)
    assert got.q is not None and torch.equal(got.q.scales, quantise(got.u).scales)
    assert between.add_norm(x, None, gain, EPS, quantised=False).q is None and torch.equal(x, total)
