"""Measured runs against predictions on a screen: the published table, and own results before and after calibration."""

from rich.console import Console
from rich.markup import escape

from longread.plan.calibrate import (
    Calibration,
    Held,
    default_factors,
    hand_set,
    leave_one_out,
    median_error,
    predict,
)
from longread.plan.estimate import Estimate
from longread.plan.figures import rate, seconds, span
from longread.plan.published import Run, left_out
from longread.plan.tables import print_records

MILLI = ("ttft", "tpot")


def print_published(console: Console) -> None:
    """Every published run: measured, predicted with and without itself, inside the interval or why not."""
    held = leave_one_out()
    names = (
        "run",
        "deployment",
        "measured",
        "predicted",
        "without this run",
        "error",
        "inside",
        "source",
        "why outside",
    )
    rows = []
    factors = default_factors()
    for h in held:
        d = h.run.deployment
        inside = ("[green]yes[/]" if h.holds else "[red]no[/]") + ("" if h.run.fit else " [dim](not fitted)[/]")
        rows.append(
            (
                escape(h.run.label),
                f"{d.engine} {d.strategy.label} {d.hardware.label}",
                _value(h.run),
                _shown(h.run, predict(h.run, factors)),
                _shown(h.run, h.predicted),
                f"{h.error:+.0%}",
                inside,
                escape(h.run.source),
                escape(h.reason),
            )
        )
    print_records(console, names, rows, left=names)
    console.print(published_summary(held))
    for what, why in left_out():
        console.print(f"[dim]not in the table: {escape(what)}: {escape(why)}[/]")


def published_summary(held: tuple[Held, ...]) -> str:
    """How far leave-one-out is off, for own layer-cut runs and whole models apart, and what it does not show."""
    whole = leave_one_out(by="deployment")
    groups = (
        ("all", lambda run: True),
        ("own runs of a model's first layers on one H200", lambda run: run.own_cut),
        ("whole models, mostly others' runs", lambda run: not run.own_cut),
    )
    head = (
        f"{len(held)} runs, {sum(h.run.fit for h in held)} calibrate. Median error of the centre, and how many lie "
        "inside the interval, with the run left out and with its whole deployment left out:"
    )
    lines = [head]
    for name, belongs in groups:
        shown = []
        for rows in (held, whole):
            fitted = [h for h in rows if h.run.fit and belongs(h.run)]
            shown.append(f"{median_error(fitted):.1%}, {sum(h.holds for h in fitted)} of {len(fitted)}")
        lines.append(f"  {name}: {shown[0]}; {shown[1]}")
    lines.append(
        f"Not out of sample: {len(hand_set())} constants were set by hand on runs of this table and stay as they are "
        f"when one is left out: {'; '.join(hand_set())}. So were readings of what sources leave open."
    )
    return "\n".join(lines)


def published_rows() -> list[dict[str, object]]:
    """The same for JSON, in base units."""
    factors = default_factors()
    rows: list[dict[str, object]] = []
    for h in leave_one_out():
        d, p, q = h.run.deployment, predict(h.run, factors), h.predicted
        rows.append(
            {
                "run": h.run.label,
                "source": h.run.source,
                "engine": d.engine,
                "strategy": d.strategy.label,
                "hardware": d.hardware.label,
                "metric": h.run.metric,
                "layers": h.run.layers,
                "measured": h.run.value,
                "predicted": [p.low, p.centre, p.high],
                "left_out": [q.low, q.centre, q.high],
                "error": h.error,
                "inside": h.holds,
                "reason": h.reason,
                "calibrates": h.run.fit,
            }
        )
    return rows


def print_calibration(console: Console, c: Calibration) -> None:
    """Own runs: measured, predicted before, after, and with the run itself left out."""
    console.print(f"[bold]calibration[/] with {len(c.rows)} runs of your own")
    rows = []
    for row in c.rows:
        shown = [f"{span(e)} {e.centre / row.run.value - 1:+.0%}" for e in (row.before, row.after, row.held_out)]
        rows.append((escape(row.run.label), seconds(row.run.value), *shown))
    names = ("run", "measured", "before", "after", "with this run left out")
    print_records(console, names, rows, left=names)
    console.print(
        f"  median error of the centre: before {c.error('before'):.0%}, after {c.error('after'):.0%}, "
        f"each run left out {c.error('held_out'):.0%}"
    )


def calibration_rows(c: Calibration) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for row in c.rows:
        own = {name: getattr(row, name) for name in ("before", "after", "held_out")}
        rows.append(
            {
                "run": row.run.label,
                "source": row.run.source,
                "measured": row.run.value,
                **{name: [e.low, e.centre, e.high] for name, e in own.items()},
            }
        )
    return rows


def _value(run: Run) -> str:
    return seconds(run.value) if run.metric in MILLI else f"{run.value:,.0f} tokens/s"


def _shown(run: Run, e: Estimate) -> str:
    return span(e) if run.metric in MILLI else rate(e)
