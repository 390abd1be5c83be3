"""``longread doctor``: what this machine is for serving long contexts, and what is wrong with it.

Knows: how findings are shown. Must not know: how they are found. Nothing is changed, remedies are only printed.

Exit codes: 0 nothing worse than notes; 1 warnings; 2 errors among the findings (or a command line that is not usable,
which prints one line on stderr and no findings).
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from longread.cli.parser import Parser, UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

    from longread.plan.doctor.facts import Facts
    from longread.plan.doctor.finding import Finding

PIPE_WIDTH = 160
STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
HEADS = {"error": "errors", "warning": "warnings", "note": "notes", "ok": "looked at and fine"}


def add_parser(commands: "_SubParsersAction[Parser]", name: str) -> None:
    parser = commands.add_parser(
        name,
        help="say what is wrong with this machine: GPUs, links, versions, disks, limits",
        description="Look at GPUs, links, driver, installed packages, running servers, disks and limits, and say what "
        "keeps long contexts from being served well, with evidence and remedy. Changes nothing, runs no remedy.",
        epilog="Exit code: 0 nothing worse than notes, 1 warnings, 2 errors.",
    )
    parser.add_argument("--json", action="store_true", help="findings and all facts as one JSON document")
    parser.add_argument(
        "--store",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder whose disk matters: the store, the models; may be given again; default: the current folder",
    )
    parser.add_argument(
        "--from",
        dest="files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="judge another machine by saved files instead, recognised by content: nvidia-smi -q -x (or -q), "
        "nvidia-smi topo -m, topo -p2p r, nvlink -s, vllm collect-env, sglang.check_env, longread doctor --json, logs",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="add what a running Longread, vLLM or SGLang server is bound by, from /metrics read twice; with a server "
        "on another machine, this machine is left out",
    )
    parser.add_argument("--interval", type=seconds, default=5.0, metavar="S", help="seconds between the two readings")
    parser.add_argument("--api-key", metavar="KEY", help="sent to --url as a bearer token")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="the same, as the first line of a file")
    parser.add_argument(
        "--ask-torch",
        action="store_true",
        help="ask torch itself for its GPU architectures, in a second Python (takes seconds; default: a table)",
    )
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Exit code by the worst finding."""
    from longread.plan.doctor.diagnose import diagnose, plain
    from longread.plan.doctor.finding import as_json, exit_code

    facts = _facts(args)
    findings = diagnose(facts)
    if args.json:
        print(json.dumps({**as_json(findings), "facts": plain(facts)}, ensure_ascii=False))
        return exit_code(findings)
    from rich.console import Console

    # In a file or a pipe a line is as wide as it needs to be found again, whatever the terminal.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    show_machine(facts, console)
    show(findings, console, facts.origin)
    return exit_code(findings)


def seconds(text: str) -> float:
    """From 0.1 s to ten minutes."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 600")
    return value


def _facts(args: argparse.Namespace) -> "Facts":
    """Of this machine, or of what the options name instead."""
    if args.url is None:
        if args.api_key or args.api_key_file:
            raise UsageError("--api-key belongs to --url, which is missing")
        return _machine(args)
    from longread.plan.doctor.facts import Facts
    from longread.plan.doctor.live import base_url, is_local, read_live

    url = base_url(args.url)
    machine = _machine(args) if args.files or args.store or is_local(url) else Facts(origin=url)
    live = read_live(url, _key(args), args.interval, _say)
    return replace(machine, live=live)


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return args.api_key
    if args.api_key is not None:
        raise UsageError("--api-key and --api-key-file: give one of them")
    try:
        lines = args.api_key_file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-file {args.api_key_file}: {error}") from None
    if not lines or not lines[0].strip():
        raise UsageError(f"--api-key-file {args.api_key_file} is empty")
    return lines[0].strip()


def _say(text: str) -> None:
    """Where the time goes, on stderr: stdout belongs to the findings."""
    print(text, file=sys.stderr, flush=True)


def _machine(args: argparse.Namespace) -> "Facts":
    from longread.plan.doctor.diagnose import read_this_machine
    from longread.plan.doctor.saved.reading import read_saved

    if args.files:
        for option, given in (("--store", args.store), ("--ask-torch", args.ask_torch)):
            if given:
                raise UsageError(f"{option} looks at this machine, --from at files of another: give one of them")
        return read_saved(args.files)
    folders = args.store or [Path()]
    if any(not str(folder).strip() for folder in folders):
        raise UsageError("--store is empty; give a folder")
    return read_this_machine(folders, args.ask_torch)


def show_machine(facts: "Facts", console: "Console") -> None:
    """What the machine is, before what is wrong with it."""
    from rich.table import Table
    from rich.text import Text

    from longread.plan.doctor.summary import matrix, summary

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, text in summary(facts):
        table.add_row(Text(name), Text(text))
    console.print(table)
    for line in matrix(facts):
        console.print(Text(line), soft_wrap=True)
    console.print()


def show(findings: "list[Finding]", console: "Console", origin: str) -> None:
    """A table a severity, worst first; what is fine in one line each."""
    from rich.table import Table
    from rich.text import Text

    from longread.plan.doctor.finding import SEVERITIES, counts

    numbers = counts(findings)
    for severity in SEVERITIES:
        group = [finding for finding in findings if finding.severity == severity]
        if not group:
            continue
        table = Table(
            title=f"{HEADS[severity]} ({len(group)})",
            title_justify="left",
            title_style=STYLES[severity],
            show_header=False,
            box=None,
            padding=(0, 2, 0, 0),
        )
        table.add_column(style="bold", max_width=28, overflow="fold")
        table.add_column(overflow="fold", ratio=1)
        for finding in group:
            # Text, not markup: evidence quotes what others wrote, brackets included.
            table.add_row(Text(finding.subject), Text(_told(finding)))
        console.print(table)
        console.print()
    told = ", ".join(f"{numbers[severity]} {HEADS[severity]}" for severity in SEVERITIES)
    console.print(Text(f"{origin}: {told}"))


def _told(finding: "Finding") -> str:
    if finding.severity == "ok":
        return f"{finding.statement} ({finding.evidence})" if finding.evidence else finding.statement
    lines = [finding.statement]
    if finding.evidence:
        lines.append(f"evidence: {finding.evidence}")
    if finding.remedy:
        lines.append(f"remedy: {finding.remedy}")
    if finding.source:
        lines.append(f"source: {finding.source}")
    return "\n".join(lines)
