"""A launch as bash: arrays with a comment before each entry, so that it can be read, pasted and run as it is."""

import shlex
from collections.abc import Iterable

from longread.plan.launch.command import Flag, Launch, Process, Variable

_WIDTH = 118


def shell(launch: Launch) -> str:
    """Works pasted into an interactive bash and as a script: it sets three arrays and ends no shell."""
    lines = ["#!/usr/bin/env bash", *header(launch), ""]
    lines += _array("environment", [w for v in launch.variables for w in _variable(v)])
    lines += _array("arguments", [w for flag in launch.flags for w in _flag(flag)])
    nodes = sorted({p.node for p in launch.processes})
    if len(nodes) == 1:
        lines += _node(launch, launch.processes, "")
    else:
        last = nodes[-1]
        lines.append(f"# On every node; NODE_RANK is its number, 0 to {last}.")
        lines.append('case "${NODE_RANK:-}" in')
        for node in nodes:
            lines.append(f"{node})")
            lines += _node(launch, [p for p in launch.processes if p.node == node], "  ")
            lines.append("  ;;")
        lines.append(f'*) echo "set NODE_RANK to this node\'s number, 0 to {last}" >&2 ;;')
        lines.append("esac")
    return "\n".join(lines) + "\n"


def header(launch: Launch) -> list[str]:
    """Comment lines: for what, for which version, and what is to know before it is run."""
    engine = {"longread": "longread serve", "vllm": "vLLM", "sglang": "SGLang"}[launch.engine]
    lines = [f"# {launch.title}: {engine} {launch.version}".rstrip()]
    if launch.version:
        lines.append(
            f"# Written for {engine} {launch.version}; other versions may lack a flag or give it another meaning."
        )
    return lines + [line for note in launch.notes for line in comment(note, "")]


def comment(text: str, indent: str) -> list[str]:
    """``text`` as comment lines of bounded width."""
    lines, line = [], f"{indent}#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH and line != f"{indent}#":
            lines.append(line)
            line = f"{indent}#  "
        line = f"{line} {word}"
    return [*lines, line]


def _array(name: str, entries: Iterable[str]) -> list[str]:
    return [f"{name}=(", *entries, ")"]


def _variable(variable: Variable) -> list[str]:
    return [*comment(variable.why, "  "), f"  {shlex.quote(f'{variable.name}={variable.value}')}"]


def _flag(flag: Flag) -> list[str]:
    return [*comment(flag.why, "  "), f"  {shlex.join(flag.words)}"]


def _node(launch: Launch, processes: Iterable[Process], indent: str) -> list[str]:
    """Commands of one node; several replicas run side by side."""
    found, lines = list(processes), []
    for p in found:
        # They stand on one line below, so each reason names its own.
        reasons = [(v.name, v.why) for v in p.variables] + [(f.name, f.why) for f in p.flags]
        lines += [line for name, why in reasons for line in comment(f"{name}: {why}", indent)]
        variables = "".join(f" {shlex.quote(f'{v.name}={v.value}')}" for v in p.variables)
        flags = "".join(f" {shlex.join(flag.words)}" for flag in p.flags)
        end = " &" if len(found) > 1 else ""
        program = shlex.join(launch.program)
        lines.append(f'{indent}env "${{environment[@]}}"{variables} {program} "${{arguments[@]}}"{flags}{end}')
    return lines + ([f"{indent}wait"] if len(found) > 1 else [])
