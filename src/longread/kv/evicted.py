"""A bounded memory of what was evicted, so that a later miss can say so.

Knows identities only. Forgetting makes a report say "never seen" where it was "evicted", no more.
"""

from collections import OrderedDict
from typing import TypeVar

from longread.kv.chain import TokenChain
from longread.kv.index import Entry
from longread.spec.state import PAGE_TOKENS, page_hash

V = TypeVar("V")
REMEMBERED = 32768  # identities of each kind: some 8M tokens, 5 MB


class EvictedKeys:
    """Pages and tails that lost their content on the device, and landing points that lost their ring."""

    def __init__(self, limit: int = REMEMBERED):
        self._limit = limit
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._tails: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()  # parent -> the last tail's key and length
        self._rings: OrderedDict[bytes, None] = OrderedDict()

    def add(self, entry: Entry, page: bool = True) -> None:
        """An entry is about to go, or (not ``page``) only its ring."""
        if entry.snapshot is not None:
            self._keep(self._rings, entry.key, None)
        if page and entry.full:
            self._keep(self._pages, entry.key, None)
        elif page and entry.parent is not None:
            self._keep(self._tails, entry.parent.key, (entry.key, entry.length))

    def ring(self, key: bytes) -> bool:
        return key in self._rings

    def after(self, chain: TokenChain, pages: int) -> bool:
        """Whether what followed the first ``pages`` pages of this prompt was there once."""
        start = pages * PAGE_TOKENS
        if start + PAGE_TOKENS <= len(chain) and chain.page_hash(pages) in self._pages:
            return True
        parent = chain.page_hash(pages - 1) if pages else chain.root
        key, length = self._tails.get(parent, (b"", 0))
        return start + length <= len(chain) and page_hash(parent, chain.ids[start : start + length]) == key

    def _keep(self, where: "OrderedDict[bytes, V]", key: bytes, value: V) -> None:
        where[key] = value
        where.move_to_end(key)
        if len(where) > self._limit:
            where.popitem(last=False)
