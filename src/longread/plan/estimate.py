"""A predicted number: an interval, and how far it can be trusted."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Provenance = Literal["arithmetic", "measured here", "measured elsewhere", "interpolated", "roofline"]
_WEAKEST_LAST: tuple[Provenance, ...] = (
    "arithmetic",
    "measured here",
    "measured elsewhere",
    "interpolated",
    "roofline",
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """``low`` <= ``centre`` <= ``high``, in base units (seconds, bytes, tokens/s).

    ``floor`` is the physical limit by itself (peak rates, nothing lost), 0 where there is none. ``source`` says in
    words where the efficiency comes from. Provenance: *arithmetic* (exact by formula); *measured here* or *elsewhere*
    (calibrated on runs of this very kind); *interpolated* (calibrated on neighbouring kinds); *roofline* (nothing near
    was measured).
    """

    low: float
    centre: float
    high: float
    provenance: Provenance
    source: str = ""
    floor: float = 0.0

    def times(self, factor: float) -> "Estimate":
        return replace(
            self,
            low=self.low * factor,
            centre=self.centre * factor,
            high=self.high * factor,
            floor=self.floor * factor,
        )

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def exact(value: float, source: str = "") -> Estimate:
    """A number that arithmetic gives."""
    return Estimate(value, value, value, "arithmetic", source, value)


def total(parts: Iterable[Estimate]) -> Estimate:
    """The sum of parts that may all be off the same way: ends add up, and the weakest provenance holds for all."""
    items = list(parts)
    if not items:
        return exact(0.0)
    weakest = max(items, key=lambda e: _WEAKEST_LAST.index(e.provenance))
    return Estimate(
        sum(e.low for e in items),
        sum(e.centre for e in items),
        sum(e.high for e in items),
        weakest.provenance,
        weakest.source,
        sum(e.floor for e in items),
    )
