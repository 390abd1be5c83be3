"""Which checkpoint a command means, a folder or a bundled model's name, and what it says about itself without weights.

Knows: the bundled models' names, and that the distribution ``longread-models`` holds a folder of each name. Must not
know: what is in a checkpoint beyond its config.json.
"""

import importlib.util
from argparse import ArgumentTypeError
from pathlib import Path

from longread.cli.parser import nearest
from longread.spec.config_json import RUNNABLE, read_config, spec_from_config
from longread.spec.errors import CheckpointError
from longread.spec.model import ModelSpec
from longread.spec.releases import release, release_name

BUNDLED = ("reader-v4", "reader-v3")


def locate(value: str) -> Path:
    """The folder that ``value`` means: a path that exists comes before a bundled model of the same name.

    A value that is neither is returned as a path, which ``spec_of`` refuses. Raises CheckpointError for a bundled name
    whose files are not installed.
    """
    path = Path(value)
    if value not in BUNDLED or path.exists():
        return path
    models = _models_folder()
    if models is None:
        raise CheckpointError(
            f"{value}: the bundled models are not installed; `pip install ./models` in Longread's repository does it"
        )
    if not (models / value / "config.json").is_file():
        raise CheckpointError(f"{value}: this installation of longread-models has no files of it (looked in {models})")
    return models / value


def tokenizer_of(value: str) -> Path:
    """An option's type: the folder or tokenizer.json that ``value`` means, which may be a bundled model's name."""
    try:
        return locate(value)
    except CheckpointError as error:
        raise ArgumentTypeError(str(error)) from None


def origin(path: Path) -> str:
    """For the operator: the path, and whether it is the bundled model or hides it."""
    if _is_bundled(path):
        return f"{path} (bundled)"
    if str(path) in BUNDLED:
        return f"{path} (a folder here; the bundled model of that name is not used)"
    return str(path)


def spec_of(path: Path) -> ModelSpec:
    """Raises CheckpointError when there is no such folder or config, UnsupportedModelError for what it asks."""
    wanted = f"give the folder that holds config.json and *.safetensors, or a bundled model ({', '.join(BUNDLED)})"
    if path.is_file():
        raise CheckpointError(f"{path}: is a file; {wanted}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder{nearest(str(path), BUNDLED)}; {wanted}{_without(path)}")
    return spec_from_config(read_config(path), label=path.name if _is_bundled(path) else None)


def _without(path: Path) -> str:
    """What to do where a public model is named whose weights nobody gave; "" where none is called so."""
    if release_name(str(path)) is None:
        return ""
    if release(str(path)).family not in RUNNABLE:
        return f"; the engine cannot run this model, `longread plan {path}` tells what it takes"
    return f"; `longread serve {path} --random-weights` runs it without its weights, to time it"


def _models_folder() -> Path | None:
    """Where the distribution is, without running any of its code; None where it is not installed."""
    found = importlib.util.find_spec("longread_models")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


def _is_bundled(path: Path) -> bool:
    models = _models_folder()
    return models is not None and path.name in BUNDLED and path.resolve().parent == models.resolve()
