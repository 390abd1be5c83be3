"""Random weights of a whole model in its stored formats, made on the device when asked for: no file, no dequantising.

Knows the inventory and the formats; what it gives is of use for measuring speed and memory at real sizes, and for
comparing kernels. The answers of such a model are gibberish, but its activations keep near unit variance, so nothing
overflows however many layers there are.
"""

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from longread.kernels.quant.ref import E2M1
from longread.spec.inventory import TensorSpec, inventory
from longread.spec.loaded import is_drafter
from longread.spec.model import ModelSpec
from longread.weights.fixture import drawn, spread
from longread.weights.safetensors import TORCH_DTYPES

FP8_SPREAD = 64.0  # standard deviation of FP8 codes: their limit of 448 is seven of these
FP4_SPREAD = (sum(v * v for v in E2M1) / len(E2M1)) ** 0.5  # of codes that are equally likely


def random_native(spec: ModelSpec, device: str | torch.device, seed: int = 0) -> Callable[[str], Tensor]:
    """The backbone's tensors by native name, scales included, each made anew on ``device`` at each call.

    A tensor depends on ``seed``, its name and the kind of device only. Codes are finite; scales are powers of two where
    the format says so. Raises KeyError for a name that the backbone does not have.
    """
    entries = {t.name: t for t in inventory(spec) if not is_drafter(t.name, spec)}
    generator = torch.Generator(device)

    def tensor(name: str) -> Tensor:
        entry = entries[name]
        generator.manual_seed(zlib.crc32(name.encode()) * 1_000_003 + seed)
        if entry.scale_of is not None:
            return _scales(entry, entries[entry.scale_of], generator)
        if entry.dtype == "int8":
            return torch.randint(-128, 128, entry.shape, dtype=torch.int8, device=device, generator=generator)
        if entry.dtype == "int64":
            order = torch.rand(entry.shape[0], spec.moe.routed, device=device, generator=generator).argsort(dim=1)
            return order[:, : entry.shape[1]].contiguous()
        noise = torch.randn(entry.shape, device=device, generator=generator)
        if entry.dtype == "float8_e4m3":
            return noise.mul_(FP8_SPREAD).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return drawn(name, entry.shape, noise).to(TORCH_DTYPES[entry.dtype])

    return tensor


def _scales(entry: TensorSpec, weight: TensorSpec, generator: torch.Generator) -> Tensor:
    """Scales of two neighbouring powers of two, in the proportion that gives the weight the variance it should have."""
    packed = weight.dtype == "int8"
    wanted = spread(weight.name, weight.shape[-1] * (2 if packed else 1)) / (FP4_SPREAD if packed else FP8_SPREAD)
    lower = torch.tensor(wanted).log2().floor().item()
    above = ((wanted / 2.0**lower) ** 2 - 1) / 3  # share s of the larger: (1 - s) + 4 s = (wanted / lower power)^2
    draw = torch.rand(entry.shape, device=generator.device, generator=generator)
    exponent = (draw < above).to(torch.int32) + int(lower)
    if entry.dtype == "float8_e8m0":
        return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return torch.exp2(exponent.float())
