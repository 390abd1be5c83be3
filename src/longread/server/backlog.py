"""Which prompts are still to be read, and how many of their tokens come before a new one's.

Pure: knows classes, owners and token counts. Must not know limits, clocks or the engine. It follows what the engine's
schedule does: classes share a step's prompt tokens by weight, the owners inside a class equally, and short prompts of
an owner pass its long ones once they have a slot.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from longread.spec.engine import RequestClass
from longread.spec.state import PAGE_TOKENS, HashedTokens

# As in engine/policy, which the server may not import. A test holds the two together.
WEIGHTS: Mapping[RequestClass, int] = {"interactive": 16, "batch": 4, "ingest": 1}
MAX_KNOWN_PAGES = 65536


class Progress(Protocol):
    """How far a prompt is."""

    @property
    def tokens(self) -> int: ...


@dataclass(slots=True, eq=False)
class Unread:
    """An accepted request whose first token has not come. ``prompt``: its tokens, ``tokens``: those that have to be
    computed, as far as one knows.
    """

    request_class: RequestClass
    owner: str
    prompt: int
    tokens: int
    hashed: HashedTokens | None = None
    progress: Progress | None = None

    @property
    def left(self) -> int:
        """Tokens that are still to be computed."""
        if self.progress is None:
            return self.tokens
        return min(self.tokens, max(self.prompt - self.progress.tokens, 0))


class Backlog:
    """The accepted requests whose prompts are not read, by id."""

    def __init__(self) -> None:
        self._unread: dict[str, Unread] = {}
        self._most = 0  # their tokens without what was computed since: never less than ``tokens``

    def __len__(self) -> int:
        return len(self._unread)

    def add(self, request_id: str, unread: Unread) -> None:
        self._unread[request_id] = unread
        self._most += unread.tokens

    def get(self, request_id: str) -> Unread | None:
        return self._unread.get(request_id)

    def pop(self, request_id: str) -> Unread | None:
        """It is read, or will never be. None: it was not here."""
        unread = self._unread.pop(request_id, None)
        if unread is not None:
            self._most -= unread.tokens
        return unread

    @property
    def tokens(self) -> int:
        """All that is still to be computed."""
        return sum(unread.left for unread in self._unread.values())

    def tokens_before(self, request_class: RequestClass) -> int:
        """The same of the classes that do not give way to this one."""
        least = WEIGHTS[request_class]
        return sum(unread.left for unread in self._unread.values() if WEIGHTS[unread.request_class] >= least)

    def below(self, limit: float) -> bool:
        """Whether ``tokens`` is certainly below ``limit``, in constant time."""
        return self._most < limit

    def ahead(self, tokens: int, request_class: RequestClass, owner: str, passing: bool) -> float:
        """Prompt tokens that are read before a new prompt of ``tokens`` is. ``passing``: there is a slot for it, so
        that it passes longer ones; else its owner's others come first.

        Never more than ``tokens`` of this backlog, and never less for a longer prompt.
        """
        classes: dict[RequestClass, dict[str, float]] = {}
        for unread in self._unread.values():
            owners = classes.setdefault(unread.request_class, {})
            left = min(unread.left, tokens) if passing and unread.request_class == request_class else unread.left
            owners[unread.owner] = owners.get(unread.owner, 0) + left
        mine = classes.pop(request_class, {})
        own = mine.pop(owner, 0) + tokens
        inside = own + sum(min(other, own) for other in mine.values())
        weight = WEIGHTS[request_class]
        outside = sum(min(sum(owners.values()), inside * WEIGHTS[other] / weight) for other, owners in classes.items())
        return inside + outside - tokens

    def excess(self, most: float, tokens: int, request_class: RequestClass, passing: bool) -> float:
        """Tokens that have to be read until no more than ``most`` are ahead of a prompt of ``tokens``.

        What is ahead is part of what is left, so that is enough in whichever order the backlog is read. Where it is all
        of one owner and of the prompt's class, the short ones get at least half of what is read, which may be enough
        sooner.
        """
        lefts = [unread.left for unread in self._unread.values()]
        enough = sum(lefts) - most
        parties = {(unread.request_class, unread.owner) for unread in self._unread.values()}
        alone = len(parties) == 1 and next(iter(parties))[0] == request_class
        # Long ones that are too much by themselves would have to be read, too.
        if passing and alone and sum(tokens for left in lefts if left > tokens) <= most:
            enough = min(enough, 2 * (sum(min(left, tokens) for left in lefts) - most))
        return enough


class KnownPages:
    """Identities of the pages that requests have read or are reading: what the engine need not compute again.

    An estimate: the engine may have evicted them, or have more from its slower tiers. The last ``limit`` are kept.
    """

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self.limit = MAX_KNOWN_PAGES

    def tokens(self, hashed: HashedTokens | None, prompt: int) -> int:
        """Tokens of a prompt that are known. The last one is always computed."""
        hashes = hashed.hashes if hashed is not None else ()
        pages = next((i for i in range(len(hashes), 0, -1) if hashes[i - 1] in self._pages), 0)
        return min(pages * PAGE_TOKENS, max(prompt - 1, 0))

    def add(self, hashes: Sequence[bytes]) -> None:
        """Read soon, or again. From the last page on: where there are too many, ends of prompts go first."""
        for page in reversed(hashes):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self.limit:
            self._pages.popitem(last=False)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Not read after all."""
        for page in hashes:
            self._pages.pop(page, None)

    def clear(self) -> None:
        self._pages.clear()
