"""A batch is put on the disk while it is still appended to: what that meets is the batch's failure, and no file is
closed under it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from errno import EIO, ENOSPC
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of, served

from longread.kv.disk import segments
from longread.kv.disk.store import DiskStore
from longread.spec.errors import StoreError, StoreFullError

CHAIN = chain_of(range(256 * 12 + 7))
MAIN = threading.main_thread()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskStore]:
    monkeypatch.setattr(segments, "EARLY_BYTES", 1)
    made = DiskStore.open(tmp_path / "store", SMALL, max_bytes=2**30)
    yield made
    made.close()


def early(monkeypatch: pytest.MonkeyPatch, work: Callable[[int], None]) -> list[int]:
    """What early syncs do from now on; the descriptors that they were given."""
    given: list[int] = []
    plain = segments.sync_data

    def sync(descriptor: int) -> None:
        if threading.current_thread() is MAIN:
            plain(descriptor)
            return
        given.append(descriptor)
        work(descriptor)

    monkeypatch.setattr(segments, "sync_data", sync)
    return given


def test_a_loss_that_only_the_early_sync_was_told_of_fails_the_write(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: int) -> None:
        raise OSError(EIO, os.strerror(EIO))

    with monkeypatch.context() as patch:
        given = early(patch, lost)
        with pytest.raises(StoreError):
            store.write(CHAIN)
        assert given
    assert served(store, CHAIN) == 0
    store.write(CHAIN)
    assert served(store, CHAIN) == len(CHAIN)


def test_a_batch_that_is_undone_waits_for_it(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is still open, and its own, when the early sync comes to its end."""
    names, ended = [], threading.Event()
    write = os.pwritev

    def slow(descriptor: int) -> None:
        threading.Event().wait(0.05)
        names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        ended.set()

    def full(file: int, parts: list[bytes], offset: int) -> int:
        if offset:
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return write(file, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        early(patch, slow)
        with pytest.raises(StoreFullError):
            store.write(CHAIN)
    assert ended.is_set() and all(".seg" in name for name in names)
    assert not list((store.path / "segments").iterdir())
    store.write(CHAIN)
    assert served(store, CHAIN) == len(CHAIN)


def test_without_a_thread_to_spare_the_last_sync_does_it(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        store.write(CHAIN)
    assert served(store, CHAIN) == len(CHAIN)


def test_one_at_a_time_and_of_each_file_of_a_batch(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch over several segments is whole after a restart."""
    store._writer.segment_bytes = 3000
    under_way, most = 0, 0

    def counted(descriptor: int) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        os.fstat(descriptor)
        under_way -= 1

    given = early(monkeypatch, counted)
    store.write(CHAIN)
    assert given and most == 1
    assert len(list((store.path / "segments").iterdir())) > 1
    assert served(store, CHAIN) == len(CHAIN)
