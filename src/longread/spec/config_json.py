"""A checkpoint's config.json: read from disk as strict JSON, and turned into a ``ModelSpec``.

The file comes from outside: anything in it ends as a spec or as a ``CheckpointError`` that says which field and why.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from longread.spec.errors import CheckpointError, UnsupportedModelError
from longread.spec.families import build
from longread.spec.model import ModelSpec
from longread.spec.releases import label_for

CONFIG_BYTES_MAX = 4 * 2**20
RUNNABLE = ("deepseek_v2", "deepseek_v3", "deepseek_v4")


def read_config(path: Path) -> dict[str, object]:
    """The object in a config.json (``path``: the file, or the checkpoint's folder).

    Raises ``CheckpointError``: no file, too large, not UTF-8, not JSON, nested too deep, NaN or Infinity, a key given
    twice, or not an object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # reading a pipe would wait for its writer
            raise CheckpointError(f"{file}: is no regular file; a checkpoint folder needs a config.json")
        size = found.st_size
        if size > CONFIG_BYTES_MAX:
            raise CheckpointError(f"{file}: {size} bytes; a config.json has at most {CONFIG_BYTES_MAX}")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: not there; a checkpoint folder needs a config.json") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: not UTF-8: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except RecursionError:
        raise CheckpointError(f"{file}: nested too deep") from None
    except ValueError as error:  # json.JSONDecodeError, the hooks below, and Python's limit on the digits of an int
        raise CheckpointError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a {type(value).__name__}, not an object")
    return value


def spec_from_config(config: Mapping[str, object], label: str | None = None) -> ModelSpec:
    """The spec of a parsed config.json in DeepSeek's own keys.

    ``label`` None: the public model of this shape, or "custom <family>". Raises ``UnsupportedModelError`` naming the
    first field that is missing, unknown, of a wrong type, or of a value that is not implemented.
    """
    if not isinstance(config, Mapping):
        raise CheckpointError(f"config.json holds a {type(config).__name__}, not an object")
    spec = build(config, label or "")
    return spec if label else replace(spec, label=label_for(spec))


def require_runnable(spec: ModelSpec) -> None:
    """Refuse a model that Longread can plan for but whose engine cannot run. Raises ``UnsupportedModelError``."""
    if spec.family not in RUNNABLE:
        raise UnsupportedModelError(
            "model_type",
            f"{spec.family} ({spec.label}) can be planned for but not run; the engine runs {', '.join(RUNNABLE)}",
        )


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key[:80]!r} is given twice")
        result[key] = value
    return result
