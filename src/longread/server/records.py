"""GET /v1/longread/requests and /v1/longread/requests/ID: what became of the last calls.

Knows: the records. Must not know: how they came about. A caller sees the records of its own API key only.
"""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from longread.server.calls import MAX_RECORDS, Call
from longread.server.errors import json_response
from longread.server.state import ServerState, state_of
from longread.server.work import choice_id
from longread.spec.engine import Standing
from longread.spec.errors import InvalidRequestError, RecordNotFoundError
from longread.wire.responses import Json

MAX_STANDINGS = 8


async def newest(request: Request) -> Response:
    """The newest first; ``limit`` in the query, 20 without it."""
    given = request.query_params.get("limit", "20")
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_RECORDS):
        raise InvalidRequestError(f"limit: {given[:20]!r} is not a number in 1..{MAX_RECORDS}", param="limit")
    calls = state_of(request).calls.newest(int(given), request.state.key)
    return json_response({"object": "list", "data": [call.summary() for call in calls]})


async def one(request: Request) -> Response:
    """By the answer's id or by X-Request-Id. While it runs, ``standing`` says where it stands and why it is not
    further, of the first ``MAX_STANDINGS`` of its choices that have not ended. 404 for one that is not kept (any more).
    """
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

    return json_response(call.record(decode) | {"standing": await _standing(state, call)})


async def _standing(state: ServerState, call: Call) -> list[Json]:
    found: list[Json] = []
    for index in range(call.choices if call.state == "running" else 0):
        standing = await state.driver.explain(choice_id(call.answer_id, index))
        if standing is not None:
            found.append({"choice": index} | standing_json(standing, call.shared))
        if len(found) == MAX_STANDINGS:
            break
    return found


def standing_json(standing: Standing, shared: bool) -> Json:
    """Times in milliseconds. ``shared``: not that a prefix is being computed, which would tell of another's prompt."""
    reason, detail = standing.reason, standing.detail
    if shared and reason == "prefix":
        reason, detail = "turn", f"{standing.position} requests come before it"
    return {
        "phase": standing.phase,
        "reason": reason,
        "detail": detail,
        "class": standing.request_class,
        "position": standing.position,
        "num_waiting": standing.num_waiting,
        "num_running": standing.num_running,
        "prompt_tokens": standing.prompt_tokens,
        "computed_tokens": standing.computed_tokens,
        "preemptions": standing.preemptions,
        "waited_ms": _ms(standing.waited),
        "starts_in_ms": _ms(standing.starts_in),
        "first_token_in_ms": _ms(standing.first_token_in),
        "cost_known": standing.cost_known,
        "step_target_ms": _ms(standing.step_target),
        "step_reason": standing.step_reason,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
