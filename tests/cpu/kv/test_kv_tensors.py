"""State tensors: shapes, fills, what each copy touches and what it leaves, and memory paid for only when used."""

import psutil
import pytest
import torch
from kv_contents import ROWS_ONLY

from longread.kv.cache import KVCache
from longread.kv.tensors import StateTensors
from longread.spec.state import StateGroup

INF = float("inf")
GROUPS = (
    StateGroup("csa", "rows", (0, 2, 3), 8, tokens_per_row=4),
    StateGroup("hca", "rows", (1,), 8, tokens_per_row=128),
    StateGroup("window", "ring", (0, 1, 2, 3), 8, ring_rows=16),
    StateGroup("score", "ring", (0, 2), 6, ring_rows=8, fill=-INF, dtype="float32"),
)


def numbered(tensors: StateTensors) -> None:
    """Give every (page or slot) its own number, plus a hundredth a layer."""
    for view in tensors.views.values():
        layers, places = view.shape[:2]
        view.copy_((torch.arange(places)[None] + torch.arange(layers)[:, None] / 128)[..., None, None])


def test_shapes_types_and_bytes():
    tensors = StateTensors(GROUPS, num_pages=5, num_slots=3, num_snapshots=4, dtype=torch.bfloat16)
    assert {name: tuple(view.shape) for name, view in tensors.views.items()} == {
        "csa": (3, 5, 64, 8),
        "hca": (1, 5, 2, 8),
        "window": (4, 3 + 4, 16, 8),
        "score": (2, 3 + 4, 8, 6),
    }
    assert [view.dtype for view in tensors.views.values()] == [torch.bfloat16] * 3 + [torch.float32]
    pages = sum(group.bytes_per_page(2) for group in GROUPS)
    slots = sum(group.bytes_per_slot(2) for group in GROUPS)
    assert tensors.nbytes == 5 * pages + (3 + 4) * slots
    assert all(not view.any() for view in tensors.views.values())


def test_no_snapshots_no_slots_no_pages():
    tensors = StateTensors(GROUPS, num_pages=0, num_slots=1, num_snapshots=0, dtype=torch.float32)
    assert tensors.views["csa"].shape == (3, 0, 64, 8)
    assert tensors.nbytes == sum(group.bytes_per_slot(4) for group in GROUPS)


def test_reset_fills_one_slot_of_every_ring_and_layer():
    tensors = StateTensors(GROUPS, 2, 3, 1, torch.float32)
    numbered(tensors)
    before = {name: view.clone() for name, view in tensors.views.items()}
    tensors.reset_slot(1)
    for name, fill in (("window", 0.0), ("score", -INF)):
        assert (tensors.views[name][:, 1] == fill).all()
        for other in (0, 2):
            assert torch.equal(tensors.views[name][:, other], before[name][:, other])
    assert torch.equal(tensors.views["csa"], before["csa"])


def test_copy_page_copies_every_rows_group_and_no_ring():
    tensors = StateTensors(GROUPS, 4, 4, 1, torch.float32)
    numbered(tensors)
    before = {name: view.clone() for name, view in tensors.views.items()}
    tensors.copy_page(3, 1)
    for name in ("csa", "hca"):
        want = before[name]
        want[:, 1] = want[:, 3]
        assert torch.equal(tensors.views[name], want)
    for name in ("window", "score"):
        assert torch.equal(tensors.views[name], before[name])


def test_snapshots_bring_back_exactly_what_was_saved():
    tensors = StateTensors(GROUPS, 2, 3, 2, torch.bfloat16)
    numbered(tensors)
    saved = {name: tensors.views[name][:, 2].clone() for name in ("window", "score")}
    tensors.save_snapshot(2, 1)
    tensors.save_snapshot(0, 0)
    tensors.reset_slot(2)
    tensors.load_snapshot(1, 0)
    for name, want in saved.items():
        assert torch.equal(tensors.views[name][:, 0], want)
    tensors.load_snapshot(0, 1)
    assert (tensors.views["window"][0, 1] == 0).all()


def test_copy_slot():
    tensors = StateTensors(GROUPS, 2, 3, 0, torch.float32)
    numbered(tensors)
    tensors.copy_slot(0, 2)
    for name in ("window", "score"):
        assert torch.equal(tensors.views[name][:, 2], tensors.views[name][:, 0])
    assert (tensors.views["window"][0, 1] == 1).all()


