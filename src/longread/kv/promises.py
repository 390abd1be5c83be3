"""Leases that compute their prompts, found by what a waiting prompt has in common with them.

Knows leases and the policy of landing points; must not know the index. Whoever waits for a sequence that computes its
prefix anyway reuses that instead of computing it twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longread.kv.chain import TokenChain
from longread.kv.lease import Lease
from longread.kv.policy import WAIT_GAIN, promised_point


@dataclass(frozen=True, slots=True)
class Promise:
    """``lease`` will publish its first ``tokens`` tokens."""

    lease: Lease
    tokens: int

    @property
    def stands(self) -> bool:
        """It may still be kept. False: it has been, or it was broken; either way waiting for it is over."""
        return not self.lease.closed and self.lease.position < self.tokens


class Promises:
    """The open leases in front of their prompts' ends, by how these begin: whoever has less than the first
    ``WAIT_GAIN`` tokens in common with a prompt promises too little of it.
    """

    def __init__(self) -> None:
        self._leases: dict[bytes, list[Lease]] = {}

    def __iter__(self) -> Iterator[Lease]:
        return (lease for each in self._leases.values() for lease in each)

    def add(self, lease: Lease) -> None:
        self._leases.setdefault(_beginning(lease.prompt), []).append(lease)

    def discard(self, lease: Lease) -> None:
        """Nothing more of its prompt will be published."""
        begins = _beginning(lease.prompt)
        others = [other for other in self._leases.get(begins, ()) if other is not lease]
        if others:
            self._leases[begins] = others
        else:
            self._leases.pop(begins, None)

    def best(self, chain: TokenChain, interval: int, rings: bool) -> Promise | None:
        """Who will publish most of ``chain`` that can be landed on; None: nobody anything worth waiting for."""
        most, best = WAIT_GAIN - 1, None
        for lease in self._leases.get(_beginning(chain), ()):
            if lease.position < len(lease.prompt) and lease.prompt.root == chain.root:
                limit = lease.prompt.common(chain)
                if rings:  # a snapshot behind the last reusable token cannot be landed on
                    limit = min(limit, len(chain) - 1)
                point = promised_point(len(lease.prompt), lease.position, limit, interval, rings)
                if min(point, len(chain) - 1) > most:
                    most, best = min(point, len(chain) - 1), lease
        return None if best is None else Promise(best, most)


def _beginning(chain: TokenChain) -> bytes:
    return chain.run(0, WAIT_GAIN)
