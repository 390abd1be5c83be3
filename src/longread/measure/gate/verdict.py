"""PASS, FAIL or INCONCLUSIVE: what one figure says about one limit, and what several say together.

Pure. Nothing that was not measured ever passes.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal

from longread.measure.gate.statistics import samples_to_decide

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
EXIT: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
LEVELS = {
    0: "exactness",
    1: "likelihood",
    2: "needles",
    3: "answers",
    4: "critical values",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure. ``verdict`` None: told, not judged. ``needed``: samples that would decide what is open, or that would
    have been enough for a failure in four of five cases (None: not known). ``low`` and ``high``: its interval, None
    where it has none.
    """

    level: int
    name: str
    verdict: Verdict | None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    limit: float | None = None
    samples: int = 0
    needed: int | None = None
    note: str = ""

    def document(self) -> dict[str, object]:
        """As JSON: what is not finite is missing."""
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class LevelResult:
    """All findings of one level. ``not_run``: why it was not."""

    level: int
    findings: tuple[Finding, ...] = ()
    not_run: str | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """INCONCLUSIVE where nothing was judged."""
        return "INCONCLUSIVE" if self.not_run is not None else together(f.verdict for f in self.findings)

    @property
    def needed(self) -> int | None:
        """The most samples that one of its open findings needs."""
        open_ones = [f.needed for f in self.findings if f.verdict == "INCONCLUSIVE" and f.needed is not None]
        return max(open_ones, default=None)


def together(verdicts: Iterable[Verdict | None]) -> Verdict:
    """One FAIL fails; one open question leaves it open; nothing at all is no PASS."""
    found = [verdict for verdict in verdicts if verdict is not None]
    if "FAIL" in found:
        return "FAIL"
    return "PASS" if found and set(found) == {"PASS"} else "INCONCLUSIVE"


def at_most(
    level: int,
    name: str,
    value: float,
    interval: tuple[float, float],
    limit: float,
    samples: int,
    *,
    needed: int | None = None,
    note: str = "",
) -> Finding:
    """Judge a figure that must not exceed ``limit``: its whole interval decides. ``needed``: a better reckoning of the
    samples that would decide than the interval's own width.
    """
    low, high = interval
    verdict: Verdict = "PASS" if high <= limit else "FAIL" if low > limit else "INCONCLUSIVE"
    wanted = None
    if verdict == "INCONCLUSIVE":
        wanted = needed if needed is not None else samples_to_decide(samples, value, low, high, limit)
    return Finding(level, name, verdict, value, low, high, limit, samples, wanted, note)


def at_least(
    level: int, name: str, value: float, interval: tuple[float, float], limit: float, samples: int, *, note: str = ""
) -> Finding:
    """Judge a figure that must not be below ``limit``."""
    low, high = interval
    verdict: Verdict = "PASS" if low >= limit else "FAIL" if high < limit else "INCONCLUSIVE"
    wanted = samples_to_decide(samples, value, low, high, limit) if verdict == "INCONCLUSIVE" else None
    return Finding(level, name, verdict, value, low, high, limit, samples, wanted, note)


def told(
    level: int, name: str, value: float | None, samples: int, interval: tuple[float, float] | None = None
) -> Finding:
    """A figure that is shown and not judged."""
    low, high = interval if interval is not None else (None, None)
    return Finding(level, name, None, value, low, high, None, samples)
