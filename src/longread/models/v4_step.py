"""Index tables of one step of a V4 model, computed once and used by every layer.

Knows segments, pages and ratios; knows no weights. Rows of a step fall in two kinds: *singles*, one-token segments that
are worked on together (decode), and *chunks*, worked on one by one. A single whose context is so long that padding
the batch to it would copy too much is treated as a chunk of one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longread.spec.batch import Segment
from longread.spec.state import PAGE_TOKENS

# A batched decode gathers its HCA rows (ratio 128) into one padded block; longer contexts read them in place instead.
MAX_BATCHED_TOKENS = 1 << 17
MIN_SPANNED = 512  # a lone single's rows, if fewer than this, are cheaper to list than to read in place


Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of a paged store for each single: ``rows`` int64 [B, n] flat row ids, the first ``counts`` int64 [B] valid.

    ``spans`` instead for a lone single with many rows: (first, end) in the flat store, to be read in place. Which of
    the two depends on the number of rows only, not on where their pages lie: their sums are rounded differently.
    """

    rows: Tensor
    counts: Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Closing:
    """Windows of one ratio that close in this step, singles' first, then chunk by chunk.

    positions: int64 [W], first token of each window. rows: int64 [W], where its row lies in the group's flat storage.
    singles: which singles close one.
    """

    positions: Tensor
    rows: Tensor
    singles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Singles:
    """One-token segments. rows int64 [B] in the flattened batch, or None when the batch is exactly these in order.

    window_rows, ring_rows: int64 [B], position mod window and mod 8. held: int64 [B], tokens in the window.
    """

    segments: tuple[Segment, ...]
    rows: Tensor | None
    slots: Tensor
    window_rows: Tensor
    ring_rows: Tensor
    held: Tensor


