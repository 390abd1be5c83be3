"""Loads of pages that are in memory go to the storage together, those of a disk as it brings them, rings one by one."""

from collections.abc import Generator, Sequence
from typing import cast

import pytest
from kv_contents import WITH_RINGS, Contents

from longread.kv.lease import Load
from longread.kv.records import Kind, Known, Verdict
from longread.kv.transfer import Disk, IOThreads, Move, Transfer


class Recorded(Contents):
    """Notes what it is asked, with where a fence was."""

    def __init__(self, pages_at_once: int):
        super().__init__(WITH_RINGS, 40, 1, 4)
        self.pages_at_once = pages_at_once
        self.asked: list[object] = []
        self.stop_after: tuple[int, Transfer] | None = None
        self.never_whole = False
        self.full_at = -1  # the page that cannot be written

    def finish(self) -> None:
        if self.never_whole:
            raise RuntimeError("the device is lost")

    def write_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert len(pages) == len(data)
        assert [bytes(each) for each in data] == [bytes([page]) for page in pages]
        if self.full_at in pages:
            raise RuntimeError("no memory")
        self.asked.append(list(pages))
        self._stop()

    def write_ring(self, snapshot: int, data: memoryview) -> None:
        self.asked.append(f"ring {snapshot}")

    def fence(self) -> object:
        return f"fence after {len(self.asked)}"

    def after(self, fence: object) -> None:
        self.asked.append(fence)

    def _stop(self) -> None:
        self._enter("write")
        if self.stop_after is not None and len(self.asked) > self.stop_after[0]:
            self.stop_after[1].cancelled = True


class Records:
    """A disk with everything but what is ``damaged``, which brings two records at a time."""

    def __init__(self, damaged: int = -1):
        self.damaged = damaged
        self.left = False  # whether whoever read told so

    def batches(
        self, wanted: Sequence[tuple[Kind, bytes]], rooms: Sequence[memoryview] = ()
    ) -> Generator[Sequence[tuple[Verdict, memoryview]], None, None]:
        try:
            for first in range(0, len(wanted), 2):
                yield [self._found(key[0]) for _, key in wanted[first : first + 2]]
        finally:
            self.left = True

    def _found(self, at: int) -> tuple[Verdict, memoryview]:
        return "corrupt" if at == self.damaged else "whole", memoryview(bytes([at]))


def moves(kinds: str) -> list[Move]:
    """h: a page in the arena, d: one on the disk, t: a tail there, r: a ring there, R: a ring on the disk."""
    out = []
    for at, kind in enumerate(kinds):
        name: Kind = {"h": "page", "d": "page", "t": "tail", "r": "ring", "R": "ring"}[kind]  # type: ignore[assignment]
        known = Known(name, bytes([at]) * 16, bytes(16), at + 1, b"", has_ring=False)
        read = kind in "dR"
        out.append(Move(known, "disk" if read else "host", at, None if read else memoryview(bytes([at]))))
    return out


def loaded(store: Recorded, kinds: str, disk: Records | None = None) -> Transfer:
    transfer = Transfer(cast(Load, None), moves(kinds), None, 0)
    if store.stop_after is not None:
        store.stop_after = store.stop_after[0], transfer
    disk = disk or Records()
    threads = IOThreads(store, cast(Disk, disk))
    threads.load(transfer)
    assert threads.stop()
    assert transfer.done
    assert disk.left or not set("dR") & set(kinds)
    return transfer


@pytest.mark.parametrize(
    ("kinds", "at_once", "asked"),
    [
        ("hhhhh", 1, [[0], [1], [2], [3], [4]]),
        ("hhhhh", 2, [[0, 1], [2, 3], [4]]),
        ("hhhhhtr", 256, [[0, 1, 2, 3, 4, 5], "ring 6"]),
        ("hhdhhdr", 256, [[0, 1], [2], [3, 4], [5], "ring 6"]),
        ("ddddd", 256, [[0, 1], [2, 3], [4]]),
        ("hdddR", 1, [[0], [1, 2], [3], "ring 4"]),
        ("dR", 256, [[0], "ring 1"]),
        ("", 256, []),
    ],
)
def test_runs(kinds: str, at_once: int, asked: list[object]) -> None:
    store = Recorded(at_once)
    transfer = loaded(store, kinds)
    assert store.asked == ["fence after 0", *asked]
    assert transfer.moved == len(kinds) and transfer.broken is None
    assert set(transfer.seconds) == {"disk" if kind in "dR" else "host" for kind in kinds}


def test_a_cancelled_load_stops_behind_its_run() -> None:
    store = Recorded(3)
    store.stop_after = 1, cast(Transfer, None)
    transfer = loaded(store, "hhhhhhhh")
    assert store.asked[1:] == [[0, 1, 2]]
    assert transfer.moved == 3 and transfer.broken is None


def test_a_run_that_fails_is_broken_at_its_beginning() -> None:
    store = Recorded(3)
    store.fail = "write"
    transfer = loaded(store, "hhhh")
    assert transfer.moved == 0
    assert transfer.broken is transfer.moves[0]


@pytest.mark.parametrize("kinds", ["dddd", "hddr"])
def test_nothing_is_whole_where_the_end_of_it_was_not_seen(kinds: str) -> None:
    store = Recorded(3)
    store.never_whole = True
    transfer = loaded(store, kinds)
    assert len(store.asked) == (3 if kinds == "dddd" else 4)
    assert transfer.moved == 0
    assert transfer.broken is transfer.moves[0]


@pytest.mark.parametrize("never_whole", [False, True])
def test_what_came_before_a_failure_is_kept_if_it_is_whole(never_whole: bool) -> None:
    store = Recorded(1)
    store.never_whole = never_whole
    store.full_at = 2
    transfer = loaded(store, "dddd")
    assert transfer.moved == (0 if never_whole else 2)
    assert transfer.broken is transfer.moves[transfer.moved]


@pytest.mark.parametrize("damaged", [0, 1, 2, 3, 4])
def test_a_load_ends_at_the_first_record_that_is_not_whole(damaged: int) -> None:
    store = Recorded(3)
    transfer = loaded(store, "ddddR", Records(damaged))
    assert transfer.moved == damaged
    assert transfer.broken is transfer.moves[damaged] and transfer.fault == "corrupt"
    assert [page for run in store.asked[1:] for page in run] == list(range(damaged))
