"""How many times faster one configuration is than another, from several visits of each, with an interval.

Pure arithmetic over runs. Knows no files and no words.

Each visit gives one figure a metric: the mean over the asks that every visit of both sides answered (so asks are paired
and their differences cancel), or a throughput. Speed-ups are ratios of geometric means of visits. The spread between
visits of one configuration is pooled over all configurations (each visit is a start of its own: another process,
another state of the machine), which gives degrees of freedom that two or three visits alone have not; it is taken to be
alike, as a share, in all of them. With one visit each there is no such spread, and the interval is of the requests
alone (measure/report/ratios.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from longread.measure.gate.statistics import ERROR
from longread.measure.intervals import t_quantile
from longread.measure.report import ratios
from longread.measure.report.run import Run

MARGIN = 0.02  # a change of less is none
HIGHER = ("output_throughput", "request_throughput")
LEAST_COMMON = 0.8  # of the asks that a side answered

Verdict = Literal["faster", "slower", "same", "inconclusive", "missing"]


@dataclass(frozen=True, slots=True)
class Speedup:
    """``value``: above 1 is faster. ``before``, ``after``: geometric means of the visits, ms or 1/s. ``visits``: the
    smaller side's. ``asks``: that both sides answered. ``why``: what is missing.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    after: float | None = None
    visits: int = 0
    asks: int | None = None
    why: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "missing"
        if self.low is None or self.high is None:
            return "inconclusive"
        if self.low >= 1 / (1 + MARGIN) and self.high <= 1 + MARGIN:
            return "same"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "inconclusive"


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the logarithm of a visit's figure around its configuration's: pooled, with its degrees of freedom."""

    deviation: float
    freedom: int


def spread(sides: Sequence[Sequence[Run]], metric: str) -> Spread | None:
    """None without two visits of anything."""
    squares, freedom = 0.0, 0
    for runs in sides:
        logs = [math.log(value) for value in figures(runs, metric, common([runs], metric)) if value]
        if len(logs) > 1:
            middle = math.fsum(logs) / len(logs)
            squares += math.fsum((each - middle) ** 2 for each in logs)
            freedom += len(logs) - 1
    return Spread(math.sqrt(squares / freedom), freedom) if freedom else None


def speedup(before: Sequence[Run], after: Sequence[Run], metric: str, pooled: Spread | None) -> Speedup:
    """Of ``after`` against ``before``."""
    if not before or not after:
        return Speedup(None, why="it was not measured")
    if metric in HIGHER and not all(map(closed, (*before, *after))):
        return Speedup(None, why="open loop: the client sets the rate, so a throughput says nothing")
    keys = common([before, after], metric)
    if metric not in HIGHER:
        least = min(len(_values(run, metric)) for run in (*before, *after))
        if len(keys) < max(LEAST_COMMON * least, 1):
            return Speedup(None, asks=len(keys), why=f"only {len(keys)} asks were answered in every visit")
    sides = [figures(runs, metric, keys) for runs in (before, after)]
    if any(not value for side in sides for value in side):
        return Speedup(None, why="a visit lacks it")
    logs = [[math.log(value) for value in side if value] for side in sides]
    middle = [math.fsum(side) / len(side) for side in logs]
    change = middle[1] - middle[0] if metric in HIGHER else middle[0] - middle[1]
    fewest, asks = min(map(len, logs)), None if metric in HIGHER else len(keys)
    half, why = _half(before, after, metric, keys, pooled)
    low, high = (None, None) if half is None else (math.exp(change - half), math.exp(change + half))
    return Speedup(math.exp(change), low, high, math.exp(middle[0]), math.exp(middle[1]), fewest, asks, why)


def _half(
    before: Sequence[Run], after: Sequence[Run], metric: str, keys: Sequence[str], pooled: Spread | None
) -> tuple[float | None, str]:
    """Half the interval's width, of the logarithm, and what must be said of it."""
    if pooled is not None:
        quantile = t_quantile(ERROR, pooled.freedom)
        return quantile * pooled.deviation * math.sqrt(1 / len(before) + 1 / len(after)), ""
    if metric in HIGHER:
        return None, "one visit each: a throughput has no interval"
    one, other = _values(before[0], metric), _values(after[0], metric)
    found = ratios.of_samples([one[k] for k in keys], [other[k] for k in keys], None, ERROR, paired=True)
    return found.half, found.why or "one visit each: what differs from start to start is not in the interval"


def common(sides: Sequence[Sequence[Run]], metric: str) -> list[str]:
    """Keys of the asks that every run answered, in the order of the first one's sending."""
    runs = [run for side in sides for run in side]
    if metric in HIGHER or not runs:
        return []
    known = [_values(run, metric) for run in runs]
    return [key for key in known[0] if all(key in each for each in known[1:])]


def figures(runs: Sequence[Run], metric: str, keys: Sequence[str]) -> list[float | None]:
    """One a visit."""
    if metric in HIGHER:
        return [run.rates.get(metric) for run in runs]
    found: list[float | None] = []
    for run in runs:
        values = _values(run, metric)
        found.append(math.fsum(values[key] for key in keys) / len(keys) if keys else None)
    return found


def _values(run: Run, metric: str) -> Mapping[str, float]:
    """By ask, in the order of sending."""
    rows = sorted((each for each in run.requests or () if each.status == "ok"), key=lambda each: each.sent or 0.0)
    return {each.key: each.values[metric] for each in rows if each.key is not None and metric in each.values}


def closed(run: Run) -> bool:
    return run.part("provenance", "schedule", "open_loop") is False
