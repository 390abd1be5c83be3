"""A comparison at a terminal. Knows rich; judges nothing."""

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from longread.measure.report.compare import Comparison, Row
from longread.measure.report.definitions import TOOLS
from longread.measure.report.numbers import percent, plain
from longread.measure.report.run import Run
from longread.plan.tables import console, print_records

COLOURS = {"better": "green", "worse": "bold red", "same": "cyan", "inconclusive": "yellow", "not judged": "dim"}
NAMES = ("", "A", "B", "change", "interval", "verdict", "n", "needs")


def show(found: Comparison) -> None:
    out = console()
    for side, runs in (("A", found.a), ("B", found.b)):
        _side(out, side, runs)
    for each in found.differences:
        out.print(
            Text(f"{'DIFFERENT' if each.grave else 'note'}: {each.what}", style="red" if each.grave else "yellow")
        )
    print_records(out, NAMES, [cells(row) for row in found.rows], left=("verdict",))
    # What is needed stands in the table; other notes do not.
    told = dict.fromkeys(
        f"{row.title}, {row.statistic}: {row.note}" for row in found.rows if row.note and not row.needed
    )
    for text in told:
        out.print(Padding(Text(text, style="dim"), (0, 0, 0, 2), expand=False))
    for text in found.left_out:
        out.print(Text(f"not compared: {text}", style="yellow"))
    method = f"B / A; {found.method}; less than {percent(found.margin)} is the same"
    out.print(Padding(Text(method, style="dim"), (0, 0, 0, 2), expand=False))
    verdict = Text.assemble("B is ", (said(found), COLOURS[found.verdict]))
    out.print(verdict)


def said(found: Comparison) -> str:
    words = {"same": f"the same as A within {percent(found.margin)}", "inconclusive": "not decided against A"}
    return words.get(found.verdict, found.verdict)


def _side(out: Console, side: str, runs: tuple[Run, ...]) -> None:
    for run in runs:
        gate = "quality not checked" if run.gate is None else f"gate {run.gate.profile}: {run.gate.verdict}"
        speed = "red" if run.red else "dim" if run.gate is None else "green"
        total = f" of {run.planned:,}" if run.planned is not None else ""
        out.print(
            Text.assemble(
                (f"{side}  ", "bold"),
                f"{run.label}: {TOOLS[run.tool]}, {run.model or 'model not told'}, {run.answered:,}{total} answered, ",
                (gate, speed),
            ),
            soft_wrap=True,
        )


def cells(row: Row) -> list[str | Text]:
    title = row.title if row.statistic in ("rate", "share") else f"{row.title} {row.statistic}"
    if row.statistic == "share":
        values = ["missing" if value is None else percent(value) for value in (row.a, row.b)]
        change = "" if row.a is None or row.b is None else f"{(row.b - row.a) * 100:+.1f} points"
    else:
        values = ["missing" if value is None else f"{plain(value)} {row.unit}" for value in (row.a, row.b)]
        change = "" if row.ratio is None else f"{(row.ratio - 1) * 100:+.1f} %"
    return [
        Text(title),
        *map(Text, values),
        Text(change),
        Text(interval(row)),
        Text(row.verdict, style=COLOURS[row.verdict]),
        Text(f"{row.samples:,}{' pairs' if row.paired else ''}"),
        Text("" if row.needed is None else f"about {row.needed:,} more {row.needed_of}"),
    ]


def interval(row: Row) -> str:
    if row.low is None or row.high is None:
        return ""
    if row.statistic == "share":
        return f"{row.low * 100:+.1f} to {row.high * 100:+.1f} points"
    return f"{(row.low - 1) * 100:+.1f} to {(row.high - 1) * 100:+.1f} %"
