"""What a checkpoint folder says about itself, without its weights."""

from pathlib import Path

from longread.spec.config_json import read_config, spec_from_config
from longread.spec.errors import CheckpointError
from longread.spec.model import ModelSpec


def spec_of(path: Path) -> ModelSpec:
    """Raises CheckpointError when there is no such folder or config, UnsupportedModelError for what it asks."""
    if path.is_file():
        raise CheckpointError(f"{path}: is a file; give the folder that holds config.json and *.safetensors")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give the folder that holds config.json and *.safetensors")
    return spec_from_config(read_config(path))
