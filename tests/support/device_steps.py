"""A sequence cut into decode rows and chunks as device tensors, and paged stores, for tests of paged kernels."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longread.kernels.compressor.device_ref import Part
from longread.kernels.places import Chunk, Rows

PAGE = 256
BASE = 10000.0


class Compressor(Protocol):
    """The operations of a compressor: a reference's module or a kernel's."""

    def layer_rows(self, *args: object) -> None: ...
    def chunk(self, *args: object) -> None: ...
    def keep(self, *args: object) -> None: ...


def one_row(at: int, slot: int, table: Tensor, padding: int = 0) -> Rows:
    """The token at position ``at`` of one sequence, behind ``padding`` rows of padding."""
    device = table.device
    positions = torch.tensor([-1] * padding + [at], dtype=torch.int32, device=device)
    slots = torch.tensor([0] * padding + [slot], dtype=torch.int32, device=device)
    tables = torch.zeros(padding + 1, len(table), dtype=torch.int32, device=device)
    tables[-1] = table
    return Rows(positions, slots, tables, at + 1)


def one_chunk(start: int, length: int, slot: int, table: Tensor, padded: int) -> Chunk:
    """Tokens start .. start + length - 1 of one sequence in a batch of ``padded`` rows."""
    meta = torch.tensor([start, length, slot, 0], dtype=torch.int32, device=table.device)
    positions = torch.full((padded,), -1, dtype=torch.int32, device=table.device)
    positions[:length] = torch.arange(start, start + length, device=table.device)
    return Chunk(meta, positions, table, start + padded)


def turns(positions: Tensor, rope: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [n, rope / 2]."""
    freqs = BASE ** -(torch.arange(0, rope, 2, device=positions.device) / rope)
    angles = positions[:, None].float() * freqs
    return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Compressed:
    """Inputs of one compressor over a whole sequence, and its state."""

    kv: Tensor
    gate: Tensor
    ape: Tensor
    gain: Tensor
    rope: int
    ratio: int
    index: bool
    eps: float = 1e-6

    def rings(self, slots: int) -> tuple[Tensor, ...]:
        """Rings of fresh slots, those of slot 0 poisoned: it is what padding names."""
        n, device = self.kv.shape[1], self.kv.device
        shapes = [(slots, 8, n)] * 2 if self.ratio == 4 else [(slots, n)] * 3
        fills = (0.0, float("-inf")) if self.ratio == 4 else (float("-inf"), 0.0, 0.0)
        out = tuple(torch.full(s, fill, device=device) for s, fill in zip(shapes, fills, strict=True))
        for ring in out:
            ring[0] = 7.5
        return out

    def step(
        self, op: Compressor, rings: tuple[Tensor, ...], store: Tensor, table: Tensor, slot: int, at: int, n: int,
        padding: int,
    ) -> None:  # fmt: skip
        """``n`` tokens from position ``at``; 0 tokens are a chunk of length 0, -1 is one token as a decode row."""
        if n < 0:
            where = one_row(at, slot, table, padding)
            firsts = torch.full((padding + 1,), at // self.ratio * self.ratio, device=table.device)
            cos, sin = turns(firsts, self.rope)
            kv, gate = (padded(x[at : at + 1], padding, before=True) for x in (self.kv, self.gate))
            part = Part(kv, gate, self.ape, rings, self.gain, cos, sin, store, self.ratio, self.index)
            latent, window = kv.new_zeros(padding + 1, 8), kv.new_zeros(len(rings[0]), 128, 8)  # nobody looks at it
            op.layer_rows((part,), latent, window, self.eps, where)
            return
        size = n + padding
        here = one_chunk(at, n, slot, table, size)
        firsts = (at // self.ratio + torch.arange(size // self.ratio + 2, device=table.device)) * self.ratio
        cos, sin = turns(firsts, self.rope)
        kv, gate = (padded(x[at : at + n], padding, before=False) for x in (self.kv, self.gate))
        op.chunk(kv, gate, self.ape, rings, self.gain, self.eps, cos, sin, store, here, self.ratio, self.index)

    def keep(
        self, op: Compressor, rings: tuple[Tensor, ...], ring: int, at: int, n: int, place: int, padding: int
    ) -> None:
        """Ring row ``ring`` keeps the state at ``place`` tokens of a chunk of ``n`` from position ``at``."""
        kv, gate = (padded(x[at : at + n], padding, before=False) for x in (self.kv, self.gate))
        table = torch.zeros(1, dtype=torch.int32, device=kv.device)
        here = one_chunk(at, place, ring, table, n + padding)
        op.keep(kv, gate, self.ape, rings, here, self.ratio)


def compressed(n: int, d: int, rope: int, ratio: int, index: bool, seed: int, device: str = "cpu") -> Compressed:
    g = torch.Generator().manual_seed(seed)
    w = 2 * d if ratio == 4 else d
    kv, gate, ape = (
        torch.randn(n, w, generator=g),
        3 * torch.randn(n, w, generator=g),
        torch.randn(ratio, w, generator=g),
    )
    gain = 1 + 0.1 * torch.randn(d, generator=g)
    return Compressed(kv.to(device), gate.to(device), ape.to(device), gain.to(device), rope, ratio, index)


def padded(x: Tensor, padding: int, *, before: bool) -> Tensor:
    """Rows of NaN beside ``x``, in a wider tensor: a strided column slice, as of one projection for several readers."""
    wide = x.new_full((len(x) + padding, x.shape[1] + 16), float("nan"))
    part = wide[:, 8:-8]
    part[padding if before else 0 :][: len(x)] = x
    return part


def spread(steps: list[int]) -> list[tuple[int, int]]:
    """(position, tokens) of each step; -1 is one token."""
    out, at = [], 0
    for n in steps:
        out.append((at, n))
        at += abs(n)
    return out
