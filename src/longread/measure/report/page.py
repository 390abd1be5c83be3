"""The report: one page that stands alone. Knows what is said and in which order; every part is a module's beside it.

No speed is shown without what its quality gate said: behind a red gate it is struck out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from longread.measure.report import charts_load, charts_requests, charts_samples, plan_against, sections
from longread.measure.report.charts_load import Curve
from longread.measure.report.compare import Wanted, compare
from longread.measure.report.files import Material
from longread.measure.report.numbers import amount, items, mapping, words
from longread.measure.report.run import Run
from longread.measure.report.style import STYLE
from longread.plan.drawing import Picture
from longread.plan.html import document, figure
from longread.spec.errors import ConfigError

ALONE = 4  # runs whose requests are drawn; those of more are in their own reports
LATENCIES = (("ttft", "ttfc"), ("tpot", "tpot_chunk"))


@dataclass(frozen=True, slots=True)
class Report:
    """``pictures``: (name, title, drawing) of all plots, for files of their own."""

    html: str
    pictures: tuple[tuple[str, str, Picture], ...]


class _Drawn:
    """Keeps every plot that goes onto the page."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, str, Picture]] = []

    def add(self, name: str, title: str, picture: Picture | None, runs: Sequence[Run] = ()) -> str:
        """``runs``: whose speed it shows; what their gates said stands below, also where the plot is shown alone."""
        if picture is None:
            return ""
        if runs:
            picture = replace(picture, caption=f"{picture.caption} {sections.gated(runs)}")
        self.kept.append((name, title, picture))
        return figure(title, picture)


def render(found: Material, title: str | None = None) -> Report:
    """Raises ConfigError where there is nothing to show."""
    if not found.all_runs and not found.gates:
        raise ConfigError("nothing to report: give results of runs, sweeps or gates")
    drawn = _Drawn()
    name = words(title) or _title(found)
    lone = found.runs[:ALONE] if found.runs else []
    parts = [
        sections.head(found),
        sections.runs(found.runs, found.sweeps),
        _comparison(found.runs),
        _load(found, drawn),
        *(_of_run(run, number, drawn, len(found.runs) > 1) for number, run in enumerate(lone)),
        _more(found.runs),
        _plans(found, drawn),
        sections.quality(found),
        sections.missing(found.all_runs),
        sections.client(found.all_runs),
        sections.provenance(found),
        sections.definitions(found.all_runs),
    ]
    return Report(document(name, parts, STYLE), tuple(drawn.kept))


def _title(found: Material) -> str:
    models = list(dict.fromkeys(run.model or "model not told" for run in found.all_runs))
    models = models or [gate.model or "model not told" for gate in found.gates]
    shown = ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")
    return f"Benchmark of {shown}" if found.all_runs else f"Quality gate of {shown}"


def _comparison(runs: Sequence[Run]) -> str:
    """Where there are two runs that may be compared, they are."""
    if len(runs) != 2:
        return ""
    try:
        return sections.comparison(compare(runs[:1], runs[1:], Wanted(statistics=("mean", "p50", "p99"))))
    except ConfigError as error:
        return sections.not_compared(str(error))


def _load(found: Material, drawn: _Drawn) -> str:
    curves = charts_load.curves(found.sweeps, found.runs)
    plots = []
    for axis in ("concurrency", "rate"):
        along = [curve for curve in curves if curve.axis == axis]
        plots += [_latency(along, axis, name, drawn) for name in _wanted(along)]
        if along:
            picture = charts_load.throughput(along, axis)
            plots.append(drawn.add(f"throughput-{axis}", "Throughput against load", picture, _runs(along)))
    lengths = [point.run for sweep in found.sweeps if sweep.axis == "context" for point in sweep.points]
    planned = [each for name, plan in found.plans for each in _planned(name, plan)]
    plots.append(drawn.add("frontier", "Context frontier", charts_load.frontier(found.sweeps, planned), lengths))
    said = "".join(f'<p class="small">{escape(text)}</p>' for sweep in found.sweeps for text in sweep.said)
    if not any(plots):
        return said
    return f'<div class="figures" id="load">{"".join(plots)}</div>{said}'


