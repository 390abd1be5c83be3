"""The naive cache: an oracle for the prefix cache, small enough to be believed.

It stores every published prefix as a plain tuple of tokens, forgets nothing by itself, and answers what could be reused
under the same landing rules. The real cache may find less (it evicts), never more. Quadratic on purpose.
"""

from collections.abc import Sequence


class NaiveCache:
    """``rings``: reuse lands only on published positions; otherwise anywhere, cut to ``grain`` tokens inside a page."""

    def __init__(self, rings: bool, grain: int = 1, page_tokens: int = 256):
        self.rings = rings
        self.grain = grain
        self.page_tokens = page_tokens
        self.prefixes: set[tuple[int, ...]] = set()

    def publish(self, tokens: Sequence[int]) -> None:
        """State at the end of ``tokens`` can be landed on from now on."""
        self.prefixes.add(tuple(tokens))

    def forget(self, tokens: Sequence[int]) -> None:
        """It cannot any more (a rolling snapshot was replaced)."""
        self.prefixes.discard(tuple(tokens))

    def match(self, tokens: Sequence[int]) -> int:
        """Tokens of the prompt that could be reused, at most len(tokens) - 1."""
        most = max(len(tokens) - 1, 0)
        return max((self._usable(prefix, tokens, most) for prefix in self.prefixes), default=0)

    def _usable(self, prefix: tuple[int, ...], tokens: Sequence[int], most: int) -> int:
        if self.rings:
            return len(prefix) if len(prefix) <= most and tuple(tokens[: len(prefix)]) == prefix else 0
        common = 0
        while common < min(len(prefix), most) and prefix[common] == tokens[common]:
            common += 1
        whole = common // self.page_tokens * self.page_tokens
        return whole + (common - whole) // self.grain * self.grain
