"""Charts as plain SVG text: lines with bands on linear or logarithmic axes, and stacked bars.

Knows numbers and words, no planner. Colours are classes (``s0`` ... ``s7``) that the page's style sheet sets, so that
light and dark need no second drawing. The same input gives the same text, and all words are escaped. A chart is 440
units wide, so that its letters stay readable on a phone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 440, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 12, 46
STYLES = 8
_BAR, _ROW, _BAR_LEFT = 20, 46, 6
_LINEAR_TICKS = 5
_DECADES = 7  # more of them on an axis get a label each second, third, ...


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high`` (above 0 if ``log``). ``show`` makes a tick's words, ``ticks`` their places."""

    label: str
    low: float
    high: float
    show: Callable[[float], str]
    log: bool = True
    ticks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        """Where ``value`` lies between the ends, 0..1; what is outside goes to the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def places(self) -> tuple[float, ...]:
        if self.ticks:
            return tuple(t for t in self.ticks if self.low <= t <= self.high)
        return _decades(self.low, self.high) if self.log else _even(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Series:
    """One line. ``band``: (x, low, high) around it; ``style`` 0..7; ``line`` False: marks only, with ``labels``.
    ``whiskers``: (x, low, high) at single places.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    style: int
    band: tuple[tuple[float, float, float], ...] = ()
    dashed: bool = False
    line: bool = True
    marks: bool = True
    labels: tuple[str, ...] = ()
    whiskers: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a stacked bar chart: words above it, and from ``start`` on (name, value, style) from left to right."""

    label: str
    parts: tuple[tuple[str, float, int], ...]
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG, its caption, its colours as (style, name) in the order of the legend, and every value in words."""

    svg: str
    caption: str
    legend: tuple[tuple[int, str], ...]
    values: tuple[str, ...] = ()


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Ends a little outside of ``values`` above 0, at least a factor of ten apart."""
    found = [v for v in values if v > 0 and math.isfinite(v)] or [1.0]
    low, high = min(found) / 1.25, max(found) * 1.25
    if high / low < 10:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(10), middle * math.sqrt(10)
    return low, high


def chart(
    name: str,
    title: str,
    description: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    guides: Sequence[tuple[str, float]] = (),
) -> str:
    """``name``: unique on the page; ``title`` and ``description`` are what a screen reader says. ``guides``: upright
    lines with words at places of ``x``.
    """
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    at_x: Callable[[float], float] = lambda value: _LEFT + x.share(value) * (right - _LEFT)  # noqa: E731
    at_y: Callable[[float], float] = lambda value: bottom - y.share(value) * (bottom - _TOP)  # noqa: E731
    body = []
    for value in x.places():
        px = _n(at_x(value))
        body.append(f'<line class="grid" x1="{px}" y1="{_TOP}" x2="{px}" y2="{bottom}"/>')
        body.append(
            f'<text class="tick" x="{px}" y="{bottom + 15}" text-anchor="middle">{escape(x.show(value))}</text>'
        )
    for value in y.places():
        py = _n(at_y(value))
        body.append(f'<line class="grid" x1="{_LEFT}" y1="{py}" x2="{right}" y2="{py}"/>')
        words = escape(y.show(value))
        body.append(f'<text class="tick" x="{_LEFT - 5}" y="{_n(at_y(value) + 4)}" text-anchor="end">{words}</text>')
    body.append(f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}"/>')
    middle_x, middle_y = (_LEFT + right) // 2, (_TOP + bottom) // 2
    body.append(f'<text class="axis" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    body.append(
        f'<text class="axis" x="13" y="{middle_y}" text-anchor="middle" '
        f'transform="rotate(-90 13 {middle_y})">{escape(y.label)}</text>'
    )
    body += [_band(one, at_x, at_y) for one in series if one.band]
    body += [_line(one, at_x, at_y) for one in series if one.points]
    body += [_guide(words, at_x(value), index, bottom) for index, (words, value) in enumerate(guides)]
    return _svg(name, title, description, HEIGHT, "".join(body))


def _guide(words: str, x: float, row: int, bottom: int) -> str:
    """An upright line, its words on the side that has room."""
    side, place = ("end", x - 4) if x > 0.7 * WIDTH else ("start", x + 4)
    return (
        f'<line class="limit" x1="{_n(x)}" y1="{_TOP}" x2="{_n(x)}" y2="{bottom}"/>'
        f'<text class="tick" x="{_n(place)}" y="{_TOP + 14 + 14 * row}" text-anchor="{side}">{escape(words)}</text>'
    )


def _band(one: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    up = [f"{_n(at_x(x))},{_n(at_y(high))}" for x, _, high in one.band]
    down = [f"{_n(at_x(x))},{_n(at_y(low))}" for x, low, _ in reversed(one.band)]
    return f'<polygon class="band s{one.style % STYLES}" points="{" ".join(up + down)}"/>'


def _line(one: Series, at_x: Callable[[float], float], at_y: Callable[[float], float]) -> str:
    places = [(at_x(x), at_y(y)) for x, y in one.points]
    style = f"s{one.style % STYLES}"
    found = []
    if one.line:
        dash = " dashed" if one.dashed else ""
        points = " ".join(f"{_n(px)},{_n(py)}" for px, py in places)
        found.append(f'<polyline class="line {style}{dash}" points="{points}"/>')
    for value, low, high in one.whiskers:
        at = _n(at_x(value))
        found.append(f'<line class="whisker {style}" x1="{at}" y1="{_n(at_y(low))}" x2="{at}" y2="{_n(at_y(high))}"/>')
    for index, (px, py) in enumerate(places if one.marks else []):
        words = one.labels[index] if index < len(one.labels) else one.name
        found.append(
            f'<circle class="mark {style}" cx="{_n(px)}" cy="{_n(py)}" r="3"><title>{escape(words)}</title></circle>'
        )
    return "".join(found)


def bars(
    name: str,
    title: str,
    description: str,
    rows: Sequence[Bar],
    whole: float,
    show: Callable[[float], str],
    limits: Sequence[tuple[str, float]] = (),
) -> str:
    """Bars of parts, ``whole`` being the full width; ``limits`` are lines through all of them with words below."""
    width = WIDTH - 2 * _BAR_LEFT
    bottom = len(rows) * _ROW
    body = []
    for index, row in enumerate(rows):
        y = index * _ROW
        body.append(f'<text class="label" x="{_BAR_LEFT}" y="{y + 13}">{escape(row.label)}</text>')
        body.append(f'<rect class="frame" x="{_BAR_LEFT}" y="{y + 19}" width="{width}" height="{_BAR}"/>')
        left = min(row.start, whole)
        for part, value, style in row.parts:
            size = max(min(value, whole - left), 0.0)
            words = f"{part}: {show(value)}"
            body.append(
                f'<rect class="part s{style % STYLES}" x="{_n(_BAR_LEFT + left / whole * width)}" y="{y + 19}" '
                f'width="{_n(size / whole * width)}" height="{_BAR}"><title>{escape(words)}</title></rect>'
            )
            left += size
    for index, (words, value) in enumerate(limits):
        px = _BAR_LEFT + min(value / whole, 1.0) * width
        body.append(f'<line class="limit" x1="{_n(px)}" y1="16" x2="{_n(px)}" y2="{bottom + 2}"/>')
        at = bottom + 14 + 14 * index
        body.append(f'<text class="tick" x="{_n(px)}" y="{at}" text-anchor="end">{escape(words)}</text>')
    return _svg(name, title, description, bottom + 6 + 14 * len(limits), "".join(body))


def _svg(name: str, title: str, description: str, height: int, body: str) -> str:
    key = escape(name, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{key}-t {key}-d" '
        f'xmlns="http://www.w3.org/2000/svg"><title id="{key}-t">{escape(title)}</title>'
        f'<desc id="{key}-d">{escape(description)}</desc>{body}</svg>'
    )


def _decades(low: float, high: float) -> tuple[float, ...]:
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    count = last - first + 1
    if count >= 3:
        step = -(-count // _DECADES)
        return tuple(10.0**n for n in range(first, last + 1, step))
    marks = [m * 10.0**n for n in range(first - 1, last + 1) for m in (1, 2, 5)]
    return tuple(m for m in marks if low <= m <= high)


def _even(low: float, high: float) -> tuple[float, ...]:
    rough = (high - low) / _LINEAR_TICKS
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return tuple(step * n for n in range(first, math.floor(high / step) + 1))


def _n(value: float) -> str:
    """A coordinate with a decimal at most, so that the same figure is the same text on every machine."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")
