"""Means and percentiles of samples with what they are worth: 95 % intervals, and how many samples an open one needs.

Pure arithmetic; knows nothing of what was measured. Samples are taken as independent, which latencies of one run under
load are not quite: the intervals are the least that is unknown.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longread.measure.intervals import Z95, percentile, t_quantile

CONFIDENCE = 0.95
_TAIL = (1 - CONFIDENCE) / 2
_EXACT = 20_000  # samples; above, the binomial is as good as normal


@dataclass(frozen=True, slots=True)
class Interval:
    """``low`` or ``high`` None: open on that side. ``needs``: the samples from which it is closed, where it is not."""

    low: float | None
    high: float | None
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of ``count`` samples from ``clusters`` independent sources (requests). ``percentiles`` and their intervals by the
    percent; without an interval where samples of one source are many. Values are None without samples.
    """

    count: int
    clusters: int
    mean: float | None
    std: float | None
    median: float | None
    mean_interval: Interval
    percentiles: dict[float, float | None]
    intervals: dict[float, Interval | None]


def estimate(clusters: Sequence[Sequence[float]], percents: Sequence[float]) -> Estimate:
    """``clusters``: the samples of each source, some may have none. ``std``: of the population, as in vLLM's bench."""
    ordered = sorted(value for cluster in clusters for value in cluster)
    single = all(len(cluster) <= 1 for cluster in clusters)
    count = len(ordered)
    mean = math.fsum(ordered) / count if count else None
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / count) if mean is not None else None
    return Estimate(
        count,
        sum(bool(cluster) for cluster in clusters),
        mean,
        std,
        percentile(ordered, 0.5) if count else None,
        mean_interval(clusters),
        {p: percentile(ordered, p / 100) if count else None for p in percents},
        {p: percentile_interval(ordered, p / 100) if single else None for p in percents},
    )


def mean_interval(clusters: Sequence[Sequence[float]]) -> Interval:
    """Student's t over the sources: each weighs by its samples (ratio estimator), so samples of one request need not be
    independent of one another. Open below two sources.
    """
    sums = [(math.fsum(cluster), len(cluster)) for cluster in clusters if cluster]
    n, total = len(sums), sum(count for _, count in sums)
    if n < 2:
        return Interval(None, None, 2)
    mean = math.fsum(value for value, _ in sums) / total
    variance = math.fsum((value - mean * count) ** 2 for value, count in sums) * n / (n - 1) / total**2
    half = t_quantile(1 - CONFIDENCE, n - 1) * math.sqrt(variance)
    return Interval(mean - half, mean + half)


def samples_needed(share: float) -> int:
    """Fewest samples with which both ends of the percentile's interval lie among them."""
    edge = max(share, 1 - share)
    return math.ceil(math.log(_TAIL) / math.log(edge)) if edge < 1 else 1


def percentile_interval(ordered: Sequence[float], share: float) -> Interval:
    """By order statistics, which assume no distribution: the samples between which the percentile lies with 95 %.

    Source: H. A. David, H. N. Nagaraja, Order Statistics (2003), 7.1. The extremes (0, 1) have no interval.
    """
    n = len(ordered)
    if not 0 < share < 1 or n == 0:
        return Interval(None, None, samples_needed(share) if 0 < share < 1 else None)
    low, high = _ranks(n, share)
    closed = low >= 1 and high <= n
    return Interval(
        ordered[low - 1] if low >= 1 else None,
        ordered[high - 1] if high <= n else None,
        None if closed else samples_needed(share),
    )


def _ranks(n: int, share: float) -> tuple[int, int]:
    """1-based ranks; 0 and n + 1 where none of the samples will do."""
    if n > _EXACT:
        half = Z95 * math.sqrt(n * share * (1 - share))
        return max(math.floor(n * share - half), 0), min(math.ceil(n * share + half) + 1, n + 1)
    low, below, k = 0, 0.0, 0
    log_share, log_other = math.log(share), math.log1p(-share)
    while k <= n:
        below += math.exp(
            math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_share + (n - k) * log_other
        )  # P(at most k samples are below the percentile)
        if below <= _TAIL:
            low = k + 1
        if below >= 1 - _TAIL:
            return low, k + 1
        k += 1
    return low, n + 1
