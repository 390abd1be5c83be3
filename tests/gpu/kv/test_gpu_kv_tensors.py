"""State tensors on a GPU: records are those of a CPU, and loads and saves keep their order beside a busy model."""

from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from staged_records import GROUPS, PAGES, SNAPSHOTS, arena, pair, put, same

from longread.kernels.records import ref
from longread.kv import layer_loads
from longread.kv.tensors import StateTensors
from longread.spec.state import StateGroup

pytestmark = pytest.mark.gpu
# V4-Flash with 32 layers, packed: a page of 0.68 MB.
FLASH = (
    StateGroup("csa", "rows", tuple(range(15)), 584, tokens_per_row=4, dtype="uint8"),
    StateGroup("index", "rows", tuple(range(15)), 132, tokens_per_row=4, dtype="uint8"),
    StateGroup("hca", "rows", tuple(range(15)), 584, tokens_per_row=128, dtype="uint8"),
    StateGroup("window", "ring", tuple(range(32)), 584, ring_rows=128, dtype="uint8"),
    StateGroup("csa_kv", "ring", tuple(range(15)), 1024, ring_rows=8, dtype="float32"),
)


def busy(device: str, milliseconds: int) -> None:
    """Work on the current stream that takes at least so long; nothing where there is no device."""
    if device == "cuda":
        torch.cuda._sleep(milliseconds * 2_000_000)


def elsewhere(work: Callable[[], None]) -> None:
    """On a thread of its own, as loads are."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 22])
def test_records_are_those_of_a_cpu(staging: int, device: str) -> None:
    plain, staged = pair(device, staging)
    rooms = arena(staged, PAGES, SNAPSHOTS)
    expected = bytearray(plain.page_bytes)
    for page, tokens in ((0, 256), (5, 130), (PAGES - 1, 3)):
        own, pinned = memoryview(bytearray(b"x" * staged.page_bytes)), put(rooms, 100 + page)
        plain.read_page(page, memoryview(expected), tokens)
        staged.read_page(page, own, tokens)
        staged.read_page(page, pinned, tokens)
        assert own == expected
        staged.settle()
        assert pinned == expected
    rings = [put(rooms, snapshot, "ring") for snapshot in range(SNAPSHOTS)]
    for snapshot, room in enumerate(rings):
        staged.read_ring(snapshot, room)
    staged.settle()
    for snapshot, room in enumerate(rings):
        ring = bytearray(plain.ring_bytes)
        plain.read_ring(snapshot, memoryview(ring))
        assert room == ring


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 22])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_read_together_into_any_memory(staging: int, seed: int, device: str) -> None:
    """As one by one: partial pages among them, memory that is not pinned, and two records for the same memory."""
    plain, staged = pair(device, staging)
    g = torch.Generator().manual_seed(seed)
    rooms = arena(staged, PAGES)
    pages = torch.randint(0, PAGES, (PAGES,), generator=g).tolist()
    tokens = [1 + int(n) if n < 256 else 256 for n in torch.randint(0, 600, (PAGES,), generator=g)]
    made = [put(rooms, number) for number in range(PAGES)]
    records = [made[slot] for slot in torch.randperm(PAGES, generator=g).tolist()]
    records[5] = records[3]
    for number in torch.randperm(PAGES, generator=g)[: 4 * seed].tolist():
        records[number] = memoryview(bytearray(b"x" * staged.page_bytes))
    busy(device, 5)
    staged.read_pages(pages, records, tokens)
    for view in staged.views.values():  # what the model does next
        view.view(torch.uint8).fill_(0xEE)
    staged.settle()
    expected = bytearray(plain.page_bytes)
    for number, (page, record, count) in enumerate(zip(pages, records, tokens, strict=True)):
        plain.read_page(page, memoryview(expected), count)
        assert record == expected or (number == 3 and record is records[5])


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 22])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_written_together_from_any_memory(staging: int, seed: int, device: str) -> None:
    plain, staged = pair(device, staging)
    g = torch.Generator().manual_seed(seed)
    rooms = arena(staged, PAGES)
    made = [put(rooms, number) for number in range(PAGES)]
    pages = torch.randperm(PAGES, generator=g)[: PAGES - seed].tolist()
    records = []
    slots, others = torch.randperm(PAGES, generator=g)[: len(pages)].tolist(), torch.rand(len(pages), generator=g) < 0.3
    for slot, outside in zip(slots, others.tolist(), strict=True):
        content = bytes(torch.randint(0, 256, (staged.page_bytes,), generator=g, dtype=torch.uint8).tolist())
        made[slot][:] = content
        records.append(memoryview(bytearray(content)) if outside else made[slot])
    fence = staged.fence()

    def load() -> None:
        staged.after(fence)
        staged.write_pages(pages, records)

    elsewhere(load)
    plain.write_pages(pages, records)
    assert same(plain, staged)


@pytest.mark.parametrize("staging", [1, 40_000, 1 << 22])
def test_pages_that_were_begun_are_whole_when_they_are_finished(staging: int, device: str) -> None:
    """One by one from memory that is overwritten at once, as a disk's reader does it; other loads before and behind."""
    plain, staged = pair(device, staging)
    rooms = arena(staged, PAGES)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(staging)).tolist()
    contents = torch.randint(0, 256, (PAGES, staged.page_bytes), dtype=torch.uint8).numpy()
    memory = bytearray(staged.page_bytes)
    fence = staged.fence()

    def load() -> None:
        staged.after(fence)
        for number, page in enumerate(order):
            memory[:] = contents[number].tobytes()
            if number % 7 == 3:
                made = put(rooms, number)
                made[:] = memory
                staged.write_page(page, made)
            else:
                staged.write_page(page, memoryview(memory))
            memory[:] = b"x" * len(memory)
        staged.finish()

    elsewhere(load)
    for number, page in enumerate(order):
        plain.write_page(page, memoryview(bytearray(contents[number].tobytes())))
    assert same(plain, staged)


