"""A store folder that somebody else made: links, FIFOs and folders where files belong, sizes that cannot be."""

import os
import sqlite3
import tracemalloc
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of

from longread.kv.disk.store import DiskStore
from longread.kv.records import Record
from longread.spec.errors import StoreError

BIG = 2**30
NAME = "0123456789abcdef.seg"
RECORDS = chain_of(range(700))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    store = DiskStore.open(path, SMALL, max_bytes=BIG)
    store.write(RECORDS)
    store.close()
    return path


def served(store: DiskStore, records: list[Record] = RECORDS) -> int:
    found = 0
    for record in records:
        into = bytearray(len(record.payload))
        if store.read(record.kind, record.key, memoryview(into)):
            assert into == record.payload
            found += 1
    return found


def enter(folder: Path, name: str, size: int) -> None:
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute("INSERT INTO segments (name, bytes) VALUES (?, ?)", (name, size))
    database.close()


@pytest.mark.parametrize("entered", [False, True])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_called_like_a_segment_and_is_none_is_left_alone(
    folder: Path, tmp_path: Path, kind: str, entered: bool
) -> None:
    victim, foreign = tmp_path / "victim", folder / "segments" / NAME
    victim.write_bytes(b"precious" * 100)
    if kind == "link":
        foreign.symlink_to(victim)
    elif kind == "fifo":
        os.mkfifo(foreign)
    else:
        foreign.mkdir()
    if entered:
        enter(folder, NAME, 0)
    store = DiskStore.open(folder, SMALL, max_bytes=BIG)
    assert served(store) == len(RECORDS)
    report = store.verify()
    assert report.sound
    assert report.foreign == [NAME]
    store.gc()
    store.close()
    store, count = DiskStore.rebuild(folder, max_bytes=BIG)
    assert count == len(RECORDS)
    store.close()
    assert victim.read_bytes() == b"precious" * 100
    assert os.path.lexists(foreign)


@pytest.mark.parametrize("fifo", [False, True])
def test_records_behind_a_link_or_fifo_are_not_read(folder: Path, tmp_path: Path, fifo: bool) -> None:
    [segment] = (folder / "segments").iterdir()
    segment.rename(tmp_path / "moved")
    if fifo:
        os.mkfifo(segment)
    else:
        segment.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    store = DiskStore.open(folder, SMALL, max_bytes=BIG)
    assert served(store) == 0
    assert store.corrupt == len(RECORDS)
    assert store.write(RECORDS) > 0
    assert served(store) == len(RECORDS)
    store.close()
    assert (tmp_path / "moved").read_bytes() == before


@pytest.mark.parametrize("name", ["use.lock", "gc.lock", "gc.reserve"])
def test_locks_are_files(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "made")
    with pytest.raises(StoreError, match=f"{name} is not a regular file"):
        DiskStore.open(folder, SMALL, max_bytes=BIG).gc()
    assert not (tmp_path / "made").exists()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(StoreError, match=f"{name} is not a regular file"):
        DiskStore.open(folder, SMALL, max_bytes=BIG).gc()
    store = DiskStore.open(folder, SMALL, max_bytes=BIG, read_only=True)
    assert served(store) == len(RECORDS)
    store.close()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "segments"])
def test_a_store_of_links_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    if (folder / name).exists():
        (folder / name).rename(target)
    else:
        target.write_bytes(b"precious")
    (folder / name).symlink_to(target)
    before = target.read_bytes() if target.is_file() else sorted(target.iterdir())
    for call in (
        lambda: DiskStore.open(folder, SMALL, max_bytes=BIG),
        lambda: DiskStore.open(folder, SMALL, max_bytes=BIG, read_only=True),
        lambda: DiskStore.rebuild(folder, max_bytes=BIG),
    ):
        with pytest.raises(StoreError, match=f"{name} is a symbolic link"):
            call()
    assert (target.read_bytes() if target.is_file() else sorted(target.iterdir())) == before


@pytest.mark.parametrize("both", [False, True])
def test_a_size_that_cannot_be_takes_no_memory(folder: Path, both: bool) -> None:
    """Also where the index agrees with itself about it."""
    with sqlite3.connect(folder / "index.sqlite") as database:
        database.execute("UPDATE records SET size = size + 4294967296 WHERE kind = 0 AND depth = 1")
        if both:
            database.execute("UPDATE segments SET bytes = bytes + 8589934592")
    database.close()
    for read_only in (True, False):
        store = DiskStore.open(folder, SMALL, max_bytes=BIG, read_only=read_only)
        tracemalloc.start()
        report = store.verify()
        assert served(store) == len(RECORDS) - 1
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**24
        assert not report.sound
        assert len(report.corrupt) + report.unsound_rows == 1
        store.close()
