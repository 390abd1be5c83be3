"""MLA's kernels against the reference in float32 on the same bfloat16 or packed inputs, in poisoned memory.

Bounds: keys and results are bfloat16 in both; queries folded into the latent, probabilities and mixed latents are
rounded in the kernels only (relative 2^-9 each), expanded keys and values too. A result is a mean of values of size
about 1, and logits of size s are off by s * 2^-9.
"""

import math
import os

import poison
import pytest
import torch
from interpreter_casts import exact_casts  # noqa: F401, an autouse fixture
from interpreter_gaps import filled_gaps  # noqa: F401, an autouse fixture
from torch import Tensor

from longread.kernels.fp8.ref import Quantised, dequantise, quantise
from longread.kernels.mla import device_ref as ref
from longread.kernels.norm import device_ref as norm_ref
from longread.kernels.places import Chunk, Rows

triton = pytest.importorskip("triton")
from longread.kernels.mla import triton as fast  # noqa: E402
from longread.kernels.norm import triton as norm  # noqa: E402

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real = pytest.mark.skipif(INTERPRETED, reason="a GPU's size")
Sizes = tuple[int, int, int, int, int]  # heads, nope, rope, v, rank
READER, V2_LITE, V3 = (8, 64, 32, 64, 128), (16, 128, 64, 128, 512), (128, 128, 64, 128, 512)
WIDE = (66, 32, 16, 32, 128)  # two programs of 64 heads, the second nearly empty
EPS, ATOL, RTOL = 1e-6, 0.03, 0.02


