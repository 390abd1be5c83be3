"""One measured run, whoever measured it: its figures by the definition sheet, its requests where they are known.

Knows what the sheet knows. Must not know files or how a figure is shown. What is not known is None, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longread.measure.report.definitions import Tool

ENDS = ("ok", "refused", "failed", "timeout", "cancelled")


@dataclass(frozen=True, slots=True)
class Figure:
    """A latency in ms. ``interval``: of the mean, 95 %. ``percentiles``: by percent, with an interval where known."""

    count: int | None
    mean: float | None
    std: float | None = None
    interval: tuple[float | None, float | None] | None = None
    percentiles: Mapping[float, float | None] = field(default_factory=dict)
    bounds: Mapping[float, tuple[float | None, float | None]] = field(default_factory=dict)
    needs: Mapping[float, int] = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """``sent``, ``ended``: seconds on the run's clock. ``values``: latencies in ms by the sheet's names. ``gaps``: ms
    between texts, where kept. ``timing``: the server's own parts in ms.
    """

    key: str | None
    kind: str
    status: str
    sent: float | None = None
    ended: float | None = None
    failure: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    gaps: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    timing: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gate:
    """What a quality gate said. ``document``: its file."""

    verdict: str
    profile: str
    date: str | None
    model: str | None
    url: str | None
    document: Mapping[str, object]
    source: str


@dataclass(slots=True)
class Run:
    """``label``: unique among the runs that are shown together. ``requests`` None: ``no_requests`` says why.

    ``own``: the block of a result of ``longread bench serve``, empty for other tools. ``load``: the axis's value by
    name (concurrency, rate in 1/s, context in tokens), where set or known. ``gate`` None: quality was not checked.
    """

    label: str
    tool: Tool
    source: str
    model: str | None
    date: str | None
    figures: Mapping[str, Figure]
    rates: Mapping[str, float | None]
    load: Mapping[str, float | None]
    ends: Mapping[str, int]
    planned: int | None
    duration: float | None
    partial: bool
    requests: list[Request] | None
    no_requests: str | None
    own: Mapping[str, object]
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    gate: Gate | None = None

    @property
    def answered(self) -> int:
        return self.ends.get("ok", 0)

    @property
    def bad(self) -> int:
        """Refused, failed and timed out."""
        return sum(self.ends.get(name, 0) for name in ("refused", "failed", "timeout"))

    @property
    def red(self) -> bool:
        return self.gate is not None and self.gate.verdict == "FAIL"

    def part(self, *path: str) -> object:
        """What lies at ``path`` in the own block; None where a part of it is missing."""
        found: object = self.own
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found


@dataclass(frozen=True, slots=True)
class Point:
    """One place of a sweep. ``frontier``: TTFT in ms of a context's "newest" interval, "warm" and "cold" prompts."""

    value: float
    run: Run
    frontier: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """``axis``: concurrency, rate or context. ``guides``: loads with words, as the knee. ``said``: what the sweep says
    of them. ``partial``: points are missing.
    """

    label: str
    axis: str
    points: tuple[Point, ...]
    guides: tuple[tuple[str, float], ...] = ()
    said: tuple[str, ...] = ()
    partial: bool = False
