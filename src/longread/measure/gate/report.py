"""A gate's outcome in a terminal, and the table of limits. Knows rich; measures nothing."""

import math
from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longread.measure.gate.profiles import LIMITS, NAMES, Profile
from longread.measure.gate.run import Outcome
from longread.measure.gate.verdict import LEVELS, Finding, LevelResult

COLOURS = {"PASS": "green", "FAIL": "bold red", "INCONCLUSIVE": "yellow"}
SHOWN_NOTE = 240
WHAT = 17  # columns: "kl_mean at 16,384" on one line of a terminal of 80


def findings_table(levels: Iterable[LevelResult], everything: bool = False) -> Table:
    """A row a finding that was judged; ``everything``: those that are only told, too."""
    table = Table(title="Quality gate", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("what", min_width=WHAT)
    table.add_column("verdict", no_wrap=True)
    for name in ("value", "interval, 95 %", "limit", "n", "needs"):
        table.add_column(name, justify="right", no_wrap=True)
    for level in levels:
        table.add_row(Text(f"{level.level} {LEVELS[level.level]}", style="bold"), _coloured(level.verdict))
        if level.not_run is not None:
            table.add_row(Text(f"not run: {level.not_run}", style="dim"))
        for finding in level.findings:
            if finding.verdict is not None or everything:
                table.add_row(Text(finding.name), *_cells(finding))
        table.add_section()
    return table


def _cells(finding: Finding) -> tuple[Text | str, ...]:
    known = all(end is not None and math.isfinite(end) for end in (finding.low, finding.high))
    interval = f"{_n(finding.low)}…{_n(finding.high)}" if known else ""
    return (
        Text("told", style="dim") if finding.verdict is None else _coloured(finding.verdict),
        _n(finding.value),
        interval,
        _n(finding.limit),
        f"{finding.samples:,}" if finding.samples else "",
        f"{finding.needed:,}" if finding.needed is not None else "",
    )


def _n(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.3g}"


def _coloured(verdict: str) -> Text:
    return Text(verdict, style=COLOURS[verdict])


def told(outcome: Outcome) -> list[Text]:
    """The lines under the table: what failed and why, notes, and the verdict."""
    lines = []
    for level in outcome.levels:
        for finding in level.findings:
            if finding.note and finding.verdict in ("FAIL", "INCONCLUSIVE"):
                note = finding.note if len(finding.note) <= SHOWN_NOTE else f"{finding.note[:SHOWN_NOTE]}..."
                lines.append(Text(f"{level.level} {finding.name}: {note}", style=COLOURS[finding.verdict]))
        lines += [Text(f"{level.level} note: {note}", style="dim") for note in level.notes]
    if outcome.stopped is not None:
        lines.append(Text(f"stopped: {outcome.stopped}", style="yellow"))
    if outcome.decided_after is not None:
        lines.append(Text(f"decided after {outcome.decided_after} documents of each length", style="dim"))
    verdict = Text.assemble(f"{outcome.profile.name}: ", _coloured(outcome.verdict))
    needed = [level.needed for level in outcome.levels if level.needed is not None]
    if outcome.verdict == "INCONCLUSIVE" and needed:
        verdict.append(f" ({max(needed):,} samples would decide, of the finding that needs most; more --documents)")
    return [*lines, verdict]


def limits_table(own: Profile | None = None) -> Table:
    """All limits of the built-in profiles, and of one's own."""
    table = Table(title="Limits of the profiles", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("limit", no_wrap=True)
    table.add_column("level", justify="right")
    for name in (*NAMES, *([own.name] if own else [])):
        table.add_column(Text(name), justify="right")
    table.add_column("unit")
    for limit in LIMITS:
        given = (*limit.values, *([own[limit.name]] if own else []))
        values = ["no limit" if value == limit.most else _n(value) for value in given]
        table.add_row(limit.name, str(limit.level), *values, limit.unit)
    return table


def limits_reasons() -> list[RenderableType]:
    """What each limit is of, and why its values are what they are: prose, which needs the whole width."""
    lines: list[RenderableType] = [Text("What they are, and why", style="italic")]
    for limit in LIMITS:
        lines.append(Text(limit.name, style="bold"))
        why = Text.assemble(f"{_sentence(limit.what)} ", (_sentence(limit.reason), "dim"))
        lines.append(Padding(why, (0, 0, 0, 2)))
    return lines


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
