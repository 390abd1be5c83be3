"""The largest load that meets an SLO: bracketed by doubling, then halved, when each answer may be "not decided".

Pure: is told verdicts and says which load to try next. Must not know how a verdict is made. A load is met or missed
only for good reasons, and loads that are not decided stay inside the interval, so noise widens it and moves nothing.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

Said = Literal["met", "missed", "undecided"]
GROWTH = 2.0


@dataclass(slots=True)
class Search:
    """``low``, ``high``: no load outside is tried. ``start``: the first. ``precision``: where the interval's ends are
    within this share of one another, or next to one another for whole loads, it is found.
    """

    low: float
    high: float
    start: float
    integer: bool
    precision: float
    verdicts: dict[float, Said] = field(default_factory=dict)

    def add(self, load: float, said: Said) -> None:
        self.verdicts[load] = said

    @property
    def met(self) -> float | None:
        """The largest load that is met with nothing missed at or below it."""
        worst = min((load for load, said in self.verdicts.items() if said == "missed"), default=math.inf)
        return max((load for load, said in self.verdicts.items() if said == "met" and load < worst), default=None)

    @property
    def missed(self) -> float | None:
        """The smallest load that is missed with nothing met at or above it."""
        best = max((load for load, said in self.verdicts.items() if said == "met"), default=-math.inf)
        return min((load for load, said in self.verdicts.items() if said == "missed" and load > best), default=None)

    @property
    def contradicts(self) -> bool:
        """Whether some load was met above one that was missed."""
        missed = [load for load, said in self.verdicts.items() if said == "missed"]
        return any(said == "met" and load > min(missed, default=math.inf) for load, said in self.verdicts.items())

    def next(self) -> float | None:
        """The next load, or None where no further one narrows the interval."""
        if not self.verdicts:
            return self._whole(min(max(self.start, self.low), self.high))
        met, missed = self.met, self.missed
        if missed is None:
            top = max(self.verdicts)
            return None if top >= self.high else self._whole(min(top * GROWTH, self.high))
        if met is None:
            bottom = min(self.verdicts)
            return None if bottom <= self.low else self._whole(max(bottom / GROWTH, self.low))
        inside = [load for load in self.verdicts if met < load < missed]
        gaps = [(met, min(inside)), (max(inside), missed)] if inside else [(met, missed)]
        below, above = max(gaps, key=lambda gap: gap[1] / gap[0])
        return None if self._close(below, above) else self._between(below, above)

    def _close(self, below: float, above: float) -> bool:
        return above <= below * (1 + self.precision) or (self.integer and above - below <= 1)

    def _between(self, below: float, above: float) -> float:
        middle = math.sqrt(below * above)
        return min(max(float(round(middle)), below + 1), above - 1) if self.integer else middle

    def _whole(self, load: float) -> float:
        return float(round(load)) if self.integer else load

    def ended(self) -> str:
        """What the search found, in words."""
        if not self.verdicts:
            return "nothing was tried"
        met, missed = self.met, self.missed
        if self.next() is not None:
            return "stopped before the interval was as narrow as wanted"
        if met is None:
            return f"no load from {self.low:g} on is known to meet it"
        if missed is None:
            return f"no load up to {self.high:g} is known to miss it"
        if any(met < load < missed for load in self.verdicts):
            return "loads inside the interval could not be decided with the requests of a probe"
        return "found"
