"""Compressors and packed rows on a GPU against their references: any cuts, padding, poisoned stores."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import os
from typing import Any

import pytest
import torch
from device_steps import PAGE, Compressed, compressed, one_chunk, spread, turns
from interpreter_casts import exact_casts  # noqa: F401
from torch import Tensor

from longread.kernels.cache_rows.ref import index_bytes, latent_bytes, pack_index, pack_latent, unpack_index
from longread.kernels.cache_rows.ref import unpack_latent as unpack
from longread.kernels.compressor import device_ref
from longread.kernels.places import Rows

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from longread.kernels.cache_rows.triton import load_latent, store_index, store_latent  # noqa: E402
from longread.kernels.compressor import triton as fast  # noqa: E402

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real = pytest.mark.skipif(INTERPRETED, reason="a GPU's size")
SLOT, PAGES = 2, 8
KINDS = [(4, False), (4, True), (128, False)]
# Float32 sums of 8 or 128 products in another order, and the device's exp and division (2 ulp).
BOUND: Any = {"rtol": 2e-5, "atol": 2e-5}


@triton.jit
def _pack(x, out, W: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    i, c = tl.program_id(0), tl.arange(0, BLOCK)
    row = tl.load(x + i * D + c, mask=c < D, other=float("nan"))
    if ROPE:
        store_latent(out + i * W, row, D, ROPE, BLOCK)
    else:
        store_index(out + i * W, row, D, BLOCK)


@triton.jit
def _unpack(rows, out, W: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    i, c = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + i * D + c, load_latent(rows + i * W, D, ROPE, BLOCK), mask=c < D)


def samples(d: int, seed: int, device: str) -> Tensor:
    """Rows of every magnitude; zeros, the largest FP8 value and its neighbours, and ties between codes among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40, d, generator=g) * torch.logspace(-7, 4, 40)[:, None]
    x[0] = 0
    x[1], x[1, 3], x[1, 5] = 0, 448.0, 3e-3
    x[2, 0] = 448.0 * (1 + 2**-23)
    x[3] = torch.arange(d) / 16 * 1.0625
    x[4, ::2] = 0
    return x.to(device)


@pytest.mark.parametrize(("d", "rope"), [(512, 64), (128, 32), (64, 16), (24, 8)])
def test_latents_are_packed_bit_for_bit(d: int, rope: int, device: str) -> None:
    x, width, block = samples(d, d, device), latent_bytes(d, rope), max(64, triton.next_power_of_2(d))
    out = torch.full((len(x), width), 0xFF, dtype=torch.uint8, device=device)
    _pack[(len(x),)](x, out, width, d, rope, block)
    assert torch.equal(out, pack_latent(x, rope))
    back = torch.full_like(x, float("nan"))
    _unpack[(len(x),)](out, back, width, d, rope, block)
    assert torch.equal(back, unpack(out, d, rope, torch.float32))


@pytest.mark.parametrize("d", [128, 32, 24])
def test_index_keys_are_packed_bit_for_bit(d: int, device: str) -> None:
    x, width, block = samples(d, d, device), index_bytes(d), max(64, triton.next_power_of_2(d))
    out = torch.full((len(x), width), 0xFF, dtype=torch.uint8, device=device)
    _pack[(len(x),)](x, out, width, d, 0, block)
    assert torch.equal(out, pack_index(x))


