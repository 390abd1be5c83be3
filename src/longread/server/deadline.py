"""The time that a client gives its request, from the header that it came with.

Knows: header names, bounds. Must not know: limits of the server, which hold beside it: a client can only tighten them.

``X-Request-Timeout-S``: seconds, ours. ``X-Envoy-Expected-Rq-Timeout-Ms``: milliseconds after which an Envoy in front
gives the request up, as it tells the server behind it
(https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/router_filter). Of both, the shorter one
holds. What OpenAI's clients send (``X-Stainless-Read-Timeout``) is how long they wait for the next byte, not for the
end: it is no deadline.
"""

import re

from starlette.requests import Request

from longread.server.body import clock_of
from longread.spec.errors import InvalidRequestError

HEADERS = {"X-Request-Timeout-S": 1.0, "X-Envoy-Expected-Rq-Timeout-Ms": 1e-3}  # and their units in seconds
LEAST, MOST = 1e-3, 86400.0  # seconds

_NUMBER = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)


def deadline_of(request: Request) -> float | None:
    """Monotonic time by which the client wants its answer whole, counted from its first byte; None: it does not say.

    Raises InvalidRequestError, before anything of the body is read.
    """
    given = [_seconds(name, unit, text) for name, unit in HEADERS.items() for text in request.headers.getlist(name)]
    return clock_of(request).begun + min(given) if given else None


def _seconds(name: str, unit: float, text: str) -> float:
    seconds = float(text) * unit if _NUMBER.fullmatch(text.strip()) else 0.0
    if not LEAST <= seconds <= MOST:
        raise InvalidRequestError(
            f"{name}: {text[:40]!r} is not a number in {LEAST / unit:g}..{MOST / unit:.10g}: leave the header out "
            "where you have no deadline",
            param=name,
            code="invalid_deadline",
        )
    return seconds
