"""Texts to prompt ids and their page identities, where they can fit at all.

Knows: tokenizer, page hasher, the engine's limits. Must not know: routes, request shapes. A text may be as long as a
body; one that no encoding could make fit is refused by its bytes, since encoding it would take long for nothing.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longread.server.state import ServerState
from longread.spec.errors import ContextLengthError
from longread.spec.state import HashedTokens, salted_root
from longread.wire.encoding.pieces import Piece
from longread.wire.tokenizer import ids_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """``hashed`` None: there is nothing to hash, or ids that are none."""

    ids: tuple[int, ...]
    hashed: HashedTokens | None = None


def encode_text(state: ServerState, text: str, bos: bool) -> tuple[int, ...]:
    """Ids of a text whose markup counts, behind BOS where ``bos``. Raises ContextLengthError."""
    return tuple(ids_of(text_bytes(state, text, bos)))


def encode_pieces(state: ServerState, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Ids of a rendered conversation. Raises ContextLengthError."""
    return tuple(ids_of(pieces_bytes(state, pieces)))


def text_bytes(state: ServerState, text: str, bos: bool) -> bytes:
    """The same as ``encode_text`` as int32 bytes."""
    _check_fits(state, [text], "prompt")
    first = array("i", (state.tokenizer.bos_id,)).tobytes() if bos else b""
    return first + state.tokenizer.encode_bytes(text, special=True)


def pieces_bytes(state: ServerState, pieces: Sequence[Piece]) -> bytes:
    """The same as ``encode_pieces`` as int32 bytes."""
    _check_fits(state, [piece.text for piece in pieces], "messages")
    return state.tokenizer.prompt_bytes(pieces)


def prompt_of(state: ServerState, data: bytes, salt: str | None = None) -> Prompt:
    """A prompt given as int32 bytes, hashed for this server's engine and a ``cache_salt``."""
    if not data:
        return Prompt(())
    hashed, ids = state.hasher.hash(salted_root(state.driver.engine_info.cache_root, salt), data)
    return Prompt(ids, hashed)


def prompt_of_ids(state: ServerState, ids: tuple[int, ...], salt: str | None = None) -> Prompt:
    """The same for ids that a client sent as numbers; those that no prompt can hold are the engine's to refuse."""
    try:
        return prompt_of(state, array("i", ids).tobytes(), salt)
    except OverflowError:
        return Prompt(ids)


def check_count(state: ServerState, count: int, param: str) -> None:
    """Refuse more ids than a context can hold. Raises ContextLengthError."""
    limit = state.driver.engine_info.max_model_len
    if count > limit:
        raise ContextLengthError(f"{param}: {count} token ids are given, max_model_len is {limit}: send fewer", param)


def _check_fits(state: ServerState, texts: Sequence[str], param: str) -> None:
    limit, least = state.driver.engine_info.max_model_len, state.tokenizer.least_tokens(texts)
    if least > limit:
        size = sum(len(text.encode()) for text in texts)
        raise ContextLengthError(
            f"max_model_len is {limit} tokens, but the text has {size} bytes, which are at least {least} tokens: "
            "shorten it",
            param,
        )
