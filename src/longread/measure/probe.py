"""``longread probe``: measures this machine and describes it as hardware that the planner reads.

Knows what to measure, in which order, and for how long. Must not know how a rate is measured (``measure.probe_rates``,
``measure.probe_disk``), how a card is put together (``measure.probe_card``) or written (``plan.hardware_file``).
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from longread.measure import probe_rates as rates
from longread.measure.probe_card import ProbeError, cpu_card, figure, gpu_card
from longread.measure.probe_disk import measure_disk
from longread.measure.probe_rates import Measured, NotHereError
from longread.measure.result import command_line, this_commit, this_machine
from longread.plan.machine import last_level_cache, probe_machine
from longread.spec.errors import ConfigError
from longread.spec.hardware import Figure, Hardware

Say = Callable[[int, int, str], None]
LEAST_OF_CACHE = 4  # times the cache that a working set is at least, or the cache would be measured
BUSY_SECONDS = 0.5
BUSY_PERCENT = 20.0
BUSY_MEMORY = 0.05  # of the whole: more than a context of our own


@dataclass(frozen=True, slots=True)
class Effort:
    """Bytes, matrix edges and seconds a measurement: what makes a probe long or short."""

    memory: int = 2**31
    host: int = 2**30
    matrix: int = 8192
    cpu_memory: int = 2**28
    cpu_matrix: int = 4096
    disk: int = 2**29
    seconds: float = 1.5


@dataclass(frozen=True, slots=True)
class Probed:
    """``evidence`` is what the file's [probe] holds: when, where, with what, all samples, and what could not be had."""

    hardware: Hardware
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]
    evidence: dict[str, object]


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """``wanted``: auto, cpu or cuda; and why it is the CPU where a GPU might be expected, "" otherwise.

    Raises ConfigError, saying why, where CUDA is asked for and there is none.
    """
    if wanted != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", 0), ""
    if torch.version.cuda is None:
        why = f"this torch ({torch.__version__}) was built without CUDA; install the build for your CUDA version"
    else:
        why = (
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU: no driver, too old a driver, or none "
            "visible (CUDA_VISIBLE_DEVICES); `nvidia-smi` shows what the driver sees"
        )
    if wanted == "cuda":
        raise ConfigError(why)
    return torch.device("cpu"), f"the CPU was measured: {why}" if wanted == "auto" else ""


def probe(device: torch.device, disk: Path | None, effort: Effort, say: Say) -> Probed:
    """Measure; ``say(done, total, what)`` before each step. What this machine cannot do becomes a note.

    Raises ProbeError where nothing can be planned with what was found.
    """
    gpu = device.type == "cuda"
    notes = _busy(device)
    steps = _gpu_steps(device, effort) if gpu else _cpu_steps(effort)
    measured: dict[str, Measured] = {}
    total = len(steps) + (disk is not None)
    for number, (what, run) in enumerate(steps):
        say(number, total, what)
        try:
            measured |= {one.name: one for one in run()}
        except NotHereError as error:
            notes.append(f"{what}: not here: {error}")
        if gpu:
            torch.cuda.empty_cache()
    if disk is not None:
        say(len(steps), total, f"disk of {disk}")
        measured |= _disk(disk, effort, notes)
    say(total, total, "done")
    source = f"longread probe, torch {torch.__version__}, {datetime.date.today().isoformat()}"
    found = list(measured.values())
    card = gpu_card(device, found, source, notes) if gpu else cpu_card(found, source)
    machine = probe_machine()
    hardware = Hardware(
        card,
        _equal_gpus(notes) if gpu else 1,
        host_memory=Figure(machine.total_bytes, "measured", f"{source}: {machine.limited_by}"),
        disk_read=figure(found, "disk read", source),
        disk_write=figure(found, "disk write", source),
    )
    return Probed(hardware, tuple(found), tuple(notes), _evidence(found, notes, device))


