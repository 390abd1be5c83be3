"""What a pressure test found: figures with intervals, each judged against a limit, and what they say together.

Pure. Words as the gate's: PASS where the whole interval is within the limit, FAIL where all of it is outside,
INCONCLUSIVE else. Nothing that was not measured passes.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from longread.measure.gate.statistics import MOST_SAMPLES, clean_samples, samples_to_decide
from longread.measure.gate.verdict import Verdict, together
from longread.measure.intervals import wilson
from longread.measure.load.estimates import percentile_interval, samples_needed

Interval = tuple[float, float]
OPEN: Interval = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure. ``verdict`` None: told, not judged. ``needed``: samples that would decide, where that is known."""

    name: str
    verdict: Verdict | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    unit: str = ""
    samples: int = 0
    needed: int | None = None
    note: str = ""

    def document(self) -> dict[str, Any]:
        """As JSON: what is not finite is missing."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(slots=True)
class PressureResult:
    """One pressure test. ``not_run``: why it was not; ``stopped``: why it ended early; ``books``: figures behind the
    findings, as JSON.
    """

    test: str
    findings: list[Finding] = field(default_factory=list)
    books: dict[str, Any] = field(default_factory=dict)
    not_run: str | None = None
    stopped: str | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return "INCONCLUSIVE" if self.not_run is not None else together(each.verdict for each in self.findings)

    def document(self) -> dict[str, Any]:
        return {
            "test": self.test,
            "verdict": self.verdict,
            "not_run": self.not_run,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
            "findings": [each.document() for each in self.findings],
            "books": self.books,
        }


def at_most(
    name: str,
    value: float,
    interval: Interval,
    limit: float,
    unit: str,
    samples: int,
    *,
    needed: int | None = None,
    note: str = "",
) -> Finding:
    """A figure that must not exceed ``limit``. ``needed``: a better reckoning than by the interval's width."""
    low, high = interval
    verdict: Verdict = "PASS" if high <= limit else "FAIL" if low > limit else "INCONCLUSIVE"
    if verdict != "INCONCLUSIVE":
        needed = None
    elif needed is None:
        needed = samples_to_decide(samples, value, low, high, limit)
    return Finding(name, verdict, value, low, high, limit, unit, samples, needed, note)


def at_least(
    name: str, value: float, interval: Interval, limit: float, unit: str, samples: int, note: str = ""
) -> Finding:
    """A figure that must not be below ``limit``."""
    low, high = interval
    verdict: Verdict = "PASS" if low >= limit else "FAIL" if high < limit else "INCONCLUSIVE"
    needed = samples_to_decide(samples, value, low, high, limit) if verdict == "INCONCLUSIVE" else None
    return Finding(name, verdict, value, low, high, limit, unit, samples, needed, note)


def counted(name: str, count: int, of: int, most: float, note: str = "") -> Finding:
    """How often something happened that may happen ``most`` times here: a count has no interval. INCONCLUSIVE where
    there was no occasion.
    """
    verdict: Verdict = "FAIL" if count > most else "PASS" if of else "INCONCLUSIVE"
    return Finding(name, verdict, float(count), None, None, most, "", of, None if of else 1, note)


def told(
    name: str, value: float | None, unit: str, samples: int, interval: Interval | None = None, note: str = ""
) -> Finding:
    low, high = interval if interval is not None else (None, None)
    return Finding(name, None, value, low, high, None, unit, samples, None, note)


def missing(name: str, limit: float | None, unit: str, why: str, needed: int | None = None) -> Finding:
    """What could not be measured, and why: an open question, no PASS."""
    return Finding(name, "INCONCLUSIVE", None, None, None, limit, unit, 0, needed, why)


def share_at_most(name: str, count: int, of: int, limit: float, note: str = "") -> Finding:
    """A share with Wilson's interval."""
    if not of:
        return missing(name, limit, "share", "nothing was counted", 1)
    needed = clean_samples(limit) if not count and 0 < limit < 1 else None
    return at_most(name, count / of, wilson(count, of), limit, "share", of, needed=needed, note=note)


def share_at_least(name: str, count: int, of: int, limit: float, note: str = "") -> Finding:
    if not of:
        return missing(name, limit, "share", "nothing was counted", 1)
    if limit <= 0:
        return told(name, count / of, "share", of, wilson(count, of), note)
    return at_least(name, count / of, wilson(count, of), limit, "share", of, note)


def percentile_at_most(
    name: str, values: Sequence[float], share: float, limit: float, unit: str, note: str = ""
) -> Finding:
    """A percentile with its interval by order statistics. What never came counts as infinite, so that failures do not
    make a tail shorter.
    """
    if not values:
        return missing(name, limit, unit, note or "nothing was measured", samples_needed(share))
    ordered = sorted(values)
    value = ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]
    found = percentile_interval(ordered, share)
    low = -math.inf if found.low is None else found.low
    high = math.inf if found.high is None else found.high
    return at_most(name, value, (low, high), limit, unit, len(ordered), needed=found.needs, note=note)


def observed_at_most(name: str, values: Sequence[float], limit: float, unit: str, note: str = "") -> Finding:
    """Events that are few and must each stay within ``limit``: the largest decides. ``low`` and ``high`` are the
    smallest and the largest, no interval: nothing is said of events that did not happen.
    """
    if not values:
        return missing(name, limit, unit, note or "it did not happen", 1)
    worst = max(values)
    verdict: Verdict = "PASS" if worst <= limit else "FAIL"
    return Finding(name, verdict, worst, min(values), worst, limit, unit, len(values), None, note)


def within(
    name: str, value: float, interval: Interval, limit: float, unit: str, samples: int, note: str = ""
) -> Finding:
    """A change that must not exceed ``limit`` either way."""
    low, high = interval
    verdict: Verdict = "INCONCLUSIVE"
    if -limit <= low and high <= limit:
        verdict = "PASS"
    elif low > limit or high < -limit:
        verdict = "FAIL"
    nearest = limit if value >= 0 else -limit
    needed = samples_to_decide(samples, value, low, high, nearest) if verdict == "INCONCLUSIVE" else None
    return Finding(name, verdict, value, low, high, limit, unit, samples, needed, note)


def slope_needed(samples: int, value: float, low: float, high: float, limit: float) -> int | None:
    """Samples after which a slope's interval would lie on one side of ``limit``: over evenly spaced samples with the
    same noise it shrinks with their number to the power of 3/2.
    """
    distance = abs(limit - value)
    half = value - low if limit < value else high - value
    if not math.isfinite(half) or distance <= 0:
        return None
    wanted = math.ceil(samples * (half / distance) ** (2 / 3))
    return max(wanted, samples + 1) if wanted <= MOST_SAMPLES else None


def all_together(results: Sequence[PressureResult]) -> Verdict:
    return together(each.verdict for each in results)
