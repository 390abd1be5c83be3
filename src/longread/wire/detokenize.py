"""Token ids to text as they come: whole characters only, and nothing past a stop string.

Both classes do constant work a token (amortised) and hold back only what is not decided yet: the bytes of an unfinished
character, the letters that may be the beginning of a stop string. Knows no requests and no markup.
"""

import codecs
from collections.abc import Sequence

from longread.wire.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """One output's text. All ``push`` and ``flush`` results joined equal ``Tokenizer.decode`` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, possibly none. Bytes that can no longer become UTF-8 are U+FFFD."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_special=self._skip))

    def flush(self) -> str:
        """At the end: U+FFFD where a character was left unfinished."""
        return self._decoder.decode(b"", final=True)


def held_suffix(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of one of ``words``."""
    longest = 0
    for word in words:
        for size in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:size]):
                longest = size
                break
    return longest


def earliest(text: str, words: Sequence[str]) -> tuple[int, str] | None:
    """Position and word of the first occurrence of any of ``words``; the longest word where two begin together."""
    found = [(at, -len(word), word) for word in words if (at := text.find(word)) >= 0]
    if not found:
        return None
    at, _, word = min(found)
    return at, word


class StopChecker:
    """Ends a text at the first stop string, wherever chunk borders fall.

    "First" is the one that is complete first, as the text grows letter by letter; of several complete at the same
    letter, the one that begins first. ``include``: the stop string itself stays in the text. Only a stop string that
    pushed text with ``stoppable`` completes counts; it may begin in the text before (vLLM's min_tokens).
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, stoppable: bool = True) -> str:
        """The text that is now certain. Empty for ever once ``matched`` is set."""
        if self.matched is not None or not text:
            return ""
        if not self._stops:
            return text
        seen = len(self._held)
        text = self._held + text
        hits = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, seen + 1 - len(stop)))) >= 0
        ]
        if hits and stoppable:
            end, at, self.matched = min(hits)
            self._held = ""
            return text[:end] if self._include else text[:at]
        keep = held_suffix(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """At the end: what was held back and became no stop string."""
        held, self._held = self._held, ""
        return held
