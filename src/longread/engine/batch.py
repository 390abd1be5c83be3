"""Gathers the granted tokens of one step into a flat ragged batch, without tensors.

Everything is built anew for each step and never written afterwards: state is not input.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longread.engine.sequence import Grant, Timeline
from longread.spec.batch import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. ``token_ids`` and ``positions``: int64 [T]. ``logit_rows``: int64 [R], the last row of each
    timeline in ``sampling``, which are those whose newest token is part of this step.
    """

    token_ids: "array[int]"
    positions: "array[int]"
    segments: tuple[Segment, ...]
    logit_rows: "array[int]"
    sampling: tuple[Timeline, ...]


def gather(grants: Sequence[Grant], slots: int) -> Batch:
    """Lay the granted tokens end to end. Decodes come first as they were granted first.

    ``slots``: of the state storage, where snapshot row r is ring row ``slots`` + r.
    """
    token_ids, positions, logit_rows = array("q"), array("q"), array("q")
    segments: list[Segment] = []
    sampling: list[Timeline] = []
    for grant in grants:
        timeline, start, end = grant.timeline, grant.timeline.computed, grant.timeline.computed + grant.length
        lease = timeline.lease
        assert lease is not None
        saves = tuple((position, slots + row) for position, row in lease.saves.items())
        segments.append(Segment(lease.slot, start, grant.length, len(token_ids), tuple(lease.pages), saves))
        token_ids.extend(iter(timeline.tokens[start:end]))  # a kind of array takes no other kind whole
        positions.extend(range(start, end))
        if end == len(timeline.tokens):
            logit_rows.append(len(token_ids) - 1)
            sampling.append(timeline)
    return Batch(token_ids, positions, tuple(segments), logit_rows, tuple(sampling))
