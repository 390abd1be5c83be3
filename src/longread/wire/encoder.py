"""Text to ids as bytes, quickly and exactly: parts seen before are looked up, the others encoded by the faster library.

Knows the two tokenizer libraries through their calls, parts of texts and when to trust what; must not know roles,
prompts or files. What it gives is by its rules what ``tokenizers`` gives for the whole text: parts are cut where that
is proved to change nothing (``wire.cuts``), looked up by their whole text, and encoded by the faster library only after
it agreed on a set of hard texts, and as long as it goes on agreeing on samples of what is really asked.
"""

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from longread.wire.cuts import PART_CHARACTERS, divisible, parts
from longread.wire.fast import FastEncoder, first_difference
from longread.wire.seen import SeenParts

logger = logging.getLogger("longread.wire")

SEEN_BYTES = 64 * 1024 * 1024  # some ten million characters of English text with their ids
SAMPLE_SECONDS = 1.0
SAMPLE_CHARACTERS = 4 * PART_CHARACTERS  # longer ones would be felt


class TextEncoder:
    """One vocabulary in two views: ``marked`` makes added tokens of markup, ``plain`` has none. Thread-safe.

    ``document``: the tokenizer.json that ``marked`` was read from; ``parsed``: the same as an object.
    """

    def __init__(self, document: str, parsed: dict[str, Any], marked: RawTokenizer, plain: RawTokenizer):
        self._document = document
        self._markup = [token["content"] for token in parsed["added_tokens"]]
        self._views = {True: marked, False: plain}
        self._divisible = divisible(parsed)
        self._bounded = parsed.get("truncation") is not None or parsed.get("padding") is not None
        self._fast: FastEncoder | None = None
        self._seen = SeenParts(SEEN_BYTES)
        self._sampled = float("-inf")
        self._lock = threading.Lock()

    @property
    def fast(self) -> bool:
        """Whether the faster library is in use."""
        return self._fast is not None

    def hasten(self) -> str:
        """Try the faster library, which takes about a second to load a large vocabulary. Says what is used, and why."""
        if self._bounded:
            return "tokenizers (tokenizer.json asks for truncation or padding)"
        try:
            fast = FastEncoder(self._document)
        except ValueError as error:
            return f"tokenizers (fastokens cannot read this tokenizer.json: {str(error)[:200]})"
        different = first_difference(fast, self._exact_one, self._markup)
        if different is not None:
            return f"tokenizers (fastokens encodes {different[:40]!r} differently)"
        self._fast = fast
        return "fastokens (same ids as tokenizers on the start-up check)"

    def encode(self, text: str, special: bool) -> bytes:
        """Ids of the text as int32 bytes, in the order of ``array("i")``."""
        if len(text) < PART_CHARACTERS:  # not worth keeping
            return self._new([text], special)[0]
        pieces = parts(text) if self._divisible else [text]
        keys = [(special, piece) for piece in pieces]
        seen = self._seen  # what another thread finds out about the faster library meanwhile starts a new one
        found = seen.take(keys)
        new = [i for i, ids in enumerate(found) if ids is None]
        for i, ids in zip(new, self._new([pieces[i] for i in new], special), strict=True):
            found[i] = ids
            if len(pieces[i]) >= PART_CHARACTERS:  # a last part is the one that changes
                seen.add(keys[i], ids)
        return b"".join(ids for ids in found if ids is not None)

    def _new(self, texts: Sequence[str], special: bool) -> list[bytes]:
        """Ids of texts that are not known."""
        fast = self._fast
        if fast is None or not texts:
            return self._exact(texts, special)
        found = [fast.encode(text, special) for text in texts]
        given_up = [i for i, ids in enumerate(found) if ids is None]
        for i, ids in zip(given_up, self._exact([texts[i] for i in given_up], special), strict=True):
            found[i] = ids
        made = [ids for ids in found if ids is not None]
        sample = len(texts) // 2
        return made if self._agrees(texts[sample], special, made[sample]) else self._exact(texts, special)

    def _agrees(self, text: str, special: bool, ids: bytes) -> bool:
        """Compare what the faster library gave with what ``tokenizers`` gives, once in ``SAMPLE_SECONDS``."""
        with self._lock:
            now = time.monotonic()
            if now - self._sampled < SAMPLE_SECONDS or len(text) > SAMPLE_CHARACTERS:
                return True
            self._sampled = now
        if ids == self._exact_one(text, special):
            return True
        # Not the text itself: it is somebody's.
        logger.error(
            "fastokens encoded a text of %d characters otherwise than tokenizers; from now on tokenizers is used, "
            "which is slower: please report it with the model's tokenizer.json",
            len(text),
        )
        self._fast = None
        self._seen = SeenParts(SEEN_BYTES)
        return False

    def _exact_one(self, text: str, special: bool) -> bytes:
        return self._exact([text], special)[0]

    def _exact(self, texts: Sequence[str], special: bool) -> list[bytes]:
        """As a batch, also of one: ``RawTokenizer.encode`` would hold the interpreter lock, and every stream with it.
        The fast kind leaves out the offsets, which nobody here needs and which cost as much again.
        """
        if not texts:
            return []
        encodings = self._views[special].encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]
