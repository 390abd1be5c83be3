"""Plots over the load: TTFT, TPOT and throughput against concurrency or rate, and the context frontier.

Knows runs and sweeps; how a line is drawn is the plan's drawing's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longread.measure.report.definitions import LATENCIES
from longread.measure.report.numbers import plain
from longread.measure.report.run import Point, Run, Sweep
from longread.plan.drawing import Axis, Picture, Series, chart, log_range
from longread.plan.figures import length, seconds

AXES = {"concurrency": "requests at once", "rate": "requests/s asked for", "context": "tokens of context"}
RED = "failed the quality gate"
TAIL = ", p99"  # dashed lines, which the legend leaves out
_LINES = 6  # series in a plot; more cannot be told apart
_GREY = 6
_LEAST_LINE = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """Runs along one axis. ``red``: none of its speeds counts."""

    label: str
    axis: str
    points: tuple[Point, ...]
    guides: tuple[tuple[str, float], ...] = ()
    red: bool = False


def curves(sweeps: Sequence[Sweep], runs: Sequence[Run]) -> list[Curve]:
    """The sweeps, and loose runs that differ in their load only, as a line."""
    found = [
        Curve(each.label, each.axis, each.points, each.guides, any(point.run.red for point in each.points))
        for each in sweeps
    ]
    groups: dict[tuple[str, str, str, str], list[Point]] = {}
    for run in runs:
        for axis in ("rate", "concurrency"):
            value = run.load.get(axis)
            if value:
                name = str(run.part("provenance", "workload", "name"))
                groups.setdefault((axis, run.tool, str(run.model), name), []).append(Point(value, run))
                break
    for (axis, tool, model, _), points in groups.items():
        ordered = tuple(sorted(points, key=lambda point: point.value))
        if len({point.value for point in ordered}) >= _LEAST_LINE:
            found.append(Curve(f"{model} ({tool})", axis, ordered, (), any(point.run.red for point in ordered)))
    return found[:_LINES]


def latency(name: str, drawn: Sequence[Curve], axis: str) -> Picture | None:
    """Mean with its interval, and p99 dashed, of the quantity ``name``; None where no curve along ``axis`` has it."""
    series: list[Series] = []
    values: list[str] = []
    guides: list[tuple[str, float]] = []
    for style, curve in enumerate(each for each in drawn if each.axis == axis):
        told = _latency_series(curve, name, _GREY if curve.red else style)
        series += told
        values += _latency_values(curve, name)
        guides += [] if curve.red else [(_of(curve, drawn, words), at) for words, at in curve.guides]
    if not any(one.points for one in series):
        return None
    title = LATENCIES[name].title
    caption = f"Mean {title} with its 95 % interval; dashed: p99. {LATENCIES[name].title} is {LATENCIES[name].meaning}."
    return _picture(
        f"{name}-{axis}", f"{title} against {AXES[axis]}", caption, axis, series, values, _time, title, guides
    )


def _of(curve: Curve, drawn: Sequence[Curve], words: str) -> str:
    """A guide's words, with the curve's name where there are several."""
    return words if sum(bool(each.guides) for each in drawn) < 2 else f"{curve.label}: {words}"


def _time(value: float) -> str:
    return seconds(value / 1000)


def _latency_series(curve: Curve, name: str, style: int) -> list[Series]:
    means, band, tails, labels = [], [], [], []
    for point in curve.points:
        figure = point.run.figures.get(name)
        if figure is None or not figure.mean:
            continue
        means.append((point.value, figure.mean))
        labels.append(f"{curve.label}, {plain(point.value)}: {_time(figure.mean)}")
        low, high = figure.interval or (None, None)
        if low is not None and high is not None and low > 0:
            band.append((point.value, low, high))
        tail = figure.percentiles.get(99.0)
        if tail:
            tails.append((point.value, tail))
    words = f"{curve.label}{f', {RED}' if curve.red else ''}"
    wide = tuple(band) if len(band) > 1 else ()
    one = Series(words, tuple(means), style, wide, labels=tuple(labels), whiskers=() if wide else tuple(band))
    return [one, Series(f"{words}{TAIL}", tuple(tails), style, dashed=True, marks=False)]


def _latency_values(curve: Curve, name: str) -> list[str]:
    found = []
    for point in curve.points:
        figure = point.run.figures.get(name)
        place = f"{curve.label}, {AXES[curve.axis]} {plain(point.value)}"
        if figure is None or figure.mean is None:
            found.append(f"{place}: missing")
            continue
        low, high = figure.interval or (None, None)
        told = f" ({_time(low)} to {_time(high)})" if low is not None and high is not None and low > 0 else ""
        tail = figure.percentiles.get(99.0)
        found.append(f"{place}: mean {_time(figure.mean)}{told}" + ("" if tail is None else f", p99 {_time(tail)}"))
    return found


def throughput(drawn: Sequence[Curve], axis: str) -> Picture | None:
    """Output tokens per second, and requests per second that met the SLOs where there are any."""
    series: list[Series] = []
    values: list[str] = []
    guides: list[tuple[str, float]] = []
    for style, curve in enumerate(each for each in drawn if each.axis == axis):
        shade = _GREY if curve.red else style
        rates = [(point.value, point.run.rates.get("output_throughput")) for point in curve.points]
        known = tuple((x, y) for x, y in rates if y)
        series.append(Series(f"{curve.label}{f', {RED}' if curve.red else ''}", known, shade))
        for point, (x, y) in zip(curve.points, rates, strict=True):
            good = point.run.rates.get("request_goodput")
            more = "" if good is None else f", goodput {plain(good)} requests/s"
            told = "missing" if y is None else f"{plain(y)} tokens/s"
            values.append(f"{curve.label}, {AXES[axis]} {plain(x)}: {told}{more}")
        guides += [] if curve.red else [(_of(curve, drawn, words), at) for words, at in curve.guides]
    if not any(one.points for one in series):
        return None
    caption = "Output tokens per second of all requests together."
    title = f"Output tokens/s against {AXES[axis]}"
    return _picture(f"rate-{axis}", title, caption, axis, series, values, plain, "output tokens/s", guides)


def _picture(
    name: str,
    title: str,
    caption: str,
    axis: str,
    series: Sequence[Series],
    values: Sequence[str],
    show: Callable[[float], str],
    label: str,
    guides: Sequence[tuple[str, float]],
) -> Picture:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    ys += [y for one in series for _, low, high in (*one.band, *one.whiskers) for y in (low, high)]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low / 1.5, x_high * 1.5
    y_low, y_high = log_range(ys)
    shown = _length if axis == "context" else plain
    ticks = tuple(sorted(set(xs))) if len(set(xs)) <= 8 else ()
    svg = chart(
        name,
        title,
        "; ".join(values),
        Axis(AXES[axis], x_low, x_high, shown, ticks=_thinned(ticks, x_low, x_high)),
        Axis(label, y_low, y_high, show),
        [one for one in series if one.points],
        sorted(((words, x) for words, x in guides if x_low <= x <= x_high), key=lambda guide: -guide[1]),
    )
    legend = tuple((one.style, one.name) for one in series if one.points and not one.name.endswith(TAIL))
    return Picture(svg, caption, legend, tuple(values))


def _length(value: float) -> str:
    return length(round(value))


def _thinned(ticks: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    """Those that leave room for their words on a logarithmic axis."""
    found: list[float] = []
    for tick in ticks:
        if not found or (tick / found[-1]) > (high / low) ** 0.09:
            found.append(tick)
    return tuple(found)


def frontier(
    sweeps: Sequence[Sweep], planned: Sequence[tuple[str, str, tuple[tuple[float, float], ...]]]
) -> Picture | None:
    """TTFT over the context: what a new interval costs, what a repeated prompt costs, and cold prompts. ``planned``:
    (name, kind "plan" or "floor", (tokens, ms)) beside it.
    """
    series: list[Series] = []
    values: list[str] = []
    style = 0
    for sweep in (each for each in sweeps if each.axis == "context"):
        for kind, title in (("newest", "new interval"), ("warm", "asked again"), ("cold", "cold")):
            known = [(p.value, told, p.run.red) for p in sweep.points if (told := p.frontier.get(kind)) is not None]
            if not known and kind == "newest":
                known = [
                    (p.value, f.mean, p.run.red) for p in sweep.points if (f := p.run.figures.get("ttft")) and f.mean
                ]
                title = "mean TTFT"
            if not known:
                continue
            words = f"{sweep.label}, {title}{f', {RED}' if any(red for _, _, red in known) else ''}"
            shade = _GREY if any(red for _, _, red in known) else style
            series.append(Series(words, tuple((x, y) for x, y, _ in known), shade, line=kind != "cold"))
            values += [f"{words}, {_length(x)}: {_time(y)}" for x, y, _ in known]
            style += 1
    if not series:
        return None
    for name, kind, points in planned:
        series.append(
            Series(f"{name}, {kind}", points, 7 if kind == "floor" else 5, dashed=True, marks=len(points) < 2)
        )
        values += [f"{name}, {kind}, {_length(x)}: {_time(y)}" for x, y in points]
    caption = "Time to the first token over the length of the context."
    return _picture("frontier", "Context frontier", caption, "context", series, values, _time, "TTFT", ())
