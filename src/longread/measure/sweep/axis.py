"""What a sweep varies: ``--sweep NAME=VALUES`` read and checked.

Knows the three axes and their limits. Must not know what is measured at a value.
"""

import difflib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from longread.measure.workloads.options import MAX_TOKENS
from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

Name = Literal["concurrency", "rate", "context"]
NAMES: Final[tuple[Name, ...]] = ("concurrency", "rate", "context")
MAX_POINTS = 64
MAX_CONCURRENCY = 65_536
MAX_RATE = 100_000.0
MIN_RATE = 1e-4
MIN_CONTEXT = 16
FORMS: Final = {
    "concurrency": "concurrency=1,2,4,8, concurrency=1:64 (doubling) or concurrency=auto",
    "rate": "rate=0.5,1,2, rate=0.5:16 (doubling) or rate=auto",
    "context": "context=1K,32K,1M, context=1K:1M (doubling; 1K:max ends where the server does), context=16K:256K:16K "
    "(in steps) or context=auto (1K:max)",
}
AUTO_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Axis:
    """``values``: rising; None: chosen while measuring, within ``low`` and ``high``. ``to_max`` (context only): the
    values go on by doubling from the last one, to what the server allows.
    """

    name: Name
    values: tuple[float, ...] | None
    low: float
    high: float
    to_max: bool = False
    bounds: bool = False

    @property
    def integer(self) -> bool:
        return self.name != "rate"

    def label(self, value: float) -> str:
        return f"{int(value)}" if self.integer else f"{value:g}"


def parse_axis(text: str) -> Axis:
    """Raises ConfigError: no such axis, no such form, a value outside its limits, too many points."""
    name, sign, rest = text.partition("=")
    name, rest = name.strip(), rest.strip()
    axis = next((each for each in NAMES if each == name), None)
    if axis is None:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--sweep: no axis is called {name[:60]!r}{hint} (all: {', '.join(NAMES)})")
    if not sign or not rest:
        raise ConfigError(f"--sweep {name}: give its values, as {FORMS[axis]}")
    low, high = limits(axis)
    if rest == "auto":
        if axis == "context":
            return Axis(axis, (AUTO_CONTEXT,), low, high, to_max=True)
        return Axis(axis, None, low, high)
    if ":" in rest:
        return _ranged(axis, rest)
    values = tuple(_value(axis, word) for word in rest.split(",")[: MAX_POINTS + 1])
    if any(later <= earlier for earlier, later in pairwise(values)):
        raise ConfigError(f"--sweep {axis}: its values must rise, each above the one before it")
    return Axis(axis, _few(axis, values), low, high)


def limits(axis: Name) -> tuple[float, float]:
    if axis == "rate":
        return MIN_RATE, MAX_RATE
    return (1, MAX_CONCURRENCY) if axis == "concurrency" else (MIN_CONTEXT, MAX_TOKENS)


def doubling(low: float, high: float) -> tuple[float, ...]:
    """``low``, twice that, …, and ``high``; at most one value more than MAX_POINTS."""
    values = [low]
    while values[-1] * 2 < high and len(values) <= MAX_POINTS:
        values.append(values[-1] * 2)
    return (*values, high) if high > low else (low,)


def _ranged(axis: Name, text: str) -> Axis:
    parts = text.split(":")
    if not 2 <= len(parts) <= 3 or (len(parts) == 3 and axis != "context"):
        raise ConfigError(f"--sweep {axis}={text[:60]}: it is {FORMS[axis]}")
    low = _value(axis, parts[0])
    if axis == "context" and parts[1].strip() == "max" and len(parts) == 2:
        return Axis(axis, (low,), low, MAX_TOKENS, to_max=True)
    high = _value(axis, parts[1])
    if high <= low:
        raise ConfigError(f"--sweep {axis}={text[:60]}: the upper end must be above the lower one")
    if len(parts) == 2:
        return Axis(axis, _few(axis, doubling(low, high)), low, high, bounds=True)
    step = _value(axis, parts[2])
    count = math.ceil((high - low) / step) + 1
    if count > MAX_POINTS:
        raise ConfigError(f"--sweep {axis}={text[:60]}: {count:,} points; at most {MAX_POINTS}, so take longer steps")
    return Axis(axis, (*(low + step * i for i in range(count - 1)), high), low, high)


def _few(axis: Name, values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) > MAX_POINTS:
        raise ConfigError(f"--sweep {axis}: more than {MAX_POINTS} points; give fewer values")
    return values


def _value(axis: Name, text: str) -> float:
    word, (low, high) = text.strip(), limits(axis)
    try:
        value = float(word) if axis == "rate" else float(parse_tokens(axis, word))
    except ValueError:
        raise ConfigError(f"--sweep {axis}: {word[:60]!r} is not a number; it is {FORMS[axis]}") from None
    if not low <= value <= high:
        raise ConfigError(f"--sweep {axis}: {word[:60]}; it must be from {low:g} to {high:g}")
    return value
