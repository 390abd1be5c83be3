"""Where a prompt lands among what is published: the deepest place that it can go on from.

Knows the index; changes nothing. Must not know who holds what, nor what a landing costs.
"""

from dataclasses import dataclass

from longread.kv.chain import TokenChain
from longread.kv.index import Entry, PrefixIndex
from longread.spec.state import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Landing:
    """The whole pages up to ``last`` (a root: none), then ``length`` tokens of ``partial``'s page; ``at`` holds the
    snapshot. ``known``: tokens in whole pages that are published, whether they can be landed on or not.
    """

    last: Entry
    partial: Entry | None = None
    length: int = 0
    at: Entry | None = None
    known: int = 0

    @property
    def tokens(self) -> int:
        return self.last.depth * PAGE_TOKENS + self.length

    def whole(self) -> list[Entry]:
        """The whole pages, from the root on."""
        found: list[Entry] = []
        entry = self.last
        while entry.parent is not None:
            found.append(entry)
            entry = entry.parent
        found.reverse()
        return found


def find_landing(index: PrefixIndex, chain: TokenChain, *, rings: bool, grain: int, partial: bool) -> Landing:
    """The deepest landing, at most one token before the end; without ``partial`` only page ends (a partial page costs a
    page to copy it to). ``rings``: only where there is a snapshot; else anywhere in steps of ``grain`` tokens.
    """
    most = max(len(chain) - 1, 0)
    last = index.deepest(chain, most // PAGE_TOKENS)
    known = last.depth * PAGE_TOKENS
    if rings:
        return _snapshot_landing(index, chain, last, most, partial)
    if partial:
        closest, common = index.closest(last, chain.run(known, min(most, known + PAGE_TOKENS)))
        length = common // grain * grain
        if length:
            return Landing(last, closest, length, known=known)
    return Landing(last, known=known)


def _snapshot_landing(index: PrefixIndex, chain: TokenChain, last: Entry, most: int, partial: bool) -> Landing:
    known, at = last.depth * PAGE_TOKENS, last
    while True:
        if partial and at.children:
            start = at.depth * PAGE_TOKENS
            # One token more than may be reused: ``prefixes`` are proper ones.
            ahead = chain.run(start, min(most + 1, start + PAGE_TOKENS))
            tail = next(index.prefixes(at, ahead), None)
            if tail is not None:
                return Landing(at, tail, tail.length, tail, known)
        if at.parent is None:
            return Landing(at, known=known)
        if at.snapshot is not None:
            return Landing(at, at=at, known=known)
        at = at.parent
