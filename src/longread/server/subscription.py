"""The events of one HTTP call on their way from the driver to whoever writes its answer. Loop thread only.

Knows: events. Must not know: HTTP, text. Waking a task for each token of each stream costs more than the token itself:
whoever waits may leave a function that takes tokens at once, and is woken only for what that does not take.
"""

import asyncio
from collections.abc import Callable, Sequence

from longread.spec.engine import Event, FinishEvent, GenerationRequest
from longread.spec.errors import RequestError

Direct = Callable[[Sequence[Event]], bool]


class Subscription:
    """The events of one HTTP call's requests, in order.

    ``refusals`` holds the error of each request that did not end in the engine, by request id. ``direct`` is given
    tokens while ``take`` waits, and returns False to leave them to it; what it raises, ``take`` raises.
    """

    def __init__(self, requests: Sequence[GenerationRequest]):
        self.choice = {request.request_id: index for index, request in enumerate(requests)}
        self.open = len(requests)
        self.refusals: dict[str, RequestError] = {}
        self.direct: Direct | None = None
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Event]:
        """All events that are here, at least one. Empty once every request has ended and all was taken."""
        if not self._events and self.open:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    @property
    def unread(self) -> int:
        """Events that nobody has taken."""
        return len(self._events)

    def give(self, events: Sequence[Event]) -> None:
        """What came at one time, in order."""
        ends = sum(isinstance(event, FinishEvent) for event in events)
        self.open -= ends
        waiter = self._waiter
        waits = waiter is not None and not waiter.done()
        if waits and waiter is not None and self.direct is not None and not ends and not self._events:
            try:
                if self.direct(events):
                    return
            except Exception as error:  # noqa: BLE001  one stream's failure is its task's, and must not reach the others
                waiter.set_exception(error)
                return
        self._events += events
        if waits and waiter is not None:
            waiter.set_result(None)
