"""What every HTTP call passes before and after its route: a request id, the API key, a count of the answer.

Knows: ASGI, the options, the metrics. Must not know: bodies, engines. Plain ASGI on purpose: it adds no task and no
buffering to a stream, and a refused call is answered before its body is read.
"""

import hashlib
import re
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longread.server.clock import Clock
from longread.server.errors import error_response
from longread.server.metrics import ServerMetrics
from longread.spec.errors import AuthenticationError

REQUEST_ID_HEADER = "X-Request-Id"
TIMING_HEADER = "X-Longread-Timing"
OPEN_PATHS = frozenset({"/health", "/ready"})

OWNER_DIGITS = 16  # of a digest of a digest: it tells keys apart and nothing about them

_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class Gate:
    """The outermost ASGI layer. ``routes`` are the patterns that may become metric labels."""

    def __init__(self, app: ASGIApp, *, api_keys: Iterable[str], metrics: ServerMetrics, routes: frozenset[str]):
        self._app = app
        # Looked up by digest, however many there are: what its time tells of a digest tells nothing about a key.
        digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._keys = {digest: key for key, digest in reversed(tuple(enumerate(digests)))}
        self._owners = tuple(hashlib.sha256(digest).hexdigest()[:OWNER_DIGITS] for digest in digests)
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        mine = scope.setdefault("state", {})
        mine["request_id"], mine["clock"] = request_id, Clock()
        route = scope["path"] if scope["path"] in self._routes else "other"

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
                self._metrics.responded(route, message["status"])
            await send(message)

        mine["key"] = self._key_of(headers)
        mine["owner"] = self._owners[mine["key"]] if mine["key"] is not None else ""
        if self._keys and scope["path"] not in OPEN_PATHS and mine["key"] is None:
            error = AuthenticationError(
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
            response = error_response(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send_marked)
            return
        await self._app(scope, receive, send_marked)

    def _key_of(self, headers: Headers) -> int | None:
        """Which of the keys was sent, None for none of them."""
        if not self._keys:
            return None
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        key = self._keys.get(hashlib.sha256(token.strip().encode()).digest())
        return key if scheme.lower() == "bearer" else None
