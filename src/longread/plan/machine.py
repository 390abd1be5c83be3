"""What memory the machine has for us, as limited by control groups, and what its processors cache.

Only reads the operating system; decides nothing. Reading happens when ``probe_machine`` is called, never at import.
"""

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes; ``available_bytes`` without swapping.

    ``limited_by`` says where the numbers come from: the machine itself, or a control group (a container).
    """

    total_bytes: int
    available_bytes: int
    limited_by: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """The one GPU that an engine would use. Memory in bytes; ``free_bytes``: no process has it. ``capability``: CUDA's
    compute capability.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


def probe_gpu(visible: str | None = None) -> Gpu | str:
    """The first GPU that CUDA would show to a process (``visible``: CUDA_VISIBLE_DEVICES), or why there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if first is not None and first.split(",")[0].strip() in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    built = _torch_version()
    if built.endswith("+cpu"):
        return (
            f"torch {built} is built without CUDA (pip install --force-reinstall torch from the index of your CUDA "
            "version)"
        )
    import pynvml  # only a process that looks for a GPU needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver does not answer ({error})"
    try:
        return _first_gpu(pynvml, first)
    except pynvml.NVMLError as error:
        return f"the GPU cannot be read ({error})"
    finally:
        pynvml.nvmlShutdown()


def _first_gpu(nvml: Any, visible: str | None) -> Gpu | str:
    if not nvml.nvmlDeviceGetCount():
        return "the NVIDIA driver shows no GPU"
    first = (visible or "0").split(",")[0].strip()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(first)
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(name.decode() if isinstance(name, bytes) else name, int(memory.total), int(memory.free), (major, minor))


def _torch_version() -> str:
    """Without importing it: a server's own process never does."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "none+cpu"


def probe_machine(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> Machine:
    """Look at this machine now. The arguments are the control group file system and this process's place in it."""
    memory = psutil.virtual_memory()
    total, available, source = int(memory.total), int(memory.available), "the machine"
    for group in _groups(cgroups, membership):
        limit, used = _memory_limit(group), _memory_used(group)
        if limit is not None and limit < total:
            total, source = limit, f"the memory limit of {group}"
        if limit is not None and used is not None:
            available = min(available, max(limit - used, 0))
    return Machine(total, min(available, total), source)


def last_level_cache(cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Bytes of the processors' last caches together, shared ones once; None where the system does not say."""
    last: dict[str, tuple[int, int]] = {}  # of each set of processors that share one: level and bytes
    for index in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, shared = _number(index / "level"), "".join(_lines(index / "shared_cpu_list"))
        size = "".join(_lines(index / "size"))
        if level is None or not shared or size[-1:] not in ("K", "M") or not size[:-1].isdecimal():
            continue
        last[f"{level}:{shared}"] = (level, int(size[:-1]) * (2**10 if size[-1] == "K" else 2**20))
    top = max((level for level, _ in last.values()), default=0)
    return sum(size for level, size in last.values() if level == top) or None


def _groups(cgroups: Path, membership: Path) -> list[Path]:
    """This process's group and all above it: a limit anywhere on the way counts. Version 1's memory group is last."""
    groups = []
    place = next((line[3:] for line in _lines(membership) if line.startswith("0::")), "/")
    path = cgroups / place.strip().lstrip("/")
    while path != cgroups and cgroups in path.parents:
        groups.append(path)
        path = path.parent
    return [*groups, cgroups, cgroups / "memory"]


def _memory_limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        value = _number(group / name)
        if value is not None:
            return value
    return None


def _memory_used(group: Path) -> int | None:
    """Bytes in use that cannot simply be dropped: file pages read once and idle do not count."""
    for name, idle in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        used = _number(group / name)
        if used is not None:
            stats = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
            return max(used - int(stats.get(idle, "0")), 0)
    return None


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(file: Path) -> list[str]:
    """The file's lines; none where it does not exist or may not be read, as on other systems."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
