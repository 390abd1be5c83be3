"""Pressure tests in a terminal: a row a finding, notes under it, the verdict last. Knows rich; measures nothing."""

import math
from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longread.measure.stress.limits import LIMITS, TITLES
from longread.measure.stress.run import Report
from longread.measure.stress.verdict import Finding, PressureResult

COLOURS = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow"}
SHORT = {"INCONCLUSIVE": "OPEN"}  # in a column of a terminal of 80; the last line spells it out
SHOWN_NOTE = 400
BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def table(results: Iterable[PressureResult]) -> Table:
    found = Table(title="Pressure tests", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("what", min_width=16, overflow="fold")
    found.add_column("verdict", no_wrap=True)
    for name in ("value", "interval", "limit", "n", "needs"):
        found.add_column(name, justify="right", no_wrap=True)
    for result in results:
        found.add_row(Text(TITLES[result.test], style="bold"), _coloured(result.verdict))
        if result.not_run is not None:
            found.add_row(Text("not run", style="dim"))
        for each in result.findings:
            found.add_row(each.name, *_cells(each))
        found.add_section()
    return found


def _cells(each: Finding) -> tuple[Text | str, ...]:
    low, high = each.low, each.high
    interval = ""
    if low is not None and high is not None and low != high and (math.isfinite(low) or math.isfinite(high)):
        lowest, highest = amount(low, each.unit) or "-∞", amount(high, each.unit) or "∞"
        number, _, unit = lowest.partition(" ")
        interval = f"{number if highest.endswith(f' {unit}') else lowest}…{highest}"
    return (
        Text("told", style="dim") if each.verdict is None else _coloured(each.verdict),
        amount(each.value, each.unit) or ("never" if each.value == math.inf else "missing"),
        interval,
        amount(each.limit, each.unit),
        f"{each.samples:,}" if each.samples else "",
        f"{each.needed:,}" if each.needed is not None else "",
    )


def amount(value: float | None, unit: str) -> str:
    """With its unit; empty where there is none."""
    if value is None or not math.isfinite(value):
        return ""
    if unit == "share":
        value = 0.0 if abs(value) < 1e-9 else value  # rounding of logarithms
        return f"{value * 100:.3g} %"
    if unit == "bytes":
        size = abs(value)
        name, part = next(((n, p) for n, p in BYTES if size >= p), ("B", 1))
        return f"{value / part:.3g} {name}"
    whole = 100 <= abs(value) < 1e9 or (float(value).is_integer() and abs(value) < 100)
    shown = f"{value:,.0f}" if whole else f"{value:.3g}"
    return f"{shown} {unit}" if unit in ("s", "ms") else f"{shown}x" if unit == "times" else shown


def _coloured(verdict: str) -> Text:
    return Text(SHORT.get(verdict, verdict), style=COLOURS[verdict])


def notes(report: Report) -> list[Text]:
    """What stands under the table."""
    lines = []
    for result in report.results:
        title = TITLES[result.test]
        if result.not_run is not None:
            lines.append(Text(f"{title}: not run: {result.not_run}", style="yellow"))
        if result.stopped is not None:
            lines.append(Text(f"{title}: ended early: {result.stopped}", style="yellow"))
        for each in result.findings:
            if each.note and (each.verdict in ("FAIL", "INCONCLUSIVE") or each.verdict is None):
                note = each.note if len(each.note) <= SHOWN_NOTE else f"{each.note[:SHOWN_NOTE]}..."
                lines.append(Text(f"{title}, {each.name}: {note}", style=COLOURS.get(each.verdict or "", "dim")))
    verdict = Text.assemble("Verdict: ", Text(report.verdict, style=COLOURS[report.verdict]))
    if report.verdict == "INCONCLUSIVE":
        verdict.append(" (OPEN rows; `needs` says how many samples would decide)")
    return [*lines, verdict]


def limits_table() -> Table:
    """All limits with their defaults."""
    found = Table(title="Limits of the pressure tests", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("limit", "test", "default"):
        found.add_column(name, justify="right" if name == "default" else "left", no_wrap=True)
    for each in LIMITS:
        found.add_row(each.name, TITLES[each.test], amount(each.default, each.unit))
    return found


def limits_reasons() -> list[RenderableType]:
    """What each limit is of, and why its default is what it is: prose, which needs the whole width."""
    lines: list[RenderableType] = [Text("What they are, and why", style="italic")]
    for each in LIMITS:
        lines.append(Text(each.name, style="bold"))
        why = Text.assemble(
            _sentence(each.what), (f" {_sentence(each.reason)}" if each.reason != "none" else "", "dim")
        )
        lines.append(Padding(why, (0, 0, 0, 2)))
    return lines


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