def _wanted(curves: Sequence[Curve]) -> list[str]:
    """TTFT and TPOT; what vLLM calls so beside them where a curve has only that."""
    runs = _runs(curves)
    found = []
    for name, other in LATENCIES:
        found += [name] if any(name in run.figures for run in runs) else []
        found += [other] if any(other in run.figures and name not in run.figures for run in runs) else []
    return found


def _latency(curves: Sequence[Curve], axis: str, name: str, drawn: _Drawn) -> str:
    picture = charts_load.latency(name, curves, axis)
    return drawn.add(f"{name}-{axis}", f"{sections.short(name)} against load", picture, _runs(curves))


def _runs(curves: Sequence[Curve]) -> list[Run]:
    return [point.run for curve in curves for point in curve.points]


def _planned(name: str, plan: object) -> list[tuple[str, str, tuple[tuple[float, float], ...]]]:
    """A plan's cold TTFT and its floor at its own context, as points of the frontier."""
    told = mapping(plan)
    isl = amount(mapping(told.get("workload")).get("isl"))
    first = mapping(next(iter(items(told.get("feasible"))), None))
    cold = mapping(mapping(first.get("ttft")).get("cold"))
    ends = [amount(each) for each in items(cold.get("interval"))]
    found: list[tuple[str, str, tuple[tuple[float, float], ...]]] = []
    if isl and len(ends) == 3 and ends[1]:
        found.append((name, "plan, cold", ((isl, ends[1] * 1000),)))
        floor = amount(cold.get("floor"))
        if floor:
            found.append((name, "floor", ((isl, floor * 1000),)))
    return found


def _of_run(run: Run, number: int, drawn: _Drawn, several: bool) -> str:
    """Plots of one run's requests and samples."""
    key = f"r{number}"
    plots = [
        drawn.add(f"ttft-distribution-{key}", "Distribution of TTFT", charts_requests.distribution(run, key), [run]),
        drawn.add(f"ttft-parts-{key}", "What TTFT is made of", charts_requests.waterfall(run, key), [run]),
        drawn.add(f"ttft-over-time-{key}", "TTFT over time", charts_requests.over_time(run, key), [run]),
        drawn.add(f"failures-{key}", "Errors and refusals over time", charts_requests.failures(run, key)),
    ]
    for title, picture in charts_samples.pictures(run, key):
        plots.append(drawn.add(f"{title.lower().replace(' ', '-')}-{key}", title, picture))
    red = ' <span class="badge bad">failed the quality gate: its speed counts for nothing</span>' if run.red else ""
    head = f'<h2 id="{key}" class="word">{escape(run.label)}{red}</h2>' if several or red else ""
    return f'{head}{sections.latencies(run, several)}<div class="figures">{"".join(plots)}</div>'


def _more(runs: Sequence[Run]) -> str:
    if len(runs) <= ALONE:
        return ""
    names = ", ".join(run.label for run in runs[ALONE:])
    return f'<p class="small">Requests over time are drawn of the first {ALONE} runs, not of {escape(names)}.</p>'


def _plans(found: Material, drawn: _Drawn) -> str:
    parts = []
    for number, (name, plan) in enumerate(found.plans):
        lines, said = plan_against.lines(name, plan, found.all_runs)
        plots = [
            drawn.add(f"plan-{slug}-{number}", f"{quantity}: plan, measured, floor", picture)
            for slug, quantity in (("ttft", "TTFT"), ("tpot", "TPOT"), ("rate", "output tokens/s"))
            if (picture := plan_against.picture(lines, quantity, f"{slug}{number}")) is not None
        ]
        parts.append(sections.plan(name, plan_against.planned(plan), lines, said, "".join(plots)))
    return "".join(parts)
