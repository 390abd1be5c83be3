"""Profiling an engine's steps: how it is allowed, and what an engine that can do it offers.

Names are vLLM's (``--profiler-config``, /start_profile, /stop_profile) and SGLang's (``num_steps``). Knows no torch.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from longread.spec.errors import ConfigError, RequestError

MOST_STEPS: Final = 32  # a step makes tens of thousands of events: more take long to be told, and gigabytes
DEFAULT_STEPS: Final = 16


class ProfileError(RequestError):
    """A profile cannot be started or ended now; the message says why."""


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """``profiler``: "torch". ``torch_profiler_dir``: where traces go beside the table; None: nowhere.
    ``max_iterations``: steps of a profile that is started without a number. Raises ConfigError.
    """

    profiler: str
    torch_profiler_dir: str | None = None
    max_iterations: int = DEFAULT_STEPS

    def __post_init__(self) -> None:
        if self.profiler != "torch":
            raise ConfigError(f"profiler_config: profiler {self.profiler!r:.60}; known is 'torch'")
        steps = self.max_iterations
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST_STEPS:
            raise ConfigError(f"profiler_config: max_iterations {steps!r:.60}; it must be from 1 to {MOST_STEPS}")
        folder = self.torch_profiler_dir
        if folder is not None and not (isinstance(folder, str) and Path(folder).is_absolute()):
            raise ConfigError(f"profiler_config: torch_profiler_dir {folder!r:.200}; it must be an absolute path")


def profiler_config(given: Mapping[str, Any]) -> ProfilerConfig:
    """From JSON. Raises ConfigError, for an unknown field with the nearest known one."""
    known = [field.name for field in fields(ProfilerConfig)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"profiler_config: {name[:60]!r} is not honoured{hint} (all: {', '.join(known)})")
    if "profiler" not in given:
        raise ConfigError('profiler_config names no profiler: give it as {"profiler": "torch"}')
    return ProfilerConfig(**given)


@runtime_checkable
class Profiling(Protocol):
    """What an engine that was loaded for it offers beside ``Engine``; on the engine's thread."""

    def start_profile(self, num_steps: int) -> None:
        """Record the next ``num_steps`` steps that compute anything. Raises ProfileError while one is under way."""
        ...

    def stop_profile(self) -> Mapping[str, Any]:
        """End it, if it has not ended by its number, and tell it as JSON. Raises ProfileError where none was begun."""
        ...
