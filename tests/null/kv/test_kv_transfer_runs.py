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
