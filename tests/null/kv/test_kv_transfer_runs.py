"""Loads of pages that are in memory go to the storage together; what comes from a disk, and rings, one by one."""

from collections.abc import Iterator, Sequence
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

    def finish(self) -> None:
        if self.never_whole:
            raise RuntimeError("the device is lost")

    def write_page(self, page: int, data: memoryview) -> None:
        self.asked.append(page)
        self._stop()

    def write_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        assert len(pages) == len(data)
        assert [bytes(each) for each in data] == [bytes([page]) for page in pages]
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
    """A disk with everything."""

    def stream(self, wanted: Sequence[tuple[Kind, bytes]]) -> Iterator[tuple[Verdict, memoryview]]:
        for _ in wanted:
            yield "whole", memoryview(b"d")


def moves(kinds: str) -> list[Move]:
    """h: a page in the arena, d: one on the disk, t: a tail in the arena, r: a ring in the arena."""
    out = []
    for at, kind in enumerate(kinds):
        name: Kind = {"h": "page", "d": "page", "t": "tail", "r": "ring"}[kind]  # type: ignore[assignment]
        known = Known(name, bytes([at]) * 16, bytes(16), at + 1, b"", has_ring=False)
        out.append(Move(known, "disk" if kind == "d" else "host", at, None if kind == "d" else memoryview(bytes([at]))))
    return out


def loaded(store: Recorded, kinds: str) -> Transfer:
    transfer = Transfer(cast(Load, None), moves(kinds), None, 0)
    if store.stop_after is not None:
        store.stop_after = store.stop_after[0], transfer
    threads = IOThreads(store, cast(Disk, Records()))
    threads.load(transfer)
    assert threads.stop()
    assert transfer.done
    return transfer


@pytest.mark.parametrize(
    ("kinds", "at_once", "asked"),
    [
        ("hhhhh", 1, [0, 1, 2, 3, 4]),
        ("hhhhh", 2, [[0, 1], [2, 3], 4]),
        ("hhhhhtr", 256, [[0, 1, 2, 3, 4, 5], "ring 6"]),
        ("hhdhhdr", 256, [[0, 1], 2, [3, 4], 5, "ring 6"]),
        ("", 256, []),
    ],
)
def test_runs(kinds: str, at_once: int, asked: list[object]) -> None:
    store = Recorded(at_once)
    transfer = loaded(store, kinds)
    assert store.asked == ["fence after 0", *asked]
    assert transfer.moved == len(kinds) and transfer.broken is None
    assert set(transfer.seconds) == {"disk" if kind == "d" else "host" for kind in kinds}


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
    assert len(store.asked) == 1 + len(kinds)
    assert transfer.moved == 0
    assert transfer.broken is transfer.moves[0]


@pytest.mark.parametrize("never_whole", [False, True])
def test_what_came_before_a_failure_is_kept_if_it_is_whole(never_whole: bool) -> None:
    store = Recorded(1)
    store.never_whole = never_whole
    plain = store.begin_page

    def begin_page(page: int, data: memoryview) -> None:
        if page == 2:
            raise RuntimeError("no memory")
        plain(page, data)

    store.begin_page = begin_page  # type: ignore[method-assign]
    transfer = loaded(store, "dddd")
    assert transfer.moved == (0 if never_whole else 2)
    assert transfer.broken is transfer.moves[transfer.moved]
