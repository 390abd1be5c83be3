"""Whether a load meets an SLO, judged from a probe's requests: met, missed, or not decided.

Pure arithmetic; knows nothing of servers. "Meets" means that at least a wanted share of requests meets every latency.

- The first fifth of each round is left out: the server starts empty, and is better then than it stays.
- The share has a Wilson interval over the number of *independent* requests: neighbours wait in the same queue, so n
  requests count as n (1 - r) / (1 + r), r their first autocorrelation (0 at least). Source: F. W. Zwiers, H. von
  Storch, Taking serial correlation into account in tests of the mean, J. Climate 8 (1995), 336-351.
- A load is met only if the latency does not grow from the beginning of the last round to its end (a line through eight
  batch means, Student's t, one-sided 97.5 %): a backlog that grows makes every share too good.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

from longread.measure.intervals import wilson
from longread.measure.load.estimates import student
from longread.measure.load.goodput import met
from longread.measure.load.outcome import Outcome
from longread.measure.sweep.search import Said

RAMP = 0.2
BATCHES, PER_BATCH = 8, 4
MOST_CORRELATED = 0.99


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: whether it met the SLOs (None: not known), and its latency in seconds (None: no answer)."""

    met: bool | None
    latency: float | None


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


def quantile(probes: int, looks: int, risk: float = 0.05) -> float:
    """The z with which ``probes`` verdicts, each looked at up to ``looks`` times, are all right with 1 - ``risk``
    (Bonferroni), so that the interval of a whole search holds with that.
    """
    return NormalDist().inv_cdf(1 - risk / 2 / (probes * looks))


def needed(share: float, z: float) -> int:
    """Fewest independent requests with which ``share`` can be told to be met, all of them good (Wilson)."""
    return math.ceil(z * z * share / (1 - share)) + 1


def seen(outcomes: Sequence[Outcome], slos: dict[str, float]) -> list[Seen]:
    """In the order of sending; what the client cancelled is left out."""
    rows = sorted((each for each in outcomes if each.status != "cancelled"), key=lambda each: each.sent)
    return [Seen(met(each, slos), each.e2el) for each in rows]


def judge(rounds: Sequence[Sequence[Seen]], share: float, z: float) -> Verdict:
    """``rounds``: of one load, each from an idle server on."""
    settled = [list(each[math.ceil(len(each) * RAMP) :]) for each in rounds]
    flags = [[bool(one.met) for one in each] for each in settled]
    judged, good = sum(map(len, flags)), sum(map(sum, flags))
    unknown = sum(one.met is None for each in settled for one in each)
    if unknown:
        return Verdict("undecided", good, judged, 0, (0.0, 1.0), False, f"of {unknown} requests it cannot be said")
    effective = min(judged, max(round(judged * _independent(flags)), 1)) if judged else 0
    part = round(good / judged * effective) if judged else 0
    low, high = wilson(part, effective, z)
    growing = bool(settled) and _growing([one.latency for one in settled[-1] if one.latency is not None])
    if high < share:
        return Verdict("missed", good, judged, effective, (low, high), growing, "the share is below what is wanted")
    if low < share:
        return Verdict("undecided", good, judged, effective, (low, high), growing, "the interval holds what is wanted")
    if growing:
        return Verdict("undecided", good, judged, effective, (low, high), True, "latency was still growing at the end")
    return Verdict("met", good, judged, effective, (low, high), False, "the share is above what is wanted")


def _independent(rounds: Sequence[Sequence[bool]]) -> float:
    """Independent requests for each of these."""
    count = sum(map(len, rounds))
    mean = sum(map(sum, rounds)) / count
    spread = math.fsum((x - mean) ** 2 for row in rounds for x in row)
    if spread == 0:
        return 1.0
    pairs = ((a - mean) * (b - mean) for row in rounds for a, b in pairwise(row))
    r = min(max(math.fsum(pairs) / spread, 0.0), MOST_CORRELATED)
    return (1 - r) / (1 + r)


def _growing(latencies: Sequence[float]) -> bool:
    size = len(latencies) // BATCHES
    if size < PER_BATCH:
        return False
    means = [fmean(latencies[i * size : (i + 1) * size]) for i in range(BATCHES)]
    middle, centre = fmean(means), (BATCHES - 1) / 2
    across = math.fsum((i - centre) ** 2 for i in range(BATCHES))
    slope = math.fsum((i - centre) * (m - middle) for i, m in enumerate(means)) / across
    left = math.fsum((m - middle - slope * (i - centre)) ** 2 for i, m in enumerate(means))
    return slope > student(BATCHES - 2) * math.sqrt(left / (BATCHES - 2) / across)
