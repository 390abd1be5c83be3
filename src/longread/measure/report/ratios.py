"""How many times B is A, with an interval: of means and percentiles of latencies, paired or not, one run or several.

Pure arithmetic; knows no files. Intervals are of the logarithm: t times the standard error of a circular block
bootstrap in the order of sending (D. N. Politis, J. P. Romano, 1992), so that requests which waited in one queue do
not count as independent ones. The blocks' length is read from the samples (D. N. Politis, H. White, Econometric
Reviews 23 (2004), 53-70). With several runs a side, a run is one sample (Welch's t): what differs from run to run is
in the interval only then.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longread.measure.intervals import t_quantile

DRAWS = 1000
CELLS = 4_000_000  # numbers drawn at once
LEAST = 10  # samples below which nothing is said
BEYOND = 5  # samples that must lie beyond a percentile
LEAST_BLOCKS = 8
LONGER = 2.0  # than the rule's blocks, which give the least error of the variance and too narrow an interval
MOST_NEEDED = 1_000_000

Values = NDArray[np.float64]
Statistic = Callable[[Values], Values]  # over the last axis


@dataclass(frozen=True, slots=True)
class Ratio:
    """``value`` B / A; ``low``, ``high``: its interval, None where there is none, and ``why`` says it. ``samples``:
    pairs, or the smaller side's requests, or runs. ``half``: half the interval's width, of the logarithm. ``least``:
    samples from which there is an interval, where there are too few.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    half: float | None = None
    why: str | None = None
    least: int | None = None


def mean(values: Values) -> Values:
    return np.asarray(values.mean(axis=-1))


def percentile(percent: float) -> Statistic:
    """Straight between neighbouring samples."""
    return lambda values: np.asarray(np.quantile(values, percent / 100, axis=-1))


def least_samples(percent: float | None) -> int:
    """How many samples a statistic needs; ``percent`` None: a mean."""
    if percent is None:
        return LEAST
    return max(LEAST, math.ceil(BEYOND / min(percent / 100, 1 - percent / 100) - 1e-9))


def of_samples(
    a: Sequence[float], b: Sequence[float], percent: float | None, error: float, *, paired: bool, seed: int = 0
) -> Ratio:
    """``a`` and ``b`` in the order of sending; ``paired``: a[i] and b[i] are of the same ask. ``percent`` None: of the
    means. ``error``: two-sided, 0.05 for 95 %.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    statistic = mean if percent is None else percentile(percent)
    count, least = min(len(left), len(right)), least_samples(percent)
    if not count:
        return Ratio(None, why="no samples on one side")
    one, other = float(statistic(left)), float(statistic(right))
    if one <= 0 or other <= 0:
        return Ratio(None, samples=count, why="it is 0, and a ratio needs something above it")
    value = other / one
    if count < least:
        return Ratio(value, samples=count, why=f"needs {least:,} samples, and there are {count:,}", least=least)
    rng = np.random.default_rng(seed)
    if paired:
        # What both share (a long prompt is long on both sides) cancels, so the memory of the difference counts.
        length = _length(_influence(right, percent) - _influence(left, percent))
        length = min(length, max(count // LEAST_BLOCKS, 1))
        logs = _drawn(statistic, (left, right), length, rng)
        spread, blocks = float(np.std(logs[1] - logs[0], ddof=1)), count // length
        freedom = float(max(blocks - 1, 1))
        stretch = blocks / max(blocks - 1, 1)
        half = t_quantile(error, int(freedom)) * spread * math.sqrt(stretch)
    else:
        half = _apart(statistic, left, right, percent, error, rng)
    if not math.isfinite(half):
        return Ratio(value, samples=count, why="its spread cannot be told")
    return Ratio(value, value * math.exp(-half), value * math.exp(half), count, half)


def _apart(
    statistic: Statistic, left: Values, right: Values, percent: float | None, error: float, rng: np.random.Generator
) -> float:
    """Half an interval's width of two runs that have nothing in common (Welch-Satterthwaite over blocks)."""
    variances, freedoms = [], []
    for values in (left, right):
        length = min(_length(_influence(values, percent)), max(len(values) // LEAST_BLOCKS, 1))
        blocks = len(values) // length
        (logs,) = _drawn(statistic, (values,), length, rng)
        variances.append(float(np.var(logs, ddof=1)) * blocks / max(blocks - 1, 1))
        freedoms.append(max(blocks - 1, 1))
    return _welch(variances, freedoms, error)


def _welch(variances: Sequence[float], freedoms: Sequence[int], error: float) -> float:
    total = sum(variances)
    if total <= 0:
        return 0.0
    freedom = total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True) if v > 0)
    return t_quantile(error, max(int(freedom), 1)) * math.sqrt(total)


