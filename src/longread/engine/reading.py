"""The prompts that running sequences read, kept so that a step finds those that may get tokens without asking all.

Knows entries, their classes and owners, and whose turn it is; must not know pages, slots or what a step costs. Which of
the candidates gets how much is ``policy``'s.

Turns. A chunk of a few tokens costs a step nearly what one of ``LUMP`` costs: attention and the experts work on tiles
of rows, and each chunk is gathered and launched by itself. So where a step has no ``LUMP`` tokens for each party (an
owner of one class), the parties take turns: those are candidates that were served longest ago, as many as there are
lumps. In the same way the prompt of a party that came first and its shorter ones take turns with a share that is too
small for two. Over as many steps as a round takes each gets what it would have got in small pieces.

Of a party, only the prompt that came first and the shortest ones can get anything (``policy.split_budget``), so a step
looks at few prompts however many there are.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from longread.engine.policy import LEVELS, PATIENCE, Demand, share
from longread.engine.waiting import Entry

LUMP = 64
FEW = 32  # parties are always looked at


@dataclass(slots=True, eq=False)
class _Party:
    """``arrivals`` and ``lengths`` (tokens that are left) of its prompts, sorted; ``want``: their tokens together.
    ``turn``: counts the steps that it was served in.
    """

    arrivals: list[tuple[int, Entry]] = field(default_factory=list)
    lengths: list[tuple[int, int, Entry]] = field(default_factory=list)
    want: int = 0
    turn: int = 0

    @property
    def oldest(self) -> Entry:
        return self.arrivals[0][1]

    def first(self, tokens: int, every: int) -> list[Entry]:
        """The prompts that share ``tokens``: the one that came first and the shortest others. Of too few tokens for
        two lumps, the first has all in one of ``every`` turns.
        """
        oldest, left = self.oldest, tokens
        found: list[Entry] = []
        for remaining, _, entry in self.lengths:
            if left <= 0:
                break
            if entry is not oldest:
                found.append(entry)
                left -= remaining
        if tokens >= 2 * LUMP or left > 0 or oldest.filed < tokens:
            return [oldest, *found]
        return [oldest] if self.turn % every == 0 else found


class Reading:
    """Entries with more than one token to compute. ``Entry.filed`` is how many that are here, 0: it is not here."""

    def __init__(self) -> None:
        # Of each level: its parties, those first that were served longest ago.
        self._levels: list[dict[str, _Party]] = [{} for _ in LEVELS]
        self._lengths: list[list[int]] = [[] for _ in LEVELS]  # of all prompts of each level, sorted
        self._dealt = 0  # prompt tokens, so far

    @property
    def count(self) -> int:
        return sum(len(party.arrivals) for parties in self._levels for party in parties.values())

    def add(self, entry: Entry) -> None:
        """It reads its prompt from now on; its level must not change while it does."""
        party = self._levels[entry.level].setdefault(entry.owner, _Party())
        entry.filed = entry.timeline.remaining
        entry.passed = self._dealt - entry.yielded
        party.want += entry.filed
        insort(party.arrivals, (entry.arrival, entry))
        insort(party.lengths, (entry.filed, entry.arrival, entry))
        insort(self._lengths[entry.level], entry.filed)

    def discard(self, entry: Entry) -> None:
        """It reads no more, or not at this level."""
        parties = self._levels[entry.level]
        party = parties[entry.owner]
        del party.arrivals[bisect_left(party.arrivals, (entry.arrival, entry))]
        del party.lengths[bisect_left(party.lengths, (entry.filed, entry.arrival, entry))]
        del self._lengths[entry.level][bisect_left(self._lengths[entry.level], entry.filed)]
        party.want -= entry.filed
        entry.yielded = self._dealt - entry.passed
        entry.filed = 0
        if not party.arrivals:
            del parties[entry.owner]

    def advanced(self, entry: Entry) -> bool:
        """Tokens of it may have been computed since it was filed. True: one at most is left, and it reads no more."""
        remaining = entry.timeline.remaining
        if remaining <= 1:
            self.discard(entry)
            return True
        if remaining != entry.filed:
            party, lengths = self._levels[entry.level][entry.owner], self._lengths[entry.level]
            del lengths[bisect_left(lengths, entry.filed)]
            insort(lengths, remaining)
            del party.lengths[bisect_left(party.lengths, (entry.filed, entry.arrival, entry))]
            party.want += remaining - entry.filed
            entry.filed = remaining
            insort(party.lengths, (remaining, entry.arrival, entry))
        return False

    def candidates(self, most: int, lumps: int) -> list[Entry]:
        """Who may get any of at most ``most`` tokens, by rank. ``lumps``: how many of ``LUMP`` tokens there are."""
        found: list[Entry] = []
        shortest = 0
        for parties, lengths in zip(self._levels, self._lengths, strict=True):
            if parties:
                shortest = min(shortest, lengths[0]) or lengths[0]
                eager, patient = self._chosen(parties, most, max(lumps, 1), shortest)
                weights = [PATIENCE] * len(eager) + [1] * len(patient)
                parts = share(most, [party.want for party in eager + patient], weights)
                for i, (party, part) in enumerate(zip(eager + patient, parts, strict=True)):
                    # A smaller step's parts are no larger, but for a token by rounding.
                    found.extend(party.first(part + 1, 2 if i < len(eager) else PATIENCE))
        found.sort(key=lambda entry: entry.rank)
        return found

    def _chosen(
        self, parties: dict[str, _Party], most: int, lumps: int, shortest: int
    ) -> tuple[list[_Party], list[_Party]]:
        """The parties of one class whose turn it is, and those of them that are patient (``policy``'s text), which have
        turns of their own: else they would hold others up. ``shortest``: prompt of it and the higher classes.
        """
        eager: list[_Party] = []
        patient: list[_Party] = []
        want = 0
        for looked, party in enumerate(parties.values()):
            # Patient ones that had no turn come first, so that those that are due are soon seen.
            enough = len(patient) >= max(lumps // PATIENCE, 1) or looked >= 2 * lumps + FEW
            if enough and len(eager) >= lumps and want >= most:
                break
            oldest = party.oldest
            if oldest.filed > 2 * shortest and self._patient(oldest):
                patient.append(party)
            elif len(eager) < lumps or want < most:
                eager.append(party)
                want += party.want
        # Nobody is let pass by these but whoever wants what is left.
        return eager, patient[: max(lumps // PATIENCE, 1) if want >= most else lumps]

    def _patient(self, entry: Entry) -> bool:
        return (self._dealt - entry.passed) * PATIENCE < entry.work

    def demand(self, entry: Entry) -> Demand:
        """What it wishes for in a step."""
        return Demand(entry.filed, entry.filed, entry.timeline.computed, entry.level, entry.owner, self._patient(entry))

    def deal(self, served: Sequence[tuple[Entry, int]], amount: int) -> None:
        """Each of these got so many tokens in a step; everybody else who reads has let ``amount`` pass. Nothing passes
        whoever has a step to himself, however small it is.
        """
        self._dealt += amount
        turns: dict[_Party, tuple[int, str]] = {}
        for entry, length in served:
            entry.granted = length
            entry.passed += amount if len(served) == 1 or length == entry.filed else length
            turns[self._levels[entry.level][entry.owner]] = (entry.level, entry.owner)
        for party, (level, owner) in turns.items():
            party.turn += 1
            self._levels[level][owner] = self._levels[level].pop(owner)

    def check(self) -> None:
        """Audit; raises AssertionError."""
        for level, parties in enumerate(self._levels):
            filed = [entry.filed for party in parties.values() for _, entry in party.arrivals]
            if sorted(filed) != self._lengths[level]:
                raise AssertionError(f"level {level}: {self._lengths[level]} are not its prompts' lengths")
            for owner, party in parties.items():
                entries = [entry for _, entry in party.arrivals]
                same = entries and all((entry.level, entry.owner) == (level, owner) for entry in entries)
                if not same or any(entry.filed < 2 for entry in entries):
                    raise AssertionError(f"{owner!r} of level {level} has prompts that are not its, or read: {entries}")
                if party.lengths != sorted((entry.filed, entry.arrival, entry) for entry in entries):
                    raise AssertionError(f"{owner!r} of level {level}: {party.lengths} are not its prompts' lengths")
                if party.want != sum(entry.filed for entry in entries):
                    raise AssertionError(f"{owner!r} of level {level} wants {party.want}, which is not the sum")
