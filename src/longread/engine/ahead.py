"""A step of decoding rows that a device computes, maybe before the one before it is booked.

Knows grants, their requests and what was launched; decides nothing. Its rows' tokens are known, their rings are one
token ahead of the books: nobody may touch their state before it has landed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from longread.engine.batch import gather
from longread.engine.device_runner import Decoding, DeviceRunner
from longread.engine.request import Request
from longread.engine.sampling_state import SamplingState
from longread.engine.sequence import Grant


@dataclass(frozen=True, slots=True)
class Ahead:
    """``decodes``: as Schedule says. ``rows``: sampling state of each grant's request. ``started``: when it was
    launched, monotonic seconds.
    """

    runner: DeviceRunner
    grants: Sequence[Grant]
    requests: Sequence[Request]
    decodes: tuple[int, int]
    rows: Sequence[SamplingState]
    started: float
    work: Decoding

    @classmethod
    def launched(
        cls,
        runner: DeviceRunner,
        grants: Sequence[Grant],
        requests: Sequence[Request],
        decodes: tuple[int, int],
        slots: int,
    ) -> "Ahead":
        """``slots``: of the cache."""
        started, rows = time.monotonic(), [request.sampling for request in requests]
        return cls(runner, grants, requests, decodes, rows, started, runner.decode(gather(grants, slots), rows))

    def following(self, token_ids: Sequence[int]) -> "Ahead":
        """The same rows, one token further, launched behind this step, which has landed with ``token_ids``."""
        started, (count, context) = time.monotonic(), self.decodes
        work = self.runner.go_on(self.work, token_ids, self.rows)
        return Ahead(self.runner, self.grants, self.requests, (count, context + count), self.rows, started, work)
