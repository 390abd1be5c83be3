"""The program of an engine process without a model: ``python fake_worker.py DESCRIPTOR``, and how a test starts it.

The task may hold: ``engine`` (FakeEngine's options), ``step_seconds`` (each step sleeps so long), ``load_seconds``,
``refuse`` (the text of a ConfigError), ``die`` (status that loading ends the process with), ``hang_at`` (the step that
sleeps for ever), ``fail_at`` (the step that raises), ``garble_at`` (the step behind which nonsense is sent), ``lie_at``
(the step that ends a request twice), ``collector`` (a file that each step writes the garbage collector's state to),
``poison`` (a prompt that begins with this id ends the process while it has a slot), ``profile_seconds`` (what ending
a profile takes before it fails).
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longread.server.fake import FakeEngine
from longread.server.worker.child import attend
from longread.server.worker.supervise import Workers
from longread.spec.engine import Event, FinishEvent
from longread.spec.errors import ConfigError

COMMAND = (sys.executable, "-P", str(Path(__file__).resolve()))


def workers(*, step_timeout: float = 0.0, **task: object) -> Workers:
    """As ``serve`` has them, but with the fake engine."""
    return Workers(COMMAND, task, step_timeout=step_timeout)


class ScriptedEngine(FakeEngine):
    """A FakeEngine with a pace and with mishaps."""

    def __init__(self, task: dict[str, Any]):
        super().__init__(**task.get("engine", {}))
        self._task = task

    def step(self) -> Sequence[Event]:
        task = self._task
        time.sleep(task.get("step_seconds", 0.0))
        events = list(super().step())
        if any(running.request.prompt[0] == task.get("poison") for running in self._running.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        if "collector" in task:
            state = {"threshold": gc.get_threshold(), "frozen": gc.get_freeze_count()}
            Path(task["collector"]).write_text(json.dumps(state), encoding="utf-8")
        if self.steps == task.get("hang_at"):
            time.sleep(3600)
        if self.steps == task.get("fail_at"):
            raise RuntimeError("the fake engine was told to break")
        if self.steps == task.get("garble_at"):
            os.write(int(sys.argv[1]), b"s\xff\xff\xff\xff nonsense" * 100)
        if self.steps >= task.get("lie_at", 1 << 60):
            events += [event for event in events if isinstance(event, FinishEvent)]
        return events


class ProfiledEngine(ScriptedEngine):
    """Its profiles fail."""

    def start_profile(self, num_steps: int) -> None: ...

    def stop_profile(self) -> None:
        time.sleep(self._task["profile_seconds"])
        raise RuntimeError("the profiler was told to break")


def load(task: dict[str, Any]) -> tuple[FakeEngine, dict[str, Any]]:
    time.sleep(task.get("load_seconds", 0.0))
    if "die" in task:
        os._exit(task["die"])
    if "refuse" in task:
        raise ConfigError(task["refuse"])
    kind = ProfiledEngine if "profile_seconds" in task else ScriptedEngine
    return kind(task), {"pid": os.getpid()}


if __name__ == "__main__":
    attend(int(sys.argv[1]), load)
