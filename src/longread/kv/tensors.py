"""The storage of all state groups as tensors, and the copies that the cache asks for.

Knows shapes and devices; not which page or row belongs to whom. The only file of kv that imports torch.
"""

import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from longread.spec.state import StateGroup


class StateTensors:
    """Implements ``StateStore``.

    ``views[name]``: rows [layers, pages, rows_per_page, width], ring [layers, slots, ring_rows, width]. ``dtype`` is
    what a group of dtype "model" is stored in. Snapshots: ring shape with ``num_snapshots`` for slots.
    """

    def __init__(
        self,
        groups: tuple[StateGroup, ...],
        num_pages: int,
        num_slots: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ):
        self._rows: list[Tensor] = []
        self._rings: list[tuple[Tensor, Tensor, float]] = []  # live, snapshots, fill
        views: dict[str, Tensor] = {}
        place = torch.device(device)
        for group in groups:
            kept = dtype if group.dtype == "model" else torch.float32
            layers = len(group.layers)
            if group.kind == "rows":
                views[group.name] = _lazy_zeros((layers, num_pages, group.rows_per_page, group.width), kept, place)
                self._rows.append(views[group.name])
            else:
                views[group.name] = _lazy_zeros((layers, num_slots, group.ring_rows, group.width), kept, place)
                saved = _lazy_zeros((layers, num_snapshots, group.ring_rows, group.width), kept, place)
                self._rings.append((views[group.name], saved, group.fill))
        self.views: Mapping[str, Tensor] = views
        saved_bytes = sum(saved.nbytes for _, saved, _ in self._rings)
        self.nbytes = sum(view.nbytes for view in views.values()) + saved_bytes

    def reset_slot(self, slot: int) -> None:
        """Fill the slot's rings. Without it a short prompt would read what the slot's last sequence left behind."""
        for live, _, fill in self._rings:
            live[:, slot].fill_(fill)

    def copy_page(self, source: int, target: int) -> None:
        for rows in self._rows:
            rows[:, target].copy_(rows[:, source])

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        for live, saved, _ in self._rings:
            saved[:, snapshot].copy_(live[:, slot])

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        for live, saved, _ in self._rings:
            live[:, slot].copy_(saved[:, snapshot])

    def copy_slot(self, source: int, target: int) -> None:
        for live, _, _ in self._rings:
            live[:, target].copy_(live[:, source])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU untouched pages cost no resident memory.

    An anonymous mapping is zero without being written, where torch.zeros writes every byte and a small torch.empty
    hands out old heap memory, whose NaN would survive a masked product in a reader.
    """
    size = dtype.itemsize
    for n in shape:
        size *= n
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)
