"""The time limits of accepted requests: until a prompt begins to be read, until the first token, until the end.

Knows: an event loop's timers, the limits as of when a request was accepted. Must not know: the engine, HTTP.
"""

import asyncio
from collections.abc import Callable

from longread.server.backlog import Progress
from longread.server.limits import TIMEOUTS, Limits
from longread.spec.engine import GenerationRequest, class_of
from longread.spec.errors import DeadlineError

CLIENT = "client_deadline"  # the limit that came with a request
Expire = Callable[[str, DeadlineError, str], None]
_MISSED = {
    "queue_timeout": "its prompt did not begin to be read",
    "ttft_timeout": "it had no first token",
    "request_timeout": "it had not ended",
    CLIENT: "it had not ended by the deadline that came with it",
}


class Deadlines:
    """Calls ``expire`` with a request's id, error and the limit's name when its time is over. Loop thread only."""

    def __init__(self, expire: Expire):
        self._expire = expire
        self._timers: dict[str, dict[str, asyncio.TimerHandle]] = {}

    def start(
        self, request: GenerationRequest, limits: Limits, progress: Progress | None, client: float | None = None
    ) -> None:
        """A request was accepted. ``progress`` tells whether its prompt is being read; needed for ``queue_timeout``.
        ``client``: seconds that its client still gives it; unlike the server's limits also to a reading of documents.
        """
        given: dict[str, float | None] = {CLIENT: client}
        if class_of(request.priority) != "ingest":
            given |= {name: getattr(limits, name) for name in TIMEOUTS}
        timers: dict[str, asyncio.TimerHandle] = {}
        loop = asyncio.get_running_loop()
        for name, seconds in given.items():
            if seconds is not None:
                timers[name] = loop.call_later(seconds, self._over, request.request_id, name, seconds, progress)
        if timers:
            self._timers[request.request_id] = timers

    def first_token(self, request_id: str) -> None:
        """Only the limit of the whole is left."""
        timers = self._timers.get(request_id, {})
        for name in ("queue_timeout", "ttft_timeout"):
            if name in timers:
                timers.pop(name).cancel()

    def end(self, request_id: str) -> None:
        """Nothing is left."""
        for timer in self._timers.pop(request_id, {}).values():
            timer.cancel()

    def _over(self, request_id: str, name: str, seconds: float, progress: Progress | None) -> None:
        if name == "queue_timeout" and progress is not None and progress.tokens > 0:
            return
        self._expire(
            request_id,
            DeadlineError(f"the request was given up after {seconds:g} s ({name}): {_MISSED[name]} by then", code=name),
            name,
        )
