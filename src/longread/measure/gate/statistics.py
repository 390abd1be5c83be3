"""How sure a figure is, and how many samples would settle it. Pure arithmetic; knows nothing of what was counted.

Decisions are made at 95 % two-sided. Data may be looked at several times on the way: a look before the last spends
half a per cent of the error, the last the rest (a Haybittle-Peto rule, Br. J. Radiol. 44 (1971), 793-797, made safe
by Bonferroni).
"""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

from longread.measure.intervals import normal_quantile, percentile, t_quantile, wilson

ERROR = 0.05
EARLY_ERROR = 0.005
DRAWS = 2000
MIN_GROUPS = 3  # below, a spread between documents cannot be told
MOST_SAMPLES = 1_000_000  # more than that is "cannot be decided like this"


def error_of_look(look: int, looks: int) -> float:
    """The error that look ``look`` (from 1) of ``looks`` may spend."""
    return EARLY_ERROR if look < looks else ERROR - EARLY_ERROR * (looks - 1)


def bootstrap_mean(groups: Sequence[Sequence[float]], error: float = ERROR, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean of all values, whole groups (documents) drawn anew: values of one document hang together.

    The percentiles are spread by t over z and the missing degree of freedom, without which few groups give too narrow
    an interval (the "expanded percentile" interval, Hesterberg, The American Statistician 69 (2015), 371-386).
    (-inf, inf) for fewer than MIN_GROUPS groups.
    """
    sums = [(math.fsum(group), len(group)) for group in groups if group]
    count = len(sums)
    if count < MIN_GROUPS:
        return -math.inf, math.inf
    rng, centre = random.Random(seed), _mean(sums)
    drawn = sorted(_mean(rng.choices(sums, k=count)) for _ in range(DRAWS))
    spread = t_quantile(error, count - 1) / normal_quantile(error) * math.sqrt(count / (count - 1))
    inner = 1 - NormalDist().cdf(normal_quantile(error) * spread)
    return min(percentile(drawn, inner), centre), max(percentile(drawn, 1 - inner), centre)


def _mean(sums: Sequence[tuple[float, int]]) -> float:
    return math.fsum(total for total, _ in sums) / sum(count for _, count in sums)


def share(count: int, of: int, error: float = ERROR) -> tuple[float, float]:
    """Wilson's interval at that error."""
    return wilson(count, of, normal_quantile(error))


def paired_drop(worse: int, better: int, of: int, error: float = ERROR) -> tuple[float, float]:
    """Interval of the drop (worse - better) / of of a paired comparison, by combining Wilson's of both shares (MOVER,
    Zou & Donner, Statistics in Medicine 27 (2008), 1693-1702). Not empty where nothing changed.
    """
    if not of:
        return -1.0, 1.0
    w, b = worse / of, better / of
    w_low, w_high = share(worse, of, error)
    b_low, b_high = share(better, of, error)
    return (w - b) - math.hypot(w - w_low, b_high - b), (w - b) + math.hypot(w_high - w, b - b_low)


def clean_samples(limit: float, error: float = ERROR) -> int:
    """How many samples without one bad put Wilson's upper bound at ``limit`` or below: z² (1 - limit) / limit."""
    if not 0 < limit < 1:
        raise ValueError(f"a share between 0 and 1, not {limit}")
    z = normal_quantile(error)
    return math.ceil(z * z * (1 - limit) / limit - 1e-9)


def samples_to_decide(samples: int, value: float, low: float, high: float, limit: float) -> int | None:
    """How many samples would bring the interval to one side of ``limit`` if the value stayed: it shrinks with the
    square root. None: never, or more than anybody takes.
    """
    distance = abs(limit - value)
    half = value - low if limit < value else high - value
    if not math.isfinite(half) or distance <= 0:
        return None
    wanted = math.ceil(samples * (half / distance) ** 2)
    return max(wanted, samples + 1) if wanted <= MOST_SAMPLES else None


def samples_for_mean(deviation: float, shift: float, power: float = 0.8, error: float = ERROR) -> int:
    """How many independent samples find a shift of the mean with that power: ((z_error + z_power) deviation / shift)²,
    for a two-sided test.
    """
    if deviation < 0 or shift == 0 or not 0 < power < 1:
        raise ValueError(f"deviation {deviation}, shift {shift}, power {power}")
    z = normal_quantile(error) + NormalDist().inv_cdf(power)
    return max(2, math.ceil((z * deviation / shift) ** 2))


def samples_for_rate(rate: float, power: float = 0.8) -> int:
    """How many samples show at least one event of that rate with that power: ln(1 - power) / ln(1 - rate)."""
    if not 0 < rate < 1 or not 0 < power < 1:
        raise ValueError(f"rate {rate}, power {power}")
    return math.ceil(math.log(1 - power) / math.log(1 - rate))
