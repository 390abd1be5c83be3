"""One token timeline and how far the cache has followed it; shared by requests and sessions.

Knows tokens and a cache lease; must not know sampling, events, tensors or scheduling.
"""

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field

from longread.kv.cache import KVCache
from longread.kv.lease import Lease
from longread.kv.transfer import Transfer
from longread.spec.state import PAGE_TOKENS, HashedTokens


@dataclass(slots=True)
class Admission:
    """How a timeline came to its first lease; monotonic seconds. ``lookup``: spent on hashing and asking the tiers.
    ``load_host``, ``load_disk``: wall time of the loads that it waited for, shared out by what each tier took; of a
    load whose layers are used as they come, until it was published.
    """

    looked_up: float = 0.0
    lookup: float = 0.0
    loaded: float = 0.0
    load_host: float = 0.0
    load_disk: float = 0.0
    transfers: list[Transfer] = field(default_factory=list)

    def add(self, transfer: Transfer, since: float) -> None:
        """A load that was waited for from ``since`` on has ended."""
        self.transfers.append(transfer)
        self.loaded = transfer.ended
        wall, measured = transfer.ended - since, sum(transfer.seconds.values())
        # Rounding may put the share above the whole; the host's would be negative.
        disk = min(wall, wall * transfer.seconds.get("disk", 0.0) / measured) if measured else wall
        self.load_disk += disk
        self.load_host += wall - disk


class Timeline:
    """``tokens`` is what the sequence consists of; the first ``computed`` of them have their state in the cache.

    The lease (one slot, some pages) comes and goes: a preempted timeline has none and starts again from the prefix
    cache. ``prompt_length`` is the number of tokens that were given; the rest was sampled. ``hashed``: what the caller
    has hashed of them. ``salt``: whose cached state it shares.
    """

    def __init__(self, key: str, tokens: Sequence[int], hashed: HashedTokens | None = None, salt: str | None = None):
        self.key = key
        self.hashed = hashed
        self.salt = salt
        # Of numbers and not of objects, which the garbage collector would visit one by one. Bytes become numbers at
        # memory speed; a million objects take as long as a step.
        known = array("i")
        if hashed is not None and hashed.fits(hashed.root, tokens):
            known.frombytes(hashed.data)
        known.extend(tokens[len(known) :])
        self.tokens: MutableSequence[int] = known
        self.prompt_length = len(self.tokens)
        self.lease: Lease | None = None
        self.admission = Admission()

    @property
    def computed(self) -> int:
        """Tokens whose state is in the cache."""
        return len(self.lease.tokens) if self.lease is not None else 0

    @property
    def remaining(self) -> int:
        """Tokens whose state is still to be computed; 1 is a decode step."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the next step computes the newest sampled token and nothing else."""
        return self.remaining == 1 and len(self.tokens) > self.prompt_length

    def advance(self, cache: KVCache, length: int) -> None:
        """Record that the state of the next ``length`` tokens has been computed, with the landing points that the cache
        was prepared for; in decode one rolling row keeps the ring state at each page end that is reached.
        """
        assert self.lease is not None
        start = self.computed
        cache.commit(self.lease, self.tokens[start : start + length])
        if self.computed > self.prompt_length and self.computed % PAGE_TOKENS == 0:
            cache.snapshot(self.lease, rolling=True)

    def release(self, cache: KVCache, keep_tail: bool) -> None:
        """Give slot and pages back. ``keep_tail``: first publish the state at the current position, so that whoever
        continues this timeline (the next turn, or a preempted request) starts there.
        """
        if self.lease is None:
            return
        # Below one page a snapshot row is worth more to the long prompts that it would push out.
        worth = self.computed >= PAGE_TOKENS or not cache.has_rings
        if keep_tail and worth and self.computed > self.lease.cached_tokens:
            cache.snapshot(self.lease)
        cache.close(self.lease)
        self.lease = None


@dataclass(frozen=True, slots=True)
class Grant:
    """``length`` tokens of one timeline in a step."""

    timeline: Timeline
    length: int
