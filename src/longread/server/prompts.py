"""Texts to prompt ids, where they can fit at all.

Knows: tokenizer, the engine's limits. Must not know: routes, request shapes. A text may be as long as a body; one that
no encoding could make fit is refused by its bytes, since encoding it would take seconds for nothing.
"""

from collections.abc import Sequence

from longread.server.state import ServerState
from longread.spec.errors import ContextLengthError
from longread.wire.encoding.pieces import Piece


def encode_text(state: ServerState, text: str, bos: bool) -> tuple[int, ...]:
    """Ids of a text whose markup counts, behind BOS where ``bos``. Raises ContextLengthError."""
    _check_fits(state, [text], "prompt")
    return (*((state.tokenizer.bos_id,) if bos else ()), *state.tokenizer.encode(text, special=True))


def encode_pieces(state: ServerState, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Ids of a rendered conversation. Raises ContextLengthError."""
    _check_fits(state, [piece.text for piece in pieces], "messages")
    return tuple(state.tokenizer.encode_prompt(pieces))


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
