"""The gate's commands: files in and out, progress on stderr, the table on stdout, an exit code.

Knows files and the terminal; how a gate works is run's.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from longread.measure.files import write_json
from longread.measure.gate import record, report
from longread.measure.gate.errors import GateError
from longread.measure.gate.profiles import profile_of
from longread.measure.gate.run import Outcome, Settings, Watch, compare_files, make_base, run_gate
from longread.measure.gate.verdict import EXIT
from longread.plan.tables import Screen

INTERRUPTED = 130


def base(settings: Settings, like: Path | None, output: Path) -> int:
    """Record a base. 0 where it is whole, 1 where it is not (it is written all the same)."""
    pattern = None if like is None else record.read(like)
    with _progress() as progress:
        found = asyncio.run(make_base(settings, pattern, Watch(progress=progress)))
    found.write(output)
    console = Screen(highlight=False)
    stopped = found.provenance.get("stopped")
    console.print(
        f"{escape(str(output))}: {len(found.said):,} answers of {escape(str(found.provenance['model']))}, "
        f"{found.provenance['requests']:,} requests, {found.provenance['seconds']} s"
    )
    if stopped is not None:
        console.print(Text(f"not complete: {stopped}"))
    return 0 if found.complete else INTERRUPTED if stopped == "interrupted" else 1


def run(settings: Settings, profile_name: str, base_path: Path | None, output: Path | None, everything: bool) -> int:
    """Judge a server."""
    profile = profile_of(profile_name)
    before = None if base_path is None else record.read(base_path)
    if before is not None and not before.said:
        raise GateError(f"{base_path}: holds no answers; make it anew with `longread gate base`")
    evidence = None if output is None else output.with_suffix(".jsonl")
    with _lines(evidence) as keep, _progress() as progress:
        outcome = asyncio.run(run_gate(settings, profile, before, Watch(keep, progress)))
    if output is not None:
        write_json(output, outcome.document())
    return _show(outcome, everything)


def compare(base_path: Path, candidate_path: Path, profile_name: str, output: Path | None, everything: bool) -> int:
    """Judge one recording against another."""
    outcome = compare_files(record.read(base_path), record.read(candidate_path), profile_of(profile_name))
    if output is not None:
        write_json(output, outcome.document())
    return _show(outcome, everything)


def profiles(own: str | None) -> int:
    """Print the limits."""
    screen = Screen(highlight=False)
    screen.print(report.limits_table(None if own is None else profile_of(own)))
    for line in report.limits_reasons():
        screen.print(line)
    return 0


def _show(outcome: Outcome, everything: bool) -> int:
    console = Screen(highlight=False)
    console.print(report.findings_table(outcome.levels, everything))
    for line in report.told(outcome):
        console.print(line)
    if outcome.interrupted:
        return INTERRUPTED
    return EXIT[outcome.verdict]


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """Evidence, a line as it comes: an interruption loses nothing that was written."""
    if path is None:
        yield lambda _: None
        return
    with path.open("w", encoding="utf-8") as file:

        def keep(one: Mapping[str, object]) -> None:
            file.write(json.dumps(one, ensure_ascii=False) + "\n")
            file.flush()

        yield keep


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, a line a step elsewhere."""
    console = Screen(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda done, total, words: console.print(f"gate: {words}", markup=False)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("gate", total=None)
        yield lambda done, total, words: bar.update(task, completed=done, total=total, description=words)
