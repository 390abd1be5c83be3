"""Products with FP8 or plain weights and the steps between them, against the reference in float32 on the same inputs.

Bounds: what is stored in FP8 may differ by one step (1/8 of a value, where the two sum in another order and fall on
either side of a middle), bfloat16 by one step (1/128), and sums of K products by float32's rounding.
"""

import os

import pytest
import torch
from torch import Tensor

from longread.kernels.fp8 import ref
from longread.kernels.fp8.ref import Fp8Weight, Quantised

triton = pytest.importorskip("triton")
from longread.kernels import counters, overlap  # noqa: E402
from longread.kernels.fp8 import rows_triton as products  # noqa: E402
from longread.kernels.fp8 import triton as kernels  # noqa: E402

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
real = pytest.mark.skipif(INTERPRETED, reason="real sizes take the interpreter hours")
E4M3, BF16 = 0.126, 0.008


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        for config in products.VECTOR.values():
            monkeypatch.setitem(config, "fill", 8)
        for config in (products.ROWS, products.FEW_PARTS):
            monkeypatch.setitem(config, "fill", 8)


def made(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers whose channels have very different sizes, a row of zeros among them."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=noise) * torch.exp2(torch.randint(-6, 6, (shape[-1],), generator=noise).float())
    x[shape[0] // 2, ..., : shape[-1] // 2] = 0
    return x.to(dtype).to(device)


def weight(device: str, *shape: int, seed: int = 1) -> Fp8Weight:
    noise = torch.Generator().manual_seed(seed)
    values = (torch.randn(*shape, generator=noise) * 64).to(torch.float8_e4m3fn)
    blocks = *shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)
    return Fp8Weight(values.to(device), torch.exp2(torch.randint(-9, -5, blocks, generator=noise).float()).to(device))


def near(got: Tensor, want: Tensor, relative: float, of: float = 0.0, besides: Tensor | float = 0.0) -> None:
    """Each number within ``relative`` of what is wanted, ``of`` times the largest of its row, and ``besides``."""
    got, want = got.float(), want.float()
    assert got.shape == want.shape and bool(got.isfinite().all())
    room = relative * want.abs() + of * want.abs().amax(-1, keepdim=True) + besides + 1e-7
    excess = (got - want).abs() - room
    assert bool((excess <= 0).all()), f"{float(excess.max())} too far"


def cut_off(x: Quantised, w: Fp8Weight) -> Tensor:
    """What Hopper may lose: the products of a block are cut to 14 bits of the largest, 2^-10 of all their sizes."""
    sizes = (
        Quantised(x.values.float().abs().to(ref.FP8), x.scales),
        Fp8Weight(w.values.float().abs().to(ref.FP8), w.scales),
    )
    linear = ref.linear if w.values.dim() == 2 else ref.grouped_linear
    return linear(*sizes).float() * 2**-10


def same_rows(got: Quantised | Tensor, want: Quantised | Tensor, exact: bool = False) -> None:
    """Quantised rows: scales equal (or, where sums may differ, a power of two apart), values within a step."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor) and got.dtype == want.dtype
        near(got, want, BF16 if want.dtype == torch.bfloat16 else 1e-5)
        return
    assert isinstance(got, Quantised) and got.values.dtype == torch.float8_e4m3fn
    assert got.scales.shape == want.scales.shape and got.scales.stride(0) == 1
    if exact:
        assert torch.equal(got.scales, want.scales)
        assert torch.equal(got.values.float(), want.values.float())
    assert bool(((got.scales / want.scales).log2().abs() <= 1).all())
    # The finest step of a block is 2^-9 of its scale, whose largest value is at least 224.
    near(ref.dequantise(got), ref.dequantise(want), E4M3, 2e-5)


@pytest.mark.parametrize(("tokens", "width"), [(1, 128), (3, 256), (17, 384), (130, 1024), (2, 100), (9, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantising_gives_the_same_values(device: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x = made(device, tokens, width + 8, seed=width, dtype=dtype)[:, :width]  # rows are strided
    got = kernels.quantise(x)
    assert got.scales.stride() == (1, tokens)
    same_rows(got, ref.quantise(x), exact=True)


def test_a_scale_reaches_its_largest_value_and_no_further(device: str) -> None:
    """At 448 times a power of two, and one float32 step above and below it."""
    peaks = torch.tensor([448.0, 448.0 * 2**-20, 1e-4, 0.0, 3e38, 447.99997, 448.00003], device=device)
    x = torch.zeros(len(peaks), 128, device=device)
    x[:, 5] = peaks
    got = kernels.quantise(x)
    assert torch.equal(got.scales, ref.quantise(x).scales)
    assert torch.equal(got.scales[[0, 5, 6], 0], torch.tensor([1.0, 1.0, 2.0], device=device))
    assert bool((got.values.float().abs() <= 448).all())


@pytest.mark.parametrize(
    ("tokens", "width", "limit"), [(1, 128, 10.0), (3, 256, None), (17, 192, 0.5), (130, 512, 10.0)]
)
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gated(device: str, tokens: int, width: int, limit: float | None, quantised: bool, dtype: torch.dtype) -> None:
    h = made(device, tokens, 2 * width, seed=tokens, dtype=dtype).clamp(-80, 80)  # further, the interpreter warns
    same_rows(kernels.gated(h, limit, quantised), ref.gated(h, limit, quantised))


@pytest.mark.parametrize(
    ("tokens", "rank", "width", "rope"), [(1, 128, 128, 32), (3, 192, 128, 32), (17, 1024, 512, 64), (5, 96, 128, 64)]
)
@pytest.mark.parametrize(("quantised", "packed"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents(
    device: str, tokens: int, rank: int, width: int, rope: int, quantised: bool, packed: bool, dtype: torch.dtype
) -> None:
    x = made(device, tokens, rank + width + 64, seed=rank, dtype=dtype)[:, : rank + width]
    gains = made(device, 1, rank, seed=2)[0], made(device, 1, width, seed=3)[0]
    angles = torch.randn(tokens, rope // 2, generator=torch.Generator().manual_seed(4)).to(device)
    arguments = (x, *gains, 1e-6, angles.cos(), angles.sin(), quantised, packed)
    (c_q, kv), (c_want, kv_want) = kernels.latents(*arguments), ref.latents(*arguments)
    same_rows(c_q, c_want)
    assert kv.dtype == dtype
    near(kv, kv_want, E4M3 if packed else BF16 if dtype == torch.bfloat16 else 1e-5, 2e-5)
    if packed:  # what is kept comes back from a packed row as it is
        assert torch.equal(kv, ref.roundtrip_latent(kv, rope))


@pytest.mark.parametrize(("tokens", "heads", "dim", "rope"), [(1, 8, 128, 32), (3, 2, 512, 64), (17, 3, 64, 16)])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_turning_back(
    device: str, tokens: int, heads: int, dim: int, rope: int, quantised: bool, dtype: torch.dtype
) -> None:
    o = made(device, tokens, heads, dim, seed=heads, dtype=dtype)
    angles = torch.randn(tokens, rope // 2, generator=torch.Generator().manual_seed(5)).to(device)
    arguments = (o, angles.cos(), angles.sin(), quantised)
    same_rows(kernels.turn_back(*arguments), ref.turn_back(*arguments))


SIZES = [(1, 256, 256), (2, 136, 384), (3, 128, 512), (17, 200, 256), (1, 512, 1024), (2, 64, 1040), (70, 128, 256)]


@pytest.mark.parametrize(("tokens", "height", "width"), SIZES)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_product_in_fp8(device: str, tokens: int, height: int, width: int, dtype: torch.dtype | None) -> None:
    x, w = kernels.quantise(made(device, tokens, width, seed=height)), weight(device, height, width)
    got, want = kernels.linear(x, w, dtype), ref.linear(x, w, torch.float32)
    assert got.dtype == (dtype or torch.bfloat16)
    near(got, want, 1e-5 if dtype else BF16, 0, cut_off(x, w))
    assert torch.equal(got, kernels.linear(x, w, dtype))  # the parts are added in one order


@pytest.mark.parametrize(("tokens", "height", "width"), SIZES)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_product_in_bfloat16(device: str, tokens: int, height: int, width: int, dtype: torch.dtype | None) -> None:
    x = made(device, tokens, width + 16, seed=height)[:, :width]
    w = made(device, height, width, seed=width)
    got, want = kernels.linear(x, w, dtype), ref.linear(x.float(), w.float())
    assert got.dtype == (dtype or torch.bfloat16)
    near(got, want, 1e-5 if dtype else BF16, 1e-4)


@pytest.mark.parametrize(("kind", "tokens", "groups"), [("by_vector", 1, 3), ("by_rows", 1, 3), ("by_rows", 2, 2)])
@pytest.mark.parametrize("fp8", [False, True])
def test_both_kernels_take_a_row_or_two(device: str, kind: str, fp8: bool, tokens: int, groups: int) -> None:
    """Into a result that is poisoned and wider than they may write; K in several steps and parts."""
    height, width = 72, 640
    rows = made(device, tokens, groups * width)
    w: ref.Weight = weight(device, groups, height, width) if fp8 else made(device, groups, height, width)
    x = ref.quantise(rows) if fp8 else rows
    out = torch.full((tokens, groups * height + 8), float("nan"), device=device, dtype=torch.float32)
    getattr(products, kind)(x, w, out[:, : groups * height])
    assert bool(out[:, groups * height :].isnan().all())
    want = ref.grouped_linear(x, w) if fp8 else ref.grouped_linear(rows.float(), ref.widened(w))
    near(out[:, : groups * height], want, BF16, 2e-4)


@real  # the interpreter does not know Gluon
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("height", "width", "blocks", "warps"), [(80, 640, 4, 4), (264, 1024, 8, 4), (128, 4096, 16, 8), (64, 1024, 8, 8)]
)
@pytest.mark.parametrize("early", [1, 2])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 33])
def test_products_fed_from_registers(
    device: str, tokens: int, height: int, width: int, blocks: int, warps: int, early: int, fp8: bool
) -> None:
    """K in uneven steps, a last tile that is not whole; a row of NaN stays alone; bits repeat."""
    rows = made(device, tokens, 2 * width)
    w: ref.Weight = weight(device, 2, height, width) if fp8 else made(device, 2, height, width)
    x = ref.quantise(rows) if fp8 else rows
    config = {"blocks": blocks, "warps": warps, "early": early, "registers": 255}
    out = torch.full((tokens, 2 * height + 16), float("nan"), device=device, dtype=torch.float32)
    products.by_hand(x, w, out[:, : 2 * height], config)
    assert bool(out[:, 2 * height :].isnan().all())
    want = ref.grouped_linear(x, w) if fp8 else ref.grouped_linear(rows.float(), ref.widened(w))
    near(out[:, : 2 * height], want.float(), BF16, 2e-4)
    again = torch.empty_like(out)
    products.by_hand(x, w, again[:, : 2 * height], config)
    assert torch.equal(again[:, : 2 * height], out[:, : 2 * height])
    if not fp8 and tokens > 1:
        rows[0] = float("nan")
        products.by_hand(rows, w, again[:, : 2 * height], config)
        assert torch.equal(again[1:, : 2 * height], out[1:, : 2 * height])


@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_grouped_product(device: str, tokens: int, fp8: bool) -> None:
    rows = made(device, tokens, 4 * 256)
    w: ref.Weight = weight(device, 4, 128, 256) if fp8 else made(device, 4, 128, 256)
    x = ref.quantise(rows) if fp8 else rows
    got = kernels.grouped_linear(x, w)
    assert got.dtype == torch.bfloat16
    near(got, ref.grouped_linear(x, w).float(), 2 * BF16, 4e-4)


def test_float32_stays_float32(device: str) -> None:
    x, w = made(device, 3, 64, dtype=torch.float32), made(device, 48, 64, seed=1, dtype=torch.float32)
    assert torch.equal(kernels.linear(x, w), ref.linear(x, w))


def test_counters_are_left_as_they_were(device: str) -> None:
    x, w = kernels.quantise(made(device, 4, 1024)), weight(device, 64, 1024)
    first = kernels.linear(x, w)
    assert all(not bool(row.any()) for row, _ in counters._held.values())
    assert torch.equal(first, kernels.linear(x, w))


def test_no_rows(device: str) -> None:
    x = made(device, 1, 256)[:0]
    assert kernels.linear(kernels.quantise(x), weight(device, 128, 256)).shape == (0, 128)
    assert kernels.gated(x, 1.0, False).shape == (0, 128)  # type: ignore[union-attr]


REAL = [(1536, 4096), (40960, 1024), (4096, 8192), (4096, 4096), (4096, 2048), (576, 7168)]


@real
@pytest.mark.parametrize(("height", "width"), REAL)
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 33, 64, 80, 130, 4096])
def test_real_sizes_in_fp8(device: str, tokens: int, height: int, width: int) -> None:
    x, w = kernels.quantise(made(device, tokens, width, seed=tokens)), weight(device, height, width)
    near(kernels.linear(x, w), ref.linear(x, w, torch.float32), BF16, 0, cut_off(x, w))
    same_rows(x, ref.quantise(made(device, tokens, width, seed=tokens)), exact=True)


@real
@pytest.mark.parametrize("tokens", [1, 4, 64, 4096])
def test_real_output_groups(device: str, tokens: int) -> None:
    x, w = kernels.quantise(made(device, tokens, 8 * 4096, seed=tokens)), weight(device, 8, 1024, 4096)
    near(kernels.grouped_linear(x, w), ref.grouped_linear(x, w).float(), 2 * BF16, 0, cut_off(x, w))


@real
@pytest.mark.parametrize(("height", "width"), [(129280, 4096), (256, 4096), (2368, 4096)])
@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 80])
def test_real_sizes_in_bfloat16(device: str, tokens: int, height: int, width: int) -> None:
    x, w = made(device, tokens, width, seed=tokens), made(device, height, width, seed=6)
    near(kernels.linear(x, w, torch.float32), ref.linear(x.float(), w.float()), 1e-5, 1e-4)


@real
@pytest.mark.parametrize("tokens", [1, 100, 8192])
def test_real_sizes_between_products(device: str, tokens: int) -> None:
    o = made(device, tokens, 64, 512, seed=tokens)
    angles = torch.randn(tokens, 32, device=device)
    same_rows(
        kernels.turn_back(o, angles.cos(), angles.sin(), True), ref.turn_back(o, angles.cos(), angles.sin(), True)
    )
    h = made(device, tokens, 4096, seed=tokens)
    same_rows(kernels.gated(h, 10.0, True), ref.gated(h, 10.0, True))
    x, gains = made(device, tokens, 1536), (made(device, 1, 1024)[0], made(device, 1, 512)[0])
    arguments = (x, *gains, 1e-6, angles.cos(), angles.sin(), True, True)
    (c_q, kv), (c_want, kv_want) = kernels.latents(*arguments), ref.latents(*arguments)
    same_rows(c_q, c_want)
    near(kv, kv_want, E4M3, 2e-5)


@real
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_a_chain_of_kernels_replays_from_a_graph(
    device: str, tokens: int, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads what the one before wrote; one that read too early would see what was there before."""
    w13, w2, shared = weight(device, 4096, 4096), weight(device, 4096, 2048, seed=2), weight(device, 8, 512, 512)
    x = made(device, tokens, 4096)

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = kernels.linear(kernels.gated(kernels.linear(kernels.quantise(y), w13), 10.0, True), w2)
            y = kernels.grouped_linear(kernels.quantise(y), shared)
        return y

    want = chain()
    monkeypatch.setattr(overlap, "MOST", overlap.MOST if on else 0)
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
