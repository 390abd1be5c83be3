"""Rings that a step keeps from inside a chunk are those that the slot would hold if the chunk ended there."""

import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from longread.models.deepseek_v4 import DeepseekV4
from longread.models.inputs import StepInputs
from longread.models.v4_step import plan_step
from longread.spec.batch import Segment
from longread.spec.config_json import spec_from_config
from longread.spec.state import StateGroup, pages_for, state_groups
from longread.weights.fixture import random_weights, tiny_config

TOLERANCE = 2e-5
KINDS = ("v4-flash", "v4-pro")
LENGTH = 900
SLOTS, SNAPSHOTS = 3, 8
TEXTS = [torch.randint(10, 400, (LENGTH,), generator=torch.Generator().manual_seed(i)) for i in range(SLOTS)]
INPUTS = [torch.randn(LENGTH, 128, generator=torch.Generator().manual_seed(i)) for i in range(SLOTS)]
# Whole windows and open ones, a token behind a chunk's start and before its end, more and fewer tokens than a ring has.
PLACES = (1, 2, 3, 4, 7, 8, 9, 60, 127, 128, 129, 255, 256, 300, 511, 512, 513, 640, 767, 768, 898, 899)

Part = tuple[int, int, int]  # sequence, start, end
Saves = Mapping[int, Sequence[tuple[int, int]]]  # (position, snapshot) by sequence


@cache
def model(kind: str, dtype: torch.dtype) -> DeepseekV4:
    spec = spec_from_config(tiny_config(kind))
    return DeepseekV4(spec, random_weights(spec, 0), dtype)


class Run:
    """Sequence i has slot i and pages of its own; rows of unused pages and of snapshots are NaN."""

    def __init__(self, made: DeepseekV4):
        self.model, self.groups = made, state_groups(made.spec)
        self.state = {group.name: self._storage(group) for group in self.groups}

    def _storage(self, group: StateGroup) -> Tensor:
        dtype = self.model.dtype if group.dtype == "model" else torch.float32
        places, rows = SLOTS + SNAPSHOTS, group.ring_rows
        if group.kind == "rows":
            places, rows = SLOTS * pages_for(LENGTH), group.rows_per_page
        storage = torch.full((len(group.layers), places, rows, group.width), float("nan"), dtype=dtype)
        if group.kind == "ring":
            storage[:, :SLOTS] = group.fill
        return storage

    def attend(self, parts: Sequence[Part], saves: Saves = MappingProxyType({})) -> list[Tensor]:
        """Every attention by itself on the same inputs, so that no rounding decides who is chosen further up."""
        segments, positions = self._lay(parts, saves)
        made = self.model
        step = plan_step(segments, positions, made.ratios, made.top_k, made.window)
        rotations = made._rotations(positions, step)
        inputs = torch.cat([INPUTS[i][start:end] for i, start, end in parts]).to(made.dtype)
        with torch.inference_mode():
            return [layer.attention(inputs, step, rotations, self.state) for layer in made.layers]

    def forward(self, parts: Sequence[Part], saves: Saves = MappingProxyType({})) -> Tensor:
        """Logits of each part's last token."""
        segments, positions = self._lay(parts, saves)
        ids = torch.cat([TEXTS[i][start:end] for i, start, end in parts])
        last = torch.tensor([s.end - s.start + s.offset - 1 for s in segments])
        return self.model.forward(StepInputs(ids, positions, segments, last), self.state)

    def _lay(self, parts: Sequence[Part], saves: Saves) -> tuple[tuple[Segment, ...], Tensor]:
        segments: list[Segment] = []
        for i, start, end in parts:
            pages = tuple(range(i * pages_for(LENGTH), (i + 1) * pages_for(LENGTH)))
            kept = tuple((position, SLOTS + row) for position, row in saves.get(i, ()))
            segments.append(Segment(i, start, end - start, sum(s.length for s in segments), pages, kept))
        return tuple(segments), torch.cat([torch.arange(start, end) for _, start, end in parts])

    def rings(self, place: int) -> dict[str, Tensor]:
        return {g.name: self.state[g.name][:, place].clone() for g in self.groups if g.kind == "ring"}


def cut_there(made: DeepseekV4, i: int, start: int, position: int) -> dict[str, Tensor]:
    """The rings of a sequence that was computed up to ``start`` and from there to ``position``."""
    run = Run(made)
    if start:
        run.attend([(i, 0, start)])
    run.attend([(i, start, position)])
    return run.rings(i)


def assert_close(found: Mapping[str, Tensor], known: Mapping[str, Tensor], tolerance: float = TOLERANCE) -> None:
    for name, ring in known.items():
        assert not ring.isnan().any() and found[name].dtype == ring.dtype
        torch.testing.assert_close(found[name], ring, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("start", [0, 1, 100, 128, 254, 256, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_rings_are_those_of_a_chunk_that_ends_there(kind: str, start: int) -> None:
    made = model(kind, torch.float32)
    places = {place for place in (*PLACES, start + 1, start + 5, start + 130) if start < place < LENGTH}
    chosen = random.Random(start).sample(sorted(places), min(len(places), SNAPSHOTS))
    run, plain = Run(made), Run(made)
    for each in (run, plain):
        if start:
            each.attend([(0, 0, start)])
    out = run.attend([(0, start, LENGTH)], {0: [(position, row) for row, position in enumerate(chosen)]})
    for kept, known in zip(out, plain.attend([(0, start, LENGTH)]), strict=True):
        assert torch.equal(kept, known), "keeping changes nothing"
    for name, ring in plain.rings(0).items():
        assert torch.equal(run.rings(0)[name], ring)
    for row, position in enumerate(chosen):
        assert_close(run.rings(SLOTS + row), cut_there(made, 0, start, position))


@pytest.mark.parametrize("kind", KINDS)
def test_several_chunks_and_decodes_of_one_step(kind: str) -> None:
    """Sequence 1 decodes; 0 and 2 are read, and what is kept of them is theirs and no other's."""
    made = model(kind, torch.float32)
    run = Run(made)
    run.attend([(0, 0, 130), (1, 0, 600)])
    kept = {0: [(256, 5), (799, 0)], 2: [(512, 1), (699, 7), (3, 2)]}
    run.attend([(1, 600, 601), (0, 130, 800), (2, 0, 700)], kept)
    for sequence, saves in kept.items():
        for position, row in saves:
            known = cut_there(made, sequence, 130 if sequence == 0 else 0, position)
            assert_close(run.rings(SLOTS + row), known)
    for row in (3, 4, 6):
        assert all(ring.isnan().all() for ring in run.rings(SLOTS + row).values()), "nobody asked for these"


@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_from_a_kept_ring_says_what_one_chunk_says(kind: str) -> None:
    made = model(kind, torch.float32)
    run = Run(made)
    whole = run.forward([(0, 0, LENGTH)], {0: [(512, 0), (767, 1), (LENGTH - 1, 2)]})
    for row, position in enumerate((512, 767, LENGTH - 1)):
        for group in run.groups:
            if group.kind == "ring":
                run.state[group.name][:, 0] = run.state[group.name][:, SLOTS + row]
        torch.testing.assert_close(run.forward([(0, position, LENGTH)]), whole, atol=TOLERANCE, rtol=0)


def test_in_bfloat16_a_ring_is_kept_in_the_storages_type() -> None:
    made = model("v4-flash", torch.bfloat16)
    run = Run(made)
    run.attend([(0, 0, 300)], {0: [(299, 0)]})
    assert_close(run.rings(SLOTS), cut_there(made, 0, 0, 299), tolerance=0.05)
