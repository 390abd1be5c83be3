"""Where weights come from, a training state's folder or an exported checkpoint, and which twin takes them.

A folder's weights are ``weights-*.pt``: parts of one dict from native name to tensor (bfloat16 or float32, tid2eid
int64), which ``training.saved`` writes.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longread.spec.config_json import spec_from_config
from longread.weights.reader import Checkpoint
from training.twin_v3 import TwinV3
from training.twin_v4 import TwinV4

Twin = TwinV3 | TwinV4


def load_weights(path: Path) -> dict[str, Tensor]:
    """float32 weights (int64 tables kept) by native name, from a checkpoint where ``path`` has a config.json.

    A quantised checkpoint is dequantised. Raises FileNotFoundError where there are no weights.
    """
    if (path / "config.json").is_file():
        checkpoint = Checkpoint.open(path)
        return checkpoint.load(spec_from_config(checkpoint.config), torch.float32)
    parts = sorted(path.glob("weights-*.pt"))
    if not parts:
        raise FileNotFoundError(f"{path}: has neither config.json nor weights-*.pt")
    weights: dict[str, Tensor] = {}
    for part in parts:
        weights |= torch.load(part, map_location="cpu", weights_only=True)
    return widened(weights)


def widened(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floats as float32; integer tables as they are."""
    return {name: value.float() if value.is_floating_point() else value for name, value in weights.items()}


def twin_for(config: Mapping[str, object]) -> Twin:
    """The trainable twin of a config's family."""
    return TwinV4(config) if config["model_type"] == "deepseek_v4" else TwinV3(config)
