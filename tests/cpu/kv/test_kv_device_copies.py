"""Records through a device's staging, which runs on a CPU too: the same bytes as without, whatever the batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from staged_records import GROUPS, PAGES, ROWS, SNAPSHOTS, arena, pair, put, same

from longread.kv.device_copies import Parts
from longread.kv.tensors import StateTensors

SIZES = [1, 20_000, 1 << 20]  # of staging: a record at a time, two, all


@pytest.mark.parametrize("staging", SIZES)
@pytest.mark.parametrize("tokens", [256, 255, 130, 3, 0])
def test_pages_are_read_as_without_staging(staging: int, tokens: int) -> None:
    plain, staged = pair("cpu", staging)
    rooms = arena(staged, 4)
    for number, page in enumerate((0, 7, PAGES - 1)):
        expected = bytearray(plain.page_bytes)
        plain.read_page(page, memoryview(expected), tokens)
        own, pinned = memoryview(bytearray(b"x" * staged.page_bytes)), put(rooms, number)
        staged.read_page(page, own, tokens)
        staged.read_page(page, pinned, tokens)
        assert own == expected  # at once
        staged.settle()
        assert pinned == expected


@pytest.mark.parametrize("staging", SIZES)
@given(
    pages=st.lists(st.integers(0, PAGES - 1), unique=True, max_size=PAGES),
    seed=st.integers(0, 99),
)
def test_pages_are_written_together_from_any_memory(staging: int, pages: list[int], seed: int) -> None:
    """Some records from the arena, in any order of its slots, some from elsewhere."""
    plain, staged = pair("cpu", staging)
    g = torch.Generator().manual_seed(seed)
    rooms = arena(staged, PAGES)
    made = [put(rooms, number) for number in range(PAGES)]
    slots, outside = torch.randperm(PAGES, generator=g).tolist(), torch.rand(PAGES, generator=g) < 0.3
    records = []
    for slot, elsewhere, _ in zip(slots, outside.tolist(), pages, strict=False):
        content = bytes(torch.randint(0, 256, (staged.page_bytes,), generator=g, dtype=torch.uint8).tolist())
        made[slot][:] = content
        records.append(memoryview(bytearray(content)) if elsewhere else made[slot])
    staged.after(staged.fence())
    staged.write_pages(pages, records)
    plain.write_pages(pages, records)
    assert same(plain, staged)


@pytest.mark.parametrize("staging", SIZES)
def test_rings_there_and_back(staging: int) -> None:
    plain, staged = pair("cpu", staging)
    rooms = arena(staged, 1, SNAPSHOTS)
    for snapshot in range(SNAPSHOTS):
        room, expected = put(rooms, snapshot, "ring"), bytearray(plain.ring_bytes)
        staged.read_ring(snapshot, room)
        plain.read_ring(snapshot, memoryview(expected))
        staged.settle()
        assert room == expected
        target = (snapshot + 3) % SNAPSHOTS
        staged.write_ring(target, room)
        plain.write_ring(target, room)
    assert same(plain, staged)


def test_many_saves_go_round_their_buffer() -> None:
    plain, staged = pair("cpu", 40_000)
    rooms = arena(staged, 3 * PAGES)
    for number in range(3 * PAGES):
        page = number * 5 % PAGES
        staged.read_page(page, put(rooms, number), 256)
    staged.settle()
    expected, found = bytearray(plain.page_bytes), bytearray(plain.page_bytes)
    for number in range(3 * PAGES):
        plain.read_page(number * 5 % PAGES, memoryview(expected), 256)
        rooms.copy("page", number.to_bytes(16, "little"), memoryview(found))
        assert found == expected


def test_staging_is_counted_and_holds_the_longest_record() -> None:
    plain, staged = pair("cpu", 1)
    longest = max(staged.page_bytes, staged.ring_bytes)
    assert 3 * longest <= staged.nbytes - plain.nbytes < 3 * (longest + 16)
    assert plain.allocate_host is None and plain.pages_at_once == 1
    assert staged.pages_at_once > 1


@pytest.mark.parametrize(("width", "dtype"), [(8, torch.int64), (4, torch.int64), (1, torch.int64), (3, torch.int64)])
def test_copies_take_the_largest_numbers_that_fit(width: int, dtype: torch.dtype) -> None:
    assert Parts([torch.zeros(2, 5, 4, width, dtype=torch.bfloat16)]).dtype == dtype


def test_copies_of_odd_widths_go_by_smaller_numbers() -> None:
    odd, even = torch.zeros(2, 5, 1, 9, dtype=torch.uint8), torch.zeros(2, 5, 4, 8)
    assert Parts([odd, even]).dtype == torch.uint8
    assert Parts([even, torch.zeros(1, 5, 1, 3, dtype=torch.bfloat16)]).dtype == torch.int16


def test_no_pages_and_no_snapshots() -> None:
    staged = StateTensors(GROUPS, 0, 1, 0, torch.float32, staging=1)
    staged.write_pages([], [])
    assert all(staged.views[name].shape[1] == 0 for name in ROWS)
