"""Whether a load meets an SLO, judged from a probe's requests: met, missed, or not decided.

Pure arithmetic; knows nothing of servers. "Meets" means that at least a wanted share of requests meets every latency.

- The first fifth of each round is left out: the server starts empty, and is better then than it stays.
- The share has a Wilson interval over the number of *independent* requests: neighbours wait in the same queue, so n
  requests count as n / t, t the integrated autocorrelation time of "met", or of "among the worst requests" (as many as
  may miss) where that is longer: it shows how bad requests come in lumps also where none is bad yet. Source: A. Sokal,
  Monte Carlo Methods in Statistical Mechanics (1997), 3, with his window of five times t.
- A load is met only if what decides does not grow from the beginning of the last round to its end (a line through eight
  batch means, Student's t, one-sided 97.5 %): a backlog that grows makes every share too good.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from longread.measure.intervals import normal_quantile, t_quantile, wilson
from longread.measure.load.goodput import met
from longread.measure.load.outcome import Outcome
from longread.measure.sweep.search import Said

RAMP = 0.2
BATCHES, PER_BATCH = 8, 4
WINDOW = 5.0
ERROR = 0.05  # two-sided
EQUAL = 1e-9  # of the spread: rounding


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: whether it met the SLOs (None: not known), and the largest of its latencies as a share of what is
    allowed (None: no answer, or not known).
    """

    met: bool | None
    severity: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``good`` of ``judged`` requests; ``effective``: how many independent ones these are worth."""

    said: Said
    good: int
    judged: int
    effective: int
    interval: tuple[float, float]
    growing: bool
    reason: str


def quantile(probes: int, looks: int, risk: float = ERROR) -> float:
    """The z with which ``probes`` verdicts, each looked at up to ``looks`` times, are all right with 1 - ``risk``
    (Bonferroni), so that the interval of a whole search holds with that.
    """
    return normal_quantile(risk / (probes * looks))


def needed(share: float, z: float) -> int:
    """Fewest independent requests with which ``share`` can be told to be met, all of them good (Wilson)."""
    return math.ceil(z * z * share / (1 - share)) + 1


def seen(outcomes: Sequence[Outcome], slos: Mapping[str, float]) -> list[Seen]:
    """In the order of sending; what the client cancelled is left out."""
    rows = sorted((each for each in outcomes if each.status != "cancelled"), key=lambda each: each.sent)
    return [Seen(met(each, slos), _severity(each, slos)) for each in rows]


def _severity(outcome: Outcome, slos: Mapping[str, float]) -> float | None:
    values = [(getattr(outcome, name), most) for name, most in slos.items()]
    known = [value * 1000 / most for value, most in values if value is not None]
    return max(known) if known and outcome.status == "ok" else None


def judge(rounds: Sequence[Sequence[Seen]], share: float, z: float) -> Verdict:
    """``rounds``: of one load, each from an idle server on."""
    settled = [list(each[math.ceil(len(each) * RAMP) :]) for each in rounds]
    flags = [[bool(one.met) for one in each] for each in settled]
    judged, good = sum(map(len, flags)), sum(map(sum, flags))
    unknown = sum(one.met is None for each in settled for one in each)
    if unknown:
        return Verdict("undecided", good, judged, 0, (0.0, 1.0), False, f"of {unknown} requests it cannot be said")
    memory = max(_memory(_worst(settled, share)), _memory(flags))
    effective = max(int(judged / memory), 1) if judged else 0
    part = round(good / judged * effective) if judged else 0
    low, high = wilson(part, effective, z)
    growing = bool(settled) and _growing([one.severity for one in settled[-1] if one.severity is not None])
    if high < share:
        return Verdict("missed", good, judged, effective, (low, high), growing, "the share is below what is wanted")
    if low < share:
        return Verdict("undecided", good, judged, effective, (low, high), growing, "the interval holds what is wanted")
    if growing:
        return Verdict("undecided", good, judged, effective, (low, high), True, "latency was still growing at the end")
    return Verdict("met", good, judged, effective, (low, high), False, "the share is above what is wanted")


def _worst(rounds: Sequence[Sequence[Seen]], share: float) -> list[list[bool]]:
    """Which requests are among the worst ones, of which there are as many as may miss."""
    order = sorted(math.inf if one.severity is None else one.severity for each in rounds for one in each)
    edge = order[min(int(len(order) * share), len(order) - 1)] if order else math.inf
    return [[one.severity is None or one.severity >= edge for one in each] for each in rounds]


def _memory(rounds: Sequence[Sequence[float]]) -> float:
    """The integrated autocorrelation time, in requests: 1 where they are independent."""
    rows = [np.asarray(row, dtype=np.float64) for row in rounds]
    count = sum(map(len, rows))
    mean = sum(row.sum() for row in rows) / count if count else 0.0
    apart = [row - mean for row in rows]
    spread = sum(float(row @ row) for row in apart)
    time = 1.0
    for lag in range(1, max(map(len, rows), default=0) // 2):
        shared = sum(float(row[lag:] @ row[:-lag]) for row in apart if len(row) > lag)
        if shared <= spread * EQUAL:
            break
        time += 2 * shared / spread
        if lag >= WINDOW * time:
            break
    return time


def _growing(latencies: Sequence[float]) -> bool:
    size = len(latencies) // BATCHES
    if size < PER_BATCH:
        return False
    means = [fmean(latencies[i * size : (i + 1) * size]) for i in range(BATCHES)]
    middle, centre = fmean(means), (BATCHES - 1) / 2
    across = math.fsum((i - centre) ** 2 for i in range(BATCHES))
    slope = math.fsum((i - centre) * (m - middle) for i, m in enumerate(means)) / across
    left = math.fsum((m - middle - slope * (i - centre)) ** 2 for i, m in enumerate(means))
    return slope > t_quantile(ERROR, BATCHES - 2) * math.sqrt(left / (BATCHES - 2) / across)
