"""Whether a series goes up or down: a slope that outliers and steps do not move, with an interval that neighbours which
hang together do not narrow.

Pure arithmetic. The slope is the median of all slopes between two points (H. Theil 1950; P. K. Sen, JASA 63 (1968),
1379-1389). Its interval is that of a regression: from the spread around the line, not from ranks, so that growth
without noise is sure at once; the spread is the plain deviation, so that a step widens it. The variance is inflated for
samples that hang together by (1 + r) / (1 - r), first-order (G. V. Bayley, J. M. Hammersley, Suppl. JRSS 8 (1946),
184-197), r with its bias put back (M. G. Kendall, Biometrika 41 (1954), 403-404); the same for Kendall's S (K. H.
Hamed, A. R. Rao, Journal of Hydrology 204 (1998), 182-196).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longread.measure.gate.statistics import ERROR, share
from longread.measure.intervals import t_quantile

MIN_SAMPLES = 10  # below, neighbours that hang together cannot be told from a trend
MOST_USED = 2000  # pairs grow with the square; a longer series is thinned evenly
MOST_HANGING = 0.98
MIN_FREE = 4.0  # independent samples that a series is taken for at least, so that its interval has an end


@dataclass(frozen=True, slots=True)
class Slope:
    """Per unit of x. ``hanging``: the correlation of neighbours, the trend taken off; ``inflation``: of the variance.
    ``p``: two-sided, of no trend at all (Mann-Kendall).
    """

    value: float
    low: float
    high: float
    samples: int
    hanging: float
    inflation: float
    p: float


def slope(x: Sequence[float], y: Sequence[float], error: float = ERROR) -> Slope | None:
    """None below MIN_SAMPLES samples. ``x`` strictly rises."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    if len(xs) > MOST_USED:
        chosen = np.unique(np.linspace(0, len(xs) - 1, MOST_USED).round().astype(int))
        xs, ys = xs[chosen], ys[chosen]
    n = len(xs)
    if n < MIN_SAMPLES:
        return None
    first, second = np.triu_indices(n, 1)
    slopes = np.sort((ys[second] - ys[first]) / (xs[second] - xs[first]))
    value = float(np.median(slopes))
    rest = ys - value * xs
    hanging = _hanging(rest)
    inflation = min((1 + hanging) / (1 - hanging), n / MIN_FREE)
    free = n / inflation - 2  # degrees of freedom that are left of n samples
    spread = math.sqrt(float(((rest - rest.mean()) ** 2).sum()) / free * (free + 2) / n)
    error_of_slope = spread * math.sqrt(inflation / float(((xs - xs.mean()) ** 2).sum()))
    half = t_quantile(error, max(round(free), 1)) * error_of_slope
    kendall = float(np.sign(ys[second] - ys[first]).sum())
    p = _p(kendall, math.sqrt(_variance(ys) * inflation))
    return Slope(value, value - half, value + half, n, hanging, inflation, p)


def _variance(ys: "np.ndarray") -> float:
    """Of Kendall's S without a trend, ties counted."""
    n = len(ys)
    ties = np.unique(ys, return_counts=True)[1].astype(float)
    return float(n * (n - 1) * (2 * n + 5) - (ties * (ties - 1) * (2 * ties + 5)).sum()) / 18


def _hanging(rest: "np.ndarray") -> float:
    """Correlation of neighbours' ranks; small samples give too little, which is put back. Never negative."""
    n = len(rest)
    ranks = np.empty(n)
    ranks[np.argsort(rest, kind="stable")] = np.arange(n)
    if np.ptp(rest) == 0:
        return 0.0
    centred = ranks - ranks.mean()
    r = float((centred[1:] * centred[:-1]).sum() / (centred * centred).sum())
    return min(max((n * r + 1) / (n - 4), 0.0), MOST_HANGING)


def _p(s: float, deviation: float) -> float:
    if deviation == 0:
        return 1.0
    z = max(abs(s) - 1, 0.0) / deviation
    return math.erfc(z / math.sqrt(2))


@dataclass(frozen=True, slots=True)
class Change:
    """Of the second sample against the first, and its interval."""

    value: float
    low: float
    high: float
    samples: int


def difference(before: Sequence[float], after: Sequence[float], error: float = ERROR) -> Change | None:
    """Of the means, by Welch's interval; None with fewer than two values on a side. Source: B. L. Welch, Biometrika 34
    (1947), 28-35.
    """
    if len(before) < 2 or len(after) < 2:
        return None
    a, b = np.asarray(before, float), np.asarray(after, float)
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    change, count = float(b.mean() - a.mean()), len(a) + len(b)
    if va + vb == 0:
        return Change(change, change, change, count)
    freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
    half = t_quantile(error, max(int(freedom), 1)) * math.sqrt(va + vb)
    return Change(change, change - half, change + half, count)


def halves(values: Sequence[float], error: float = ERROR) -> Change | None:
    """The second half against the first; None below MIN_SAMPLES values."""
    middle = len(values) // 2
    return difference(values[:middle], values[middle:], error) if len(values) >= MIN_SAMPLES else None


def share_change(before: Sequence[bool], after: Sequence[bool], error: float = ERROR) -> Change | None:
    """Of a share; None where a side is empty. Source: R. G. Newcombe, Statistics in Medicine 17 (1998), 873-890,
    method 10 (Wilson's intervals of both shares combined).
    """
    if not before or not after:
        return None
    p, q = sum(before) / len(before), sum(after) / len(after)
    p_low, p_high = share(sum(before), len(before), error)
    q_low, q_high = share(sum(after), len(after), error)
    low = (q - p) - math.hypot(q - q_low, p_high - p)
    high = (q - p) + math.hypot(q_high - q, p - p_low)
    return Change(q - p, low, high, len(before) + len(after))
