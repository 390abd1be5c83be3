"""The room that a store keeps back: who makes it, in whose limit it is, and who may use it. (On full file systems:
test_kv_disk_full.)
"""

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from recordmaker import SMALL, chain_of, served

from longread.kv.disk.reserve import LIMIT_SHARE, RESERVE_NAME, SIZE, Reserve
from longread.kv.disk.store import DiskStore
from longread.spec.errors import StoreFullError

ENOUGH = SIZE * LIMIT_SHARE


def kept(folder: Path) -> int:
    path = folder / RESERVE_NAME
    return path.stat().st_size if path.exists() else 0


def test_it_is_made_by_who_writes_and_within_a_limit_that_has_room_for_it(tmp_path: Path) -> None:
    for limit, layout, size in ((ENOUGH - 1, SMALL, 0), (2**60, None, 0), (ENOUGH, SMALL, SIZE), (2**60, None, SIZE)):
        with closing(DiskStore.open(tmp_path, layout, max_bytes=limit)) as store:
            assert kept(tmp_path) == size == store.stats().reserve_bytes
    assert (tmp_path / RESERVE_NAME).stat().st_blocks * 512 >= SIZE
    with closing(DiskStore.open(tmp_path, None, max_bytes=0, read_only=True)) as store:
        assert store.stats().reserve_bytes == SIZE
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=ENOUGH - 1)):
        assert kept(tmp_path) == 0


def test_it_counts_in_the_limit_unless_that_is_small(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=ENOUGH)) as store:
        store.write(chain_of(range(2000)))
        files = store.stats().file_bytes
        assert store.gc().counted_bytes == files + SIZE
        done = store.gc(files)
        assert done.counted_bytes == files and not done.evicted and kept(tmp_path) == 0
        assert store.write(chain_of(range(1, 2000))) and kept(tmp_path) == SIZE


def test_the_largest_record_fits_in_twice(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, replace(SMALL, page_bytes=SIZE), max_bytes=ENOUGH * 3)) as store:
        assert store.stats().reserve_bytes > 2 * SIZE


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_it_is_written_where_it_cannot_be_allocated(tmp_path: Path, code: int | None, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "not here")

    if code is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    Reserve(tmp_path, ENOUGH).make()
    assert (tmp_path / RESERVE_NAME).stat().st_blocks * 512 >= SIZE


def test_a_quota_leaves_nothing_half_made(tmp_path: Path, monkeypatch) -> None:
    """Neither does it stop who writes: the quota does, when it must."""

    def refuse(file: int, offset: int, size: int) -> None:
        os.ftruncate(file, offset + size // 2)
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with closing(DiskStore.open(tmp_path, SMALL, max_bytes=ENOUGH)) as store:
        assert kept(tmp_path) == 0
        assert store.write(chain_of(range(600)))
        assert served(store, chain_of(range(600))) == len(chain_of(range(600)))


def test_it_is_lent_to_one_at_a_time(tmp_path: Path) -> None:
    one, other = Reserve(tmp_path, ENOUGH), Reserve(tmp_path, ENOUGH)
    one.make()
    sizes: list[tuple[int, int]] = []

    def work() -> str:
        sizes.append((one.size, one.within(ENOUGH)))
        if len(sizes) == 1:
            raise StoreFullError("full")
        other.make()
        assert other.size == 0 and other.stands()  # there is room for both
        with pytest.raises(StoreFullError, match="in the other"):
            other.lend(failing)
        return "done"

    def failing() -> None:
        raise StoreFullError("in the other")

    assert one.lend(work) == "done"
    assert sizes == [(SIZE, SIZE), (0, SIZE)]
    assert one.size == other.size == SIZE
    with pytest.raises(StoreFullError, match="in the other"):  # what fails twice fails, and the room is taken back
        one.lend(failing)
    assert one.size == SIZE
