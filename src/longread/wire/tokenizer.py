"""Text to token ids and back, over a checkpoint's ``tokenizer.json``.

Two views of one vocabulary: with the added tokens (markup in the text becomes special tokens) and without (the same
text is plain text). Everything a person wrote goes through the second. Knows files and ids; knows no roles, no
templates. Encoding releases the interpreter lock, so that long prompts may be encoded in a thread.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer as RawTokenizer

from longread.spec.errors import CheckpointError
from longread.wire.encoder import TextEncoder
from longread.wire.encoding.pieces import Piece


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the other 68 for the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(rest)}


BYTES: Mapping[str, int] = _byte_of_char()


def _read(path: Path) -> bytes | None:
    """A file's bytes, None where there is none. Raises CheckpointError where it is no file or cannot be read."""
    try:
        if not path.exists():
            return None
        if not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path}: not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(document: bytes) -> dict[str, Any]:
    """The parts of a tokenizer.json that are read here, checked. Raises CheckpointError, which names no folder."""
    try:
        parsed = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"tokenizer.json: not valid JSON: {error}") from None
    model = parsed.get("model") if isinstance(parsed, dict) else None
    if not isinstance(model, dict):
        raise CheckpointError("not a tokenizer.json: it has no object 'model'")
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise CheckpointError(
            f"tokenizer.json: model type {_short(model.get('type'))} is not supported; DeepSeek's is byte-level BPE"
        )
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict) or not vocabulary or not all(map(_is_id, vocabulary.values())):
        raise CheckpointError("tokenizer.json: model.vocab must map at least one token to its id, a whole number")
    if not isinstance(parsed.get("normalizer"), dict | None):
        raise CheckpointError("tokenizer.json: normalizer must be an object or null")
    added = parsed.get("added_tokens")
    if not isinstance(added, list):
        raise CheckpointError("tokenizer.json: added_tokens must be a list")
    for i, token in enumerate(added):
        whole = isinstance(token, dict) and isinstance(token.get("special"), bool) and _is_id(token.get("id"))
        if not whole or not isinstance(token.get("content"), str) or not token["content"]:
            raise CheckpointError(
                f"tokenizer.json: added_tokens[{i}] must have a content, an id (a whole number) and special (a bool), "
                f"got {_short(token)}"
            )
    return dict(parsed)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _short(value: object) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _longest_token(parsed: Mapping[str, Any]) -> int | None:
    """Bytes that one token stands for at most; None where a token may swallow any number (a normalizer, stripping)."""
    normalizer = parsed.get("normalizer")
    if normalizer is not None and normalizer.get("normalizers") != []:
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in parsed["added_tokens"]):
        return None
    letters = frozenset(BYTES)  # one a byte
    sizes = [len(token) if letters.issuperset(token) else len(token.encode()) for token in parsed["model"]["vocab"]]
    return max([1, *sizes, *(len(token["content"].encode()) for token in parsed["added_tokens"])])


def ids_of(data: bytes) -> list[int]:
    """Ids that are given as int32 bytes."""
    return memoryview(data).cast("i").tolist()


