"""A token sequence with its page hashes, converted and hashed once however often it is looked up.

Knows token ids and page identity; nothing of pages in memory.
"""

from array import array
from collections.abc import Callable, Sequence

from longread.spec.state import PAGE_TOKENS, HashedTokens, page_hash

ID_BYTES = 4


class TokenChain:
    """Immutable token ids, as int32, and the chained hash of each full page under ``root``.

    ``hashed``: bytes and hashes of the tokens or their beginning, made elsewhere; ignored unless it fits.
    Raises OverflowError or TypeError for ids that are not 32-bit integers.
    """

    __slots__ = ("_hashes", "data", "ids", "root")

    def __init__(self, root: bytes, tokens: Sequence[int], hashed: HashedTokens | None = None):
        self.root = root
        self._hashes: list[bytes] = []
        if hashed is not None and hashed.fits(root, tokens):
            rest = tokens[len(hashed.data) // ID_BYTES :]
            self.data = hashed.data + array("i", rest).tobytes() if rest else hashed.data
            self._hashes.extend(hashed.hashes)
        else:
            self.data = encode(tokens)
        self.ids = memoryview(self.data).cast("i")  # bytes compare and slice at memory speed, and are there once

    def __len__(self) -> int:
        return len(self.ids)

    def run(self, start: int, stop: int) -> bytes:
        """Tokens start .. stop-1 as int32 bytes."""
        return self.data[start * ID_BYTES : stop * ID_BYTES]

    def page_hash(self, page: int) -> bytes:
        """Identity of full page number ``page``, which must lie within the tokens; hashed on first use."""
        while len(self._hashes) <= page:
            done = len(self._hashes)
            parent = self._hashes[-1] if done else self.root
            self._hashes.append(page_hash(parent, self.ids[done * PAGE_TOKENS : (done + 1) * PAGE_TOKENS]))
        return self._hashes[page]

    def page_hashes(self, start: int, stop: int) -> list[bytes]:
        """``page_hash`` of the pages start .. stop-1: for who looks up a book of them."""
        if stop > start:
            self.page_hash(stop - 1)
        return self._hashes[start:stop]

    def common(self, other: "TokenChain") -> int:
        """Length in tokens of the longest common prefix with a chain of the same root. By the pages' identities: two
        readings of one book are compared at a few places.
        """
        pages = min(len(self), len(other)) // PAGE_TOKENS
        start = PAGE_TOKENS * leading(pages, lambda page: self.page_hash(page) == other.page_hash(page))
        stop = start + PAGE_TOKENS
        return start + common_tokens(self.run(start, stop), other.run(start, stop))


def leading(count: int, holds: Callable[[int], bool]) -> int:
    """How many of ``count`` pages ``holds`` is true of, from the first on, where behind one that it is false of it is
    false of all. It asks few of them, and none more than twice as deep as the answer: pages may be hashed for it.
    """
    done, step = 0, 1
    while done < count:
        page = min(done + step, count) - 1
        if holds(page):
            done, step = page + 1, step * 2
        elif page == done:
            break
        else:  # the first one that it is false of is this or before it: halve instead of doubling until it is found
            count, step = page, max((page - done) // 2, 1)
    return done


def encode(tokens: Sequence[int]) -> bytes:
    """Token ids as int32 bytes, as ``TokenChain.run`` gives them."""
    return array("i", tokens).tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two encoded runs; the cost follows the answer."""
    limit = min(len(a), len(b)) // ID_BYTES
    done, step = 0, PAGE_TOKENS
    while done < limit:
        stop = min(done + step, limit)
        if a[done * ID_BYTES : stop * ID_BYTES] == b[done * ID_BYTES : stop * ID_BYTES]:
            done, step = stop, step * 2
        elif stop == done + 1:
            break
        else:  # the first difference is inside: halve instead of doubling until it is found
            limit = stop
            step = max((stop - done) // 2, 1)
    return done