def test_untouched_pages_cost_no_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    tensors = StateTensors((StateGroup("latent", "rows", tuple(range(4)), 512),), 512, 1, 0, torch.float32)
    assert tensors.nbytes == 1 << 30
    assert process.memory_info().rss - before < 64 << 20
    tensors.views["latent"][:, 7] = 1.0
    assert process.memory_info().rss - before < 64 << 20
    assert tensors.views["latent"][3, 7].sum() == 256 * 512
    assert tensors.views["latent"][3, 8].sum() == 0


@pytest.mark.parametrize("groups", [ROWS_ONLY, GROUPS])
def test_the_cache_drives_it(groups):
    """One prompt, closed and asked again: the reused rows and rings are the ones that were written."""
    tensors = StateTensors(groups, 8, 2, 4, torch.float32)
    cache = KVCache(groups, b"r" * 16, 8, 2, 4, tensors)
    prompt = list(range(300))
    for view in tensors.views.values():
        view.fill_(-7.0)
    lease = cache.open(prompt)
    cache.reserve(lease, 300)
    for group in groups:
        view = tensors.views[group.name]
        if group.kind == "ring":
            assert (view[:, lease.slot] == group.fill).all()
            view[:, lease.slot] = 299.0
        else:
            rows = torch.arange(512 // group.tokens_per_row, dtype=torch.float32)
            view[:, lease.pages] = rows.view(1, 2, -1, 1)
    cache.commit(lease, prompt[:299])
    assert cache.snapshot(lease)
    slot, pages = lease.slot, lease.pages
    cache.close(lease)
    tensors.reset_slot(slot)
    lease = cache.open(prompt)
    assert lease.cached_tokens == 299
    assert (lease.pages[0], lease.pages[1]) != tuple(pages)
    for group in groups:
        view = tensors.views[group.name]
        if group.kind == "ring":
            assert (view[:, lease.slot] == 299.0).all()
        else:
            assert torch.equal(view[:, lease.pages], view[:, pages])
    cache.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_are_what_was_stored_and_touch_nothing_else(dtype: torch.dtype):
    source = StateTensors(GROUPS, num_pages=3, num_slots=2, num_snapshots=2, dtype=dtype)
    target = StateTensors(GROUPS, num_pages=4, num_slots=2, num_snapshots=3, dtype=dtype)
    for tensors in (source, target):
        for view in tensors.views.values():
            view.copy_(torch.randn(view.shape))
    source.save_snapshot(1, 0)
    page, ring = (memoryview(bytearray(b"x" * size)) for size in (source.page_bytes, source.ring_bytes))
    assert source.page_bytes == sum(group.bytes_per_page(dtype.itemsize) for group in GROUPS)
    before = {name: view.clone() for name, view in target.views.items()}
    source.read_page(2, page, 256)
    target.write_page(3, page)
    source.read_ring(0, ring)
    target.write_ring(2, ring)
    target.load_snapshot(2, 0)
    for name, view in target.views.items():
        rows = name in ("csa", "hca")
        to, other, origin = (3, slice(0, 3), source.views[name][:, 2]) if rows else (0, 1, source.views[name][:, 1])
        assert torch.equal(view[:, to], origin)
        assert torch.equal(view[:, other], before[name][:, other])


def test_a_tail_ends_with_zeros_whatever_lies_behind_it():
    tensors = StateTensors(GROUPS, num_pages=2, num_slots=1, num_snapshots=1, dtype=torch.float32)
    records = []
    for garbage in (1.0, float("nan")):
        for view in tensors.views.values():
            view.fill_(garbage)
        tensors.views["csa"][:, 0, :32] = 7.0  # 130 tokens close 32 windows of 4 and one of 128
        tensors.views["hca"][:, 0, :1] = 8.0
        records.append(bytearray(tensors.page_bytes))
        tensors.read_page(0, memoryview(records[-1]), 130)
    assert records[0] == records[1]
    tensors.write_page(1, memoryview(records[0]))
    assert torch.equal(tensors.views["csa"][:, 1, :32], tensors.views["csa"][:, 0, :32])
    assert not tensors.views["csa"][:, 1, 32:].any() and not tensors.views["hca"][:, 1, 1:].any()
