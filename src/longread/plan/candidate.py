"""What a search finds: candidates with their times and verdicts, and refusals with the limit that they hit first.

Data only, in base units (bytes, seconds, tokens/s); reports and pages read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longread.plan.deployment import Deployment, EngineName, Workload
from longread.plan.estimate import Estimate
from longread.plan.evaluate import Times
from longread.plan.gpu_memory import Capacity, GpuMemory
from longread.plan.peer_capacity import PeerCapacity
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

Grade = Literal["yes", "likely", "unlikely", "no"]
RefusalKind = Literal["strategy", "engine", "memory", "sessions"]


@dataclass(frozen=True, slots=True)
class Binding:
    """The constraint that is met with least to spare: ``margin`` = how many times over (below 1: missed).

    ``name``: "memory", "TTFT", "TPOT", or "speed" where no target was given. ``value`` and ``limit`` in ``unit``;
    ``why``: the part of the time, or the resource, that it hangs on.
    """

    name: str
    value: float
    limit: float
    unit: str
    margin: float
    why: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment that runs the load. ``workload``: as asked, with the tier in which its read prefixes lie.

    ``sessions``: how many requests of this load run at once, by the engine's own allocator (``peer``) or, for longread,
    by ``capacity``. ``meets``: by "concurrency", "ttft", "tpot" (those with a target): *yes* where even the bad end
    of the interval is within it, *likely* where its centre is, *unlikely* where only the good end is, *no*. ``score``:
    output tokens/s. ``lossy`` and ``notes`` in words; ``runs_today``: see space.runs_today. ``lost``:
    what is given up against the first in the ranking.
    """

    deployment: Deployment
    workload: Workload
    memory: GpuMemory
    capacity: Capacity
    peer: PeerCapacity | None
    sessions: int
    times: Times
    meets: Mapping[str, Grade]
    binding: Binding
    score: float
    lossy: tuple[str, ...]
    notes: tuple[str, ...]
    runs_today: bool
    lost: str = ""

    @property
    def ttft_cold(self) -> Estimate:
        return self.times.cold.total

    @property
    def ttft_warm(self) -> Estimate | None:
        return self.times.warm.total if self.times.warm is not None else None

    @property
    def ttft_load(self) -> Estimate:
        return self.times.load

    @property
    def tpot_load(self) -> Estimate:
        return self.times.steady

    @property
    def throughput(self) -> Estimate:
        return self.times.rate


@dataclass(frozen=True, slots=True)
class Refusal:
    """Deployments that do not run, together because they hit the same limit first.

    ``what``: them in words; ``count`` of them. ``limit``: which, with ``value`` against ``bound`` in ``unit`` where it
    is a number; ``by``: how far over, in words; ``cure``: what would make it fit.
    """

    kind: RefusalKind
    engines: tuple[EngineName, ...]
    what: str
    count: int
    limit: str
    cure: str
    value: float | None = None
    bound: float | None = None
    unit: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """``feasible``: ranked, the best first, engines that exist for this hardware before those that do not.

    ``floors``: seconds that no engine on this hardware can go below, "ttft" (this load's prompt), "ttft cold" and
    "tpot". ``rule``: how they were ranked. ``considered``: deployments looked at, refused ones included.
    """

    spec: ModelSpec
    hardware: Hardware
    workload: Workload
    feasible: tuple[Candidate, ...]
    infeasible: tuple[Refusal, ...]
    floors: Mapping[str, float]
    rule: str
    notes: tuple[str, ...]
    considered: int

    @property
    def best(self) -> Candidate | None:
        """The first that runs today."""
        return next((c for c in self.feasible if c.runs_today), None)
