"""What a run leaves behind so that the next one goes on: the whole state, and the weights alone in small files.

Knows files and dicts of tensors; knows no models. `state.pt` continues a run exactly. `weights-N.pt` (read by
`training.state.load_weights`) with `progress.json` is what travels where the optimisers' buffers would be too large.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PART_BYTES = 15 * 2**20
_SMALL = 2**15
"""Below this many numbers a tensor (norms, routers, hyper-connections) travels in float32: it costs nothing."""


@dataclass(slots=True)
class Progress:
    """Where a run stands. taken: how many batches of each (stage, row length) have been used."""

    name: str
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"taken": [[*key, count] for key, count in self.taken.items()]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Progress":
        return cls(**{**fields, "taken": {(stage, length): count for stage, length, count in fields["taken"]}})


def write_atomically(value: object, path: Path) -> None:
    """torch.save beside the file, then rename: a reader or a killed run sees the old file or the new one."""
    part = path.with_name(path.name + ".part")
    torch.save(value, part)
    os.replace(part, path)


def save_weights(folder: Path, weights: Mapping[str, Tensor], progress: Progress) -> None:
    """Write weights-0.pt, weights-1.pt, ... of at most 15 MiB each (a larger tensor alone is larger) and progress.json.

    Large float tensors as bfloat16, small ones as float32, integer ones as they are.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        kept = value.bfloat16() if value.is_floating_point() and value.numel() >= _SMALL else value
        # A file stores whole storages: a view of a stacked tensor would carry the stack along.
        kept = kept.detach().cpu().clone()
        # 512: the entry's share of the file's directory and alignment.
        if parts[-1] and size + kept.nbytes + 512 > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = kept
        size += kept.nbytes + 512
    for number, part in enumerate(parts):
        write_atomically(part, folder / f"weights-{number}.pt")
    for stale in folder.glob("weights-*.pt"):
        if int(stale.stem.removeprefix("weights-")) >= len(parts):
            stale.unlink()
    text = folder / "progress.json.part"
    text.write_text(json.dumps(progress.to_json()) + "\n")
    os.replace(text, folder / "progress.json")


def read_progress(folder: Path, name: str) -> Progress:
    """The progress of a folder. Raises ValueError if it belongs to another reader."""
    return belongs(Progress.from_json(json.loads((folder / "progress.json").read_text())), name, folder)


def belongs(progress: Progress, name: str, folder: Path) -> Progress:
    if progress.name != name:
        raise ValueError(f"{folder} holds the training of {progress.name}, not of {name}: name another folder")
    return progress