def stored(tokens: int, size: Sizes, packed: bool, device: str) -> tuple[Tensor, Tensor]:
    """A poisoned store that holds a sequence of ``tokens``, and its table with zeros behind."""
    _, _, rope, _, rank = size
    pages = -(-tokens // 256) + 3
    table = torch.randperm(pages - 1, device=device).int() + 1
    c, pe = torch.randn(tokens, rank, device=device).bfloat16(), torch.randn(tokens, rope, device=device).bfloat16()
    position = torch.arange(tokens, device=device)
    where = table[position // 256].long(), position % 256
    if packed:
        store = torch.full((pages, 256, ref.packed_bytes(rank, rope)), 0xFF, dtype=torch.uint8, device=device)
        store[where] = ref.pack(c, pe)
    else:
        store = torch.full((pages, 256, rank + rope), float("nan"), dtype=torch.bfloat16, device=device)
        store[where] = torch.cat((c, pe), -1)
    table[-(-tokens // 256) :] = 0
    return store, table


def weights(size: Sizes, device: str) -> tuple[Tensor, float]:
    heads, nope, rope, v, rank = size
    kv_b = torch.randn(heads, nope + v, rank, device=device) / math.sqrt(rank)
    return kv_b.bfloat16(), (nope + rope) ** -0.5


def queries(tokens: int, size: Sizes, device: str) -> Tensor:
    heads, nope, rope, _, _ = size
    return (2 * torch.randn(tokens, heads, nope + rope, device=device)).bfloat16()


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=ATOL, rtol=RTOL)


TINY = [(READER, [0]), (READER, [300, -1, 31, 255, 256]), (WIDE, [70, -1])]
REAL = [
    (V2_LITE, [5000, -1, 0]),
    (V3, [0]),
    (V3, [70000]),
    (V3, [5000, 63, -1, 64, 20000, 255, 256, 1]),
    (V3, list(range(3000, 3160))),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("size, positions", [*TINY, *(pytest.param(*c, marks=real) for c in REAL)])
def test_attend_rows(size: Sizes, positions: list[int], packed: bool, device: str) -> None:
    torch.manual_seed(len(positions) + packed)
    kv_b, scale = weights(size, device)
    longest = max(positions) + 1
    store, table = stored(longest, size, packed, device)
    q = queries(len(positions), size, device)
    where = torch.tensor(positions, dtype=torch.int32, device=device)
    rows = Rows(where, where, table.expand(len(positions), -1), 256 * table.shape[0])
    want = ref.attend_rows(q.float(), store, kv_b.float(), scale, rows)
    with poison.poisoned_memory():
        got = fast.attend_rows(q, store, kv_b, scale, rows)
    close(got, want)
    assert not got[where < 0].any()


@real
@pytest.mark.parametrize("packed", [False, True])
def test_both_kernels_of_the_models_own_sizes(packed: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows_gluon.py does, done by Triton's compiler; one part and many."""
    kv_b, scale = weights(V3, device)
    store, table = stored(3000, V3, packed, device)
    q = queries(3, V3, device)
    where = torch.tensor([2999, -1, 64], dtype=torch.int32, device=device)
    rows = Rows(where, where, table.expand(3, -1), 256 * table.shape[0])
    want = ref.attend_rows(q.float(), store, kv_b.float(), scale, rows)
    for by_hand in (False, True):
        monkeypatch.setitem(fast.BY_HAND, packed, by_hand)
        for splits in (1, 5, 64):
            monkeypatch.setattr(fast, "_splits", lambda programs, blocks, n=splits: n)
            with poison.poisoned_memory():
                got = fast.attend_rows(q, store, kv_b, scale, rows)
            close(got, want)
            assert not got[1].any()


def test_every_number_of_splits(device: str) -> None:
    """More parts than key blocks: some have no keys."""
    kv_b, scale = weights(READER, device)
    store, table = stored(150, READER, False, device)
    q = queries(2, READER, device)
    where = torch.tensor([149, 20], dtype=torch.int32, device=device)
    rows = Rows(where, where, table.expand(2, -1), 1024)
    want = ref.attend_rows(q.float(), store, kv_b.float(), scale, rows)
    for splits in (1, 2, 3, 24):
        with pytest.MonkeyPatch.context() as patch, poison.poisoned_memory():
            patch.setattr(fast, "_splits", lambda programs, blocks, n=splits: n)
            close(fast.attend_rows(q, store, kv_b, scale, rows), want)


def chunk(start: int, length: int, padded: int, table: Tensor) -> Chunk:
    positions = torch.full((padded,), -1, dtype=torch.int32)
    positions[:length] = torch.arange(start, start + length)
    meta = torch.tensor((start, length, 0, 0), dtype=torch.int32)
    return Chunk(meta.to(table.device), positions.to(table.device), table, 256 * table.shape[0])


SPANS = [(0, 5, 8), (0, 300, 300), (256, 70, 80), (300, 33, 40), (1000, 20, 20)]
REAL_SPANS = [(0, 8192, 8192), (8192, 1000, 1024), (40000, 2048, 2048), (5001, 700, 768)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "size, span",
    [*((READER, s) for s in SPANS), *(pytest.param(V3, s, marks=real) for s in REAL_SPANS)],
)
def test_attend_chunk(
    size: Sizes, span: tuple[int, int, int], packed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, length, padded = span
    torch.manual_seed(start + packed)
    if size is READER:
        monkeypatch.setattr(fast, "KEYS", 512)
    kv_b, scale = weights(size, device)
    store, table = stored(start + length, size, packed, device)
    q, where = queries(padded, size, device), chunk(start, length, padded, table)
    got = fast.attend_chunk(q, store, kv_b, scale, where, start, length)
    few = [0, 1, size[0] - 1]
    want = ref.attend_chunk(q[:, few].float(), store, kv_b[few].float(), scale, where, start, length)
    close(got[:length, few], want[:length])
    assert got.isfinite().all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("size, q_lora", [(READER, 128), (READER, 0), pytest.param(V3, 1536, marks=real)])
def test_latents(size: Sizes, q_lora: int, tokens: int, quantised: bool, packed: bool, device: str) -> None:
    torch.manual_seed(tokens)
    _, _, rope, _, rank = size
    joined = torch.randn(tokens, q_lora + rank + rope + 8, device=device).bfloat16()
    q, kv = (joined[:, :q_lora] if q_lora else None), joined[:, q_lora : q_lora + rank + rope]
    q_gain = torch.rand(q_lora, device=device).bfloat16() + 0.5 if q_lora else None
    gain, angle = torch.rand(rank, device=device).bfloat16() + 0.5, torch.rand(tokens, rope // 2, device=device) * 7
    positions = torch.arange(250, 250 + tokens, dtype=torch.int32, device=device)
    positions[tokens // 2 + 1 :: 3] = -1
    table = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    width = ref.packed_bytes(rank, rope) if packed else rank + rope
    kind, fill = (torch.uint8, 0xFF) if packed else (torch.bfloat16, float("nan"))
    stores = [torch.full((4, 256, width), fill, dtype=kind, device=device) for _ in range(2)]
    for where in (
        Rows(positions, positions, table.expand(tokens, -1), 768),
        Chunk(positions[:1], positions, table, 768),
    ):
        args = (q, kv, q_gain, gain, EPS, angle.cos(), angle.sin(), quantised and q_lora > 0)
        with poison.poisoned_memory():
            got = fast.latents(*args, stores[0], where)
        want = ref.latents(*args, stores[1], where)
    written = (stores[1].view(torch.uint8) != 0xFF).any(-1) if packed else ~stores[1].isnan().any(-1)
    assert written.sum() == (positions >= 0).sum()
    plain = [ref.unpack(s, rank, rope, torch.float32) if packed else s.float() for s in stores]
    torch.testing.assert_close(plain[0][written], plain[1][written], rtol=2**-3 if packed else 2**-7, atol=1e-2)
    assert torch.equal(stores[0][~written].nan_to_num(7), stores[1][~written].nan_to_num(7))
    if q is None:
        assert got is None
    elif quantised:
        assert isinstance(got, Quantised) and isinstance(want, Quantised)
        torch.testing.assert_close(dequantise(got), dequantise(want), rtol=2**-3, atol=1e-2)  # a code may flip
        assert got.scales.stride(0) == 1
    else:
        assert isinstance(got, Tensor) and isinstance(want, Tensor)
        close(got, want)


@pytest.mark.parametrize("size", [READER, pytest.param(V3, marks=real)])
def test_rotate(size: Sizes, device: str) -> None:
    q = queries(3, size, device)
    angle = torch.rand(3, size[2] // 2, device=device) * 7
    want = q.float()
    ref.rotate(want, angle.cos(), angle.sin())
    fast.rotate(q, angle.cos(), angle.sin())
    torch.testing.assert_close(q.float(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("tokens, d", [(1, 256), (5, 384), pytest.param(300, 7168, marks=real)])
@pytest.mark.parametrize("add", [False, True])
def test_add_norm(tokens: int, d: int, add: bool, device: str) -> None:
    torch.manual_seed(tokens)
    x, y = (torch.randn(tokens, d, device=device).bfloat16() for _ in range(2))
    gain = torch.rand(d, device=device).bfloat16()
    theirs = x.clone()
    want = norm_ref.add_norm(theirs, y if add else None, gain, EPS, True)
    with poison.poisoned_memory():
        got = norm.add_norm(x, y if add else None, gain, EPS, True)
    assert torch.equal(x, theirs)
    torch.testing.assert_close(got.u.float(), want.u.float(), rtol=2**-7, atol=1e-6)
    exact = quantise(got.u)
    assert got.q is not None and torch.equal(got.q.scales, exact.scales)
    assert torch.equal(got.q.values.view(torch.uint8), exact.values.view(torch.uint8))
