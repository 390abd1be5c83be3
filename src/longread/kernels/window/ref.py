"""The ring of a sequence's last 128 latents in plain torch: written token by token, read and replaced chunk by chunk.

Knows rings and the bytes of a row; knows no attention. ring: [slots, 128, W], one layer's, position p at row p mod 128;
uint8 holds packed latents, any other dtype the numbers.
"""

import torch
from torch import Tensor

from longread.kernels.cache_rows.ref import latent_bytes, pack_latent, unpack_latent
from longread.kernels.places import Chunk, Rows

SIZE = 128  # tokens


def rope_of(d: int, width: int) -> int:
    """How many of a packed latent's d channels are rotated: the power of two from 8 that makes ``width`` bytes.

    Raises ValueError where there is none or more than one.
    """
    found = [1 << n for n in range(3, d.bit_length()) if latent_bytes(d, 1 << n) == width]
    if len(found) != 1:
        raise ValueError(
            f"no packed latent of {d} channels has {width} bytes" if not found else f"{width} bytes fit {found}"
        )
    return found[0]


def rows(kv: Tensor, ring: Tensor, where: Rows) -> None:
    """The newest token of each of B sequences into its ring. kv: [B, d]. Padding touches nothing."""
    live = (where.positions >= 0).nonzero().flatten()
    positions, slots = where.positions[live].long(), where.slots[live].long()
    ring[slots, positions % SIZE] = _stored(kv[live], ring)


def slab(ring: Tensor, kv: Tensor, where: Chunk, rope: int) -> Tensor:
    """A chunk's keys behind those that its first query sees: kv [T, d] -> [128 + T, d] in kv's dtype.

    Row i is position start - 128 + i; rows before position 0 and behind the chunk's end are zeros.
    """
    start, length, slot = (int(n) for n in where.meta[:3].tolist())
    d, held = kv.shape[1], min(start, SIZE)
    out = kv.new_zeros(SIZE + kv.shape[0], d)
    past = ring[slot, torch.arange(start - held, start, device=ring.device) % SIZE]
    out[SIZE - held : SIZE] = unpack_latent(past, d, rope, kv.dtype) if ring.dtype == torch.uint8 else past
    out[SIZE : SIZE + length] = kv[:length]
    return out


def keep(ring: Tensor, kv: Tensor, where: Chunk) -> None:
    """The chunk's last tokens into the ring, after ``slab`` has read it. kv: [T, d]."""
    start, length, slot = (int(n) for n in where.meta[:3].tolist())
    kept, end = min(length, SIZE), start + length
    at = torch.arange(end - kept, end, device=ring.device) % SIZE
    ring[slot, at] = _stored(kv[length - kept : length], ring)


def _stored(kv: Tensor, ring: Tensor) -> Tensor:
    if ring.dtype == torch.uint8:
        return pack_latent(kv, rope_of(kv.shape[1], ring.shape[2]))
    return kv.to(ring.dtype)