def test_an_evicted_page_leaves_as_it_was_and_comes_back(device: str) -> None:
    """Evicted behind a step in flight, its page reserved for a load at once, and the record needed by that load."""
    plain, staged = pair(device, 40_000)
    for round_ in range(8):
        rooms = arena(staged, PAGES)
        old = [bytearray(plain.page_bytes) for _ in range(PAGES)]
        order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(round_)).tolist()
        busy(device, 5)
        for view in staged.views.values():  # the step in flight writes before it all
            view.view(torch.uint8).add_(1)
        for name, view in plain.views.items():
            view.view(torch.uint8).add_(1)
            assert view.dtype == staged.views[name].dtype
        for page in range(PAGES):
            plain.read_page(page, memoryview(old[page]), 256)
        held = [put(rooms, page) for page in range(PAGES)]
        for page in range(PAGES):
            staged.read_page(page, held[page], 256)
        fence = staged.fence()

        def load(fence: object = fence, order: list[int] = order, held: list[memoryview] = held) -> None:
            staged.after(fence)
            staged.write_pages(order, held)

        elsewhere(load)
        plain.write_pages(order, [memoryview(each) for each in old])
        assert same(plain, staged)
        staged.settle()
        assert all(room == content for room, content in zip(held, old, strict=True))


def test_a_save_is_not_touched_by_what_the_model_does_next(device: str) -> None:
    plain, staged = pair(device, 1)
    rooms = arena(staged, PAGES)
    expected = bytearray(plain.page_bytes)
    held = [put(rooms, page) for page in range(PAGES)]
    for page in range(PAGES):
        staged.read_page(page, held[page], 256)
        for view in staged.views.values():
            view.view(torch.uint8)[:, : page + 1] = 0xEE
    staged.settle()
    for page in range(PAGES):
        plain.read_page(page, memoryview(expected), 256)
        assert held[page] == expected


def test_pages_of_a_real_size_come_back(device: str) -> None:
    """V4-Flash's, loaded 256 and saved 64 at a time, in no order. What rate the link gives: benchmarks/hopper_engine.py
    (host).
    """
    if device != "cuda":
        pytest.skip("a GPU's size")
    pages = 300
    staged = StateTensors(FLASH, pages, 1, 1, torch.bfloat16, device)
    rooms = arena(staged, 2 * pages)
    loaded, saved = ([put(rooms, first + page) for page in range(pages)] for first in (0, pages))
    g = torch.Generator().manual_seed(1)
    for room in loaded:
        torch.frombuffer(room, dtype=torch.uint8).random_(generator=g)
    targets, order = (torch.randperm(pages, generator=g).tolist() for _ in range(2))
    for first in range(0, pages, staged.pages_at_once):
        last = first + staged.pages_at_once
        staged.write_pages(targets[first:last], loaded[first:last])
    for first in range(0, pages, 64):
        some = order[first : first + 64]
        staged.read_pages(some, [saved[page] for page in some], [256] * len(some))
    staged.settle()
    for page, room in zip(targets, loaded, strict=True):
        assert saved[page] == room


