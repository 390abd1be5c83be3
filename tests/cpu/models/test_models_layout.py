"""Logits and cache rows do not depend on where pages and slots lie: bit for bit those of pages 0, 1, 2, ...

A hit, a load, an eviction and a copy on write all give a sequence other pages; whatever else runs in the step is kept
the same here.
"""

import random
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longread.kernels.indexer import ref as indexer
from longread.kernels.mla import ref as mla
from longread.models import v4_attention
from longread.models.deepseek_v3 import DeepseekV3
from longread.models.deepseek_v4 import DeepseekV4
from longread.models.inputs import StepInputs
from longread.spec.batch import Segment
from longread.spec.config_json import spec_from_config
from longread.spec.state import pages_for, state_groups
from longread.weights.fixture import random_weights, tiny_config

KINDS = ("v3", "v4-flash", "v4-pro")
SLOTS = 3
Steps = Sequence[Sequence[int]]  # for each step the new tokens of each sequence, 0 if it has no part in it

# Chunks that end inside pages, then decode, over few keys and over so many that BLAS reads them (V3) and that V4 copies
# what it selects; several sequences in one step.
SHORT: Steps = [[257], [512], [33], [1]]
LONG: Steps = [[5], [1800], [1], [500], [1], [40]]
TOGETHER: Steps = [[260, 0, 700], [1, 511, 1], [1, 2, 1], [1, 1, 1]]


@cache
def model(kind: str, dtype: torch.dtype, top_k: int | None = None) -> DeepseekV3 | DeepseekV4:
    spec = spec_from_config(tiny_config(kind, **({} if top_k is None else {"index_topk": top_k})))
    return (DeepseekV3 if spec.mla is not None else DeepseekV4)(spec, random_weights(spec, 0), dtype)


class Laid:
    """Sequences whose pages and slots are taken from ``order`` and ``slots`` in order."""

    def __init__(self, made: DeepseekV3 | DeepseekV4, order: Sequence[int], slots: Sequence[int]):
        self.model, self.free, self.slots = made, list(order), slots
        self.state: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}  # tokens a row of each paged group
        for g in state_groups(made.spec):
            shape = (max(order) + 1, g.rows_per_page) if g.kind == "rows" else (SLOTS, g.ring_rows)
            fill = float("nan") if g.kind == "rows" else g.fill
            dtype = made.dtype if g.dtype == "model" else torch.float32
            self.state[g.name] = torch.full((len(g.layers), *shape, g.width), fill, dtype=dtype)
            if g.kind == "rows":
                self.rows[g.name] = g.tokens_per_row

    def run(self, steps: Steps) -> list[Tensor]:
        """The logits of each part's last tokens, step by step, then each sequence's rows."""
        lengths = [sum(step[i] for step in steps) for i in range(len(steps[0]))]
        tables = [tuple(self.free.pop(0) for _ in range(pages_for(n))) for n in lengths]
        texts = [torch.randint(10, 400, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
        at, found = [0] * len(lengths), []
        for step in steps:
            segments: list[Segment] = []
            ids: list[Tensor] = []
            for i, n in enumerate(step):
                if n:
                    offset = sum(s.length for s in segments)
                    segments.append(Segment(self.slots[i], at[i], n, offset, tables[i][: pages_for(at[i] + n)]))
                    ids.append(texts[i][at[i] : at[i] + n])
                    at[i] += n
            tokens = torch.cat(ids)
            positions = torch.cat([torch.arange(s.start, s.end) for s in segments])
            wanted = torch.cat([torch.arange(max(0, s.length - 3), s.length) + s.offset for s in segments])
            inputs = StepInputs(tokens, positions, tuple(segments), wanted)
            found.append(self.model.forward(inputs, self.state))
        for name, tokens_per_row in self.rows.items():
            for table, n in zip(tables, lengths, strict=True):
                found.append(self.state[name][:, list(table)].flatten(1, 2)[:, : n // tokens_per_row])
        return found


def check(made: DeepseekV3 | DeepseekV4, steps: Steps, layouts: Sequence[Sequence[int]]) -> None:
    known = Laid(made, range(pages(steps)), range(SLOTS)).run(steps)
    assert all(part.isfinite().all() for part in known)
    for n, layout in enumerate(layouts):
        found = Laid(made, layout, [(n + 1 + i) % SLOTS for i in range(SLOTS)]).run(steps)
        for expected, part in zip(known, found, strict=True):
            assert torch.equal(expected, part), (steps, layout)


def pages(steps: Steps) -> int:
    return sum(pages_for(sum(step[i] for step in steps)) for i in range(len(steps[0])))


def layouts(steps: Steps) -> list[list[int]]:
    """One page elsewhere, as after a copy on write; and any order."""
    count = pages(steps)
    return [[*range(count - 2), count + 1, count - 1], random.Random(count).sample(range(count + 3), count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [SHORT, LONG, TOGETHER], ids=["short", "long", "together"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_wherever_the_pages_lie(kind: str, steps: Steps, dtype: torch.dtype) -> None:
    check(model(kind, dtype), steps, layouts(steps))


@pytest.mark.parametrize("kind", KINDS)
def test_where_tiles_end_inside_pages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "WIDE_KEYS", 1000)
    monkeypatch.setattr(mla, "KEY_BLOCK", 300)
    monkeypatch.setattr(mla, "SPLIT_ROWS", 100)
    monkeypatch.setattr(indexer, "BLOCK_ROWS", 70)
    monkeypatch.setattr(v4_attention, "TILE", 9)
    for steps in (SHORT, TOGETHER):
        check(model(kind, torch.float32), steps, layouts(steps)[1:])


@pytest.mark.parametrize("kind", ["v4-flash", "v4-pro"])
def test_a_lone_sequence_whose_rows_are_all_read_in_place(kind: str) -> None:
    """Decode with at least ``v4_step.MIN_SPANNED`` rows and no more than top-k, in one run of pages or in many."""
    steps: Steps = [[2100], [1], [1]]
    check(model(kind, torch.float32, top_k=640), steps, layouts(steps))


@pytest.mark.parametrize("kind", ["v3", "v4-flash", "v4-pro"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(*2 * [st.sampled_from([0, 1, 1, 7, 64, 255, 400])]).filter(any), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
)
def test_any_cuts_and_any_pages(kind: str, steps: list[tuple[int, int]], seed: int) -> None:
    layout = random.Random(seed).sample(range(pages(steps) + 4), pages(steps))
    check(model(kind, torch.float32), steps, [layout])