def _drawn(statistic: Statistic, sides: Sequence[Values], length: int, rng: np.random.Generator) -> list[Values]:
    """Logarithms of the statistic of each side over ``DRAWS`` resamples; the sides of a pair are drawn together."""
    count = len(sides[0])
    blocks = -(-count // length)
    at_once = max(CELLS // count, 1)
    found: list[list[Values]] = [[] for _ in sides]
    for begun in range(0, DRAWS, at_once):
        starts = rng.integers(0, count, (min(at_once, DRAWS - begun), blocks, 1))
        places = ((starts + np.arange(length)) % count).reshape(len(starts), -1)[:, :count]
        for side, values in zip(found, sides, strict=True):
            side.append(np.log(np.maximum(statistic(values[places]), 1e-12)))
    return [np.concatenate(side) for side in found]


def _influence(values: Values, percent: float | None) -> Values:
    """What each sample adds to the statistic: it is this whose memory matters."""
    if percent is None:
        return values / values.mean()
    return (values > np.quantile(values, percent / 100)).astype(np.float64)


def _length(values: Values) -> int:
    """Samples a block: 1 where neighbours do not look alike. Politis and White's rule with their flat-top window."""
    count = len(values)
    centred = values - values.mean()
    variance = float(centred @ centred) / count
    most = min(max(math.ceil(math.sqrt(count)) + 5, 5), count - 1)
    if variance <= 0 or most < 5:
        return 1
    lags = np.array([float(centred[k:] @ centred[: count - k]) / count for k in range(most + 1)]) / variance
    edge, needed = 2 * math.sqrt(math.log10(count) / count), 5
    last, quiet = 0, 0
    for k in range(1, most + 1):
        quiet = quiet + 1 if abs(lags[k]) < edge else 0
        last = k if quiet == 0 else last
        if quiet >= needed:
            break
    if last == 0:
        return 1
    window = min(2 * last, most)
    steps = np.arange(1, window + 1)
    weight = np.minimum(1.0, 2 * (1 - steps / window))
    density = 1 + 2 * float(weight @ lags[1 : window + 1])
    bend = 2 * float(weight @ (steps * lags[1 : window + 1]))
    if density <= 0:
        return max(last, 1)
    return max(math.ceil(LONGER * (1.5 * (bend / density) ** 2 * count) ** (1 / 3)), 1)


def of_summaries(
    a: tuple[float, float | None, int | None], b: tuple[float, float | None, int | None], error: float
) -> Ratio:
    """Of means of which only mean, standard deviation and count are known: requests are taken as independent."""
    if a[0] <= 0 or b[0] <= 0:
        return Ratio(None, why="it is 0, and a ratio needs something above it")
    value = b[0] / a[0]
    variances, freedoms = [], []
    for centre, deviation, count in (a, b):
        if deviation is None or not count:
            return Ratio(value, why="a file holds no single requests, and not the spread and number of its samples")
        if count < LEAST:
            return Ratio(value, samples=count, why=f"needs {LEAST} samples, and there are {count}", least=LEAST)
        variances.append((deviation / centre) ** 2 / (count - 1))
        freedoms.append(count - 1)
    half = _welch(variances, freedoms, error)
    count = min(a[2] or 0, b[2] or 0)
    return Ratio(value, value * math.exp(-half), value * math.exp(half), count, half)


def of_runs(a: Sequence[float], b: Sequence[float], error: float) -> Ratio:
    """Of one statistic over several runs a side: geometric means, each run one sample."""
    if min(a, default=0.0) <= 0 or min(b, default=0.0) <= 0:
        return Ratio(None, samples=min(len(a), len(b)), why="a run lacks it, or has 0")
    logs = [np.log(np.asarray(side, dtype=np.float64)) for side in (a, b)]
    value = math.exp(float(logs[1].mean() - logs[0].mean()))
    fewest = min(len(a), len(b))
    if fewest < 2:
        return Ratio(value, samples=fewest, why="needs 2 runs a side, and there is 1", least=2)
    half = _welch([float(np.var(x, ddof=1)) / len(x) for x in logs], [len(x) - 1 for x in logs], error)
    return Ratio(value, value * math.exp(-half), value * math.exp(half), fewest, half)


def more_needed(ratio: Ratio, margin: float) -> int | None:
    """About how many samples more would decide, if the ratio stayed: away from 1, or within the margin around it.

    None: decided, not known, or more than a million.
    """
    if ratio.least is not None:
        return ratio.least - ratio.samples
    if ratio.half is None or ratio.value is None or not ratio.samples:
        return None
    distance = abs(math.log(ratio.value))
    room = max(distance, math.log1p(margin) - distance)
    if room <= 0:
        return None
    wanted = math.ceil(ratio.samples * (ratio.half / room) ** 2)
    return max(wanted - ratio.samples, 1) if wanted <= MOST_NEEDED else None
