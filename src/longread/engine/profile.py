"""An engine whose steps can be profiled: torch's profiler over whole steps, told as a table by op.

Knows torch's profiler and the engine's step. Must not know HTTP or machines' rates. Times are divided by nesting: a
named range's own time is its duration without the named ranges inside, so that all rows add up to the steps' time by
construction. The ranges have the names of kernels/dispatch.py; they cost a few microseconds a call also while nothing
is recorded, which is why an engine is made for this or not.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from longread.engine.batch import Batch
from longread.engine.core import Core
from longread.engine.engine import LocalEngine
from longread.engine.profile_counts import BETWEEN, BOOKS, SAMPLER, Shape, counts, group_of
from longread.engine.runner import Runner
from longread.engine.sampler import Sample
from longread.engine.sampling_state import SamplingState
from longread.kernels.dispatch import OP_PREFIX
from longread.spec.config import ComputeDtype
from longread.spec.engine import Event
from longread.spec.model import ModelSpec
from longread.spec.profiler import MOST_STEPS, ProfileError, ProfilerConfig

PREFIX = "longread::"
STEP, MODEL, CHOOSE = PREFIX + "step", PREFIX + "model", PREFIX + "sampler"
_LABELS = {STEP: (BOOKS, BOOKS), MODEL: (BETWEEN, BETWEEN), CHOOSE: (SAMPLER, SAMPLER)}
INNER = 40  # of torch's own ops that are told


class NamedRunner(Runner):
    """A runner whose calls are ranges, and which notes the shape of each step while ``noting``."""

    shapes: list[Shape] | None = None

    def forward(self, batch: Batch) -> Tensor:
        if self.shapes is not None:
            segments = tuple((each.start, each.length) for each in batch.segments)
            self.shapes.append(Shape(segments, len(batch.logit_rows)))
        with record_function(MODEL):
            return super().forward(batch)

    def choose(self, logits: Tensor, rows: Sequence[SamplingState]) -> list[Sample]:
        with record_function(CHOOSE):
            return super().choose(logits, rows)


class ProfiledEngine(LocalEngine):
    """``LocalEngine`` with ``spec.profiler.Profiling``. ``core`` has a ``NamedRunner``."""

    def __init__(self, core: Core, spec: ModelSpec, dtype: ComputeDtype, config: ProfilerConfig):
        super().__init__(core)
        assert isinstance(core.runner, NamedRunner)
        self._named, self._spec, self._dtype, self._config = core.runner, spec, dtype, config
        self._recording: profile | None = None
        self._ended: profile | None = None
        self._wanted = self._profiles = 0
        self._shapes: list[Shape] = []

    def start_profile(self, num_steps: int) -> None:
        """As ``Profiling.start_profile``."""
        if self._recording is not None:
            raise ProfileError("a profile is under way: end it with /stop_profile", code="profile_running")
        if not 1 <= num_steps <= MOST_STEPS:
            raise ProfileError(f"num_steps: {num_steps}; it must be from 1 to {MOST_STEPS}", param="num_steps")
        self._ended, self._wanted = None, num_steps
        self._named.shapes = self._shapes = []
        self._recording = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self._recording.start()

    def stop_profile(self) -> Mapping[str, Any]:
        """As ``Profiling.stop_profile``."""
        self._end()
        ended, self._ended = self._ended, None
        if ended is None:
            raise ProfileError("no profile was started: POST /start_profile first", code="no_profile")
        told = {
            "profiler": "torch",
            "device": "cpu",
            "dtype": self._dtype,
            "threads": torch.get_num_threads(),
            "wanted_steps": self._wanted,
            **table(ended.events() or (), self._shapes),
            "shapes": [{"segments": [list(s) for s in each.segments]} for each in self._shapes],
            "counts": counts(self._spec, self._dtype, self._shapes),
            "trace": self._trace(ended),
        }
        self._shapes = []
        return told

    def step(self) -> Sequence[Event]:
        """As ``LocalEngine.step``; a profile ends behind its last step."""
        if self._recording is None:
            return super().step()
        with record_function(STEP):
            events = super().step()
        if len(self._shapes) >= self._wanted:
            self._end()
        return events

    def close(self) -> None:
        self._end()
        super().close()

    def _end(self) -> None:
        if self._recording is not None:
            self._recording.stop()
            self._ended, self._recording, self._named.shapes = self._recording, None, None

    def _trace(self, ended: profile) -> str | None:
        """Written for a viewer of traces (Perfetto); the name of the file."""
        if self._config.torch_profiler_dir is None:
            return None
        self._profiles += 1
        path = Path(self._config.torch_profiler_dir) / f"longread-{os.getpid()}-{self._profiles}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(path))
        except OSError as error:
            return f"not written: {error.strerror or error}"
        return path.name


def table(events: Iterable[Any], shapes: Sequence[Shape]) -> dict[str, Any]:
    """torch's events as ``steps``, ``step_ms`` (all of them together), ``rows`` by op, which add up to that, and
    ``inner``: torch's own ops inside, by their self time. Milliseconds. Steps that computed nothing are left out.
    ``prompt_steps``, ``prompt_step_ms`` and each row's ``prompt_ms``: of the steps that read prompts.
    """
    found = (each for each in events if each.name == STEP and any(_named(each, MODEL)))
    roots = sorted(found, key=lambda each: each.time_range.start)
    reads = [any(new > 1 for _, new in shape.segments) for shape in shapes]  # a step has one shape
    own: dict[str, float] = defaultdict(float)
    prompt: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    inner: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for root, reading in zip(roots, reads, strict=True):
        todo = [(root, "")]
        while todo:
            event, parent = todo.pop()
            if event.name.startswith(PREFIX):
                took = event.time_range.elapsed_us() / 1000
                own[event.name] += took
                own[parent] -= took
                if reading:
                    prompt[event.name] += took
                    prompt[parent] -= took
                calls[event.name] += 1
                parent = event.name
            else:
                inner[event.name][0] += 1
                inner[event.name][1] += event.self_cpu_time_total / 1000
            todo += [(child, parent) for child in event.cpu_children]
    total = -own.pop("", 0.0)
    read = -prompt.pop("", 0.0)
    rows = [_row(name, calls[name], took, total) | {"prompt_ms": prompt[name]} for name, took in own.items()]
    top = sorted(inner.items(), key=lambda item: -item[1][1])[:INNER]
    return {
        "steps": len(roots),
        "step_ms": total,
        "prompt_steps": sum(reads),
        "prompt_step_ms": read,
        "rows": sorted(rows, key=lambda row: -row["self_ms"]),
        "inner": [{"op": name, "calls": int(count), "self_ms": took} for name, (count, took) in top],
    }


def _named(event: Any, name: str) -> Iterable[Any]:
    """The children of that name; the model and the sampler are direct ones of a step."""
    return (child for child in event.cpu_children if child.name == name)


def _row(name: str, count: int, took: float, total: float) -> dict[str, Any]:
    op = name.removeprefix(OP_PREFIX)
    label, group = _LABELS.get(name) or (op, group_of(op))
    return {"op": label, "group": group, "calls": count, "self_ms": took, "share": took / total if total else None}
