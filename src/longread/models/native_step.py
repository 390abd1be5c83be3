"""Where one step's tokens lie on the device, and their rotations: made once a step, used by every layer.

Knows segments, pages and positions; knows no weights. Nothing is read back from the device, so what runs on it can be
captured in a CUDA graph; only ``rows_of`` and ``chunk_of`` copy from the host.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from longread.kernels.fp8.ref import Quantised
from longread.kernels.places import Chunk, Rows
from longread.spec.batch import Segment
from longread.spec.state import PAGE_TOKENS, pages_for

QUERY_BLOCK = 8192  # queries of a chunk in attention at once: 512 MB each of q and of the output at 64 heads of 512
RATIOS = (4, 128)
# Ring states are kept on a chunk's way where no window is open, and where all that they hold is the chunk's own: at
# multiples of this many tokens, as many behind the chunk's start.
SAVE_STEP = 128
Pair = tuple[Tensor, Tensor]
Layers = Generator[None, None, Tensor | None]  # a chunk layer by layer; returns its logits where they are wanted
Save = tuple[int, int, int]  # position, the ring row that keeps the state there, start of the chunk that it lies in


@dataclass(frozen=True, slots=True)
class Turns:
    """RoPE as (cos, sin), float32 [.., rope / 2]: of the step's tokens by the plain and by the compressed table, and
    of the windows of each ratio by the latter: each row's own window (decode), or window start // ratio + i (a chunk).
    """

    plain: Pair
    compressed: Pair
    windows: Mapping[int, Pair]


class Rotation:
    """The two tables' frequencies (float32 [rope / 2]) on a device."""

    def __init__(self, plain: Tensor, compressed: Tensor, device: torch.device):
        self._freqs = torch.stack((plain, compressed, compressed, compressed)).to(device)[:, None]
        self._every = torch.tensor(((1,), (1,), *((r,) for r in RATIOS)), dtype=torch.int32, device=device)

    def of_rows(self, positions: Tensor) -> Turns:
        """positions: int32 [B]; padding (-1) gets some finite angle."""
        first = positions // self._every * self._every  # [4, B]: two tables of tokens, then windows by ratio
        angles = first.float()[:, :, None] * self._freqs
        cos, sin = angles.cos(), angles.sin()
        windows = {ratio: (cos[2 + i], sin[2 + i]) for i, ratio in enumerate(RATIOS)}
        return Turns((cos[0], sin[0]), (cos[1], sin[1]), windows)

    def of_chunk(self, where: Chunk) -> Turns:
        positions, start = where.positions, where.meta[0]
        angles = positions.float()[:, None] * self._freqs[:2]
        cos, sin = angles.cos(), angles.sin()
        windows: dict[int, Pair] = {}
        for ratio in RATIOS:
            count = positions.shape[0] // ratio + 2
            first = (start // ratio + torch.arange(count, dtype=torch.int32, device=positions.device)) * ratio
            turns = first.float()[:, None] * self._freqs[1]
            windows[ratio] = turns.cos(), turns.sin()
        return Turns((cos[0], sin[0]), (cos[1], sin[1]), windows)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries of a chunk that are worked on together: ``rows`` of it, a slice or, on the device, the number of one."""

    rows: slice | Tensor
    where: Chunk

    def of(self, x: Tensor) -> Tensor:
        """This block's rows of x [T, ..]."""
        return x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)

    def quantised(self, x: Quantised | Tensor) -> Quantised | Tensor:
        """The same of rows that may be quantised; the scales' layout is kept."""
        if isinstance(x, Tensor):
            return self.of(x)
        if isinstance(self.rows, slice):
            scales = x.scales[self.rows]  # columns without holes, as products want them: no copy where it is all rows
            return Quantised(x.values[self.rows], scales.t().contiguous().t())
        return Quantised(
            x.values.view(torch.uint8).index_select(0, self.rows).view(x.values.dtype),
            x.scales.t().index_select(1, self.rows).t(),
        )

    def slab(self, slab: Tensor, window: int) -> Tensor:
        """This block's part of the window's keys [window + T, d], with the ``window`` tokens before it."""
        if isinstance(self.rows, slice):
            return slab[self.rows.start : self.rows.stop + window]
        return slab.index_select(0, self.rows + torch.arange(window + 1, device=slab.device))


