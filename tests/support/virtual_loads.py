"""Loads and limits for tests of the simulator: requests that share nothing, and V4-Flash on two H20."""

from functools import cache
from itertools import count

from longread.engine.virtual import Limits
from longread.measure.arrivals import BLOCK_TOKENS, Arrival
from longread.measure.planned_cost import PlannedCost, planned_limits
from longread.plan.cards import parse_hardware
from longread.plan.space import Fixed
from longread.plan.survey import survey
from longread.spec.releases import release

_IDS = count()


def fresh(at: float, isl: int, osl: int, kind: str, priority: int = 0, owner: str = "") -> Arrival:
    """A request whose prompt nobody has had."""
    blocks = tuple(next(_IDS) for _ in range(-(-isl // BLOCK_TOKENS)))
    return Arrival(at, isl, osl, blocks, kind, priority, owner)


def small(**changes: object) -> Limits:
    """A small engine without rings: nothing is cut but by the budget."""
    base = {
        "pages": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "snapshots": 0,
        "snapshot_interval": 32768,
        "context": 64 * 256,
        "rings": False,
    }
    return Limits(**(base | changes))  # type: ignore[arg-type]


@cache
def two_h20() -> tuple[Limits, PlannedCost]:
    """V4-Flash on 2 x H20-96, as the planner lays it out."""
    found = survey(release("V4-Flash"), parse_hardware("2xH20-96"), engines=("longread",), fixed=Fixed())
    return planned_limits(found.deployment), PlannedCost(found.deployment)
