"""The machine around the GPUs: CPU, memory, limits, container, disks. Reads only.

Knows: /proc, /sys, resource limits. Must not know: what is good or bad. ``root`` stands before every path, so that a
test can bring its own machine.
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil

from longread.plan.doctor.facts import HostFacts
from longread.plan.doctor.storage import read_storage
from longread.plan.machine import probe_machine

UNLIMITED = -1


def read_host(storage: Sequence[Path] = (), root: Path = Path("/")) -> HostFacts:
    """Look now. ``storage``: folders that matter (the store, the models)."""
    proc, sysfs = root / "proc", root / "sys"
    machine = probe_machine(sysfs / "fs" / "cgroup", proc / "self" / "cgroup")
    memory = _meminfo(proc / "meminfo")
    flags, model = _cpu(proc / "cpuinfo")
    shm_total, shm_free = _room(root / "dev" / "shm")
    nofile, nofile_hard = _limit("RLIMIT_NOFILE")
    limited = machine.limited_by != "the machine"
    unread = {}
    if shm_total is None:
        unread["shm_total"] = "there is no /dev/shm"
    if flags is None:
        unread["cpu_flags"] = "/proc/cpuinfo does not say"
    return HostFacts(
        kernel=_line(proc / "sys" / "kernel" / "osrelease") or platform.release(),
        cpu=model,
        cpus_online=psutil.cpu_count(),
        cpus_allowed=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        cpu_flags=flags,
        governor=_line(sysfs / "devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        clock_source=_line(sysfs / "devices/system/clocksource/clocksource0/current_clocksource"),
        numa_nodes=_numa_nodes(sysfs / "devices/system/node"),
        numa_balancing=_flag(_line(proc / "sys/kernel/numa_balancing")),
        memory_total=memory.get("MemTotal"),
        memory_available=machine.available_bytes,
        swap_total=memory.get("SwapTotal"),
        swap_used=memory["SwapTotal"] - memory["SwapFree"] if {"SwapTotal", "SwapFree"} <= memory.keys() else None,
        thp=_chosen(_line(sysfs / "kernel/mm/transparent_hugepage/enabled")),
        huge_pages=(memory["HugePages_Total"], memory["Hugepagesize"])
        if {"HugePages_Total", "Hugepagesize"} <= memory.keys()
        else None,
        nofile=nofile,
        nofile_hard=nofile_hard,
        memlock=_limit("RLIMIT_MEMLOCK")[0],
        core=_limit("RLIMIT_CORE")[0],
        container=_container(root),
        cgroup_memory=machine.total_bytes if limited else None,
        cgroup_memory_used=machine.total_bytes - machine.available_bytes if limited else None,
        cgroup_cpus=_cgroup_cpus(sysfs / "fs" / "cgroup", _line(proc / "self" / "cgroup") or ""),
        shm_total=shm_total,
        shm_free=shm_free,
        iommu=_iommu(sysfs, proc),
        storage=tuple(read_storage(path) for path in storage),
        unread=unread,
    )


def _line(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _flag(text: str | None) -> bool | None:
    return None if text is None else text != "0"


def _chosen(text: str | None) -> str | None:
    """``"always [madvise] never"`` -> "madvise"."""
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def _meminfo(file: Path) -> dict[str, int]:
    """Sizes in bytes, counts as they are."""
    found = {}
    for line in (_line(file) or "").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return found


def _cpu(file: Path) -> tuple[frozenset[str] | None, str | None]:
    flags, model = None, None
    for line in (_line(file) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features") and flags is None:
            flags = frozenset(value.split())
        if name.strip() == "model name" and model is None:
            model = value.strip()
    return flags, model


def _limit(name: str) -> tuple[int | None, int | None]:
    """Soft and hard; -1 for unlimited, None where the system has no such limits."""
    try:
        import resource
    except ImportError:
        return None, None
    which = getattr(resource, name, None)
    if which is None:
        return None, None
    soft, hard = resource.getrlimit(which)
    return (
        UNLIMITED if soft == resource.RLIM_INFINITY else soft,
        UNLIMITED if hard == resource.RLIM_INFINITY else hard,
    )


def _numa_nodes(folder: Path) -> int | None:
    try:
        return sum(entry.name.startswith("node") and entry.name[4:].isdigit() for entry in folder.iterdir())
    except OSError:
        return None


def _room(folder: Path) -> tuple[int | None, int | None]:
    try:
        room = os.statvfs(folder)
    except OSError:
        return None, None
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def _container(root: Path) -> str:
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run" / ".containerenv").exists():
        return "podman"
    groups = _line(root / "proc" / "1" / "cgroup") or ""
    for word, name in (("kubepods", "kubernetes"), ("docker", "docker"), ("containerd", "containerd"), ("lxc", "lxc")):
        if word in groups:
            return name
    return "kubernetes" if (root / "var/run/secrets/kubernetes.io").exists() else ""


def _cgroup_cpus(cgroups: Path, membership: str) -> float | None:
    """CPUs that the tightest quota on the way up allows; None without one. Version 2, then version 1."""
    place = next((line[3:] for line in membership.splitlines() if line.startswith("0::")), "/")
    group = cgroups / place.lstrip("/")
    allowed = []
    for folder in (group, *group.parents):
        if folder == cgroups or cgroups in folder.parents:
            quota, _, period = (_line(folder / "cpu.max") or "").partition(" ")
            if quota.isdigit() and period.isdigit():
                allowed.append(int(quota) / int(period))
    quota_us, period_us = (_line(cgroups / "cpu" / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    if quota_us.isdigit() and period_us.isdigit():
        allowed.append(int(quota_us) / int(period_us))
    return min(allowed, default=None)


def _iommu(sysfs: Path, proc: Path) -> str | None:
    try:
        groups = any((sysfs / "kernel" / "iommu_groups").iterdir())
    except OSError:
        return None
    if not groups:
        return "off"
    return "passthrough" if "iommu=pt" in (_line(proc / "cmdline") or "") else "on"
