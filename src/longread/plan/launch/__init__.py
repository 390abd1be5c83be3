"""From a plan to what is run: a command, a Compose file or systemd units, each flag with its reason.

What an engine cannot do of a plan is refused with what to choose instead; nothing is left out silently.
"""

from dataclasses import replace

from longread.plan.deployment import Deployment, Workload
from longread.plan.launch.command import Launch, Options
from longread.plan.launch.compose import compose
from longread.plan.launch.longread import longread_launch
from longread.plan.launch.sglang import sglang_launch
from longread.plan.launch.shell import shell
from longread.plan.launch.systemd import systemd
from longread.plan.launch.vllm import vllm_launch
from longread.spec.errors import ConfigError

TARGETS = ("longread", "vllm", "sglang", "compose", "systemd")
_ENGINES = {"longread": longread_launch, "vllm": vllm_launch, "sglang": sglang_launch}

__all__ = ["TARGETS", "Launch", "Options", "emit", "launch"]


def emit(d: Deployment, workload: Workload | None, target: str, options: Options | None = None) -> str:
    """The command or file. ``compose`` and ``systemd`` start ``d.engine``; an engine's name starts that one.

    Raises ``ConfigError`` for an unknown target or version, and for what the engine cannot do of ``d``.
    """
    if target not in TARGETS:
        raise ConfigError(f"{target!r} is nothing to emit; choose one of {', '.join(TARGETS)}")
    chosen = options or Options()
    if target == "compose":
        return compose(launch(d, workload, chosen), chosen)
    if target == "systemd":
        return systemd(launch(d, workload, chosen), chosen)
    return shell(launch(replace(d, engine=target), workload, chosen))  # type: ignore[arg-type]


def launch(d: Deployment, workload: Workload | None, options: Options | None = None) -> Launch:
    """The same as data, for ``d.engine``."""
    chosen = options or Options()
    if chosen.layers is not None and d.engine != "longread":
        raise ConfigError(f"layers={chosen.layers}: only longread serve draws a model that is cut, not {d.engine}")
    return _ENGINES[d.engine](d, workload, chosen)
