"""Results of ``longread bench`` as runs that calibrate: JSON read by its schema, not by the code that wrote it.

A file names its machine and its models. ``models`` in the file holds each model's config.json; a public release's name
needs none. What is not a time (peak memory) is left to others.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.published import Run
from longread.spec.config_json import spec_from_config
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec
from longread.spec.releases import release

SCHEMA = 1
_QUESTION = 32  # new tokens of a warm figure: the same document with another question


def read_runs(
    path: Path, *, hardware: Hardware | None = None, specs: Mapping[str, ModelSpec] | None = None
) -> tuple[Run, ...]:
    """The times in one result file. ``hardware``: where it was measured, if the file names a CPU or nothing.

    ``specs``: models by the names in the file, where it does not hold them itself. Raises ``ConfigError``: not a result
    file, another schema, no time in it, or a model that nothing describes.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable result file ({error})") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "figures" not in document:
        raise ConfigError(f"{path}: not a result of `longread bench` with schema {SCHEMA}")
    runs = []
    for figure in document["figures"]:
        run = _run(path, document, figure, hardware, specs or {})
        if run is not None:
            runs.append(run)
    if not runs:
        raise ConfigError(f"{path}: no figure in it is a time (TTFT or decode)")
    return tuple(runs)


def _run(
    path: Path,
    document: Mapping[str, Any],
    figure: Mapping[str, Any],
    hardware: Hardware | None,
    specs: Mapping[str, ModelSpec],
) -> Run | None:
    try:
        quantity, label, value = figure["quantity"], figure["model"], median(figure["samples"])
        context, batch = int(figure["context"]), int(figure["batch"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: a figure without model, quantity, context, batch or samples ({error})") from error
    if quantity not in ("TTFT, cold", "TTFT, warm", "decode"):
        return None
    if value <= 0:
        raise ConfigError(f"{path}: {label}, {quantity}: {value} is no measurement")
    deployment = _deployment(path, document, _spec(path, document, label, specs), hardware)
    source = f"{path.name} ({document.get('date', 'no date')}, commit {document.get('commit', 'unknown')})"
    common = {"name": label, "source": source, "deployment": deployment, "here": True, "text": False}
    if quantity == "decode":  # tokens/s of the whole batch
        return Run(metric="tpot", value=batch / value, isl=context, batch=batch, **common)
    if quantity == "TTFT, warm":
        return Run(metric="ttft", value=value, isl=context + _QUESTION, cached=context, **common)
    return Run(metric="ttft", value=value, isl=context, **common)


def _spec(path: Path, document: Mapping[str, Any], label: str, specs: Mapping[str, ModelSpec]) -> ModelSpec:
    if label in specs:
        return specs[label]
    config = document.get("models", {}).get(label)
    if config is not None:
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
