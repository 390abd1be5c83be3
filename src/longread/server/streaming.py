"""Work that lasts as long as its client: a client that goes away takes its requests with it.

Knows: ASGI, subscriptions. Must not know: what the bytes mean.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longread.server.driver import EngineDriver
from longread.server.subscription import Subscription

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """``work``'s result; cancels it and raises ClientDisconnect when the client goes away. The body must be read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from ``chunks``. Whatever way it ends, what is left of ``subscription`` is cancelled and
    ``on_end`` is called.

    Starlette's StreamingResponse would leave the requests running when the client is gone before the first chunk.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        driver: EngineDriver,
        subscription: Subscription,
        headers: Mapping[str, str],
        on_end: Callable[[], None],
    ):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._chunks = chunks
        self._driver = driver
        self._subscription = subscription
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except ClientDisconnect:
            pass
        finally:
            self._driver.cancel(self._subscription)
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
