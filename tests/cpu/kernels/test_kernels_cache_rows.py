"""Packed cache rows: their sizes and bytes, what rounding costs, and that packing again changes no value."""

import math

import pytest
import torch

from longread.kernels.cache_rows import ref

SHAPES = [(512, 64), (128, 32), (64, 32)]


def random_rows(d: int, n: int = 37) -> torch.Tensor:
    """Rows over many magnitudes, a row of zeros among them."""
    x = torch.randn(n, d) * torch.logspace(-8, 4, n)[:, None]
    x[3] = 0
    return x


def test_sizes_are_those_of_the_published_caches() -> None:
    assert [ref.latent_bytes(*shape) for shape in SHAPES[:2]] == [584, 168]
    assert ref.index_bytes(128) == 132


@pytest.mark.parametrize(("d", "rope"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_is_close_and_stable(d: int, rope: int, dtype: torch.dtype) -> None:
    x = random_rows(d).to(dtype)
    packed = ref.pack_latent(x, rope)
    back = ref.unpack_latent(packed, d, rope, dtype)
    assert packed.dtype == torch.uint8 and packed.shape == (x.shape[0], ref.latent_bytes(d, rope))
    assert torch.equal(back[:, d - rope :], x[:, d - rope :].bfloat16().to(dtype))
    # E4M3 keeps 3 bits: half a step is 1/16 of a value, and below the normals 2^-10 of a block's scale (<= amax / 224).
    for begin in range(0, d - rope, ref.BLOCK):
        block = slice(begin, min(begin + ref.BLOCK, d - rope))
        was, got = x[:, block].float(), back[:, block].float()
        scale = was.abs().amax(-1, keepdim=True).clamp_min(ref.FLOOR) / 224
        assert ((got - was).abs() <= was.abs() / 16 + scale * 2**-10).all()
    assert torch.equal(ref.roundtrip_latent(x, rope), back)
    assert torch.equal(ref.roundtrip_latent(back, rope), back)


def test_latent_bytes_lie_as_documented() -> None:
    x = torch.zeros(2, 3, 512)
    x[1, 2, 64] = 448 * 2.0**5  # the largest value a scale of 2^5 holds
    x[1, 2, 65] = 2.0**5
    x[1, 2, 448] = -1.5
    row = ref.pack_latent(x, 64)[1, 2]
    assert row[64] == 0x7E and row[65] == 0x38  # 448 and 1 in E4M3
    assert row[448:450].tolist() == [0xC0, 0xBF]  # -1.5 in bfloat16, little-endian
    floor = math.ceil(math.log2(ref.FLOOR / 448)) + 127
    assert row[576:].tolist() == [floor, 5 + 127, *[floor] * 5, 0]
    x[1, 2, 64] *= 1 + 2**-20
    assert ref.pack_latent(x, 64)[1, 2, 577] == 6 + 127


def test_exponents_are_the_ceiling_of_the_logarithm() -> None:
    amax = torch.cat([torch.rand(1000) * torch.logspace(-3, 5, 1000), 448 * 2.0 ** torch.arange(-10, 10)])
    expected = [math.ceil(math.log2(max(a, ref.FLOOR) / 448)) + 127 for a in amax.double().tolist()]
    assert ref.exponents(amax).tolist() == expected


@pytest.mark.parametrize("di", [32, 128])
def test_index_key_is_close_and_stable(di: int) -> None:
    x = random_rows(di)
    packed = ref.pack_index(x)
    values, scale = ref.unpack_index(packed)
    assert packed.shape == (x.shape[0], ref.index_bytes(di)) and values.dtype == torch.float8_e4m3fn
    back = values.float() * scale[:, None]
    assert ((back - x).abs() <= x.abs() / 16 + scale[:, None] * 2**-10).all()
    again, scale_again = ref.unpack_index(ref.pack_index(back))
    assert torch.equal(again.float() * scale_again[:, None], back)
    assert torch.equal(torch.log2(scale).round(), torch.log2(scale))
