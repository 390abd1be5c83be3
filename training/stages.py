"""What is trained when: lengths, sparse selection and weight rounding by progress, and the schedule of the rates.

Knows numbers only (no torch, no data). Progress is the share of the planned training that is done, 0..1.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

WARM_UP_STEPS = 100
DECAY_FROM = 0.6


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of the training, up to `until` of the progress.

    lengths: the share of the steps that each row length gets. sparse: attention over the indexer's choice instead of
    over everything. fake_quant: weights rounded as the checkpoint stores them. index_weight: factor of the indexer's
    loss.
    """

    until: float
    lengths: Mapping[int, float]
    sparse: bool = False
    fake_quant: bool = False
    index_weight: float = 1.0


# What the bundled readers were trained with, as shares of the time that each stretch takes on an H200 of its own
# (training/README.md has the runs as they really were). Nothing is trained sparsely: while the model attends to
# everything, the indexer learns from the attention, and its choice then holds.
READER_V4 = (
    Stage(0.07, {256: 1.0}),
    Stage(0.233, {512: 1.0}),
    Stage(0.419, {512: 0.2, 2048: 0.8}),
    Stage(0.55, {2048: 0.3, 8192: 0.7}),
    Stage(0.78, {1024: 0.05, 2048: 0.15, 8192: 0.35, 16384: 0.45}, fake_quant=True),
    Stage(1.0, {1024: 0.1, 4096: 0.15, 8192: 0.2, 16384: 0.3, 32768: 0.25}, fake_quant=True),
)
READER_V3 = (
    Stage(0.031, {256: 1.0}, index_weight=0.0),
    Stage(0.206, {512: 1.0}, index_weight=0.0),
    Stage(0.414, {512: 0.3, 2048: 0.7}, index_weight=0.0),
    Stage(0.653, {1024: 0.15, 2048: 0.25, 8192: 0.6}, fake_quant=True, index_weight=0.0),
    Stage(0.881, {1024: 0.15, 4096: 0.25, 8192: 0.45, 16384: 0.15}, fake_quant=True, index_weight=0.0),
    Stage(1.0, {1024: 0.05, 4096: 0.2, 8192: 0.6, 16384: 0.15}, fake_quant=True, index_weight=0.0),
)
STAGES: dict[str, tuple[Stage, ...]] = {"reader-v3": READER_V3, "reader-v4": READER_V4}


def read_stages(path: Path) -> tuple[Stage, ...]:
    """The stages of a JSON file: a list of objects with the fields of Stage (row lengths as strings).

    Raises ValueError for an unknown field, for `until` that does not increase to 1, and for lengths without weight.
    """
    known = {f.name for f in fields(Stage)}
    stages = []
    for number, entry in enumerate(json.loads(path.read_text())):
        if unknown := set(entry) - known:
            raise ValueError(f"{path}: stage {number} has the unknown field {min(unknown)!r}; known: {sorted(known)}")
        lengths = {int(length): float(weight) for length, weight in entry["lengths"].items()}
        stages.append(Stage(**entry | {"lengths": lengths}))
    check_stages(stages)
    return tuple(stages)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise ValueError unless `until` increases to exactly 1 and each stage has lengths of positive weight."""
    ends = [stage.until for stage in stages]
    if not ends or ends[-1] != 1.0 or any(a >= b for a, b in zip([0.0, *ends], ends, strict=False)):
        raise ValueError(f"the stages end at {ends}: `until` must increase from above 0 to exactly 1")
    for number, stage in enumerate(stages):
        if not stage.lengths or min(stage.lengths.values()) <= 0:
            raise ValueError(f"stage {number} has the lengths {dict(stage.lengths)}: each needs a weight above 0")


def stage_at(stages: Sequence[Stage], progress: float) -> int:
    """The index of the stage that this progress falls in; the last one from 1 on."""
    return next((i for i, stage in enumerate(stages) if progress < stage.until), len(stages) - 1)


def draw_length(stage: Stage, seed: int, step: int) -> int:
    """The row length of a step: drawn from the step's number alone, so that a resumed run draws the same."""
    draw = random.Random(f"length {seed} {step}")
    return draw.choices(list(stage.lengths), list(stage.lengths.values()))[0]


def rate_factor(progress: float, steps: int) -> float:
    """The factor of all learning rates: a warm-up over the optimiser's first steps, then linear decay at the end."""
    decay = min(1.0, (1.0 - progress) / (1.0 - DECAY_FROM))
    return max(0.0, decay) * min(1.0, (steps + 1) / WARM_UP_STEPS)
