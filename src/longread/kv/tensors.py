"""The storage of all state groups as tensors, and the copies that the cache asks for.

Knows shapes and devices; not which page or row belongs to whom. The only file of kv that imports torch.
"""

import math
import mmap
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from longread.spec.state import StateGroup

# Bytes of a storage or a record, indexed and assigned alike: an np.ndarray in main memory, a Tensor on a device. Torch
# would copy with a team of threads for every thread that asks, which get in each other's and the model's way.
_Bytes: TypeAlias = Any


class StateTensors:
    """Implements ``StateStore`` and ``RecordStore``.

    ``views[name]``: rows [layers, pages, rows_per_page, width], ring [layers, slots + snapshots, ring_rows, width], so
    that a model reaches both. ``dtype`` is what a group of dtype "model" is stored in.
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
        self._row_bytes: list[tuple[_Bytes, int]] = []  # the same as bytes, with tokens a row
        self._rings: list[tuple[Tensor, float]] = []  # with fill
        self._num_slots = num_slots
        views: dict[str, Tensor] = {}
        place = torch.device(device)
        for group in groups:
            kept = {"model": dtype, "float32": torch.float32, "uint8": torch.uint8}[group.dtype]
            layers = len(group.layers)
            if group.kind == "rows":
                views[group.name] = _lazy_zeros((layers, num_pages, group.rows_per_page, group.width), kept, place)
                self._rows.append(views[group.name])
                self._row_bytes.append((_as_bytes(views[group.name]), group.tokens_per_row))
            else:
                shape = (layers, num_slots + num_snapshots, group.ring_rows, group.width)
                views[group.name] = _lazy_zeros(shape, kept, place)
                self._rings.append((views[group.name], group.fill))
        self.views: Mapping[str, Tensor] = views
        self.nbytes = sum(view.nbytes for view in views.values())
        self._saved_bytes = [_as_bytes(rings)[:, num_slots:] for rings, _ in self._rings]
        self.page_bytes = sum(group.bytes_per_page(dtype.itemsize) for group in groups)
        self.ring_bytes = sum(group.bytes_per_slot(dtype.itemsize) for group in groups)

    def reset_slot(self, slot: int) -> None:
        """Fill the slot's rings. Without it a short prompt would read what the slot's last sequence left behind."""
        for rings, fill in self._rings:
            rings[:, slot].fill_(fill)

    def copy_page(self, source: int, target: int) -> None:
        for rows in self._rows:
            rows[:, target].copy_(rows[:, source])

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        self.copy_slot(slot, self._num_slots + snapshot)

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        self.copy_slot(self._num_slots + snapshot, slot)

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        """The page as one record: groups, layers, rows, in the storage's types. Rows that ``tokens`` tokens do not
        fill become zeros, so that equal tokens give equal bytes.
        """
        for (rows, grain), part in self._page_parts(into):
            valid = tokens // grain
            part[:, :valid] = rows[:, page, :valid]
            part[:, valid:] = 0

    def write_page(self, page: int, data: memoryview) -> None:
        for (rows, _), part in self._page_parts(data):
            rows[:, page] = part

    def read_ring(self, snapshot: int, into: memoryview) -> None:
        for saved, part in self._ring_parts(into):
            part[:] = saved[:, snapshot]

    def write_ring(self, snapshot: int, data: memoryview) -> None:
        for saved, part in self._ring_parts(data):
            saved[:, snapshot] = part

    def _page_parts(self, data: memoryview) -> Iterator[tuple[tuple[_Bytes, int], _Bytes]]:
        yield from zip(self._row_bytes, _parts(data, [rows for rows, _ in self._row_bytes]), strict=True)

    def _ring_parts(self, data: memoryview) -> Iterator[tuple[_Bytes, _Bytes]]:
        yield from zip(self._saved_bytes, _parts(data, self._saved_bytes), strict=True)

    def copy_slot(self, source: int, target: int) -> None:
        for rings, _ in self._rings:
            rings[:, target].copy_(rings[:, source])


def _as_bytes(storage: Tensor) -> _Bytes:
    return storage.view(torch.uint8).numpy() if storage.device.type == "cpu" else storage.view(torch.uint8)


def _parts(data: memoryview, storages: list[_Bytes]) -> Iterator[_Bytes]:
    """A record cut into one view [layers, rows, width in bytes] a group; ``data`` must be writable memory."""
    start = 0
    for storage in storages:
        shape = (storage.shape[0], *storage.shape[2:])
        size = math.prod(shape)
        part = np.frombuffer(data, dtype=np.uint8, count=size, offset=start).reshape(shape)
        yield part if isinstance(storage, np.ndarray) else torch.from_numpy(part)
        start += size


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
