"""The disk store on a file system that is really full: each answer is right or none, and it goes on when there is room.

Each function without ``test_`` runs in a process of its own, on a file system of its own.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from apart import called
from recordmaker import SMALL, chain_of, served
from small_disk import Ballast, run_on_small_disk

from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Record
from longread.spec.documents import document_id
from longread.spec.errors import StoreError, StoreFullError

BIG = 2**30


def chain(number: int) -> list[Record]:
    return chain_of([number, *range(3000)])


def named(records: list[Record]) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    key = records[-1].key
    return DocumentInfo(document_id(key), "x", "tiny", len(ids) // 4, 4, key, token_ids=ids, text="text")


@contextmanager
def refused() -> Iterator[None]:
    """SQLite calls it an I/O error where it is the memory that the users of an index share that has no room."""
    with pytest.raises(StoreError, match=r"disk is full|disk I/O error"):
        yield


def is_sound(store: DiskStore) -> None:
    """But for documents of which something was evicted."""
    report = store.verify()
    assert not (report.corrupt or report.unsound_rows or report.index_faults or report.unreachable), report
    files = sum(path.stat().st_size for path in (store.path / "segments").iterdir())
    assert files == store.stats().file_bytes


def written_until_it_is_full(place: Path) -> None:
    """Segments, the log of the index and its database grow until nothing fits: whichever of them it is."""
    store, ballast, done = DiskStore.open(place / "store", SMALL, max_bytes=BIG), Ballast(place), []
    ballast.fill(7 * 2**20)  # the rest is what comes free later: even to forget records takes room
    for number in range(1000):
        try:
            store.write(chain(number), document=named(chain(number)))
        except StoreFullError as error:
            assert "the disk is full" in str(error)
            break
        done.append(number)
    assert len(done) > 20
    for left in (0, 4096, 8192, 12_288, 16_384, 20_480, 40_960):  # of a write, less and less fails at last
        ballast.fill(left)
        for number in range(2000, 2003):
            try:
                store.write(chain(number))
                done.append(number)
            except StoreFullError:
                assert served(store, chain(number)) == 0
    for number in done:
        assert served(store, chain(number)) == len(chain(number))
    store.close()  # with uses that cannot be written down
    again = DiskStore.open(place / "store", SMALL, max_bytes=BIG)
    for number in done:
        assert served(again, chain(number)) == len(chain(number))
    ballast.free()
    is_sound(again)
    again.gc(again.stats().live_bytes // 2)
    again.write(chain(9000), document=named(chain(9000)))
    assert served(again, chain(9000)) == len(chain(9000))
    is_sound(again)
    again.close()


def collected_and_closed_while_it_is_full(place: Path) -> None:
    """Whether eviction can go on without room, and whatever it answers: nothing wrong is served, then or later."""
    ballast = Ballast(place)
    store = DiskStore.open(place / "store", SMALL, max_bytes=600_000)
    numbers = range(60)
    for number in numbers:
        store.write(chain(number), document=named(chain(number)))
    there = {number for number in numbers if served(store, chain(number)) == len(chain(number))}
    assert len(there) > 10
    for left in (0, 4096, 16_384, 65_536):
        ballast.fill(left)
        for attempt in (lambda: store.gc(300_000), lambda: store.write(chain(500)), lambda: store.remove("doc-none")):
            with suppress(StoreFullError):
                attempt()
        for number in numbers:
            served(store, chain(number))
        assert store.corrupt == 0
    ballast.fill()
    store.touch([record.key for record in chain(59)])
    store.close()
    ballast.free()
    again = DiskStore.open(place / "store", SMALL, max_bytes=600_000)
    is_sound(again)
    assert again.write(chain(777)) > 0
    again.gc(300_000)
    is_sound(again)
    assert served(again, chain(777)) == len(chain(777))
    again.close()


def opened_while_it_is_full(place: Path) -> None:
    ballast = Ballast(place)
    ballast.fill()
    with refused():
        DiskStore.open(place / "new", SMALL, max_bytes=BIG)
    ballast.free()
    with store_at(place / "store") as store:
        store.write(chain(1), document=named(chain(1)))
    ballast.fill()
    opened = []
    for read_only in (True, False):  # no room even for the memory that the readers of an index share
        try:
            store = DiskStore.open(place / "store", SMALL, max_bytes=BIG, read_only=read_only)
        except StoreError as error:
            assert "disk is full" in str(error) or "disk I/O error" in str(error), error
        else:
            opened.append(read_only)
            assert served(store, chain(1)) == len(chain(1))
            store.close()
    ballast.free()
    with store_at(place / "store") as store:
        assert served(store, chain(1)) == len(chain(1))
        is_sound(store)
    print(opened)


def rebuilt_while_it_is_full(place: Path) -> None:
    """The old index stays until the new one is whole."""
    ballast = Ballast(place)
    with store_at(place / "store") as store:
        for number in range(30):
            store.write(chain(number), document=named(chain(number)))
    for left in (0, 4096, 40_960, 100_000):
        ballast.fill(left)
        with refused():
            DiskStore.rebuild(place / "store", max_bytes=BIG)
        ballast.free()
        with store_at(place / "store") as store:
            assert served(store, chain(left % 30)) == len(chain(0))
    store, entered = DiskStore.rebuild(place / "store", max_bytes=BIG)
    assert entered == 30 * len(chain(0)) and len(store.documents()) == 30
    is_sound(store)
    store.close()


def imported_and_exported_while_it_is_full(place: Path) -> None:
    ballast = Ballast(place)
    with store_at(place / "store") as store:
        store.write(chain(1), document=named(chain(1)))
        ident = named(chain(1)).id
        size = store.export(ident, place / "file")
        with store_at(place / "other") as other:
            for left in (0, 4096, size // 2, size + 4096):
                ballast.fill(left)
                with refused():
                    other.import_(place / "file")
                assert not other.documents() and not other.stats().records
            ballast.fill(size // 2)
            with pytest.raises(OSError, match="No space left"):
                store.export(ident, place / "second")
            assert sorted(os.listdir(place)) == ["ballast", "file", "other", "store"]
            ballast.free()
            other.import_(place / "file")
            assert served(other, chain(1)) == len(chain(1))
            is_sound(other)


@contextmanager
def store_at(path: Path) -> Iterator[DiskStore]:
    store = DiskStore.open(path, SMALL, max_bytes=BIG)
    try:
        yield store
    finally:
        store.close()


SCENES: list[Callable[[Path], None]] = [
    written_until_it_is_full,
    collected_and_closed_while_it_is_full,
    opened_while_it_is_full,
    rebuilt_while_it_is_full,
    imported_and_exported_while_it_is_full,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_on_a_small_disk(scene: Callable[[Path], None], tmp_path: Path) -> None:
    run_on_small_disk(__file__, scene, tmp_path)


if __name__ == "__main__":
    called(SCENES)
