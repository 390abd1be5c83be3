"""How long prompts and answers are: fixed, even, log-normal or in turn; the same draws on every machine and Python.

Knows numbers only. Draws use the integer methods of ``random.Random``.
"""

import math
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from longread.spec.config import parse_tokens
from longread.spec.errors import ConfigError

FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or list:N,N,…"
MAX_SIGMA = 5.0
MAX_LISTED = 10_000
_BITS = 1 << 53


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. ``form``: fixed, uniform, lognormal or list. ``low`` and ``high`` bound every
    draw (a log-normal one is clipped to them); ``values``: of a list, given out in turn.
    """

    form: str
    low: int
    high: int
    median: int = 0
    sigma: float = 0.0
    values: tuple[int, ...] = ()

    def draw(self, rng: Random, turn: int = 0) -> int:
        """The length of the ``turn``-th ask. A fixed length and a list take nothing from ``rng``."""
        if self.form == "fixed":
            return self.low
        if self.form == "list":
            return self.values[turn % len(self.values)]
        if self.form == "uniform":
            return self.low + rng.randrange(self.high - self.low + 1)
        normal = NormalDist().inv_cdf((1 + rng.randrange(_BITS - 1)) / _BITS)
        return min(max(round(self.median * math.exp(self.sigma * normal)), self.low), self.high)

    @property
    def text(self) -> str:
        if self.form == "fixed":
            return str(self.low)
        if self.form == "list":
            return "list:" + ",".join(map(str, self.values))
        if self.form == "uniform":
            return f"uniform:{self.low}:{self.high}"
        return f"lognormal:{self.median}:{self.sigma:g}"


def lengths(name: str, value: object, low: int, high: int) -> Lengths:
    """From a number or a text in one of ``FORMS``. Raises ConfigError for anything else, and outside low..high."""
    if isinstance(value, Lengths):
        return lengths(name, value.text, low, high)
    if isinstance(value, int) and not isinstance(value, bool):
        return _fixed(_within(name, value, low, high))
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r:.60}; it must be {FORMS}")
    form, _, rest = value.strip().partition(":")
    if form == "uniform":
        first, last = _parts(name, value, rest, ":", 2)
        least, most = _tokens(name, first, low, high), _tokens(name, last, low, high)
        if least > most:
            raise ConfigError(f"{name}={value}; the lower length is above the upper one")
        return Lengths("uniform", least, most)
    if form == "lognormal":
        middle, spread = _parts(name, value, rest, ":", 2)
        return Lengths("lognormal", low, high, _tokens(name, middle, low, high), _sigma(name, spread))
    if form == "list":
        listed = tuple(_tokens(name, each, low, high) for each in _parts(name, value, rest, ",", None))
        return Lengths("list", min(listed), max(listed), values=listed)
    return _fixed(_tokens(name, value, low, high))


def ranged(name: str, base: Lengths, ratio: float, low: int, high: int) -> Lengths:
    """vLLM's random-range-ratio: even from floor(N × (1 − ratio)) to ceil(N × (1 + ratio)) of a fixed length N."""
    if ratio == 0:
        return base
    if base.form != "fixed":
        raise ConfigError(f"range_ratio={ratio:g} needs a fixed {name}, not {base.text}; give one of the two")
    least, most = math.floor(base.low * (1 - ratio)), math.ceil(base.low * (1 + ratio))
    return Lengths("uniform", max(least, low), min(most, high))


def _fixed(value: int) -> Lengths:
    return Lengths("fixed", value, value)


def _parts(name: str, value: str, rest: str, mark: str, wanted: int | None) -> list[str]:
    parts = rest.split(mark)
    if len(parts) > MAX_LISTED:
        raise ConfigError(f"{name}: a list of {len(parts):,} lengths; at most {MAX_LISTED:,}")
    if not all(part.strip() for part in parts) or (wanted is not None and len(parts) != wanted):
        raise ConfigError(f"{name}={value[:60]}; it must be {FORMS}")
    return parts


def _tokens(name: str, text: str, low: int, high: int) -> int:
    return _within(name, parse_tokens(name, text.strip()), low, high)


def _within(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ConfigError(f"{name}={value:,}; it must be from {low:,} to {high:,} tokens")
    return value


def _sigma(name: str, text: str) -> float:
    try:
        sigma = float(text)
    except ValueError:
        sigma = math.nan
    if not 0 < sigma <= MAX_SIGMA:
        raise ConfigError(f"{name}: sigma {text.strip()[:20]!r}; it must be above 0 and at most {MAX_SIGMA:g}")
    return sigma
