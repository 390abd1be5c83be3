"""The disk store on a file system that is really full: each answer is right or none, and it goes on when there is room.

Each function without ``test_`` runs in a process of its own, on a file system of its own.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from errno import ENOSPC
from pathlib import Path

import pytest
from apart import called
from recordmaker import ROOT, SMALL, chain_of, served
from small_disk import Ballast, run_on_small_disk

from longread.kv.disk.folder import INDEX_NAME
from longread.kv.disk.reserve import RESERVE_NAME, SIZE
from longread.kv.disk.store import DiskStore
from longread.kv.records import DocumentInfo, Layout, Record
from longread.spec.documents import document_id
from longread.spec.errors import StoreFullError

BIG = 2**30
ROOM = SIZE + 7 * 2**20


def chain(number: int) -> list[Record]:
    return chain_of([number, *range(3000)])


def named(records: list[Record]) -> DocumentInfo:
    ids = b"".join(record.run for record in records)
    key = records[-1].key
    return DocumentInfo(document_id(key), "x", "tiny", len(ids) // 4, 4, key, token_ids=ids, text="text")


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(StoreFullError, match="the disk is full"):
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
    with refused():  # no room even for the memory that the users of an index share
        DiskStore.open(place / "store", SMALL, max_bytes=BIG)
    with closing(DiskStore.open(place / "store", SMALL, max_bytes=BIG, read_only=True)) as reader:
        assert served(reader, chain(1)) == len(chain(1))  # one that was closed well can do without
    ballast.free()
    with store_at(place / "store") as store:
        assert not store.stats().reserve_bytes  # of so small a disk
        assert served(store, chain(1)) == len(chain(1))
        is_sound(store)


def opened_with_a_reserve_while_it_is_full(place: Path) -> None:
    ballast, reserve = Ballast(place), place / "store" / RESERVE_NAME
    with store_at(place / "store") as store:
        store.write(chain(1), document=named(chain(1)))
    before = reserve.stat().st_size
    ballast.fill()
    for layout in (SMALL, None):  # it has room for the memory that is shared, and takes back what is left
        with store_at(place / "store", layout) as store:
            assert served(store, chain(1)) == len(chain(1))
            assert 0 < before - reserve.stat().st_size <= 2**17
            with store_at(place / "store") as other, refused():
                other.write(chain(2))
    ballast.free()
    with store_at(place / "store") as store:
        assert reserve.stat().st_size == before == store.stats().reserve_bytes
        assert served(store, chain(1)) == len(chain(1))
        is_sound(store)


def fills_the_disk_by_itself(place: Path, pinned_each: int, closed: bool) -> None:
    """Nothing comes free but by the store's own getting smaller: all at once, or chains between pinned ones."""
    Ballast(place).fill(ROOM)
    store, done = DiskStore.open(place / "store", SMALL, max_bytes=BIG), []
    with refused():
        for number in range(10_000):
            pinned = pinned_each > 0 and number % pinned_each == 0
            store.write(chain(number), document=replace(named(chain(number)), pinned=pinned))
            done.append(number)
    pinned_ones = done[:: pinned_each or len(done) + 1][: 1000 if pinned_each else 0]
    with refused():  # what is kept back is not for records
        for number in range(20_000, 21_000):
            store.write(chain(number)[:1])
    before = store.stats()
    assert before.reserve_bytes == SIZE
    if closed:  # with what SQLite then gives back taken by somebody else
        store.close()
        Ballast(place, "more").fill()
        store = DiskStore.open(place / "store", None, max_bytes=BIG)
    done_here = store.gc((before.file_bytes + before.document_bytes) // 2)
    assert done_here.evicted and done_here.counted_bytes <= (before.file_bytes + before.document_bytes) // 2
    is_sound(store)
    for number in pinned_ones:
        assert served(store, chain(number)) == len(chain(number))
    assert {named(chain(number)).id for number in pinned_ones} <= {info.id for info in store.documents() if info.pinned}
    if closed:
        store.close()
        store = DiskStore.open(place / "store", SMALL, max_bytes=BIG)
    assert served(store, chain(done[-1])) == len(chain(done[-1]))
    store.write(chain(20_000))
    assert served(store, chain(20_000)) == len(chain(20_000))
    assert store.stats().reserve_bytes == before.reserve_bytes
    is_sound(store)
    store.close()


def filled_by_itself(place: Path) -> None:
    fills_the_disk_by_itself(place, pinned_each=0, closed=False)


def filled_by_itself_between_pinned_ones(place: Path) -> None:
    fills_the_disk_by_itself(place, pinned_each=4, closed=False)


def filled_by_itself_and_closed(place: Path) -> None:
    fills_the_disk_by_itself(place, pinned_each=4, closed=True)


def what_is_pinned_moves_from_the_end_of_a_segment(place: Path) -> None:
    """More is pinned in one segment than there is room for beside it, even with the reserve's."""
    layout = Layout(ROOT, "tiny", "float32", page_bytes=100_000, ring_bytes=250)
    chains = [chain_of([number, *range(2000)], layout) for number in range(60)]
    Ballast(place).fill(SIZE + 40 * 2**20)
    store, done = DiskStore.open(place / "store", layout, max_bytes=BIG), []
    with refused():
        for number, records in enumerate(chains):
            store.write(records, document=replace(named(records), pinned=number % 3 > 0))
            done.append(records)
    pinned = [records for number, records in enumerate(done) if number % 3]
    assert SIZE < sum(len(each.payload) for records in pinned for each in records) < store.stats().file_bytes * 0.7
    [before] = (place / "store" / "segments").iterdir()
    store.gc(2**20)
    assert [before] != list((place / "store" / "segments").iterdir())
    assert all(served(store, records) == len(records) for records in pinned)
    assert served(store, done[0]) == 0
    stats = store.stats()
    assert stats.file_bytes == stats.live_bytes
    is_sound(store)
    store.close()


def a_smaller_size_shrinks_it(place: Path) -> None:
    """As the message says: opened with a smaller size, the next write makes room."""
    Ballast(place).fill(ROOM)
    store = DiskStore.open(place / "store", SMALL, max_bytes=BIG)
    with refused():
        for number in range(10_000):
            store.write(chain(number), document=named(chain(number)))
    store.close()
    Ballast(place, "more").fill()
    with closing(DiskStore.open(place / "store", SMALL, max_bytes=2**21)) as store:
        assert not store.stats().reserve_bytes  # of so small a size
        assert store.write(chain(20_000))
        stats = store.stats()
        assert stats.file_bytes + stats.document_bytes <= 2**21
        assert served(store, chain(20_000)) == len(chain(20_000))
        is_sound(store)


def shared_while_it_is_full(place: Path) -> None:
    """One process collects in the room of the reserve; another that would write meanwhile does not get it."""
    first, second = (DiskStore.open(place / "store", SMALL, max_bytes=BIG) for _ in range(2))
    ballast = Ballast(place)
    ballast.fill(ROOM)
    for number in range(40):
        (first, second)[number % 2].write(chain(number), document=named(chain(number)))
    ballast.fill()
    before = first.stats()
    whole = before.reserve_bytes
    collect, meanwhile = first._collector.collect, []

    def collecting(*arguments: object) -> None:
        lent = first._reserve.size == 0
        if lent:
            with refused():
                second.write(chain(20_000))
            second.remove("doc-none")  # what needs no room goes on
            DiskStore.open(place / "store", SMALL, max_bytes=BIG).close()
        meanwhile.append(lent)
        collect(*arguments)  # type: ignore[arg-type]
        if not lent:
            raise OSError(ENOSPC, "as if the log had not found room")

    first._collector.collect = collecting  # type: ignore[method-assign,assignment]
    first.gc(100_000)
    assert meanwhile == [False, True]
    after = first.stats()  # the other one's segment is still being written to
    assert after.live_bytes + after.document_bytes <= 100_000 and after.file_bytes < before.file_bytes
    ballast.free()
    assert second.write(chain(20_000)) and second.stats().reserve_bytes == whole
    for store in (first, second):
        assert served(store, chain(20_000)) == len(chain(20_000))
        is_sound(store)
        store.close()


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


def rebuilt_with_a_reserve_while_it_is_full(place: Path) -> None:
    """In the reserve's room, of which the index has its part then: no record is written until that is made up."""
    ballast, reserve, index = Ballast(place), place / "store" / RESERVE_NAME, place / "store" / INDEX_NAME
    with store_at(place / "store") as store:
        for number in range(30):
            store.write(chain(number), document=named(chain(number)))
    before, lost = reserve.stat().st_size, index.read_bytes()
    index.write_bytes(lost[:100] + bytes(4000) + lost[4100:])
    ballast.fill()
    store, entered = DiskStore.rebuild(place / "store", max_bytes=BIG)
    with closing(store):
        assert entered == 30 * len(chain(0))
        assert served(store, chain(7)) == len(chain(7))
        is_sound(store)
        assert 0 < reserve.stat().st_size < before
        with store_at(place / "store") as other, refused():
            other.write(chain(31))
    ballast.free()
    with store_at(place / "store") as store:
        assert reserve.stat().st_size == before and store.write(chain(31))


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
def store_at(path: Path, layout: Layout | None = SMALL) -> Iterator[DiskStore]:
    store = DiskStore.open(path, layout, max_bytes=BIG)
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

WITH_A_RESERVE: list[Callable[[Path], None]] = [
    opened_with_a_reserve_while_it_is_full,
    filled_by_itself,
    filled_by_itself_between_pinned_ones,
    filled_by_itself_and_closed,
    what_is_pinned_moves_from_the_end_of_a_segment,
    a_smaller_size_shrinks_it,
    shared_while_it_is_full,
    rebuilt_with_a_reserve_while_it_is_full,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_on_a_small_disk(scene: Callable[[Path], None], tmp_path: Path) -> None:
    run_on_small_disk(__file__, scene, tmp_path)


@pytest.mark.parametrize("scene", WITH_A_RESERVE, ids=lambda scene: scene.__name__)
def test_on_a_disk_with_room_for_a_reserve(scene: Callable[[Path], None], tmp_path: Path) -> None:
    run_on_small_disk(__file__, scene, tmp_path, size="128m")


if __name__ == "__main__":
    called(SCENES + WITH_A_RESERVE)
