"""Tiles of paged rows: cut by positions, copied only over a break; and the kernels that read by them give the same bits
wherever the rows lie.
"""

import random
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.indexer import ref as indexer
from longread.kernels.mla import cpu as mla_cpu
from longread.kernels.mla import ref as mla
from longread.kernels.tiles import tiles
from longread.spec.batch import Segment
from longread.spec.state import PAGE_TOKENS

H, NOPE, ROPE, V, RANK = 4, 16, 16, 32, 64
SCALE = 0.2
NAN = float("nan")


@given(lengths=st.lists(st.integers(0, 9), max_size=6), size=st.integers(1, 12))
def test_the_same_rows_cut_by_their_number(lengths: list[int], size: int) -> None:
    whole = torch.arange(2.0 * sum(lengths)).view(-1, 2)
    runs = [run.clone() for run in whole.split(lengths)] if lengths else []
    cut = list(tiles(runs, size))
    assert [len(tile) for tile in cut] == [len(part) for part in whole.split(size) if len(part)]
    assert torch.equal(torch.cat([*cut, whole[:0]]), whole)
    assert all(tile.is_contiguous() for tile in cut)


def test_a_tile_is_copied_only_over_a_break() -> None:
    store = torch.arange(40.0).view(20, 2)
    cut = list(tiles([store[:7], store[10:]], 4))
    own = store.untyped_storage().data_ptr()
    assert [tile.untyped_storage().data_ptr() == own for tile in cut] == [True, False, True, True, True]
    assert cut[1][:, 0].tolist() == [8.0, 10.0, 12.0, 20.0]  # rows 4, 5, 6 and 10


def test_one_tile_is_made_at_a_time() -> None:
    store = torch.zeros(10, 2)

    def runs() -> Iterator[Tensor]:
        yield store[:3]
        yield store[5:]
        raise AssertionError("read on")

    assert len(next(tiles(runs(), 4))) == 4


class Sequences:
    """Random latents of several sequences, and attention over them with their pages anywhere in the pool."""

    def __init__(self, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.shapes, self.dtype = shapes, dtype
        self.latents = [torch.randn(start + n, RANK + ROPE, generator=g).to(dtype) for start, n in shapes]
        self.q = torch.randn(sum(n for _, n in shapes), H, NOPE + ROPE, generator=g).to(dtype)
        self.kv_b = torch.randn(H, NOPE + V, RANK, generator=g).to(dtype)
        self.pages = sum(-(-len(latent) // PAGE_TOKENS) for latent in self.latents)

    def attend(self, order: Sequence[int], expand_from: int, gather: int, compiled: bool) -> Tensor:
        store = torch.full((max(order) + 1, PAGE_TOKENS, RANK + ROPE), NAN, dtype=self.dtype)
        free, segments, offset = list(order), [], 0
        for (start, n), latent in zip(self.shapes, self.latents, strict=True):
            pages = tuple(free.pop(0) for _ in range(-(-len(latent) // PAGE_TOKENS)))
            for page, rows in zip(pages, latent.split(PAGE_TOKENS), strict=True):
                store[page, : len(rows)] = rows
            segments.append(Segment(0, start, n, offset, pages))
            offset += n
        step = mla.reading(mla.spans(segments), mla.Policy(expand_from, gather))
        return (mla_cpu if compiled else mla).attend(self.q, store, self.kv_b, step, SCALE)


def anywhere(pages: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(pages + 3), pages)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("small", [False, True], ids=["real-tiles", "small-tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.tuples(st.sampled_from([0, 255, 256, 700, 2100]), st.sampled_from([1, 1, 2, 33, 300])),
        min_size=1,
        max_size=3,
    ),
    expand_from=st.sampled_from([1, 33, sys.maxsize]),
    gather=st.sampled_from([0, 1000]),
    compiled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_latent_attention_is_the_same_bits_wherever_pages_lie(
    shapes: list[tuple[int, int]], expand_from: int, gather: int, compiled: bool, seed: int, dtype: torch.dtype,
    small: bool, threads: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # decides about the parts of a piece
    if small:
        monkeypatch.setattr(mla, "WIDE_KEYS", 500)
        monkeypatch.setattr(mla, "KEY_BLOCK", 130)
        monkeypatch.setattr(mla, "SPLIT_ROWS", 100)
    sequences = Sequences(shapes, dtype, seed)
    known = sequences.attend(range(sequences.pages), expand_from, gather, compiled)
    found = sequences.attend(anywhere(sequences.pages, seed), expand_from, gather, compiled)
    assert known.isfinite().all() and torch.equal(known, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 99), max_size=8), count=st.integers(1, 6000), queries=st.sampled_from([1, 7, 40]))
def test_index_scores_are_the_same_bits_wherever_runs_end(
    cuts: list[int], count: int, queries: int, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(count)
    keys = torch.randn(count, 32, generator=g).to(dtype)
    q, weights = torch.randn(queries, 32, 32, generator=g), torch.randn(queries, 32, generator=g)
    ends = sorted({64 * cut for cut in cuts if 64 * cut < count})
    runs = [keys[a:b].clone() for a, b in zip([0, *ends], [*ends, count], strict=True)]
    assert torch.equal(indexer.scores(q, weights, runs), indexer.scores(q, weights, [keys]))


def test_runs_of_a_part_are_found() -> None:
    every = [mla.Run(100 * i, 256 * i, 256) for i in range(5)]
    assert list(mla.clip(every, 300, 800)) == [mla.Run(144, 300, 212), mla.Run(200, 512, 256), mla.Run(300, 768, 32)]
    assert list(mla.clip(every, 0, 5 * 256)) == every
    assert list(mla.clip(every, 512, 512)) == list(mla.clip((), 0, 9)) == []
    assert list(mla.clip(every[2:], 0, 600)) == [mla.Run(200, 512, 88)]
