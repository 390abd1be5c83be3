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
        "window": (4, 3, 16, 8),
        "score": (2, 3, 8, 6),
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