@dataclass(frozen=True, slots=True)
class Saves:
    """Ring states that are kept from inside the chunks (``Segment.saves``), each in the ring row ``rings``.

    slots, rings: int64 [S]. recent[size]: of rings with the last ``size`` tokens, what comes from this step: int64 [N]
    rows of the flattened rings and of the flattened batch; the rest is what the slot held before it. empty: int64, the
    ring rows whose window of 128 has nothing from before the chunk. open: (chunk, position, ring row) of those that
    have a token in theirs.
    """

    slots: Tensor
    rings: Tensor
    recent: dict[int, tuple[Tensor, Tensor]]
    empty: Tensor
    open: tuple[tuple[Segment, int, int], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """All tables of one step. ``visible[ratio]`` is None where the layer selects its rows (see ``plan_step``).

    ``chunk_runs`` and ``single_runs``: page runs; the latter, with ``table`` (``page_table`` at ratio 4), only where
    singles select. ``phase[ratio]``: int64 [T], each token's place in its window.
    """

    singles: Singles
    chunks: tuple[Segment, ...]
    chunk_runs: tuple[Runs, ...]
    single_runs: tuple[Runs, ...]
    table: Tensor | None
    phase: dict[int, Tensor]
    closing: dict[int, Closing]
    visible: dict[int, Gathered | None]
    saves: Saves | None


def page_runs(pages: Sequence[int]) -> Runs:
    """Consecutive page ids as (first page, pages)."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)


def spans(runs: Runs, rows_per_page: int, count: int) -> list[tuple[int, int]]:
    """Where the first ``count`` rows of a sequence lie in the flat store: (first, end), one a run of pages."""
    out = []
    for page, pages in runs:
        if count <= 0:
            break
        first, n = page * rows_per_page, min(count, pages * rows_per_page)
        out.append((first, first + n))
        count -= n
    return out


def plan_step(segments: Sequence[Segment], positions: Tensor, ratios: Sequence[int], top_k: int, window: int) -> Step:
    """Build the tables. positions: int64 [T]. ``ratios``: the compression ratios in use (of 4 and 128).

    The singles' ratio-4 rows are gathered whole while none sees more than ``top_k``; otherwise the layer selects.
    """
    single = tuple(s for s in segments if s.length == 1 and s.end <= MAX_BATCHED_TOKENS)
    chunks = tuple(s for s in segments if s.length > 1 or (s.length == 1 and s.end > MAX_BATCHED_TOKENS))
    selects = 4 in ratios and any(s.end // 4 > top_k for s in single)
    return Step(
        _singles(single, not chunks, window),
        chunks,
        tuple(page_runs(s.pages) for s in chunks),
        tuple(page_runs(s.pages) for s in single) if selects else (),
        page_table(single, 4) if selects else None,
        {ratio: positions % ratio for ratio in ratios},
        {ratio: _closing(single, chunks, ratio) for ratio in ratios},
        {ratio: _gathered(single, ratio) if single and not (ratio == 4 and selects) else None for ratio in ratios},
        _saves(chunks, (window, 8)),
    )


def _saves(chunks: Sequence[Segment], sizes: Sequence[int]) -> Saves | None:
    """``sizes``: rows of the rings that hold the last tokens, position p at row p mod size."""
    every = [(s, position, ring) for s in chunks for position, ring in s.saves]
    if not every:
        return None
    recent = {}
    for size in sizes:
        rows: list[int] = []
        tokens: list[int] = []
        for s, position, ring in every:
            held = range(max(s.start, position - size), position)
            rows += [ring * size + p % size for p in held]
            tokens += [s.offset + p - s.start for p in held]
        recent[size] = torch.tensor(rows, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
    return Saves(
        torch.tensor([s.slot for s, _, _ in every], dtype=torch.int64),
        torch.tensor([ring for _, _, ring in every], dtype=torch.int64),
        recent,
        torch.tensor([ring for s, position, ring in every if s.start <= position // 128 * 128], dtype=torch.int64),
        tuple(save for save in every if save[1] % 128),
    )


def _singles(segments: tuple[Segment, ...], alone: bool, window: int) -> Singles:
    positions = torch.tensor([s.start for s in segments], dtype=torch.int64)
    in_order = alone and all(s.offset == i for i, s in enumerate(segments))
    return Singles(
        segments,
        None if in_order else torch.tensor([s.offset for s in segments], dtype=torch.int64),
        torch.tensor([s.slot for s in segments], dtype=torch.int64),
        positions % window,
        positions % 8,
        (positions + 1).clamp(max=window),
    )


def _closing(singles: tuple[Segment, ...], chunks: tuple[Segment, ...], ratio: int) -> Closing:
    per_page = PAGE_TOKENS // ratio
    done = tuple(i for i, s in enumerate(singles) if s.end % ratio == 0)
    windows: list[int] = []
    rows: list[int] = []
    for s in (*(singles[i] for i in done), *chunks):
        for w in range(s.start // ratio, s.end // ratio):
            windows.append(w * ratio)
            rows.append(s.pages[w // per_page] * per_page + w % per_page)
    return Closing(torch.tensor(windows, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64), done)


def _gathered(singles: tuple[Segment, ...], ratio: int) -> Gathered:
    per_page = PAGE_TOKENS // ratio
    counts = [s.end // ratio for s in singles]
    width, seen = max(counts), torch.tensor(counts, dtype=torch.int64)
    if len(singles) == 1 and width >= MIN_SPANNED:
        runs = page_runs(singles[0].pages[: -(-width // per_page)])
        return Gathered(torch.empty(1, 0, dtype=torch.int64), seen, tuple(spans(runs, per_page, width)))
    index = torch.arange(width)
    rows = page_table(singles, ratio)[:, index // per_page] * per_page + index % per_page
    return Gathered(rows, seen, ())


def page_table(singles: Sequence[Segment], ratio: int) -> Tensor:
    """int64 [B, pages] of the pages that hold closed rows, padded with page 0."""
    per_page = PAGE_TOKENS // ratio
    needed = [-(-(s.end // ratio) // per_page) for s in singles]
    table = torch.zeros(len(singles), max(needed, default=0), dtype=torch.int64)
    for b, (s, n) in enumerate(zip(singles, needed, strict=True)):
        table[b, :n] = torch.tensor(s.pages[:n], dtype=torch.int64)
    return table
