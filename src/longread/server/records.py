"""GET /v1/longread/requests and /v1/longread/requests/ID: what became of the last calls.

Knows: the records. Must not know: how they came about. A caller sees the records of its own API key only.
"""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from longread.server.calls import MAX_RECORDS
from longread.server.errors import json_response
from longread.server.state import state_of
from longread.spec.errors import InvalidRequestError, RecordNotFoundError


async def newest(request: Request) -> Response:
    """The newest first; ``limit`` in the query, 20 without it."""
    given = request.query_params.get("limit", "20")
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_RECORDS):
        raise InvalidRequestError(f"limit: {given[:20]!r} is not a number in 1..{MAX_RECORDS}", param="limit")
    calls = state_of(request).calls.newest(int(given), request.state.key)
    return json_response({"object": "list", "data": [call.summary() for call in calls]})


async def one(request: Request) -> Response:
    """By the answer's id or by X-Request-Id. 404 for one that is not kept (any more)."""
    state, name = state_of(request), request.path_params["id"]
    call = state.calls.find(name, request.state.key)
    if call is None:
        raise RecordNotFoundError(
            f"no record of request {name[:200]!r}: the last {MAX_RECORDS} calls that reached the engine are kept, each "
            "for its own API key; GET /v1/longread/requests lists them",
            code="record_not_found",
        )

    def decode(ids: Sequence[int]) -> str:
        return state.tokenizer.decode(list(ids), skip_special=False)

    return json_response(call.record(decode))
