"""How an error looks on the wire: ``{"error": {"message", "type", "param", "code"}}``, as OpenAI's clients expect.

Knows: RequestError and HTTP statuses. Must not know: routes. No message carries a traceback or a path of this machine.
"""

import http
import logging
import math

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from longread.spec.errors import (
    DeadlineError,
    EngineFailedError,
    OverloadedError,
    PoisonedPromptError,
    RequestError,
    RequestTimeoutError,
)
from longread.wire.responses import error_body

logger = logging.getLogger("longread.server")

RETRY_AFTER_SECONDS = 1


def error_response(error: RequestError) -> Response:
    """The answer for an error: its status and body, and Retry-After where trying again helps."""
    headers = None
    if isinstance(error, OverloadedError | DeadlineError | PoisonedPromptError):
        seconds = error.retry_after if error.retry_after is not None else RETRY_AFTER_SECONDS
        headers = {"Retry-After": str(max(RETRY_AFTER_SECONDS, math.ceil(seconds)))}
    elif isinstance(error, RequestTimeoutError):
        headers = {"Connection": "close"}  # the rest of the body may still come
    return json_response(error_body(error), status=error.status, headers=headers)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any JSON answer."""
    return Response(orjson.dumps(content), status_code=status, headers=headers, media_type="application/json")


async def on_request_error(request: Request, error: Exception) -> Response:
    """A route raised RequestError."""
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown route (404) or wrong method (405), in the same shape."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    messages = {
        404: f"no route {path}: GET /v1/models, POST /v1/chat/completions and POST /v1/completions are the main ones",
        405: f"{method} is not allowed for {path}",
    }
    body = {
        "error": {
            "message": messages.get(error.status_code, error.detail),
            "type": "not_found_error" if error.status_code == 404 else "invalid_request_error",
            "param": None,
            "code": http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "_"),
        }
    }
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Nobody reads this answer; the status (nginx's "client closed request") is for the metrics."""
    return Response(status_code=499)


async def on_crash(request: Request, error: Exception) -> Response:
    """A bug in the server. Starlette re-raises after this answer: the log has the traceback, the client has not."""
    request_id = request.scope.get("state", {}).get("request_id", "")
    return error_response(
        EngineFailedError(
            f"internal server error; the server's log has the details of request {request_id}", code="internal"
        )
    )
