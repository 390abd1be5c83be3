"""What a training run is told. Knows names and defaults; knows no torch, so that --help is fast."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# What the bundled readers were trained with, where the two differ. V3 normalises neither queries nor keys behind their
# last projection as V4 does: with V4's rate Muon's steps, which are of one size, saturate its attention (LOG.md).
DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "reader-v3": {"planned_minutes": 11.0, "lr_muon": 0.005, "lr_adam": 0.002, "lr_embed": 0.002},
    "reader-v4": {"planned_minutes": 15.9, "lr_muon": 0.02, "lr_adam": 0.003, "lr_embed": 0.003},
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `python -m training.train`, under their own names.

    planned_steps, in place of planned_minutes, makes progress follow the steps: the same on every machine. steps: at
    most this many in this run. has_selection: the twin selects entries sparsely (V4). Fields without a default have
    each reader's own in DEFAULTS.
    """

    name: str
    state: Path
    minutes: float = 8.0
    planned_minutes: float = field(kw_only=True)
    planned_steps: int | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cuda"
    compile: bool = False
    graphs: bool = False
    workers: int = 14
    tokens_per_step: int = 32768
    lr_muon: float = field(kw_only=True)
    lr_adam: float = field(kw_only=True)
    lr_embed: float = field(kw_only=True)
    clip: float = 1.0
    bias_rate: float = 0.001
    document_weight: float = 0.1
    stages: Path | None = None
    profile: int = 0

    @property
    def has_selection(self) -> bool:
        return self.name == "reader-v4"