def layered(device: str, groups: tuple[StateGroup, ...], pages: int, monkeypatch: pytest.MonkeyPatch) -> StateTensors:
    monkeypatch.setattr(layer_loads, "LEAST_BYTES", 0)
    spread: layer_loads.Spread = ref.spread
    if device == "cuda":
        from longread.kernels.records import triton

        spread = triton.spread
    return StateTensors(groups, pages, 1, 1, torch.bfloat16, device, 1 << 20, spread)


def begun(staged: StateTensors, pages: list[int], rooms: list[memoryview]) -> None:
    """As the tiers have it: on a thread of its own, then told."""
    fence = staged.fence()

    def load() -> None:
        staged.after(fence)
        begin = staged.layered(pages, rooms)
        assert begin is not None
        arrivals.append(begin())

    arrivals: list[layer_loads.Arrival] = []
    elsewhere(load)
    staged.arrivals.begun(arrivals[0], pages)


@pytest.mark.parametrize("seed", range(4))
def test_what_touches_a_page_on_its_way_waits_for_it(seed: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy, a record read, a page given to somebody else; odd widths among the groups."""
    staged = layered(device, GROUPS, PAGES, monkeypatch)
    plain = StateTensors(GROUPS, PAGES, 1, 1, torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    rooms = arena(staged, 3 * PAGES)
    for round_ in range(6):
        pages = torch.randperm(PAGES, generator=g)[: 3 + seed].tolist()
        given = [put(rooms, 100 * round_ + page) for page in pages]
        for room in given:
            torch.frombuffer(room, dtype=torch.uint8).random_(0, 255, generator=g)
        staged.taken(pages)
        begun(staged, pages, given)
        plain.write_pages(pages, given)
        source, target = torch.randint(0, PAGES, (2,), generator=g).tolist()
        for store in (plain, staged):
            if round_ % 3 == 0:
                store.copy_page(source, target)
            elif round_ % 3 == 1:
                store.taken([source])
                for group in GROUPS[:3]:
                    store.views[group.name][:, source].view(torch.uint8).fill_(round_)
        if round_ % 3 == 2:
            record, expected = (memoryview(bytearray(plain.page_bytes)) for _ in range(2))
            staged.read_page(pages[0], record, 256)
            plain.read_page(pages[0], expected, 256)
            assert record == expected
    staged.finish()
    assert same(plain, staged)


def test_a_captured_chunk_meets_each_layer_as_it_came(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real size: replayed at once behind a load's beginning, again and again with other records."""
    if device != "cuda":
        pytest.skip("graphs are a GPU's")
    pages = 300
    staged = layered(device, FLASH, pages + 20, monkeypatch)
    rooms = arena(staged, pages)
    given = [put(rooms, page) for page in range(pages)]
    seen = {group.name: torch.empty_like(staged.views[group.name]) for group in FLASH[:3]}

    def steps() -> Generator[None, None, None]:
        for layer in range(15):
            for name, view in seen.items():
                view[layer].copy_(staged.views[name][layer])
            if layer < 14:
                yield

    def chunk() -> None:
        for _ in staged.arrivals.layers(steps()):
            pass

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chunk()
        side.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        chunk()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    g = torch.Generator().manual_seed(1)
    for _ in range(6):
        targets = torch.randperm(pages + 20, generator=g)[:pages].tolist()
        for room in given:
            torch.frombuffer(room, dtype=torch.uint8).random_(generator=g)
        staged.taken(targets)
        begun(staged, targets, given)
        graph.replay()
        staged.arrivals.replayed()
        torch.cuda.synchronize()
        record = memoryview(bytearray(staged.page_bytes))
        for name, view in seen.items():
            assert torch.equal(view, staged.views[name])
        for target, room in list(zip(targets, given, strict=True))[::37]:
            staged.read_page(target, record, 256)
            assert record == room