def store_of(ratio: int, d: int, rope: int, index: bool, kind: str, device: str) -> Tensor:
    if kind == "packed":
        width = index_bytes(d) if index else latent_bytes(d, rope)
        return torch.full((PAGES, PAGE // ratio, width), 0xFF, dtype=torch.uint8, device=device)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kind]
    return torch.full((PAGES, PAGE // ratio, d), float("nan"), dtype=dtype, device=device)


def compare(got: Tensor, want: Tensor, written: Tensor, d: int, rope: int, index: bool) -> None:
    """The same rows written, equal up to a step of their type; nothing else touched."""
    assert torch.equal(got[~written].view(torch.uint8), want[~written].view(torch.uint8))
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, want, equal_nan=True, **BOUND)
    elif got.dtype == torch.bfloat16:
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-5, equal_nan=True)
    else:
        a, b = (numbers(store[written], d, rope, index) for store in (got, want))
        # A sum that lies at a rounding step may go the other way: one step of E4M3 (2^-3), and seldom.
        torch.testing.assert_close(a, b, rtol=2**-3, atol=2e-3)
        assert (a != b).sum() <= 2 + 2e-3 * a.numel()


def numbers(rows: Tensor, d: int, rope: int, index: bool) -> Tensor:
    if index:
        values, scale = unpack_index(rows)
        return values.float() * scale[..., None]
    return unpack(rows, d, rope, torch.float32)


def walk(s: Compressed, steps: list[int], kind: str, padding: int) -> None:
    """The same steps through both; a step's errors stay in the rings, so they are compared at the end."""
    device = str(s.kv.device)
    d, n = len(s.gain), sum(abs(k) for k in steps)
    table = torch.tensor([5, 1, 3, 2, 7, 0, 0], dtype=torch.int32, device=device)
    done = []
    for op in (fast, device_ref):
        rings, store = s.rings(4), store_of(s.ratio, d, s.rope, s.index, kind, device)
        for at, k in spread(steps):
            s.step(op, rings, store, table, SLOT, at, k, padding)
        done.append((rings, store))
    windows = torch.arange(n // s.ratio, device=device)
    per_page = PAGE // s.ratio
    written = torch.zeros(PAGES, per_page, dtype=torch.bool, device=device)
    written[table[windows // per_page].long(), windows % per_page] = True
    compare(done[0][1], done[1][1], written, d, s.rope, s.index)
    for got, want in zip(done[0][0], done[1][0], strict=True):
        torch.testing.assert_close(got, want, **BOUND)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "packed"])
@pytest.mark.parametrize(("ratio", "index"), KINDS)
@pytest.mark.parametrize("steps", [[17], [1, -1, 2, -1, 0, 3, -1, 130], [127, -1, 130], [256, -1, -1, -1, -1, 5]])
def test_steps_of_small_compressors(ratio: int, index: bool, kind: str, steps: list[int], device: str) -> None:
    d, rope = (32, 8) if index else (128, 32)
    s = compressed(sum(abs(k) for k in steps), d, rope, ratio, index, seed=len(steps), device=device)
    walk(s, steps, kind, padding=2)


@real
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "packed"])
@pytest.mark.parametrize(("ratio", "index"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_random_cuts_at_real_widths(ratio: int, index: bool, kind: str, seed: int, device: str) -> None:
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 6, (14,), generator=g).tolist()
    sizes = [[-1], [0], [1, 2, 3], [4, 8, 16, 17], [127, 128, 129, 130], [255, 256, 200]]
    steps = [sizes[k][int(torch.randint(0, len(sizes[k]), (), generator=g))] for k in pick]
    while sum(abs(k) for k in steps) > 5 * PAGE:
        steps.pop()
    s = compressed(sum(abs(k) for k in steps), 128 if index else 512, 64, ratio, index, seed, device)
    walk(s, steps, kind, padding=seed)


@real
@pytest.mark.parametrize(("ratio", "index"), KINDS)
def test_a_long_chunk(ratio: int, index: bool, device: str) -> None:
    """8192 tokens from an odd start into a table that is not in order."""
    d, n, pages = 128 if index else 512, 8192, 40
    s = compressed(n + 61, d, 64, ratio, index, seed=ratio, device=device)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(device, torch.int32)
    stores = []
    for op in (fast, device_ref):
        rings, store = s.rings(4), torch.zeros(pages, PAGE // ratio, d, device=device)
        for at, k in spread([61, n]):
            s.step(op, rings, store, table, SLOT, at, k, 0)
        stores.append(store)
    torch.testing.assert_close(stores[0], stores[1], **BOUND)


@pytest.mark.parametrize(("ratio", "index"), KINDS)
@pytest.mark.parametrize("batch", [1, 3, 6, pytest.param(130, marks=real)])
def test_rows_of_many_sequences(ratio: int, index: bool, batch: int, device: str) -> None:
    """A decode step of sequences at every phase, padding among them, on rings that hold anything."""
    d, rope = (32, 8) if index else (128, 32)
    g = torch.Generator().manual_seed(batch)
    s = compressed(batch, d, rope, ratio, index, batch, device)
    positions = torch.randint(8, 2 * PAGE, (batch,), generator=g)
    positions[::2] = positions[::2] // ratio * ratio + ratio - 1
    positions[1::4] = -1
    slots = torch.randperm(batch, generator=g) + 1
    slots[1::4] = 0
    where = Rows(
        positions.int().to(device),
        slots.int().to(device),
        torch.randperm(2 * batch, generator=g).view(batch, 2).int().to(device),
        2 * PAGE,
    )
    cos, sin = turns(positions.clamp(min=0).to(device) // ratio * ratio, rope)
    first = [torch.randn(r.shape, generator=g).abs().to(device) for r in s.rings(batch + 1)]
    latent = torch.randn(batch, d, generator=g).to(device)
    done = []
    for op in (fast, device_ref):
        rings = tuple(r.clone() for r in first)
        store = torch.full((2 * batch, PAGE // ratio, d), float("nan"), device=device)
        ring = torch.full((batch + 1, 128, d), float("nan"), device=device)
        part = device_ref.Part(s.kv, s.gate, s.ape, rings, s.gain, cos, sin, store, ratio, index)
        op.layer_rows((part,), latent, ring, 1e-6, where)
        done.append((*rings, store, ring))
    for got, want in zip(*done, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True, **BOUND)


@pytest.mark.parametrize("ratio", [4, 128, 0])
@pytest.mark.parametrize("kind", ["float32", "packed"])
def test_what_a_token_leaves_in_a_layer(ratio: int, kind: str, device: str) -> None:
    """Every compressor of the layer and the window's ring, as one by one; padding touches nothing."""
    batch, rope, d = 4, 32, 128
    g = torch.Generator().manual_seed(ratio)
    positions = torch.tensor([255, -1, 131, 6], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=device)
    where = Rows(positions, slots, torch.randperm(2 * batch, generator=g).view(batch, 2).int().to(device), 2 * PAGE)
    latent = torch.randn(batch, d, generator=g).to(device)
    width = store_of(4, d, rope, False, kind, device).shape[-1]
    kinds = [(False, d, rope), (True, 32, 8)][: {4: 2, 128: 1, 0: 0}[ratio]]
    made = [compressed(batch, n, r, ratio, index, batch, device) for index, n, r in kinds]
    angles = [turns(positions.clamp(min=0) // ratio * ratio, s.rope) for s in made]
    held = [[torch.randn(r.shape, generator=g).abs().to(device) for r in s.rings(batch + 1)] for s in made]
    done = []
    for op in (fast, device_ref):
        ring = torch.zeros(
            batch + 1, 128, width, dtype=torch.uint8 if kind == "packed" else latent.dtype, device=device
        )
        parts = [
            device_ref.Part(
                s.kv, s.gate, s.ape, tuple(r.clone() for r in rings), s.gain, *turn,
                store_of(ratio, len(s.gain), s.rope, s.index, kind, device), ratio, s.index,
            )
            for s, rings, turn in zip(made, held, angles, strict=True)
        ]  # fmt: skip
        op.layer_rows(parts, latent, ring, 1e-6, where)
        done.append((parts, ring))
    assert torch.equal(done[0][1], done[1][1])
    for got, want, s in zip(done[0][0], done[1][0], made, strict=True):
        written = torch.zeros(PAGES, PAGE // ratio, dtype=torch.bool, device=device)
        for b, position in enumerate(positions.tolist()):
            if position >= 0 and position % ratio == ratio - 1:
                window = position // ratio
                written[int(where.tables[b, window // (PAGE // ratio)]), window % (PAGE // ratio)] = True
        compare(got.store, want.store, written, len(s.gain), s.rope, s.index)
        for mine, theirs in zip(got.rings, want.rings, strict=True):
            torch.testing.assert_close(mine, theirs, **BOUND)


@pytest.mark.parametrize(("ratio", "index"), KINDS)
@pytest.mark.parametrize("start", [0, 1, 128])
def test_a_kept_state_is_that_of_a_chunk_which_ends_there(ratio: int, index: bool, start: int, device: str) -> None:
    """Bit for bit what the kernels leave in a slot, and what the reference keeps; no other ring row is touched."""
    d, rope = (32, 8) if index else (128, 32)
    s = compressed(start + 300, d, rope, ratio, index, seed=start, device=device)
    table = torch.tensor([5, 1], dtype=torch.int32, device=device)
    place = 256 - start % 128
    ends, kept, plain = s.rings(4), s.rings(4), s.rings(4)
    for at, n in ((0, start), (start, place)):
        s.step(fast, ends, store_of(ratio, d, rope, index, "float32", device), table, SLOT, at, n, 0)
    for ring in (*kept, *plain):
        ring[1:] = 3.25
    s.keep(fast, kept, 1, start, 300, place, 3)
    s.keep(device_ref, plain, 1, start, 300, place, 3)
    for got, want, same in zip(kept, ends, plain, strict=True):
        assert torch.equal(got[1], want[SLOT])
        assert torch.equal(got, same)


@pytest.mark.parametrize("ratio", [4, 128])
def test_a_chunk_of_padding_alone_touches_nothing(ratio: int, device: str) -> None:
    s = compressed(6, 128, 32, ratio, index=False, seed=1, device=device)
    rings, store = s.rings(4), torch.full((2, PAGE // ratio, 128), 7.0, device=device)
    before = [r.clone() for r in rings]
    table = torch.zeros(2, dtype=torch.int32, device=device)
    nan = torch.full_like(s.kv, float("nan"))
    cos, sin = turns(torch.arange(6 // ratio + 2, device=device) * ratio, 32)
    here = one_chunk(127, 0, SLOT, table, 6)
    fast.chunk(nan, nan, s.ape, rings, s.gain, 1e-6, cos, sin, store, here, ratio, False)
    fast.keep(nan, nan, s.ape, rings, here, ratio)
    assert (store == 7).all()
    for got, want in zip(rings, before, strict=True):
        assert torch.equal(got, want)
