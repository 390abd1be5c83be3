"""A step of decoding rows that a device computes, maybe before the one before it is booked.

Knows grants, their requests and what was launched; decides nothing. Its rows' tokens are known, their rings are one
token ahead of the books: nobody may touch their state before it has landed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from longread.engine.batch import Batch
from longread.engine.device_runner import Decoding, DeviceRunner
from longread.engine.request import Request
from longread.engine.sampling_state import SamplingState
from longread.engine.sequence import Grant


@dataclass(slots=True)
class Ahead:
    """``decodes``: as Schedule says. ``rows``: sampling state of each grant's request. ``started``: when it was
    launched, monotonic seconds. ``work``: what was launched; None: nothing yet.
    """

    runner: DeviceRunner
    grants: Sequence[Grant]
    requests: Sequence[Request]
    decodes: tuple[int, int]
    rows: Sequence[SamplingState]
    started: float = field(default_factory=time.monotonic)
    work: Decoding | None = None

    def launch(self, batch: Batch) -> None:
        self.work = self.runner.decode(batch, self.rows)

    def launch_behind(self, before: "Ahead", token_ids: Sequence[int]) -> None:
        """The same rows as ``before``, which has landed, one token further."""
        assert before.work is not None
        self.work = self.runner.go_on(before.work, token_ids, self.rows)

    def following(self) -> "Ahead":
        """The same rows' next step, not launched."""
        count, context = self.decodes
        return Ahead(self.runner, self.grants, self.requests, (count, context + count), self.rows)
