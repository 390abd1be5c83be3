"""What a training run is told. Knows names and defaults; knows no torch, so that --help is fast."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `python -m training.train`, under their own names.

    planned_steps, in place of planned_minutes, makes progress follow the steps: the same on every machine. steps: at
    most this many in this run. has_selection: the twin selects entries sparsely (V4).
    """

    name: str
    state: Path
    minutes: float = 8.0
    planned_minutes: float = 19.0
    planned_steps: int | None = None
    steps: int | None = None
    seed: int = 0
    device: str = "cuda"
    compile: bool = False
    graphs: bool = False
    workers: int = 14
    tokens_per_step: int = 32768
    lr_muon: float = 0.02
    lr_adam: float = 0.003
    lr_embed: float = 0.003
    clip: float = 1.0
    bias_rate: float = 0.001
    document_weight: float = 0.1
    stages: Path | None = None
    profile: int = 0

    @property
    def has_selection(self) -> bool:
        return self.name == "reader-v4"
