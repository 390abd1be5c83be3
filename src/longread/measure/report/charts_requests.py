"""Plots of single requests: how TTFT is spread, what it is made of, and what happened when.

Knows requests; a run without them has none of these.
"""

import math
from collections.abc import Iterable, Sequence

from longread.measure.intervals import percentile
from longread.measure.load.outcome import SERVER_PARTS
from longread.measure.report.numbers import figure, percent, plain
from longread.measure.report.run import Request, Run
from longread.plan.drawing import Axis, Bar, Picture, Series, bars, chart, log_range
from longread.plan.figures import seconds

_STEPS = 160  # of a distribution's line
_DOTS = 500  # of a cloud; of more, the largest and smallest of each stretch of time are drawn
_LINES = 7
_BINS = 40
OUTSIDE = "outside the server"
_SMALL = 0.02  # of the whole; parts below are drawn together
_SLOW = 0.9


def _time(value: float) -> str:
    return seconds(value / 1000)


def _answered(run: Run, name: str = "ttft") -> list[Request]:
    return [each for each in run.requests or () if each.status == "ok" and each.values.get(name, 0.0) > 0]


def main_name(run: Run) -> str:
    """TTFT, or the first chunk where a tool knows only that."""
    return "ttft" if "ttft" in run.figures else "ttfc"


def distribution(run: Run, key: str) -> Picture | None:
    """The share of requests that had their first token within a time, for each kind of request."""
    name = main_name(run)
    rows = _answered(run, name)
    if not rows:
        return None
    kinds = sorted({each.kind for each in rows}, key=lambda kind: -sum(each.kind == kind for each in rows))
    shown = kinds[:_LINES]
    series, values = [], []
    for style, kind in enumerate(shown):
        ordered = sorted(each.values[name] for each in rows if each.kind == kind)
        series.append(Series(f"{kind} ({len(ordered):,})", _steps(ordered), style, marks=False))
        told = ", ".join(f"p{p:g} {_time(percentile(ordered, p / 100))}" for p in (10, 50, 90, 99))
        values.append(f"{kind}: {len(ordered):,} answered; {told}; slowest {_time(ordered[-1])}")
    low, high = log_range([each.values[name] for each in rows])
    svg = chart(
        f"spread-{key}",
        f"Distribution of TTFT of {run.label}",
        "; ".join(values),
        Axis("time to the first token", low, high, _time),
        Axis("share of requests", 0.0, 1.0, lambda v: f"{v * 100:.0f} %", log=False, ticks=(0.0, 0.25, 0.5, 0.75, 1.0)),
        series,
    )
    more = f" {len(kinds) - len(shown)} more kinds are not drawn." if len(kinds) > len(shown) else ""
    caption = f"{run.label}: the share of requests whose first token came within a time, by kind.{more}"
    return Picture(svg, caption, tuple((one.style, one.name) for one in series), tuple(values))


