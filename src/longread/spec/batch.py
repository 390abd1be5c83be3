"""What one engine step works on, without tensors: which tokens of which sequence, and where their state lies."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a step: ``length`` tokens at positions start .. start+length-1.

    The step's tokens are all segments' tokens laid end to end; this one's begin at ``offset``.
    ``pages`` covers at least positions 0 .. start+length-1. ``slot`` is the sequence's ring row, kept for life.
    ``saves``: (position, ring row) of each place inside, start < position < start+length, whose ring state is kept:
    what the slot would hold if the segment ended there.
    """

    slot: int
    start: int
    length: int
    offset: int
    pages: tuple[int, ...]
    saves: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length
