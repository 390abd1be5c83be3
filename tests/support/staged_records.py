"""State tensors whose records go through a device's staging, beside plain ones with the same contents."""

import torch

from longread.kv.host import HostArena
from longread.kv.records import Known
from longread.kv.tensors import StateTensors
from longread.spec.state import StateGroup

INF = float("inf")
# Widths that are not multiples of 8 bytes among them; the last page rows are packed bytes.
GROUPS = (
    StateGroup("csa", "rows", (0, 2, 3), 9, tokens_per_row=4),
    StateGroup("hca", "rows", (1,), 8, tokens_per_row=128),
    StateGroup("index", "rows", (0, 2, 3), 36, tokens_per_row=4, dtype="uint8"),
    StateGroup("window", "ring", (0, 1, 2, 3), 9, ring_rows=16),
    StateGroup("score", "ring", (0, 2), 6, ring_rows=8, fill=-INF, dtype="float32"),
)
ROWS = ("csa", "hca", "index")
PAGES, SNAPSHOTS = 24, 7


def pair(device: str, staging: int, groups: tuple[StateGroup, ...] = GROUPS) -> tuple[StateTensors, StateTensors]:
    """(plain on a CPU, staged on ``device``), filled alike; the staged one's buffers are poisoned."""
    plain = StateTensors(groups, PAGES, 3, SNAPSHOTS, torch.bfloat16)
    staged = StateTensors(groups, PAGES, 3, SNAPSHOTS, torch.bfloat16, device, staging=staging)
    g = torch.Generator().manual_seed(staging)
    for name, view in plain.views.items():
        view.view(torch.uint8).copy_(
            torch.randint(0, 256, view.view(torch.uint8).shape, generator=g, dtype=torch.uint8)
        )
        staged.views[name].copy_(view)
    assert staged._copies is not None
    for buffer in (*staged._copies._loading, staged._copies._saving):
        buffer.fill_(0xA5)
    return plain, staged


def same(plain: StateTensors, staged: StateTensors) -> bool:
    return all(
        torch.equal(view.view(torch.uint8), staged.views[name].cpu().view(torch.uint8))
        for name, view in plain.views.items()
    )


def arena(tensors: StateTensors, pages: int, rings: int = 0) -> HostArena:
    """Room for at least so many."""
    size = max(pages * tensors.page_bytes * 2, 8 * rings * tensors.ring_bytes)
    return HostArena(tensors.page_bytes, tensors.ring_bytes, size, tensors.allocate_host)


def put(host: HostArena, number: int, kind: str = "page") -> memoryview:
    key = number.to_bytes(16, "little")
    room = host.put(Known(kind, key, bytes(16), 1, b"", has_ring=False))  # type: ignore[arg-type]
    assert room is not None
    return room