def _steps(ordered: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """A distribution's line: at most ``_STEPS`` places, the ends among them."""
    count = len(ordered)
    places = sorted({round(step * (count - 1) / _STEPS) for step in range(_STEPS + 1)})
    found = []
    for place in places:
        found += [(ordered[place], place / count), (ordered[place], (place + 1) / count)]
    return tuple(found)


def waterfall(run: Run, key: str) -> Picture | None:
    """Parts of TTFT one after the other, on the mean of all requests and of the slowest tenth."""
    rows = [each for each in _answered(run) if parts_of(each)]
    if not rows:
        return None
    edge = percentile(sorted(each.values["ttft"] for each in rows), _SLOW)
    slow = [each for each in rows if each.values["ttft"] >= edge]
    everything = mean_parts(rows)
    whole = sum(everything.values())
    main = {name: value for name, value in everything.items() if value >= _SMALL * whole or name == OUTSIDE}
    if len(main) < len(everything):
        main["all smaller parts"] = whole - sum(main.values())
    lines, begun = [], 0.0
    for style, (name, value) in enumerate(main.items()):
        lines.append(Bar(f"{name}: {_time(value)} ({percent(value / whole)})", ((name, value, style % 8),), begun))
        begun += value
    tail = mean_parts(slow)
    tail_whole = sum(tail.values())
    values = [
        f"{name}: mean {_time(value)} ({percent(value / whole)}); slowest tenth {_time(tail.get(name, 0.0))} "
        f"({percent(tail.get(name, 0.0) / tail_whole)})"
        for name, value in everything.items()
    ]
    svg = bars(
        f"waterfall-{key}",
        f"Parts of TTFT of {run.label}",
        "; ".join(values),
        lines,
        whole,
        _time,
        [(f"mean TTFT {_time(whole)}", whole)],
    )
    grown = max(everything, key=lambda name: tail.get(name, 0.0) - everything[name])
    caption = (
        f"{run.label}: mean TTFT of {len(rows):,} requests by the server's own clock; what is left is outside of it "
        f"(network, client). In the slowest tenth TTFT is {_time(tail_whole)}, and most of the difference is {grown} "
        f"({_time(tail.get(grown, 0.0))} there)."
    )
    return Picture(svg, caption, (), tuple(values))


def parts_of(request: Request) -> dict[str, float]:
    """The server's parts of this TTFT in ms. A server that tells of no parts, but of queue and prefill, has those."""
    told = {name: value for name, value in request.timing.items() if name in SERVER_PARTS}
    if told:
        return told
    found = {}
    for name, spellings in (("queue", ("queue_ms", "queue_time_ms")), ("prefill", ("prefill_ms", "prompt_ms"))):
        value = next((request.timing[s] for s in spellings if s in request.timing), None)
        if value is not None:
            found[name] = value
    return found


def mean_parts(rows: Sequence[Request]) -> dict[str, float]:
    """Means over ``rows`` in the server's order, and what is left of the client's TTFT."""
    names = [name for name in SERVER_PARTS if any(name in parts_of(each) for each in rows)]
    found = {name: sum(parts_of(each).get(name, 0.0) for each in rows) / len(rows) for name in names}
    ttft = sum(each.values["ttft"] for each in rows) / len(rows)
    found[OUTSIDE] = max(ttft - sum(found.values()), 0.0)
    return {name: value for name, value in found.items() if value > 0 or name == OUTSIDE}


def over_time(run: Run, key: str) -> Picture | None:
    """When each request was sent and how long its first token took."""
    name = main_name(run)
    rows = [each for each in _answered(run, name) if each.sent is not None]
    if len(rows) < 2:
        return None
    kinds = sorted({each.kind for each in rows})[:_LINES]
    series = []
    for style, kind in enumerate(kinds):
        dots = _cloud([(each.sent or 0.0, each.values[name]) for each in rows if each.kind == kind], len(kinds))
        labels = tuple(f"{kind}, sent at {plain(x)} s: {_time(y)}" for x, y in dots)
        series.append(Series(kind, dots, style, line=False, labels=labels))
    end = max(each.sent or 0.0 for each in rows)
    low, high = log_range([each.values[name] for each in rows])
    halves = [[each.values[name] for each in rows if ((each.sent or 0.0) > end / 2) is late] for late in (False, True)]
    told = "; ".join(
        f"{words} half: median {_time(percentile(sorted(half), 0.5))} of {len(half):,}"
        for words, half in zip(("first", "second"), halves, strict=True)
        if half
    )
    svg = chart(
        f"time-{key}",
        f"TTFT over time of {run.label}",
        told,
        Axis("seconds since the run's start", 0.0, max(end, 1e-3), plain, log=False),
        Axis("time to the first token", low, high, _time),
        series,
    )
    drawn = sum(len(one.points) for one in series)
    less = f" {drawn:,} of {len(rows):,} are drawn, the extremes among them." if drawn < len(rows) else ""
    return Picture(svg, f"{run.label}: a dot a request, where it was sent.{less}", _legend(series), (told,))


def _legend(series: Iterable[Series]) -> tuple[tuple[int, str], ...]:
    return tuple((one.style, one.name) for one in series)


def _cloud(dots: Sequence[tuple[float, float]], share: int) -> tuple[tuple[float, float], ...]:
    ordered = sorted(dots)
    room = max(_DOTS // max(share, 1) // 2, 1)
    if len(ordered) <= 2 * room:
        return tuple(ordered)
    size = math.ceil(len(ordered) / room)
    found = []
    for begun in range(0, len(ordered), size):
        stretch = ordered[begun : begun + size]
        found += sorted({min(stretch, key=lambda dot: dot[1]), max(stretch, key=lambda dot: dot[1])})
    return tuple(found)


def failures(run: Run, key: str) -> Picture | None:
    """How many requests of each stretch of time were answered and how many not, by reason."""
    rows = [each for each in run.requests or () if each.ended is not None or each.sent is not None]
    reasons = sorted({each.failure or each.status for each in rows if each.status != "ok"})
    if not reasons:
        return None
    end = max((each.ended if each.ended is not None else each.sent) or 0.0 for each in rows) or 1.0
    bins = min(_BINS, max(len(rows) // 4, 4))
    shown = reasons[:_LINES]
    counts = {name: [0] * bins for name in ("answered", *shown)}
    for each in rows:
        at = min(int(((each.ended if each.ended is not None else each.sent) or 0.0) / end * bins), bins - 1)
        name = "answered" if each.status == "ok" else each.failure or each.status
        if name in counts:
            counts[name][at] += 1
    series = []
    for style, (name, found) in enumerate(counts.items()):
        points = tuple(
            (edge / bins * end, float(count)) for place, count in enumerate(found) for edge in (place, place + 1)
        )
        series.append(Series(name, points, 3 if not style else (4, 1, 2, 5, 0, 7, 6)[style - 1], marks=False))
    total = {
        name: sum(each.status != "ok" and (each.failure or each.status) == name for each in rows) for name in reasons
    }
    values = tuple(f"{name}: {count:,} of {len(rows):,} requests" for name, count in total.items())
    most = max(max(found) for found in counts.values()) or 1
    svg = chart(
        f"failures-{key}",
        f"Requests not answered of {run.label}",
        "; ".join(values),
        Axis("seconds since the run's start", 0.0, end, plain, log=False),
        Axis(f"requests ended in {figure(end / bins)} s", 0.0, float(most) * 1.1, plain, log=False),
        series,
    )
    return Picture(svg, f"{run.label}: how requests ended, over time.", _legend(series), values)
