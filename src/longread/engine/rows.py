"""The running sequences that get one token in each step, side by side: a step looks at numbers and not at objects.

Knows entries, the lengths of their timelines and of their pages; decides nothing. With 1,000 of them, asking each entry
for its timeline, its lease and its pages takes longer than all the rest of a decision.
"""

from collections.abc import Sequence
from itertools import compress
from operator import gt

from longread.engine.sequence import Grant
from longread.engine.waiting import Entry
from longread.spec.state import PAGE_TOKENS


class DecodeRows:
    """``grants``: one token for each, to be copied. All of a list's places belong to the same entries."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []
        self._entries: list[Entry] = []
        self._tokens: list[Sequence[int]] = []
        self._rooms: list[int] = []  # tokens that their pages hold
        self._unread: list[Entry] = []  # of them: some of what the lease was opened with may not be computed

    def __len__(self) -> int:
        return len(self.grants)

    def add(self, entry: Entry) -> None:
        """It has its lease, and nothing to compute but its newest token."""
        assert entry.timeline.lease is not None
        self.grants.append(Grant(entry.timeline, 1))
        self._entries.append(entry)
        self._tokens.append(entry.timeline.tokens)
        self._rooms.append(len(entry.timeline.lease.pages) * PAGE_TOKENS)
        self._unread.append(entry)
        entry.granted = 1

    def discard(self, entry: Entry) -> None:
        """It ended, or lost its pages; those that never were here are ignored."""
        if entry in self._entries:
            i = self._entries.index(entry)
            for places in (self.grants, self._entries, self._tokens, self._rooms):
                del places[i]
            if entry in self._unread:
                self._unread.remove(entry)

    def reserved(self, entry: Entry) -> None:
        """It was given pages."""
        assert entry.timeline.lease is not None
        self._rooms[self._entries.index(entry)] = len(entry.timeline.lease.pages) * PAGE_TOKENS

    def short(self) -> list[Entry]:
        """Those whose pages do not hold their tokens, by rank."""
        lacking = map(gt, map(len, self._tokens), self._rooms)
        return sorted(compress(self._entries, lacking), key=lambda entry: entry.rank)

    def go_on(self, grants: Sequence[Grant]) -> bool:
        """Whether they are ``grants``, and the newest token of each lies on the page of the one before it, behind what
        its lease was opened with: nothing is to be had, published or kept before it is computed.
        """
        same = grants == self.grants and all((len(tokens) - 1) % PAGE_TOKENS for tokens in self._tokens)
        return same and not self.unread()

    def context(self) -> int:
        """Tokens of all of them together."""
        return sum(map(len, self._tokens))

    def unread(self) -> list[Entry]:
        """Those whose token of the coming step is the last of what their lease was opened with."""
        self._unread = [entry for entry in self._unread if entry.timeline.computed < _planned(entry)]
        return self._unread

    def check(self, entries: Sequence[Entry]) -> None:
        """Audit: these and nobody else are here. Raises AssertionError."""
        if set(entries) != set(self._entries) or len(entries) != len(self._entries):
            raise AssertionError(f"{len(self._entries)} rows are kept, of {len(entries)}")
        for entry, grant, tokens, room in zip(self._entries, self.grants, self._tokens, self._rooms, strict=True):
            lease = entry.timeline.lease
            pages = len(lease.pages) if lease is not None else 0
            if (
                grant.timeline is not entry.timeline
                or tokens is not entry.timeline.tokens
                or room != pages * PAGE_TOKENS
            ):
                raise AssertionError(f"the row of {entry.timeline.key!r} is another's, or its pages are {pages}")


def _planned(entry: Entry) -> int:
    return len(entry.timeline.lease.prompt) if entry.timeline.lease is not None else 0
