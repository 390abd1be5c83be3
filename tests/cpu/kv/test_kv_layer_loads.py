"""Loads that are published before they are there, with tensors: the same bytes whatever the link has done by when."""

from collections.abc import Generator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_link import LateLink
from staged_records import GROUPS, PAGES, arena, put

from longread.kernels.records import ref
from longread.kv import layer_loads
from longread.kv.layer_loads import first_layers
from longread.kv.tensors import StateTensors

LAYERS = 4


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves by itself, and every load is worth it."""
    monkeypatch.setattr(layer_loads, "link_of", lambda copies, marks: LateLink(marks))
    monkeypatch.setattr(layer_loads, "LEAST_BYTES", 0)


def filled(seed: int) -> tuple[StateTensors, StateTensors, LateLink]:
    """Without staging, and with late loads; with the same contents."""
    plain = StateTensors(GROUPS, PAGES, 3, 2, torch.bfloat16)
    late = StateTensors(GROUPS, PAGES, 3, 2, torch.bfloat16, staging=1, spread=ref.spread)
    g = torch.Generator().manual_seed(seed)
    for name, view in plain.views.items():
        flat = view.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=g, dtype=torch.uint8))
        late.views[name].view(torch.uint8).copy_(flat)
    assert late._layered is not None
    link = late._layered.link
    assert isinstance(link, LateLink) and not link.pending()
    return plain, late, link


def same(plain: StateTensors, late: StateTensors) -> bool:
    return all(torch.equal(view.view(torch.uint8), late.views[n].view(torch.uint8)) for n, view in plain.views.items())


@given(data=st.data(), seed=st.integers(0, 99))
def test_any_use_of_pages_that_are_on_their_way(data: st.DataObject, seed: int) -> None:
    """What is done is done to both; the late one's pages come when they have to, or when the link goes on."""
    plain, late, link = filled(seed)
    g = torch.Generator().manual_seed(seed)
    rooms = arena(late, PAGES)
    made = [put(rooms, number) for number in range(PAGES)]
    for room in made:
        room[:] = torch.randint(0, 256, (len(room),), generator=g, dtype=torch.uint8).numpy().tobytes()
    pages = st.integers(0, 4)  # few, so that they meet
    for _ in range(data.draw(st.integers(2, 12))):
        kind = data.draw(st.sampled_from(["load", "load", "copy", "read", "taken", "link", "row"]))
        page = data.draw(pages)
        if kind == "load":
            some = data.draw(st.lists(pages, unique=True, min_size=1, max_size=5))
            late.taken(some)  # as a load's pages are before they are its own
            begin = late.layered(some, [made[each] for each in some])
            assert begin is not None
            late.arrivals.begun(begin(), some)
            plain.write_pages(some, [made[each] for each in some])
        elif kind == "copy":
            target = data.draw(pages)
            for store in (plain, late):
                store.copy_page(page, target)
        elif kind == "read":
            records = [memoryview(bytearray(store.page_bytes)) for store in (plain, late)]
            for store, record in zip((plain, late), records, strict=True):
                store.read_pages([page], [record], [200])
            assert records[0] == records[1]
        elif kind == "link":
            link.go(link.done + data.draw(st.integers(1, 6)))
        else:
            late.taken([page]) if kind == "taken" else late.arrivals.touch([page])
            for store in (plain, late):
                for name in ("csa", "hca", "index"):
                    store.views[name][:, page] += 1
    link.finish()
    assert same(plain, late)


@pytest.mark.parametrize("use", ["copied from", "copied to", "read", "taken"])
def test_one_use_of_a_page_that_is_on_its_way(use: str) -> None:
    plain, late, link = filled(1)
    room = put(arena(late, 1), 0)
    room[:] = bytes(range(256)) * (len(room) // 256) + bytes(len(room) % 256)
    begin = late.layered([3], [room])
    assert begin is not None
    late.arrivals.begun(begin(), [3])
    plain.write_pages([3], [room])
    record = memoryview(bytearray(late.page_bytes))
    late.copy_page(1, 2)
    plain.copy_page(1, 2)
    assert link.pending()  # which had nothing to do with it
    if use == "read":
        late.read_pages([3], [record], [256])
        assert record == room
    elif use == "taken":
        late.taken([3])
    else:
        for store in (plain, late):
            store.copy_page(*((3, 1) if use == "copied from" else (1, 3)))
    assert not link.pending()
    assert same(plain, late)


@given(places=st.lists(st.integers(0, PAGES - 1), unique=True, min_size=1), seed=st.integers(0, 9))
def test_layers_come_in_their_order(places: list[int], seed: int) -> None:
    plain, late, _ = filled(seed)
    rooms = arena(late, PAGES)
    made = [put(rooms, number) for number in range(PAGES)]
    for number, room in enumerate(made):
        room[:] = bytes([number + 1]) * len(room)
    begin = late.layered(places, [made[place] for place in places])
    assert begin is not None
    late.arrivals.begun(begin(), places)
    layer = 0

    def steps() -> Generator[None, None, None]:
        nonlocal layer
        while layer < LAYERS:
            for group in GROUPS:
                if group.kind == "rows" and layer in group.layers:
                    rows = late.views[group.name][group.layers.index(layer)].view(torch.uint8)
                    for place in places:
                        assert (rows[place] == place + 1).all(), (group.name, layer, place)
            layer += 1
            if layer < LAYERS:
                yield

    for _ in late.arrivals.layers(steps(), places):
        pass
    assert layer == LAYERS
    plain.write_pages(places, [made[place] for place in places])
    assert same(plain, late)


def test_what_does_not_lie_in_pinned_memory_is_waited_for() -> None:
    _, late, _ = filled(1)
    rooms = arena(late, 2)
    one, other = put(rooms, 0), memoryview(bytearray(late.page_bytes))
    assert late.layered([1, 2], [one, other]) is None
    assert late.layered([1], [one]) is not None
    assert late.layered([], []) is None


def test_small_loads_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = filled(1)[1]
    monkeypatch.setattr(layer_loads, "LEAST_BYTES", 3 * late.page_bytes)
    small = filled(1)[1]
    rooms = arena(small, 3)
    made = [put(rooms, number) for number in range(3)]
    assert small.layered([1, 2], made[:2]) is None and small.layered([1, 2, 3], made) is not None


def test_ranges_begin_at_layers_that_have_rows() -> None:
    csa, hca = tuple(range(2, 32, 2)), tuple(range(3, 32, 2))
    assert first_layers((csa, csa, hca)) == (2, 5, 9, 13, 17, 20, 24, 28)
    assert first_layers((range(4),)) == (0, 1, 2, 3)
    assert first_layers((range(61),)) == (0, 7, 15, 22, 30, 38, 45, 53)
