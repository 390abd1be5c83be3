"""What the machine has, under control groups of either version."""

from pathlib import Path

import psutil

from longread.plan.machine import probe_machine

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def probe(tmp_path: Path, place: str = "/") -> object:
    (tmp_path / "cgroup").write_text(f"0::{place}\n")
    return probe_machine(tmp_path / "fs", tmp_path / "cgroup")


def test_without_control_groups_the_machine_itself_counts(tmp_path: Path) -> None:
    machine = probe_machine(tmp_path / "none", tmp_path / "none")
    assert machine.total_bytes == psutil.virtual_memory().total
    assert 0 < machine.available_bytes <= machine.total_bytes
    assert machine.limited_by == "the machine"


def test_this_machine_can_be_probed() -> None:
    machine = probe_machine()
    assert 0 < machine.available_bytes <= machine.total_bytes


def test_version_2_limit_counts_and_idle_file_pages_do_not(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max=GIB, memory__current=GIB // 2, memory__stat=f"anon 5\ninactive_file {GIB // 4}")
    machine = probe(tmp_path)
    assert (machine.total_bytes, machine.available_bytes) == (GIB, 3 * GIB // 4)
    assert str(tmp_path / "fs") in machine.limited_by


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max="max", memory__current=5)
    write(tmp_path / "fs" / "a", memory__max=GIB // 8, memory__current=0)
    write(tmp_path / "fs" / "a" / "b", memory__max=GIB, memory__current=0)
    assert probe(tmp_path, "/a/b").total_bytes == GIB // 8


def test_version_1_limit(tmp_path: Path) -> None:
    write(
        tmp_path / "fs" / "memory",
        memory__limit_in_bytes=GIB,
        memory__usage_in_bytes=GIB // 2,
        memory__stat=f"total_inactive_file {GIB // 2}",
    )
    machine = probe(tmp_path)
    assert (machine.total_bytes, machine.available_bytes) == (GIB, GIB)


def test_unlimited_groups_and_a_full_one(tmp_path: Path) -> None:
    write(tmp_path / "fs", memory__max="max")
    assert probe(tmp_path).total_bytes == psutil.virtual_memory().total
    write(tmp_path / "fs", memory__max=GIB, memory__current=2 * GIB)
    assert probe(tmp_path).available_bytes == 0
