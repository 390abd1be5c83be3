"""Numbers of files that anybody may have written, and how they are shown.

What is no finite number is missing (None), never 0. Knows no metric.
"""

import math
from collections.abc import Mapping, Sequence

MOST = 1e15  # more than that of anything here is no measurement


def real(value: object) -> float | None:
    """A finite number of sensible size, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) and abs(found) <= MOST else None


def amount(value: object) -> float | None:
    """The same, and not below 0: what a time, a count or a rate can be."""
    found = real(value)
    return None if found is None or found < 0 else found


def whole(value: object) -> int | None:
    found = amount(value)
    return int(found) if found is not None and found.is_integer() else None


def words(value: object, most: int = 200) -> str | None:
    """A text, shortened and on one line; None for what is none, or empty."""
    if not isinstance(value, str):
        return None
    line = " ".join("".join(c if c.isprintable() else " " for c in value[: 4 * most]).split())
    return (line if len(line) <= most else line[: most - 1] + "…") or None


def mapping(value: object) -> Mapping[str, object]:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: object) -> Sequence[object]:
    """A list, or an empty one."""
    return value if isinstance(value, list) else ()


def figure(value: float | None, unit: str = "") -> str:
    """Three figures and the unit; "missing" where there is none."""
    if value is None:
        return "missing"
    if unit == "ms" and abs(value) >= 10_000:
        value, unit = value / 1000, "s"
    return f"{plain(value)} {unit}".rstrip()


def plain(value: float) -> str:
    """Three figures: 0.0123, 1.23, 12.3, 1,234."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e9 or size < 1e-4:
        return f"{value:.3g}"
    if size >= 100:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{float(text):g}"


def span(low: float | None, high: float | None) -> str:
    """An interval in words, an open end said."""
    if low is None and high is None:
        return "no interval"
    if low is None:
        return f"up to {plain(high or 0.0)}"
    if high is None:
        return f"{plain(low)} or more"
    return f"{plain(low)} to {plain(high)}"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if abs(share) < 0.9995 or abs(share) > 1.0005 else "100 %"
