"""Records in memory spread over a storage, in plain torch: what of each record belongs to some layers, to its place.

Knows bytes, places and layers; not what a record means nor whose a place is. A record is the parts of several storages,
one behind the other, each its layers and their rows (kv/device_copies.py).
"""

import torch
from torch import Tensor


def spread(
    memory: Tensor, starts: Tensor, places: Tensor, storage: Tensor, at: int, layers: tuple[int, int]
) -> None:  # fmt: skip
    """Layers first .. stop - 1 of a storage's part of n records, each to its place of ``storage``.

    memory: uint8 [bytes], which the device must be able to read: a GPU reads pinned main memory. starts: int64 [n], the
    first byte of each record in it. places: int64 [n], all different. storage: [layers, places, ..] of any dtype,
    contiguous. at: bytes from a record's start to the storage's part of it.
    """
    flat = storage.view(torch.uint8).flatten(2)
    first, stop = layers
    width = flat.shape[2]
    for start, place in zip(starts.tolist(), places.tolist(), strict=True):
        part = memory[start + at + first * width : start + at + stop * width]
        flat[first:stop, place] = part.view(stop - first, width)
