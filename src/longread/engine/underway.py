"""A step whose chunks are still being computed, while others' decoding rows go on in steps of their own.

Knows grants and their slices; decides nothing. What was granted stays granted: the schedule is not asked again before
the chunks have landed, so no page or slot of theirs can be taken.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from longread.engine.batch import Batch
from longread.engine.sampling_state import SamplingState
from longread.engine.sequence import Grant, Timeline
from longread.engine.slices import Slices

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Underway:
    """``chunks``: as Schedule says. ``rows``: sampling state of each of ``batch.sampling``. ``error``: it broke so."""

    grants: list[Grant]
    chunks: Sequence[tuple[int, int]]
    batch: Batch
    rows: Sequence[SamplingState]
    work: Slices
    started: float = field(default_factory=time.monotonic)
    error: Exception | None = None

    def advance(self, seconds: float | None) -> None:
        """Launch about that much more, None: all; never raises for the model's sake."""
        if self.error is None and self.work.logits is None:
            try:
                self.work.advance(seconds)
            except Exception as error:  # the edge to the model, as in the engine: told when the step lands
                log.exception("a chunk's layers could not be launched")
                self.error = error

    @property
    def launched(self) -> bool:
        return self.error is not None or self.work.logits is not None

    def timelines(self) -> tuple[Timeline, ...]:
        return tuple(grant.timeline for grant in self.grants)

    def drop(self, timeline: Timeline) -> bool:
        """Leave the rest of a timeline's chunk out. False: it has none here."""
        for grant in self.grants:
            if grant.timeline is timeline:
                assert timeline.lease is not None
                self.work.dropped.add(timeline.lease.slot)
                self.grants.remove(grant)
                return True
        return False
