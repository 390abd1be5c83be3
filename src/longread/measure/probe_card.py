"""A card as the planner knows it, from what was measured and from what the table and the driver say of it.

Knows torch's and the driver's view of a device. Must not measure.
"""

import subprocess
from collections.abc import Sequence
from dataclasses import replace

import torch

from longread.measure.probe_rates import Measured
from longread.measure.result import this_machine
from longread.plan.cards import find_card
from longread.plan.machine import last_level_cache, probe_machine
from longread.spec.errors import LongreadError
from longread.spec.hardware import Architecture, Card, Figure

FASTEST_PCIE = 64e9  # bytes/s one direction of Gen5 x16: what is faster between two GPUs is no PCIe
ARCHITECTURES: dict[int, Architecture] = {8: "ampere", 9: "hopper", 10: "blackwell", 11: "blackwell", 12: "blackwell"}
RATES = ("fp8", "int8", "bf16", "tf32", "fp32")
MEMORY = ("copy", "read")


class ProbeError(LongreadError):
    """The device cannot be described."""


def figure(measured: Sequence[Measured], name: str, source: str) -> Figure | None:
    """The best of all measurements called ``name``, or ``name`` and how: a ceiling is what the best way reaches."""
    found = [one for one in measured if one.name == name or one.name.startswith(f"{name} ")]
    if not found:
        return None
    best, *others = sorted(found, key=lambda one: one.value, reverse=True)
    beside = "".join(f"; {shown(one)}" for one in others)
    return Figure(best.value, "measured", f"{source}: {best.name}{beside}")


def shown(one: Measured) -> str:
    """ "bf16 8192^3: 756 TFLOP/s"."""
    steps = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1.0, ""))
    factor, prefix = next(step for step in steps if one.value >= step[0] or step[0] == 1.0)
    return f"{one.name}: {one.value / factor:,.4g} {prefix}{one.unit}"


def bandwidth(measured: Sequence[Measured], source: str) -> Figure:
    """Raises ProbeError where no memory rate was measured: nothing can be planned without one."""
    found = [one for name in MEMORY if (one := figure(measured, name, source))]
    if not found:
        raise ProbeError("the memory could not be measured; is something else using the device?")
    return max(found, key=lambda one: one.value)


def flops(measured: Sequence[Measured], source: str) -> dict[str, Figure]:
    """The best product of each type; of FP8 whatever the scales, each named in the source."""
    return {kind: one for kind in RATES if (one := figure(measured, kind, source))}


def cpu_card(measured: Sequence[Measured], source: str) -> Card:
    """The processor that this runs on, all cores as one. Raises ProbeError."""
    machine, memory, rates = probe_machine(), bandwidth(measured, source), flops(measured, source)
    if not rates:
        raise ProbeError("no matrix product could be measured on this CPU")
    total = Figure(machine.total_bytes, "measured", f"{source}: {machine.limited_by}")
    return Card(
        name=" ".join(this_machine(()).cpu.split())[:64] or "cpu",
        aliases=(),
        architecture="cpu",
        compute_capability=None,
        sms=None,
        memory=total,
        usable=replace(total, value=machine.available_bytes, source=f"{source}: available then"),
        bandwidth=memory,
        flops=rates,
        l2=Figure(cache, "measured", f"{source}: last-level cache") if (cache := last_level_cache()) else None,
        nvlink=None,
        pcie=None,
        power=None,
        measured_bandwidth=memory,
        measured_flops=rates,
    )


def gpu_card(device: torch.device, measured: Sequence[Measured], source: str, notes: list[str]) -> Card:
    """A known card with what was measured on it; of an unknown one, what was measured stands for its peaks.

    Raises ProbeError. Adds to ``notes`` what the reader must know.
    """
    properties = torch.cuda.get_device_properties(device)
    known = find_card(properties.name)
    memory, rates = bandwidth(measured, source), flops(measured, source)
    if known is None:
        notes.append(f"{properties.name} is not in the table of cards: measured rates stand for its peaks")
        if not rates:
            raise ProbeError(f"no matrix product could be measured on {properties.name}, and its peaks are not known")
    usable = Figure(float(torch.cuda.mem_get_info(device)[1]), "measured", f"{source}: CUDA's total")
    total, cap = _driver_view(str(getattr(properties, "uuid", "")))
    read = f"{source}: read from the card"
    return Card(
        name=known.name if known else " ".join(properties.name.split())[:64],
        aliases=(),
        architecture=_architecture(properties.major, properties.minor, properties.name),
        compute_capability=(properties.major, properties.minor),
        sms=Figure(float(properties.multi_processor_count), "measured", read),
        memory=Figure(total, "measured", f"{source}: nvidia-smi") if total and total >= usable.value else usable,
        usable=usable,
        bandwidth=known.bandwidth if known else memory,
        flops=known.flops if known else rates,
        l2=Figure(float(properties.L2_cache_size), "measured", read),
        nvlink=_nvlink(known, measured, source),
        pcie=figure(measured, "host to device", source) or (known.pcie if known else None),
        power=Figure(cap, "measured", f"{source}: enforced limit") if cap else (known.power if known else None),
        measured_bandwidth=memory,
        measured_flops=rates,
    )


def _architecture(major: int, minor: int, name: str) -> Architecture:
    if (major, minor) == (8, 9):
        return "ada"
    if major not in ARCHITECTURES:
        raise ProbeError(f"{name} has compute capability {major}.{minor}; the planner knows 8.0 (Ampere) and later")
    return ARCHITECTURES[major]


def _nvlink(known: Card | None, measured: Sequence[Measured], source: str) -> Figure | None:
    """The slowest pair, one direction. Without a second GPU: what the table says."""
    pairs = [one for one in measured if one.name.startswith("GPU ")]
    if not pairs:
        return known.nvlink if known else None
    slowest = min(pairs, key=lambda one: one.value)
    if known is None and slowest.value <= FASTEST_PCIE:
        return None
    if known and known.nvlink is None:
        return None  # peers over PCIe: the samples are in the evidence
    return Figure(
        slowest.value, "measured", f"{source}: one direction, {slowest.name}, the slowest of {len(pairs)} pairs"
    )


def _driver_view(uuid: str) -> tuple[float | None, float | None]:
    """Bytes that nvidia-smi shows, and the enforced power limit in watts; None where it does not say."""
    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,enforced.power.limit", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    rows = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    row = next((row for row in rows if len(row) == 3 and uuid and row[0].removeprefix("GPU-") == uuid), None)
    if row is None:
        return None, None
    memory, cap = (float(cell) if cell.replace(".", "", 1).isdecimal() else None for cell in row[1:])
    return memory * 2**20 if memory else None, cap
