"""Plots of what was sampled while a run went on: cache, queues, memory of the process, and the GPUs' state.

Knows the ``samples`` block (measure/load/samples.py) and trusts no value of it. A series that is not there is missing
and its reason is told; nothing is drawn as 0.
"""

from collections.abc import Callable, Mapping, Sequence

from longread.measure.report.numbers import items, mapping, plain, real, words
from longread.measure.report.run import Run
from longread.plan.drawing import Axis, Picture, Series, chart
from longread.plan.figures import gib

_GPUS = 8
_POINTS = 240
_NAMES = {
    "kv usage": "KV cache",
    "running": "running",
    "waiting": "waiting",
    "rss": "process memory",
    "gpus": "GPUs",
}

Points = tuple[tuple[float, float], ...]


def sampled(run: Run) -> Mapping[str, object]:
    return mapping(run.part("samples"))


def pictures(run: Run, key: str) -> list[tuple[str, Picture]]:
    """(title, plot) of all that was sampled."""
    block = sampled(run)
    times = [real(each) for each in items(block.get("at"))]
    own = {name: _points(times, each) for name, each in mapping(block.get("series")).items()}
    found = []
    usage = [Series("KV cache in use", own["kv usage"], 0, marks=False)] if own.get("kv usage") else []
    if usage:
        found.append(("KV cache", _plot(run, f"kv-{key}", "KV cache in use", "share of the cache", usage, _share, 1.0)))
    queue = [
        Series(f"{name} requests", own[name], style, marks=False)
        for style, name in enumerate(("running", "waiting"))
        if own.get(name)
    ]
    if queue:
        found.append(
            ("Requests in the server", _plot(run, f"queue-{key}", "Requests in the server", "requests", queue, plain))
        )
    memory = [Series("server's process (RSS)", own["rss"], 0, marks=False)] if own.get("rss") else []
    cards = [mapping(each) for each in items(block.get("gpus"))][:_GPUS]
    memory += _of_cards(cards, times, "memory", 1)
    if memory:
        found.append(("Memory over time", _plot(run, f"memory-{key}", "Memory", "memory in use", memory, _bytes)))
    for name, title, unit, zero in (
        ("temperature", "GPU temperature", "°C", False),
        ("power", "GPU power", "W", True),
        ("sm clock", "GPU SM clock", "MHz", False),
    ):
        lines = _of_cards(cards, times, name, 0)
        if lines:
            key_ = f"{name.replace(' ', '-')}-{key}"
            found.append((title, _plot(run, key_, title, unit, lines, plain, from_zero=zero)))
    return found


def missing(run: Run) -> list[str]:
    """What was not sampled, and why."""
    block = sampled(run)
    if not block:
        return ["memory, queues and GPUs over time: the run has no samples (they are taken by `longread bench serve`)"]
    found = [f"{_NAMES.get(name, name)} over time: {words(why) or 'no reason told'}" for name, why in _told(block)]
    for each in map(mapping, items(block.get("gpus"))):
        found += [f"GPU {_index(each)}, {name}: {words(why) or 'no reason told'}" for name, why in _told(each)]
    return found


def _told(block: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(words(name, 40) or "?", why) for name, why in mapping(block.get("missing")).items()]


def _index(card: Mapping[str, object]) -> str:
    index = real(card.get("index"))
    return "?" if index is None else f"{index:g}"


def _points(times: Sequence[float | None], column: object) -> Points:
    """Known values, thinned to what a plot can show; the largest of each stretch is kept."""
    found = [
        (at, value)
        for at, each in zip(times, items(column), strict=False)
        if at is not None and (value := real(each)) is not None
    ]
    if len(found) <= _POINTS:
        return tuple(found)
    size = -(-len(found) // _POINTS)
    return tuple(max(found[i : i + size], key=lambda point: point[1]) for i in range(0, len(found), size))


def _of_cards(
    cards: Sequence[Mapping[str, object]], times: Sequence[float | None], name: str, style: int
) -> list[Series]:
    found: list[Series] = []
    for card in cards:
        points = _points(times, mapping(card.get("series")).get(name))
        if points:
            found.append(Series(f"GPU {_index(card)}", points, style + len(found), marks=False))
    return found


def _bytes(value: float) -> str:
    return gib(value).replace(".0 ", " ") if value else "0"


def _share(value: float) -> str:
    return f"{plain(value * 100)} %"


def _plot(
    run: Run,
    name: str,
    title: str,
    label: str,
    series: Sequence[Series],
    show: Callable[[float], str],
    top: float | None = None,
    from_zero: bool = True,
) -> Picture:
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    full = top is not None and 0.2 * top <= max(ys) <= top  # little of a whole would be a line at 0
    high = top if full and top is not None else max(ys) * 1.08 or 1.0
    values = tuple(
        f"{one.name}: {show(min(y for _, y in one.points))} to {show(max(y for _, y in one.points))}, "
        f"{show(one.points[-1][1])} at the end"
        for one in series
    )
    low = min(min(ys), 0.0)
    if not from_zero and high > low:
        low = max(min(ys) - 0.3 * (max(ys) - min(ys)) - 0.02 * max(ys), low)
    svg = chart(
        name,
        f"{title} of {run.label}",
        "; ".join(values),
        Axis("seconds since the run's start", min(xs), max(max(xs), min(xs) + 1e-3), plain, log=False),
        Axis(label, low, max(high, low + 1e-9), show, log=False, ticks=_nice(high) if show is _bytes else ()),
        series,
    )
    legend = tuple((one.style % 8, one.name) for one in series)
    return Picture(
        svg, f"{run.label}: {title.lower() if not title.startswith(('GPU', 'KV')) else title}.", legend, values
    )


def _nice(high: float) -> tuple[float, ...]:
    """Ticks of bytes at whole powers of two of them."""
    step = 2.0**20
    while high / step > 6:
        step *= 2
    return tuple(step * n for n in range(int(high / step) + 1))
