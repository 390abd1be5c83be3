"""V4's attention kernels against the reference in float32 on the same bfloat16 or packed inputs, in poisoned memory.

Bounds: keys and results are bfloat16 in both, queries and probabilities only in the kernels (relative 2^-9 each), so a
result, a mean of keys of size about 1, differs by a few times 2^-9, one of few keys by their own size (4) times that;
logits of size s by s * 2^-9.
"""

import os

import pytest
import torch
from interpreter_casts import exact_casts  # noqa: F401, an autouse fixture
from interpreter_gaps import filled_gaps  # noqa: F401, an autouse fixture
from torch import Tensor

from longread.kernels.cache_rows.ref import latent_bytes, pack_latent
from longread.kernels.fp8.ref import BLOCK, Quantised, dequantise
from longread.kernels.places import Chunk, Rows
from longread.kernels.sparse_attention import device_ref as ref

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real_size = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
READER, FLASH, PRO = (8, 128, 32), (64, 512, 64), (128, 512, 64)  # heads, head_dim, rotated
WINDOW, PAGES, EPS = 128, 12, 1e-6
ATOL, RTOL = 0.009, 0.008


@pytest.fixture
def kernels(device: str) -> object:
    from longread.kernels.sparse_attention import triton

    return triton


def tables(tokens: int, rope: int, device: str) -> tuple[Tensor, Tensor]:
    angle = torch.rand(tokens, rope // 2, device=device) * 7
    return angle.cos(), angle.sin()


def queries(tokens: int, heads: int, d: int, device: str) -> Tensor:
    """Raw queries as a column slice of a wider projection, so that tokens lie apart."""
    return (3 * torch.randn(tokens, heads * d + 64, device=device)).bfloat16()[:, : heads * d].unflatten(1, (heads, d))


def stored(n: int, ratio: int, shape: tuple[int, int, int], packed: bool, device: str) -> tuple[Tensor, Tensor]:
    """A poisoned store with n closed rows of a sequence, and the sequence's table."""
    _, d, rope = shape
    per_page, pages = 256 // ratio, max(PAGES, -(-n * ratio // 256) + 2)
    table = torch.randperm(pages, device=device)[: pages - 1].int()
    row = torch.arange(n, device=device)
    flat = table[row // per_page].long() * per_page + row % per_page
    entries = torch.randn(n, d, device=device).bfloat16()
    if packed:
        store = torch.full((pages * per_page, latent_bytes(d, rope)), 0xFF, dtype=torch.uint8, device=device)
        store[flat] = pack_latent(entries, rope)
    else:
        store = torch.full((pages * per_page, d), float("nan"), dtype=torch.bfloat16, device=device)
        store[flat] = entries
    return store.view(pages, per_page, -1), table


def piece(start: int, length: int, padded: int, table: Tensor, bound: int) -> Chunk:
    positions = torch.full((padded,), -1, dtype=torch.int32)
    positions[:length] = torch.arange(start, start + length)
    meta = torch.tensor([start, length, 0, 0], dtype=torch.int32)
    return Chunk(meta.to(table.device), positions.to(table.device), table, bound)


def pick(visible: int, top_k: int, device: str) -> Tensor:
    """int32 [top_k]: ascending, -1 behind the last."""
    row = torch.randperm(visible, device=device)[:top_k].sort().values.int()
    return torch.nn.functional.pad(row, (0, top_k - len(row)), value=-1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("shape", [READER, pytest.param(FLASH, marks=real_size)])
@pytest.mark.parametrize("end", [0, 3, 67, 1000, 2048])
def test_entries(kernels: object, device: str, packed: bool, ratio: int, shape: tuple[int, int, int], end: int) -> None:
    torch.manual_seed(end)
    _, d, rope = shape
    store, table = stored(end // ratio, ratio, shape, packed, device)
    where = piece(max(0, end - 5), min(end, 5), 8, table, 2300)
    arguments = store, where, ratio, d, rope, torch.bfloat16
    want = ref.entries(*arguments)
    out = torch.full((2300 // ratio + 3, d), 7.0, dtype=torch.bfloat16, device=device)
    got = kernels.entries(*arguments, out)  # type: ignore[attr-defined]
    assert got.shape == want.shape and got.data_ptr() == out.data_ptr()
    assert torch.equal(got[: end // ratio], want[: end // ratio]), "unpacking is exact"
    assert (out[end // ratio :] == 7).all()
    fresh = kernels.entries(*arguments)  # type: ignore[attr-defined]
    assert torch.equal(fresh[: end // ratio], want[: end // ratio])


CHUNKS = [(0, 1, 1), (0, 3, 3), (37, 15, 17), (700, 3, 4)]
LONG_CHUNKS = [(0, 130, 130), (0, 700, 704), (5000, 130, 192), (1500, 1, 1)]


@pytest.mark.parametrize("hopper", [pytest.param("roles", marks=real_size), pytest.param("one", marks=real_size), ""])
@pytest.mark.parametrize("kind", ["window", "chosen", "dense"])
@pytest.mark.parametrize(
    ("shape", "start", "length", "padded"),
    [(READER, *c) for c in CHUNKS]
    + [pytest.param(s, *c, marks=real_size) for s in (READER, FLASH) for c in LONG_CHUNKS]
    + [pytest.param(PRO, *LONG_CHUNKS[2], marks=real_size)],
)
def test_chunk(
    kernels: object,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    hopper: str,
    kind: str,
    shape: tuple[int, int, int],
    start: int,
    length: int,
    padded: int,
) -> None:
    from longread.kernels.sparse_attention import chunk_triton

    if hopper and shape == READER:
        pytest.skip("head_dim 128 has one kernel")
    monkeypatch.setattr(chunk_triton, "HOPPER", bool(hopper))
    monkeypatch.setattr(chunk_triton, "BY_ROLES", hopper == "roles")
    torch.manual_seed(start + length)
    heads, d, rope = shape
    ratio = {"window": 0, "chosen": 4, "dense": 128}[kind]
    top_k, end = (72 if INTERPRETED else 512), start + length
    where = piece(start, length, padded, torch.arange(PAGES, device=device).int(), end + 300)
    q, (cos, sin) = queries(padded, heads, d, device), tables(padded, rope, device)
    sink = torch.randn(heads, device=device)
    slab = torch.full((WINDOW + padded, d), float("nan"), dtype=torch.bfloat16, device=device)
    low = max(0, WINDOW - start)
    slab[low : WINDOW + length] = torch.randn(WINDOW + length - low, d, device=device)
    rows = chosen = None
    if ratio:
        rows = torch.full(((end + 300) // ratio, d), float("nan"), dtype=torch.bfloat16, device=device)
        rows[: end // ratio] = torch.randn(end // ratio, d, device=device)
    if kind == "chosen":
        chosen = torch.stack([pick((start + i + 1) // ratio, top_k, device) for i in range(padded)])
        chosen[length:] = 1 << 30  # padding's choice is not looked at
    rest = (sink, d**-0.5)
    given = (q, EPS, cos, sin, *rest, slab, rows, chosen, ratio, where)
    got = kernels.chunk_turned(*given, False)  # type: ignore[attr-defined]
    wide = None if rows is None else rows.float()
    want = ref.chunk_turned(q.float(), EPS, cos, sin, *rest, slab.float(), wide, chosen, ratio, where, False)
    near(got, want)
    assert (got[length:] == 0).all()
    if not INTERPRETED:  # whose FP8 casts truncate
        near_quantised(kernels.chunk_turned(*given, True), want)  # type: ignore[attr-defined]


def near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=ATOL, rtol=RTOL)


def near_quantised(got: Quantised, want: Tensor) -> None:
    """A step of E4M3 is a sixteenth; below 2^-6 of a block's scale steps are even, a thousandth of its largest."""
    plain = dequantise(got)
    room = (
        ATOL + 2**-4 * want.abs() + 2**-9 * want.view(len(want), -1, BLOCK).abs().amax(-1).repeat_interleave(BLOCK, 1)
    )
    assert ((plain - want).abs() <= room).all(), f"{float(((plain - want).abs() - room).max())} too far"


def batch(positions: list[int], device: str) -> tuple[Tensor, Tensor]:
    slots = torch.randperm(len(positions) + 2, device=device)[: len(positions)].int()
    return torch.tensor(positions, dtype=torch.int32, device=device), slots


def decode(
    kernels: object, device: str, packed: bool, kind: str, shape: tuple[int, int, int], spots: list[int], bound: int
) -> None:
    heads, d, rope = shape
    ratio = {"window": 0, "chosen": 4, "dense": 128}[kind]
    top_k = 72 if INTERPRETED else 512
    positions, slots = batch(spots, device)
    q, (cos, sin) = queries(len(spots), heads, d, device), tables(len(spots), rope, device)
    sink = torch.randn(heads, device=device)
    longest = max(spots) + 1
    store, table = stored(longest // ratio if ratio else 1, max(ratio, 4), shape, packed, device)
    ring = torch.full((len(spots) + 2, WINDOW, d), float("nan"), dtype=torch.bfloat16, device=device)
    if packed:
        ring = torch.full((*ring.shape[:2], latent_bytes(d, rope)), 0xFF, dtype=torch.uint8, device=device)
    chosen = []
    for slot, t in zip(slots.tolist(), spots, strict=True):
        newest = torch.randn(min(WINDOW, t + 1), d, device=device).bfloat16()
        if t >= 0:
            ring[slot, : len(newest)] = pack_latent(newest, rope) if packed else newest
        if kind != "chosen":
            continue
        row = pick((t + 1) // 4, top_k, device)
        flat = table[(row.clamp(min=0) // 64).long()] * 64 + row.clamp(min=0) % 64
        chosen.append(torch.where(row < 0, -1, flat).int() if t >= 0 else torch.full_like(row, 1 << 30))
    held = torch.stack(chosen) if kind == "chosen" else None
    wide = torch.nn.functional.pad(table.expand(len(spots), -1), (0, 5), value=1 << 30)
    where = Rows(positions, slots, wide[:, : len(table)], bound)  # a slice: rows of the table lie apart
    source = store if ratio else None
    rest = (EPS, cos, sin, sink, d**-0.5)
    given = (*rest, ring, source, held, ratio, where, rope)
    got = kernels.rows_turned(q, *given, False)  # type: ignore[attr-defined]
    want = ref.rows_turned(q.float(), *given, False)
    near(got, want)
    assert (got[positions < 0] == 0).all()
    if not INTERPRETED:
        near_quantised(kernels.rows_turned(q, *given, True), want)  # type: ignore[attr-defined]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["window", "chosen", "dense"])
@pytest.mark.parametrize("spots", [[0], [700], [126, -1, 127, 699]])
def test_rows(kernels: object, device: str, packed: bool, kind: str, spots: list[int]) -> None:
    torch.manual_seed(len(spots))
    decode(kernels, device, packed, kind, READER, spots, 1100)


@real_size
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["window", "chosen", "dense"])
@pytest.mark.parametrize("shape", [FLASH, PRO])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_rows_of_real_size(
    kernels: object, device: str, packed: bool, kind: str, shape: tuple[int, int, int], size: int
) -> None:
    torch.manual_seed(size)
    spots = [[5000, 0, -1, 127, 2047][i % 5] + 64 * (i // 5) for i in range(size)]
    spots = [-1 if i % 5 == 2 else t for i, t in enumerate(spots)]
    decode(kernels, device, packed, kind, shape, spots, 70000)
