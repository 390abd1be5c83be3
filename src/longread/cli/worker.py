"""The program of the engine's process: ``python -m longread.cli.worker DESCRIPTOR``, started by ``longread serve``.

Knows how a checkpoint becomes an engine, and how its resolved configuration travels. Must not know HTTP.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import JsonValue, TypeAdapter

from longread.cli.checkpoint import spec_of
from longread.kv.records import Layout
from longread.server.worker.child import attend
from longread.spec.config import ResolvedConfig
from longread.spec.engine import Engine
from longread.spec.profiler import ProfilerConfig, profiler_config
from longread.spec.reduced import random_spec

# -P: the folder that the server was started in is nobody's library.
COMMAND = (sys.executable, "-P", "-m", "longread.cli.worker")

_CONFIG = TypeAdapter(ResolvedConfig)


def task_of(config: ResolvedConfig, profiler: ProfilerConfig | None = None) -> dict[str, object]:
    """What the process is told to load. The configuration goes whole: resolved again, it could be another."""
    told = None if profiler is None else asdict(profiler)
    return {"config": _CONFIG.dump_python(config, mode="json"), "profiler": told}


def config_of(task: Mapping[str, Any]) -> ResolvedConfig:
    """The other way."""
    return _CONFIG.validate_python(task["config"])


def layout_of(told: Mapping[str, JsonValue]) -> Layout | None:
    """How the loaded engine's store lays out its records; None: it has none, or it could not be opened."""
    layout: Any = told["layout"]
    return None if layout is None else Layout(**(layout | {"root": bytes.fromhex(layout["root"])}))


def load(task: Mapping[str, Any]) -> tuple[Engine, dict[str, JsonValue]]:
    """Raises ConfigError and CheckpointError."""
    from longread.engine.load import load_resolved  # loads torch
    from longread.weights.progress import loading_bar

    config, given = config_of(task), task.get("profiler")
    profiler = None if given is None else profiler_config(given)
    path = Path(config.model)
    with loading_bar(f"loading {path.name}") as report:
        spec = random_spec(config.model, config.layers) if config.random_weights else spec_of(path)
        engine = load_resolved(path, spec, config, report, profiler)
    store = engine.store
    layout = None if store is None or store.layout is None else asdict(store.layout) | {"root": store.layout.root.hex()}
    return engine, {"layout": layout}


def log_to_stderr() -> None:
    """As every process of ``serve`` does it: what loading leaves out is said; libraries only warn."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    logging.getLogger("longread").setLevel(logging.INFO)


if __name__ == "__main__":
    log_to_stderr()
    attend(int(sys.argv[1]), load)
