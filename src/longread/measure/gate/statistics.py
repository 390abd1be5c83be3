"""How sure a figure is, and how many samples would settle it. Pure arithmetic; knows nothing of what was counted.

Decisions are made at 95 % two-sided. Data may be looked at several times on the way: a look before the last spends
half a per cent of the error, the last the rest (a Haybittle-Peto rule, Br. J. Radiol. 44 (1971), 793-797, made safe
by Bonferroni).
"""

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean

from longread.measure.intervals import wilson

ERROR = 0.05
EARLY_ERROR = 0.005
DRAWS = 2000
MIN_GROUPS = 3  # below, a spread between documents cannot be told
MOST_SAMPLES = 1_000_000  # more than that is "cannot be decided like this"


def error_of_look(look: int, looks: int) -> float:
    """The error that look ``look`` (from 1) of ``looks`` may spend."""
    return EARLY_ERROR if look < looks else ERROR - EARLY_ERROR * (looks - 1)


def normal_quantile(error: float) -> float:
    """Two-sided: 1.96 for 0.05."""
    return NormalDist().inv_cdf(1 - error / 2)


def t_quantile(error: float, freedom: int) -> float:
    """Two-sided quantile of Student's t, by the Cornish-Fisher series (Abramowitz & Stegun 26.7.5); within 5 % for
    freedom >= 2 and within 0.1 % from 10 on. Below the series' reach it is exact.
    """
    if freedom == 1:
        return math.tan(math.pi * (1 - error) / 2)
    if freedom == 2:
        p = 1 - error / 2
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, v = normal_quantile(error), float(freedom)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v**power for power, term in enumerate(terms, 1))


def bootstrap(
    groups: Sequence[Sequence[float]],
    error: float = ERROR,
    figure: Callable[[Sequence[float]], float] = fmean,
    seed: int = 0,
) -> tuple[float, float]:
    """Interval of a figure over all values, whole groups (documents) drawn anew: values of one document hang together.

    The percentiles are spread by t over z and the missing degree of freedom, without which few groups give too narrow
    an interval (the "expanded percentile" interval, Hesterberg, The American Statistician 69 (2015), 371-386).
    (-inf, inf) for fewer than MIN_GROUPS groups.
    """
    full = [group for group in groups if group]
    if len(full) < MIN_GROUPS:
        return -math.inf, math.inf
    rng, count = random.Random(seed), len(full)
    centre = figure([value for group in full for value in group])
    drawn = []
    for _ in range(DRAWS):
        drawn.append(figure([value for group in rng.choices(full, k=count) for value in group]))
    drawn.sort()
    spread = t_quantile(error, count - 1) / normal_quantile(error) * math.sqrt(count / (count - 1))
    inner = 1 - NormalDist().cdf(normal_quantile(error) * spread)
    low, high = _quantile(drawn, inner), _quantile(drawn, 1 - inner)
    return min(low, centre), max(high, centre)


def bootstrap_mean(groups: Sequence[Sequence[float]], error: float = ERROR, seed: int = 0) -> tuple[float, float]:
    """``bootstrap`` of the mean, from each group's sum and size: a thousand times fewer additions."""
    sums = [(math.fsum(group), len(group)) for group in groups if group]
    if len(sums) < MIN_GROUPS:
        return -math.inf, math.inf
    pairs: list[float] = list(range(len(sums)))

    def mean(chosen: Sequence[float]) -> float:
        return math.fsum(sums[int(i)][0] for i in chosen) / sum(sums[int(i)][1] for i in chosen)

    return bootstrap([[i] for i in pairs], error, mean, seed)


def _quantile(values: Sequence[float], share: float) -> float:
    at = min(max(share, 0.0), 1.0) * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


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
