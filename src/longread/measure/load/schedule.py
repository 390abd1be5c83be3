"""When requests are due: open loop, closed loop, or both.

Knows rates, seeds and asks with times of their own. Must not know HTTP, nor what is asked.

Open loop: arrivals of a seeded gamma process (``burstiness`` 1 is Poisson, infinite is a constant rate), scaled so that
their mean gap is exactly 1 / rate, as vLLM's bench does: of 100 drawn gaps the sum is off by 10 % (one sigma), and it
would be the seed that sets the load. Or the asks' own times (a trace). Closed loop: an infinite rate under
``max_concurrency``. With both the cap holds back what the rate wanted; each outcome says for how long.

The unit is a session: a request without one is a session of one turn. A rate is of sessions' first turns, and the cap
is of sessions under way, thinking included, so requests in flight are never more.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """``rate``: sessions per second; infinite: all at once. ``trace``: at the asks' own times instead."""

    rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    trace: bool = False

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if not value > 0:
                raise ConfigError(f"request {name} {value:g}: it must be above 0 (inf is allowed)")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max concurrency {self.max_concurrency}: it must be at least 1")
        if self.rate == math.inf and self.burstiness != 1.0:
            raise ConfigError(f"burstiness {self.burstiness:g} shapes the gaps of a finite request rate; give a rate")
        if self.trace and self.rate != math.inf:
            raise ConfigError("the workload has arrival times of its own, so a request rate contradicts it; give none")

    @property
    def open_loop(self) -> bool:
        """Whether requests have times that do not depend on answers."""
        return self.trace or self.rate < math.inf

    def starts(self, count: int) -> list[float]:
        """Seconds at which each of ``count`` sessions is due, the first at 0, the last at (count - 1) / rate; without a
        trace.
        """
        if self.rate == math.inf:
            return [0.0] * count
        draw = random.Random(self.seed)
        due = [0.0, *itertools.accumulate(self._gap(draw) for _ in range(count - 1))][:count]
        scale = (count - 1) / self.rate / due[-1] if due and due[-1] > 0 else 1.0
        return [at * scale for at in due]

    def _gap(self, draw: random.Random) -> float:
        """Before it is scaled."""
        return 1.0 if self.burstiness == math.inf else draw.gammavariate(self.burstiness, 1.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One ask's place in the schedule, without its content. ``at``: not before this second."""

    index: int
    at: float | None
    think: float


def sessions(asks: Sequence[Ask], schedule: Schedule) -> list[list[Turn]]:
    """Turns by session, sessions in the order of their first turn; the first turn of each has its time.

    Raises ConfigError where a trace is wanted and an ask has no time, or the other way round.
    """
    found: dict[object, list[Turn]] = {}
    for index, ask in enumerate(asks):
        if schedule.trace != (ask.at is not None):
            raise ConfigError(
                f"ask {ask.key!r} has no arrival time, and the schedule is the workload's own times"
                if schedule.trace
                else f"ask {ask.key!r} is due at {ask.at:g} s by the workload, and the schedule is of another kind"
            )
        if ask.at is not None and not 0 <= ask.at < math.inf:
            raise ConfigError(f"ask {ask.key!r} is due at {ask.at} s: it must be a time from 0 on")
        turn = Turn(index, ask.at, ask.think_seconds)
        found.setdefault(index if ask.session is None else ask.session, []).append(turn)
    rows = list(found.values())
    if schedule.trace:
        return sorted(rows, key=lambda turns: turns[0].at or 0.0)
    starts = schedule.starts(len(rows))
    return [[Turn(turns[0].index, at, 0.0), *turns[1:]] for turns, at in zip(rows, starts, strict=True)]