def query_blocks(where: Chunk) -> tuple[Block, ...]:
    """All of a chunk's queries, QUERY_BLOCK at a time."""
    tokens = where.positions.shape[0]
    if tokens <= QUERY_BLOCK:
        return (Block(slice(0, tokens), where),)
    start, length, slot, rest = where.meta.unbind()
    blocks = []
    for begin in range(0, tokens, QUERY_BLOCK):
        rows = slice(begin, min(tokens, begin + QUERY_BLOCK))
        size = (length - begin).clamp(0, QUERY_BLOCK)
        meta = torch.stack((start + begin, size, slot, rest))
        blocks.append(Block(rows, Chunk(meta, where.positions[rows], where.table, where.bound)))
    return tuple(blocks)


def last_query(where: Chunk) -> Block:
    """The chunk's last token (not its padding) alone."""
    start, length, slot, rest = where.meta.unbind()
    meta = torch.stack((start + length - 1, torch.ones_like(length), slot, rest))
    return Block((length - 1).long()[None], Chunk(meta, meta[:1], where.table, where.bound))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a segment that is computed as one chunk. ``inside``: ring states kept on the way; ``saves``: ring rows
    that get what the slot holds at its end.
    """

    segment: Segment
    start: int
    stop: int
    inside: tuple[Save, ...]
    saves: tuple[int, ...]


def pieces(segment: Segment, short: int = 0) -> list[Piece]:
    """A segment cut at states that cannot be kept on a chunk's way, and in pieces of up to ``short`` tokens at all."""
    places = sorted({position for position, _ in segment.saves if position < segment.end})
    cuts = [segment.start]
    for position in places:
        if not kept_inside(position, cuts[-1]):
            cuts.append(position)
    cuts.append(segment.end)
    whole = [(start, stop) for start, stop in pairwise(cuts) if stop - start <= short]
    cuts += [position for start, stop in whole for position in places if start < position < stop]
    found = []
    for start, stop in pairwise(sorted(cuts)):
        inside = tuple((position, ring, start) for position, ring in segment.saves if start < position < stop)
        found.append(Piece(segment, start, stop, inside, tuple(r for position, r in segment.saves if position == stop)))
    return found


def kept_inside(position: int, start: int) -> bool:
    """Whether the ring state at a position can be kept on the way of a chunk that begins at ``start``."""
    return position % SAVE_STEP == 0 and position - start >= SAVE_STEP


def up_to(where: Chunk, save: Save) -> Chunk:
    """The chunk as far as a state is kept, with the ring row that keeps it as its slot: for ``keep`` of rings.

    Raises ValueError where it cannot be kept on the chunk's way.
    """
    position, ring, start = save
    if not kept_inside(position, start):
        raise ValueError(
            f"the ring state at {position} cannot be kept inside a chunk from {start}: only at multiples of "
            f"{SAVE_STEP}, {SAVE_STEP} tokens and more behind its start; cut the chunk there"
        )
    meta = where.meta.clone()
    meta[1].fill_(position - start)  # numbers of the host as launches' arguments: nothing is copied or waited for
    meta[2].fill_(ring)
    return replace(where, meta=meta, extent=None)


def finished(steps: Generator[object, None, Tensor | None]) -> Tensor | None:
    """What ``steps`` return, run to their end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            logits: Tensor | None = end.value
            return logits


def rows_of(segments: Sequence[Segment], device: torch.device) -> Rows:
    """One-token segments as they are, without padding."""
    pages = max(pages_for(s.end) for s in segments)
    tables = torch.zeros(len(segments), pages, dtype=torch.int32)
    for row, s in zip(tables, segments, strict=True):
        held = s.pages[: pages_for(s.end)]
        row[: len(held)] = torch.tensor(held, dtype=torch.int32)
    positions = torch.tensor([s.start for s in segments], dtype=torch.int32)
    slots = torch.tensor([s.slot for s in segments], dtype=torch.int32)
    return Rows(positions.to(device), slots.to(device), tables.to(device), pages * PAGE_TOKENS)


def chunk_of(s: Segment, start: int, stop: int, device: torch.device) -> Chunk:
    """Positions start .. stop - 1 of a segment, without padding."""
    pages = pages_for(stop)
    meta = torch.tensor((start, stop - start, s.slot, 0), dtype=torch.int32)
    positions = torch.arange(start, stop, dtype=torch.int32)
    table = torch.tensor(s.pages[:pages], dtype=torch.int32)
    extent = start, stop - start
    return Chunk(meta.to(device), positions.to(device), table.to(device), pages * PAGE_TOKENS, extent)
