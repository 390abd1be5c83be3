"""The storage of all state groups as tensors, and the copies that the cache asks for.

Knows shapes and devices; not which page or row belongs to whom. With ``device_copies`` and ``layer_loads``, the only
file of kv that imports torch.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longread.kv.arrivals import Arrival, Arrivals
from longread.kv.device_copies import STAGING_BYTES, DeviceCopies, Parts
from longread.kv.layer_loads import LayerLoads, Spread
from longread.spec.state import StateGroup

# Bytes of a storage or a record in main memory. Torch would copy with a team of threads for every thread that asks,
# which get in each other's and the model's way.
_Bytes: TypeAlias = NDArray[np.uint8]
# That records of a disk are read to, while one is copied from: a millisecond of most disks.
ROOMS, ROOM_BYTES = 5, 12 * 2**20
PAGES_AT_ONCE = 256  # that a load brings before it looks whether it is still wanted: 4 ms of V4-Flash's


class StateTensors:
    """Implements ``StateStore`` and ``RecordStore``.

    ``views[name]``: rows [layers, pages, rows_per_page, width], ring [layers, slots + snapshots, ring_rows, width], so
    that a model reaches both. ``dtype`` is what a group of dtype "model" is stored in. ``staging``: bytes of a staging
    buffer between a device and main memory; None: what suits the device, and none on a CPU, where a record is copied
    to and from its places directly. ``spread``: how a device reads pinned memory by itself (kernels/records); without
    it, and without a staging buffer, every load is waited for. All methods but those of loads (``write_*``,
    ``rooms``, ``layered``, ``finish``, ``after``) belong to the thread that runs the model, on the stream that its
    work is put on. ``arrivals``: pages that are on their way; what else is put on that stream asks it first.
    """

    def __init__(
        self,
        groups: tuple[StateGroup, ...],
        num_pages: int,
        num_slots: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        staging: int | None = None,
        spread: Spread | None = None,
    ):
        self._rows: list[Tensor] = []
        self._grains: list[int] = []  # of the same, tokens a row
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
                self._grains.append(group.tokens_per_row)
            else:
                shape = (layers, num_slots + num_snapshots, group.ring_rows, group.width)
                views[group.name] = _lazy_zeros(shape, kept, place)
                self._rings.append((views[group.name], group.fill))
        self.views: Mapping[str, Tensor] = views
        self.nbytes = sum(view.nbytes for view in views.values())
        self.page_bytes = sum(group.bytes_per_page(dtype.itemsize) for group in groups)
        self.ring_bytes = sum(group.bytes_per_slot(dtype.itemsize) for group in groups)
        self._copies: DeviceCopies | None = None
        self._layered: LayerLoads | None = None
        self.arrivals = Arrivals()
        self._rooms: list[memoryview] = []
        self.pages_at_once = 1
        if staging is not None or place.type != "cpu":
            longest = max(self.page_bytes, self.ring_bytes)
            self._copies = DeviceCopies(place, longest, STAGING_BYTES if staging is None else staging)
            self._staged_pages = Parts(self._rows)
            self._staged_rings = Parts([rings[:, num_slots:] for rings, _ in self._rings])
            self.nbytes += self._copies.nbytes
            self.pages_at_once = PAGES_AT_ONCE
            if spread is not None:
                owners = [group.layers for group in groups if group.kind == "rows"]
                self._layered = LayerLoads(self._copies, spread, self._staged_pages, owners)
                self.arrivals = Arrivals(self._layered.link, self._layered.firsts)
                if num_pages:  # zeros on zeros, so that nothing of a load is compiled while the engine serves
                    zeros = torch.zeros(self.page_bytes, dtype=torch.uint8, pin_memory=place.type == "cuda")
                    self._layered.begin(zeros, [0], [0])
                    self._layered.finish()
        else:
            self._row_bytes = [_as_bytes(rows) for rows in self._rows]
            self._saved_bytes = [_as_bytes(rings)[:, num_slots:] for rings, _ in self._rings]

    @property
    def allocate_host(self) -> Callable[[int], memoryview] | None:
        """Where records cross to main memory fastest (for ``HostArena``); None: anywhere."""
        return None if self._copies is None else self._copies.allocate

    def reset_slot(self, slot: int) -> None:
        """Fill the slot's rings. Without it a short prompt would read what the slot's last sequence left behind."""
        for rings, fill in self._rings:
            rings[:, slot].fill_(fill)

    def copy_page(self, source: int, target: int) -> None:
        self.arrivals.touch((source, target))
        for rows in self._rows:
            rows[:, target].copy_(rows[:, source])

    def taken(self, pages: Sequence[int]) -> None:
        self.arrivals.touch(pages)

    def save_snapshot(self, slot: int, snapshot: int) -> None:
        self.copy_slot(slot, self._num_slots + snapshot)

    def load_snapshot(self, snapshot: int, slot: int) -> None:
        self.copy_slot(self._num_slots + snapshot, slot)

    def read_page(self, page: int, into: memoryview, tokens: int) -> None:
        """The page as one record: groups, layers, rows, in the storage's types. Rows that ``tokens`` tokens do not
        fill become zeros, so that equal tokens give equal bytes.
        """
        if self._copies is not None:
            self.read_pages([page], [into], [tokens])
            return
        for rows, grain, part in zip(self._row_bytes, self._grains, _parts(into, self._row_bytes), strict=True):
            valid = tokens // grain
            part[:, :valid] = rows[:, page, :valid]
            part[:, valid:] = 0

    def read_pages(self, pages: Sequence[int], into: Sequence[memoryview], tokens: Sequence[int]) -> None:
        self.arrivals.touch(pages)
        if self._copies is not None:
            valid = [[count // grain for grain in self._grains] for count in tokens]
            self._copies.read(self._staged_pages, pages, into, valid)
            return
        for page, record, count in zip(pages, into, tokens, strict=True):
            self.read_page(page, record, count)

    def write_page(self, page: int, data: memoryview) -> None:
        self.write_pages([page], [data])

    def rooms(self) -> Sequence[memoryview]:
        if self._copies is None:
            return ()
        if not self._rooms:  # only where a disk is loaded from
            size = max(ROOM_BYTES, self.page_bytes, self.ring_bytes)
            self._rooms = [self._copies.allocate(size) for _ in range(ROOMS)]
        return self._rooms

    def layered(self, pages: Sequence[int], data: Sequence[memoryview]) -> Callable[[], Arrival] | None:
        if self._layered is None or self._copies is None or not pages:
            return None
        if len(pages) * self.page_bytes < self._layered.least_bytes:
            return None
        located = self._copies.located(data)
        return None if located is None else partial(self._layered.begin, *located, pages)

    def finish(self) -> None:
        if self._copies is not None:
            self._copies.finish()
        if self._layered is not None:
            self._layered.finish()

    def write_pages(self, pages: Sequence[int], data: Sequence[memoryview]) -> None:
        if self._copies is not None:
            try:
                self._copies.write(self._staged_pages, pages, data)
            finally:
                self._copies.finish()
            return
        for page, record in zip(pages, data, strict=True):
            for rows, part in zip(self._row_bytes, _parts(record, self._row_bytes), strict=True):
                rows[:, page] = part

    def read_ring(self, snapshot: int, into: memoryview) -> None:
        if self._copies is not None:
            self._copies.read(self._staged_rings, [snapshot], [into])
            return
        for saved, part in zip(self._saved_bytes, _parts(into, self._saved_bytes), strict=True):
            part[:] = saved[:, snapshot]

    def write_ring(self, snapshot: int, data: memoryview) -> None:
        if self._copies is not None:
            try:
                self._copies.write(self._staged_rings, [snapshot], [data])
            finally:
                self._copies.finish()
            return
        for saved, part in zip(self._saved_bytes, _parts(data, self._saved_bytes), strict=True):
            saved[:, snapshot] = part

    def settle(self) -> None:
        if self._copies is not None:
            self._copies.settle()

    def fence(self) -> object:
        return None if self._copies is None else self._copies.fence()

    def after(self, fence: object) -> None:
        if self._copies is not None:
            self._copies.after(fence)

    def copy_slot(self, source: int, target: int) -> None:
        for rings, _ in self._rings:
            rings[:, target].copy_(rings[:, source])


def _as_bytes(storage: Tensor) -> _Bytes:
    return storage.view(torch.uint8).numpy()


def _parts(data: memoryview, storages: list[_Bytes]) -> Iterator[_Bytes]:
    """A record cut into one view [layers, rows, width in bytes] a group; ``data`` must be writable memory."""
    start = 0
    for storage in storages:
        shape = (storage.shape[0], *storage.shape[2:])
        size = math.prod(shape)
        yield np.frombuffer(data, dtype=np.uint8, count=size, offset=start).reshape(shape)
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
