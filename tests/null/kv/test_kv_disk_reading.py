"""A read that fails: damage loses the record, a shortage of the system's loses nothing."""

import os
from collections.abc import Callable
from contextlib import closing
from errno import EACCES, EINTR, EIO, EMFILE, ENFILE, ENOMEM
from pathlib import Path
from typing import Any, ClassVar

import pytest
from recordmaker import SMALL, chain_of

from longread.kv.disk import segments
from longread.kv.disk import store as store_module
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo
from longread.spec.errors import StoreError

BIG = 2**30
RECORDS = chain_of(range(700))


@pytest.fixture
def store(tmp_path: Path):
    made = DiskStore.open(tmp_path / "store", SMALL, max_bytes=BIG)
    ids = b"".join(record.run for record in RECORDS)
    made.write(RECORDS, document=DocumentInfo("doc-a", "a", "", 700, 1, RECORDS[-1].key, token_ids=ids, text="a"))
    yield made
    made.close()


def read(store: DiskStore) -> list[bool]:
    buffers = [bytearray(len(record.payload)) for record in RECORDS]
    return [store.read(r.kind, r.key, memoryview(b)) for r, b in zip(RECORDS, buffers, strict=True)]


def fail(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: int) -> None:
    def failing(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("error", [EMFILE, ENFILE, ENOMEM, EACCES, EINTR])
@pytest.mark.parametrize(("owner", "name"), [(segments, "open_own"), (os, "preadv")])
def test_a_shortage_drops_nothing(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: int
) -> None:
    with monkeypatch.context() as patch:
        fail(patch, owner, name, error)
        for call in (
            lambda: read(store),
            store.verify,
            lambda: store.export("doc-a", tmp_path / "a.lrd"),
        ):
            with pytest.raises(StoreError, match="cannot be read now"):
                call()
    assert store.corrupt == 0
    assert all(read(store))
    assert store.verify().sound


def test_a_disk_that_cannot_read_is_damage(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail(patch, os, "preadv", EIO)
        assert not any(read(store))
    assert store.corrupt == len(RECORDS)
    assert not any(read(store))
    assert store.write(RECORDS) > 0
    assert all(read(store))


def open_in(folder: Path) -> list[str]:
    files = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(file) for file in files if file.is_symlink()]
    return [link for link in links if str(folder) in link]


class FakeTimer:
    """Runs when it is told to."""

    made: ClassVar[list["FakeTimer"]] = []

    def __init__(self, seconds: float, run: Callable[[], None]):
        self.seconds, self.run, self.cancelled = seconds, run, False
        FakeTimer.made.append(self)

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        assert self.cancelled  # else it would be waited for


def test_who_reads_nothing_for_a_while_has_no_segment_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an idle server gives back the space of what another process deletes."""
    now = [100.0]
    monkeypatch.setattr(segments.threading, "Timer", FakeTimer)
    monkeypatch.setattr(segments.time, "monotonic", lambda: now[0])
    FakeTimer.made = []
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=BIG)) as other:
        other.write(RECORDS)
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=BIG)) as store:

        def held() -> int:
            return sum(".seg" in link for link in open_in(tmp_path))

        assert all(read(store)) and held() == 1
        (timer,) = FakeTimer.made
        now[0] += 3
        assert all(read(store)) and len(FakeTimer.made) == 1
        now[0] += 3
        timer.run()  # read from 3 seconds ago
        assert held() == 1
        later = FakeTimer.made[-1]
        assert later is not timer and 2 <= later.seconds <= 3
        now[0] += 2
        with store._segments._file(next(iter(store._segments._open))):
            now[0] += 60
            later.run()  # read from right now
        assert held() == 1
        now[0] += 60
        FakeTimer.made[-1].run()
        assert held() == 0 and len(FakeTimer.made) == 3
        assert all(read(store)) and held() == 1 and len(FakeTimer.made) == 4
    assert held() == 0 and FakeTimer.made[-1].cancelled
    FakeTimer.made[-1].run()  # it was too late to be cancelled
    assert len(FakeTimer.made) == 4


def test_space_of_deleted_segments_is_given_back_by_who_has_them_open(tmp_path: Path, monkeypatch) -> None:
    """At the next use that is written down, not while a read is under way."""

    def held() -> list[str]:
        return [link for link in open_in(tmp_path) if link.endswith(".seg (deleted)")]

    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=2**30)) as one:
        with closing(DiskStore.open(tmp_path, SMALL, max_bytes=2**30)) as other:
            other.write(RECORDS)
            for record in RECORDS:
                assert one.read(record.kind, record.key, memoryview(bytearray(len(record.payload))))
            other.gc(0)
        assert len(held()) == 1
        with one._segments._file(held()[0].split("/")[-1].removesuffix(" (deleted)")):
            one.gc()
            assert len(held()) == 1
        assert not held()
        one.write(RECORDS)
        monkeypatch.setattr(store_module, "TOUCH_SECONDS", -1)
        one.read(RECORDS[0].kind, RECORDS[0].key, memoryview(bytearray(len(RECORDS[0].payload))))
        with closing(DiskStore.open(tmp_path, SMALL, max_bytes=2**30)) as other:
            one._writer.finish()
            other.gc(0)
        assert len(held()) == 1
        one.touch([RECORDS[0].key])
        assert not held()