Step = tuple[str, Callable[[], Sequence[Measured]]]


def _cpu_steps(effort: Effort) -> list[Step]:
    def matrix(dtype: torch.dtype, name: str) -> Callable[[], Sequence[Measured]]:
        return lambda: [rates.cpu_matrix(dtype, name, effort.cpu_matrix, effort.seconds)]

    beyond_cache = max(effort.cpu_memory, LEAST_OF_CACHE * (last_level_cache() or 0))
    memory = min(beyond_cache, probe_machine().available_bytes // 4)
    return [
        ("memory", lambda: rates.cpu_memory(memory, effort.seconds)),
        ("matrix product, fp32", matrix(torch.float32, "fp32")),
        ("matrix product, bf16", matrix(torch.bfloat16, "bf16")),
    ]


def _gpu_steps(device: torch.device, effort: Effort) -> list[Step]:
    seconds, count = effort.seconds, torch.cuda.device_count()
    free, _ = torch.cuda.mem_get_info(device)
    memory, host = min(effort.memory, free // 8), min(effort.host, probe_machine().available_bytes // 8, free // 8)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    if memory < LEAST_OF_CACHE * cache:
        raise ProbeError(
            f"only {free / 2**30:.1f} GiB of the GPU are free: too little to measure past its {cache / 2**20:.0f} MiB "
            "cache; `nvidia-smi` shows who holds the rest"
        )

    def matrix(kind: str) -> Callable[[], Sequence[Measured]]:
        return lambda: [rates.gpu_matrix(kind, effort.matrix, device, seconds)]

    fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    kinds = [kind for kind in rates.PRODUCTS if fp8 or not kind.startswith("fp8")]
    steps: list[Step] = [("memory", lambda: rates.gpu_memory(memory, device, seconds))]
    steps += [(f"matrix product, {kind}", matrix(kind)) for kind in kinds]
    steps.append(("link to the host", lambda: rates.host_link(host, device, seconds)))
    if count > 1:
        steps.append((f"links between {count} GPUs", lambda: rates.peers(memory // 2, count, seconds / 2)))
    return steps


def _disk(folder: Path, effort: Effort, notes: list[str]) -> dict[str, Measured]:
    try:
        written, read, note = measure_disk(folder, effort.disk, 4 * effort.seconds)
    except (ConfigError, OSError) as error:
        notes.append(f"disk: not measured: {error}")
        return {}
    if note:
        notes.append(f"disk: {note}")
        return {"disk write": Measured("disk write", "B/s", (written,))}
    return {name: Measured(name, "B/s", (rate,)) for name, rate in (("disk write", written), ("disk read", read))}


def _busy(device: torch.device) -> list[str]:
    """Whoever shares the device lowers every figure, and nobody would see it in the file."""
    notes = []
    load = psutil.cpu_percent(interval=BUSY_SECONDS)
    if load > BUSY_PERCENT:
        notes.append(f"other processes used {load:.0f} % of the processor: on a quiet machine the figures are higher")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if total - free > BUSY_MEMORY * total:
            held = (total - free) / 2**30
            notes.append(f"other processes hold {held:.1f} GiB of the GPU: if they run, the figures are too low")
    return notes


def _equal_gpus(notes: list[str]) -> int:
    """How many GPUs are like the first: a plan spreads over equal ones."""
    names = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        notes.append(f"only GPUs like the first are counted, of {', '.join(names)}")
    return names.count(names[0])


def _evidence(measured: Sequence[Measured], notes: Sequence[str], device: torch.device) -> dict[str, object]:
    machine = this_machine(("longread", "torch"))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": this_commit(),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}",
        "packages": machine.packages,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cuda": torch.version.cuda or "none",
        "threads": torch.get_num_threads(),
        "notes": list(notes),
        "samples": {f"{one.name}, {one.unit}": [float(f"{sample:.5g}") for sample in one.samples] for one in measured},
    }