class Tokenizer:
    """One checkpoint's tokenizer. Thread-safe."""

    def __init__(self, document: bytes, *, bos_id: int, eos_id: int):
        """``document``: a tokenizer.json. Raises CheckpointError for what is none, or no byte-level BPE."""
        parsed = _parse(document)
        added = parsed["added_tokens"]
        try:
            text = document.decode()
            self._marked = RawTokenizer.from_str(text)
            plain = RawTokenizer.from_str(orjson.dumps(parsed | {"added_tokens": []}).decode())
        except Exception as error:  # the library raises Exception itself
            raise CheckpointError(f"tokenizer.json: the tokenizers library refuses it: {_short(error)}") from error
        self._encoder = TextEncoder(text, parsed, self._marked, plain)
        self._markup = {token["content"]: int(token["id"]) for token in added}
        self._contents = {i: content for content, i in self._markup.items()}
        self._plain: dict[int, bytes] = {}  # bytes of ids that were seen
        self._hidden = frozenset(int(token["id"]) for token in added if token["special"])
        self._largest_id = max([*parsed["model"]["vocab"].values(), *self._contents])
        self._longest = _longest_token(parsed)
        self.vocab_size = self._marked.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_id = eos_id

    @classmethod
    def open(cls, checkpoint: Path, *, bos_id: int, eos_id: int) -> "Tokenizer":
        """Read ``tokenizer.json`` of a checkpoint folder; the ids come from its ModelSpec.

        Raises CheckpointError: no such file, not a byte-level BPE, or a ``tokenizer_config.json`` whose bos or eos
        token has another id than the model's config.
        """
        path = checkpoint / "tokenizer.json"
        document = _read(path)
        if document is None:
            raise CheckpointError(f"{path}: not found; copy the release's tokenizer.json into the checkpoint")
        try:
            tokenizer = cls(document, bos_id=bos_id, eos_id=eos_id)
        except CheckpointError as error:
            raise CheckpointError(f"{checkpoint}: {error}") from error
        tokenizer._agree(checkpoint / "tokenizer_config.json")
        return tokenizer

    def check_vocabulary(self, size: int) -> None:
        """Raises CheckpointError where the model has no row for one of the ids. Fewer ids than rows are padding."""
        if self._largest_id >= size:
            raise CheckpointError(
                f"tokenizer.json: its largest id is {self._largest_id}, but config.json's vocab_size is {size}: "
                "copy the tokenizer of this very release"
            )

    def _agree(self, path: Path) -> None:
        document = _read(path)
        if document is None:
            return
        try:
            config = orjson.loads(document)
        except orjson.JSONDecodeError as error:
            raise CheckpointError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise CheckpointError(f"{path}: must be a JSON object, not a {type(config).__name__}")
        for key, expected in (("bos_token", self.bos_id), ("eos_token", self.eos_id)):
            entry = config.get(key)
            content = entry.get("content") if isinstance(entry, dict) else entry
            if not isinstance(content, str) and entry is not None:
                raise CheckpointError(f"{path}: {key} must be a text or an object with a text as content")
            if content is not None and self.id_of(content) != expected:
                raise CheckpointError(
                    f"{path}: {key} {content!r} has id {self.id_of(content)}, but config.json says {expected}"
                )

    @property
    def added_ids(self) -> frozenset[int]:
        """The ids of markup, special or not: no text of a person becomes one of them."""
        return frozenset(self._contents)

    def has(self, markup: str) -> bool:
        return markup in self._markup

    def id_of(self, token: str) -> int | None:
        """The id of an added token or of a vocabulary entry; None where there is none."""
        return self._marked.token_to_id(token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of a text, without BOS. ``special``: markup inside the text becomes special tokens."""
        return ids_of(self._encoder.encode(text, special))

    def encode_bytes(self, text: str, *, special: bool = False) -> bytes:
        """The same as int32 bytes, in the order of ``array("i")``."""
        return self._encoder.encode(text, special)

    def hasten(self) -> str:
        """Use the faster library if it gives the same ids; see ``TextEncoder.hasten``."""
        return self._encoder.hasten()

    def least_tokens(self, texts: Iterable[str]) -> int:
        """No encoding of the texts, one behind the other, has fewer ids: what cannot fit is known without encoding."""
        if self._longest is None:
            return 0
        return -(-sum(len(text.encode()) for text in texts) // self._longest)

    def encode_prompt(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a rendered prompt. Markup that this vocabulary lacks (``<think>`` in V3) is written as plain text."""
        return ids_of(self.prompt_bytes(pieces))

    def prompt_bytes(self, pieces: Sequence[Piece]) -> bytes:
        """The same as int32 bytes, in the order of ``array("i")``."""
        found: list[bytes] = []
        pending: list[str] = []

        def flush() -> None:
            if pending:
                found.append(self._encoder.encode("".join(pending), False))
                pending.clear()

        for piece in pieces:
            token = self._markup.get(piece.text) if piece.markup else None
            if token is None:
                pending.append(piece.text)
            else:
                flush()
                found.append(array("i", (token,)).tobytes())
        flush()
        return b"".join(found)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of whole ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids).decode(errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """The bytes that a token adds to the text. ``skip_special``: none for BOS, EOS, padding and the like; turn,
        reasoning and tool markers are not among them (``special`` is false in DeepSeek's files) and stay visible.
        An id outside the vocabulary (a padded embedding row) has no bytes.
        """
        content = self._contents.get(token_id)
        if content is not None:
            return b"" if skip_special and token_id in self._hidden else content.encode()
        known = self._plain.get(token_id)
        if known is None and (token := self._marked.id_to_token(token_id)) is not None:
            mapped = all(char in BYTES for char in token)
            known = self._plain[token_id] = bytes(map(BYTES.__getitem__, token)) if mapped else token.encode()
        return known or b""

    def token_text(self, token_id: int) -> str:
        """One token for people and logprobs; a piece of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")
