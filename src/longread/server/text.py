"""POST /tokenize and /detokenize: what the engine would be given, and what its ids mean.

Knows: tokenizer, encoding. Must not know: engines beyond their limits.
"""

from starlette.requests import Request
from starlette.responses import Response

from longread.server.body import with_body
from longread.server.errors import json_response
from longread.server.named import may_name_documents, texts_named
from longread.server.prompts import check_count, encode_pieces, encode_text
from longread.server.state import ServerState, state_of
from longread.spec.errors import InvalidRequestError
from longread.wire import responses
from longread.wire.body import parse_json
from longread.wire.encoding.conversation import conversation
from longread.wire.types import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, validate


async def tokenize(request: Request) -> Response:
    """``prompt`` as /v1/completions would send it, or ``messages`` as /v1/chat/completions would."""
    state = state_of(request)
    limit = state.driver.engine_info.max_model_len
    made, _ = await with_body(
        request, state.bodies, state.options.max_body_bytes, lambda body: _tokenize(state, body), may_name_documents
    )
    ids, strings = made
    return json_response(responses.tokenize_response(ids, limit, strings))


def _tokenize(state: ServerState, body: bytes) -> tuple[tuple[int, ...], list[str] | None]:
    data = parse_json(body)
    fields: TokenizeChatRequest | TokenizeTextRequest
    if isinstance(data, dict) and "messages" in data:
        fields = validate(TokenizeChatRequest, data)
        asked = conversation(fields, state.encoding.abilities, state.template_defaults, texts_named(state, fields))
        rendered = state.encoding.render(asked)
        ids = encode_pieces(state, rendered.pieces)
    else:
        fields = validate(TokenizeTextRequest, data)
        ids = encode_text(state, fields.prompt, fields.add_special_tokens is not False)
    state.check_model(fields.model)
    return ids, [state.tokenizer.token_text(i) for i in ids] if fields.return_token_strs else None


async def detokenize(request: Request) -> Response:
    """The text of ``tokens``, special tokens included. 400 for ids outside the vocabulary."""
    state = state_of(request)
    text, _ = await with_body(
        request, state.bodies, state.options.max_body_bytes, lambda body: _detokenize(state, body)
    )
    return json_response(responses.detokenize_response(text))


def _detokenize(state: ServerState, body: bytes) -> str:
    fields = validate(DetokenizeRequest, parse_json(body))
    state.check_model(fields.model)
    check_count(state, len(fields.tokens), "tokens")
    size = state.tokenizer.vocab_size
    bad = next((i for i in fields.tokens if i >= size), None)
    if bad is not None:
        raise InvalidRequestError(f"tokens: id {bad} is outside 0..{size - 1}", param="tokens")
    return state.tokenizer.decode(fields.tokens, skip_special=False)
