"""Results of ``longread bench`` as runs that calibrate: JSON read by its schema, not by the code that wrote it.

A file names its machine and its models. ``models`` in the file holds each model's config.json; a public release's name
needs none. What is not a time (peak memory) is left to others.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.given_file import read_given
from longread.plan.published import Run
from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release

SCHEMA = 1
FILE_BYTES = 2**24
_MOST = 2**31  # tokens or requests of a figure
_QUESTION = 32  # new tokens of a warm figure: the same document with another question


def read_runs(
    path: Path, *, hardware: Hardware | None = None, specs: Mapping[str, ModelSpec] | None = None
) -> tuple[Run, ...]:
    """The times in one result file. ``hardware``: where it was measured, if the file names a CPU or nothing.

    ``specs``: models by the names in the file, where it does not hold them itself. Raises ``ConfigError``: not a result
    file, another schema, no time in it, or a model that nothing describes.
    """
    document = _document(path)
    if isinstance(document, str):
        raise ConfigError(f"{path}: {document}")
    runs = []
    for figure in document["figures"]:
        run = _run(path, document, figure, hardware, specs or {})
        if run is not None:
            runs.append(run)
    if not runs:
        raise ConfigError(f"{path}: no figure in it is a time (TTFT or decode)")
    return tuple(runs)


def other_kind(path: Path) -> str | None:
    """What ``path`` is instead of a result of `longread bench`; None: it is one.

    Raises ``ConfigError`` for what cannot be read, and for a .json that is no JSON: damaged, not of another kind.
    """
    if path.is_dir():
        return "a folder"
    if path.suffix.lower() != ".json" and path.is_file():
        return f"not JSON by its name ({path.suffix or 'no ending'})"
    found = _document(path)
    return found if isinstance(found, str) else None


def _document(path: Path) -> Mapping[str, Any] | str:
    """The file's object, or what it is instead of a result."""
    try:
        document = json.loads(read_given(path, FILE_BYTES, "a result file"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file, so not a readable result of `longread bench`") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a readable result file (nested without end)") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a readable result file ({error})") from None
    if not isinstance(document, dict) or not isinstance(document.get("figures"), list):
        return "not a result of `longread bench` (it has no figures)"
    if document.get("schema") != SCHEMA:
        return f"not a result of `longread bench` with schema {SCHEMA}"
    return document


def _run(
    path: Path,
    document: Mapping[str, Any],
    figure: Mapping[str, Any],
    hardware: Hardware | None,
    specs: Mapping[str, ModelSpec],
) -> Run | None:
    try:
        quantity, label, value = figure["quantity"], str(figure["model"]), float(median(figure["samples"]))
        context, batch = int(figure["context"]), int(figure["batch"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: a figure without model, quantity, context, batch or samples ({error})") from error
    if quantity not in ("TTFT, cold", "TTFT, warm", "decode"):
        return None
    if not (0 < value < math.inf and 1 <= context <= _MOST and 1 <= batch <= _MOST):
        raise ConfigError(f"{path}: {label}, {quantity}: {value:g} at {context} x {batch} is no measurement")
    deployment = _deployment(path, document, _spec(path, document, label, specs), hardware)
    source = f"{path.name} ({document.get('date', 'no date')}, commit {document.get('commit', 'unknown')})"
    common: dict[str, Any] = {"name": label, "source": source, "deployment": deployment, "here": True, "text": False}
    if quantity == "decode":  # tokens/s of the whole batch
        return Run(metric="tpot", value=batch / value, isl=context, batch=batch, **common)
    if quantity == "TTFT, warm":
        return Run(metric="ttft", value=value, isl=context + _QUESTION, cached=context, **common)
    return Run(metric="ttft", value=value, isl=context, **common)


def _spec(path: Path, document: Mapping[str, Any], label: str, specs: Mapping[str, ModelSpec]) -> ModelSpec:
    if label in specs:
        return specs[label]
    models = document.get("models")
    config = models.get(label) if isinstance(models, dict) else None
    if isinstance(config, dict):
        return spec_from_config(config, label=label)
    try:
        return release(label)
    except ConfigError as error:
        raise ConfigError(
            f"{path}: what {label!r} is, is neither in the file (`models`) nor public; measure again, or give its "
            f"checkpoint ({error})"
        ) from error


def _deployment(path: Path, document: Mapping[str, Any], spec: ModelSpec, hardware: Hardware | None) -> Deployment:
    """As the file says; else one replica of Longread on this machine's CPU, cache in the weights' plain type."""
    said = document.get("deployment", {})
    if not isinstance(said, dict) or not isinstance(said.get("strategy", {}), dict):
        raise ConfigError(f"{path}: deployment and its strategy must be objects")
    splits = {field.name for field in fields(Strategy)}
    if unknown := set(said.get("strategy", {})) - splits:
        raise ConfigError(f"{path}: strategy has unknown keys {', '.join(sorted(unknown))}")
    known = {"hardware", "strategy", "engine", "experts", "cache", "chunk"}
    if unknown := set(said) - known:
        raise ConfigError(
            f"{path}: deployment has unknown keys {', '.join(sorted(unknown))} (known: {', '.join(known)})"
        )
    return Deployment(
        spec=spec,
        hardware=hardware or parse_hardware(said.get("hardware", "cpu")),
        strategy=Strategy(**said.get("strategy", {})),
        engine=said.get("engine", "longread"),
        experts=said.get("experts", "native"),
        cache=said.get("cache", "float32"),
        chunk=said.get("chunk", 2048),
    )
