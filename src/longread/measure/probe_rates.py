"""What a processor's memory, matrix units and links reach, measured with torch.

Knows torch and clocks. Must not know cards, machines or files (``measure.probe``). Every measurement warms up, repeats,
waits for the device, works on more than the caches hold, and keeps all its samples; the median is the figure.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

REPEATS = 25
LEAST_REPEATS = 3
SLICE = 0.03  # seconds that one sample takes at least on a GPU: clocks and launches then weigh nothing
BLOCK = 128  # DeepSeek's FP8: activations scaled by 1 x 128, weights by 128 x 128
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Measured:
    """One quantity in base units a second (bytes or operations); ``samples`` in the order of measuring."""

    name: str
    unit: str
    samples: tuple[float, ...]

    @property
    def value(self) -> float:
        return median(self.samples)


class NotHereError(Exception):
    """This device or this torch cannot do what was to be measured; the message is torch's."""


@contextmanager
def _refusals() -> Iterator[None]:
    """What torch raises for a type, a shape or a device that it cannot serve (memory too) becomes NotHereError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise NotHereError((str(error).strip() or type(error).__name__).splitlines()[0][:200]) from error


def cuda_rate(
    name: str, unit: str, work: float, run: Callable[[], object], device: torch.device, budget: float
) -> Measured:
    """``work`` units a ``run()``, timed by events on ``device``'s stream. Raises NotHereError where torch refuses."""
    with _refusals(), torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def seconds(times: int) -> float:
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000 / times

        seconds(2)
        times = max(1, min(1000, int(SLICE / max(seconds(1), 1e-6))))
        return Measured(name, unit, _samples(lambda: seconds(times), work, budget))


def cpu_rate(name: str, unit: str, work: float, run: Callable[[], object], budget: float) -> Measured:
    """``work`` units a ``run()``, by the wall clock. Raises NotHereError where torch refuses."""

    def seconds() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    with _refusals():
        seconds()
        return Measured(name, unit, _samples(seconds, work, budget))


def _samples(seconds: Callable[[], float], work: float, budget: float) -> tuple[float, ...]:
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < REPEATS:
        found.append(work / seconds())
        if len(found) >= LEAST_REPEATS and time.perf_counter() - begun > budget:
            break
    return tuple(found)


def cpu_memory(size: int, budget: float) -> list[Measured]:
    """Copy (read + write) and read of ``size`` bytes by all threads, bytes/s."""
    source = torch.randn(size // 4)
    target = torch.empty_like(source)
    return [
        cpu_rate("copy", "B/s", 2 * source.nbytes, lambda: target.copy_(source), budget),
        cpu_rate("read", "B/s", source.nbytes, source.sum, budget),
    ]


def cpu_matrix(dtype: torch.dtype, name: str, most: int, budget: float) -> Measured:
    """A square product, FLOP/s, as large as ``most`` or as a sample takes a tenth of the budget."""
    size = min(most, 256)
    while True:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        begun = time.perf_counter()
        a @ b
        if size * 2 > most or (time.perf_counter() - begun) * 8 > budget / 10:
            break
        size *= 2
    with torch.inference_mode():
        return cpu_rate(f"{name} {size}^3", "FLOP/s", 2.0 * size**3, lambda: a @ b, budget)


def gpu_memory(size: int, device: torch.device, budget: float) -> list[Measured]:
    """Copy by the driver, copy by a kernel (both read + write), and read, bytes/s, of ``size`` bytes each side."""
    with _refusals():
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
    return [
        cuda_rate("copy", "B/s", 2 * source.nbytes, lambda: target.copy_(source), device, budget),
        cuda_rate("copy by a kernel", "B/s", 2 * source.nbytes, lambda: torch.neg(source, out=target), device, budget),
        cuda_rate("read", "B/s", source.nbytes, source.sum, device, budget),
    ]


def gpu_matrix(kind: str, size: int, device: torch.device, budget: float) -> Measured:
    """A product of ``kind`` (a key of ``PRODUCTS``) with ``size``^3 multiply-adds, FLOP/s. Operands are random: zeros
    would spare the power that limits real work. Raises NotHereError."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        with _refusals():
            run = PRODUCTS[kind](*(torch.randn(size, size, device=device) for _ in range(2)))
        return cuda_rate(f"{kind} {size}^3", "FLOP/s", 2.0 * size**3, run, device, budget)
    finally:
        torch.set_float32_matmul_precision(before)


Product = Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]


def _bf16(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    left, right = a.bfloat16(), b.bfloat16().t()
    return lambda: left @ right


def _fp32(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    right = b.t()
    return lambda: a @ right


def _int8(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    left, right = ((x * 30).round().clamp(-127, 127).to(torch.int8) for x in (a, b))
    return lambda: torch._int_mm(left, right.t())


def _fp8_rows(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    left, right = a.to(FP8), b.to(FP8).t()
    scales_a, scales_b = torch.ones(a.shape[0], 1, device=a.device), torch.ones(1, b.shape[0], device=a.device)
    return lambda: torch._scaled_mm(left, right, scales_a, scales_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_tensor(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    left, right, one = a.to(FP8), b.to(FP8).t(), torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_blocks(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    kinds, scaled_mm = torch.nn.functional.ScalingType, torch.nn.functional.scaled_mm
    left, right = a.to(FP8), b.to(FP8).t()
    rows, depth = a.shape
    # cuBLAS wants 1 x 128 scales rows first in memory, and the depth of 128 x 128 scales a multiple of four.
    scales_a = torch.ones(depth // BLOCK, rows, device=a.device).t()
    scales_b = torch.ones(b.shape[0] // BLOCK, -(-depth // BLOCK // 4) * 4, device=a.device).t()
    return lambda: scaled_mm(
        left, right, scales_a, kinds.BlockWise1x128, scales_b, kinds.BlockWise128x128, output_dtype=torch.bfloat16
    )


PRODUCTS: dict[str, Product] = {
    "bf16": _bf16,
    "fp8 row-wise": _fp8_rows,
    "fp8 1x128 by 128x128": _fp8_blocks,
    "fp8 tensor-wise": _fp8_tensor,
    "int8": _int8,
    "tf32": _fp32,
    "fp32": _fp32,
}


def host_link(size: int, device: torch.device, budget: float) -> list[Measured]:
    """Host to device and back through pinned memory, bytes/s, one direction at a time."""
    with _refusals():
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=device)
    return [
        cuda_rate("host to device", "B/s", size, lambda: there.copy_(host, non_blocking=True), device, budget),
        cuda_rate("device to host", "B/s", size, lambda: host.copy_(there, non_blocking=True), device, budget),
    ]


def peers(size: int, count: int, budget: float) -> list[Measured]:
    """Between GPU 0 and each other one, bytes/s, one pair and one direction at a time."""
    found: list[Measured] = []
    for other in range(1, count):
        if not torch.cuda.can_device_access_peer(0, other):
            raise NotHereError(f"GPU 0 cannot reach the memory of GPU {other}: copies go through the host")
        first, second = torch.device("cuda", 0), torch.device("cuda", other)
        found += [_pair(size, first, second, budget), _pair(size, second, first, budget)]
    return found


def _pair(size: int, giver: torch.device, taker: torch.device, budget: float) -> Measured:
    with _refusals():
        source = torch.randn(size // 4, device=giver)
        target = torch.empty(size // 4, device=taker)
    name = f"GPU {giver.index} to {taker.index}"
    return cuda_rate(name, "B/s", source.nbytes, lambda: target.copy_(source, non_blocking=True), giver, budget)
