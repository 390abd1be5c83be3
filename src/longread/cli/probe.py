"""``longread probe``: measure this machine for the planner."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser
from longread.spec.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from longread.measure.probe import Probed


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="measure this machine's memory, matrix rates, links and disk",
        description="Measure what this machine reaches (memory, matrix products by type, links between host and GPUs, "
        "disk) and describe it as hardware for `longread plan --hardware FILE`. About 40 s on a GPU, 20 s on a CPU; "
        "stop what else uses the device first.",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the description here, not to stdout")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="what is measured")
    parser.add_argument(
        "--disk", type=Path, metavar="DIR", help="the folder whose disk is measured (default: this one)"
    )
    parser.add_argument("--no-disk", action="store_true", help="do not measure a disk")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    disk = _disk_folder(args)
    if args.output:
        _check_output(args.output)
    try:
        from longread.measure.probe import Effort, choose_device, probe  # loads torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("longread probe measures with torch, which is not installed: pip install torch") from None
    from longread.plan.hardware_file import machine_toml

    device, why = choose_device(args.device)
    if why:
        print(f"note: {why}", file=sys.stderr, flush=True)
    with _steps() as say:
        probed = probe(device, disk, Effort(), say)
    text = machine_toml(probed.hardware, probed.evidence)
    if args.output is None:
        print(text, end="")
        return 0
    args.output.write_text(text, encoding="utf-8")
    print("\n".join(_lines(probed)))
    print(f"written to {args.output}: longread plan MODEL --hardware {args.output}")
    return 0


def _disk_folder(args: argparse.Namespace) -> Path | None:
    if args.no_disk:
        if args.disk:
            raise ConfigError("--disk and --no-disk exclude each other")
        return None
    folder: Path = args.disk or Path()
    if not folder.is_dir():
        raise ConfigError(f"--disk {folder}: no such folder")
    if args.disk and not os.access(folder, os.W_OK):
        raise ConfigError(f"--disk {folder}: not writable; its disk is measured with a file that is removed again")
    return folder


def _check_output(path: Path) -> None:
    """Before the machine is busy for half a minute."""
    if path.suffix.lower() != ".toml":
        raise ConfigError(f"--output {path}: must end with .toml, by which --hardware tells a file from a card's name")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"--output {path}: {'is a folder' if path.is_dir() else 'its folder does not exist'}")
    if not os.access(path if path.exists() else path.resolve().parent, os.W_OK):
        raise ConfigError(f"--output {path}: not writable")


def _lines(probed: "Probed") -> list[str]:
    from longread.measure.probe_card import shown

    machine = probed.hardware
    memory, usable = (figure.value / 2**30 for figure in (machine.card.memory, machine.card.usable))
    lines = [f"{machine.label}: {memory:,.1f} GiB a device, {usable:,.1f} usable"]
    lines += [f"  {shown(one)}" for one in probed.measured]
    return lines + [f"note: {note}" for note in probed.notes]


@contextmanager
def _steps() -> Iterator[Callable[[int, int, str], None]]:
    """On a terminal a bar, elsewhere a line a step; both on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, what: print(f"probe {done}/{total}: {what}", file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
