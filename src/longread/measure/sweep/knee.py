"""The knee of a load curve: from where latency grows faster than throughput.

Pure arithmetic over measured points. The method is Kleinrock's power, throughput over latency: while one per cent more
load brings more throughput than latency (relatively) power rises, after that it falls, so the load of the greatest
power is the knee. Source: L. Kleinrock, Power and deterministic rules of thumb for probabilistic problems in computer
communications, ICC 1979; R. Jain, The Art of Computer Systems Performance Analysis (1991), 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

METHOD = "the load with the greatest power (throughput / latency; Kleinrock 1979)"
FEWEST = 4


@dataclass(frozen=True, slots=True)
class Point:
    """``latency`` and its 95 % interval in any unit, ``throughput`` in any unit. ``closed``: a closed loop, where
    throughput is load / latency (Little), so that an error of the one is an error of the other.
    """

    load: float
    throughput: float
    latency: float
    low: float | None = None
    high: float | None = None
    closed: bool = False

    @property
    def power(self) -> float:
        return self.throughput / self.latency

    @property
    def error(self) -> float | None:
        """Half the interval of ln(power); None where the latency has no interval."""
        if self.low is None or self.high is None or self.low <= 0:
            return None
        half = max(math.log(self.high / self.latency), math.log(self.latency / self.low))
        return half * (2 if self.closed else 1)


@dataclass(frozen=True, slots=True)
class Knee:
    """``value``: the measured load of the greatest power. ``interval``: the knee lies between these loads: all points
    whose power cannot be told from the greatest one, and their neighbours, since between points nothing was measured.
    """

    value: float
    interval: tuple[float, float]


def knee(points: Sequence[Point]) -> tuple[Knee | None, str]:
    """The knee and how it was found, or None and why there is none. Points in any order, each load once."""
    rows = sorted((p for p in points if p.latency > 0 and p.throughput > 0), key=lambda p: p.load)
    if len(rows) < FEWEST:
        return None, f"no knee can be told from {len(rows)} points; at least {FEWEST} with answers are needed"
    best = max(range(len(rows)), key=lambda i: rows[i].power)
    first = last = best
    while first > 0 and _same(rows[first - 1], rows[best]):
        first -= 1
    while last + 1 < len(rows) and _same(rows[last + 1], rows[best]):
        last += 1
    if first == 0 and last == len(rows) - 1:
        return None, "no knee: throughput and latency grow alike over all of what was measured, within its noise"
    if last == len(rows) - 1:
        return None, f"no knee up to {rows[-1].load:g}: throughput still grows at least as fast as latency"
    if first == 0:
        return None, f"no knee from {rows[0].load:g} on: latency grows at least as fast as throughput from the start"
    noise = (
        "" if all(row.error is not None for row in rows) else "; some points have no interval, their noise is left out"
    )
    return Knee(rows[best].load, (rows[first - 1].load, rows[last + 1].load)), METHOD + noise


def _same(one: Point, best: Point) -> bool:
    """Whether the powers' intervals overlap; without an interval a point is taken as it is."""
    return math.log(best.power / one.power) <= (one.error or 0.0) + (best.error or 0.0)
