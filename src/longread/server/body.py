"""Reads a request body within the size limit, and moves long work off the loop.

Knows: ASGI bodies, threads. Must not know: what is in a body.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from longread.server.clock import Clock
from longread.server.streaming import while_connected
from longread.spec.errors import InvalidRequestError, OverloadedError, PayloadTooLargeError, RequestTimeoutError
from longread.wire.binary import MEDIA_TYPE

# Above this many bytes parsing and tokenising take milliseconds: they leave the loop, so that open streams go on.
OFFLOAD_BYTES = 16 * 1024

# Few texts at a time: each costs memory while it is read, and together they must leave the engine its cores.
OFFLOAD_THREADS = 2

BODY_SECONDS = 60.0  # without a byte
BODIES_AT_ONCE = 4  # of the largest size; of the usual size, thousands

Result = TypeVar("Result")

_threads = ThreadPoolExecutor(OFFLOAD_THREADS, thread_name_prefix="longread-prompt")


class Bodies:
    """Bytes of the bodies that are being read or made into prompts, of all connections. Belongs to the loop thread."""

    def __init__(self, limit: int):
        self._limit = limit
        self.held = 0

    def hold(self, size: int) -> None:
        """Raises OverloadedError where the bytes would exceed the limit; they are not held then."""
        if self.held + size > self._limit:
            raise OverloadedError(
                f"request bodies of {self.held} bytes are being read, the limit is {self._limit} "
                f"({BODIES_AT_ONCE} times --max-body-bytes): try again later",
                code="too_many_bodies",
            )
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size


def clock_of(request: Request) -> Clock:
    """The call's clock, which the gate started."""
    clock: Clock = request.state.clock
    return clock


async def with_body(
    request: Request,
    bodies: Bodies,
    limit: int,
    call: Callable[[bytes], Result],
    is_long_work: Callable[[bytes], bool] = lambda body: False,
    binary: bool = False,
) -> tuple[Result, int]:
    """What ``call`` makes of the body, on a thread where that is large or ``is_long_work`` says so, and its size.

    ``binary``: the route also takes bytes that are no JSON. Raises what ``read_body`` and ``call`` raise,
    OverloadedError where too many bodies are on their way, and ClientDisconnect; work that has not begun by then never
    does.
    """
    held, clock = 0, clock_of(request)

    def hold(size: int) -> None:
        nonlocal held
        bodies.hold(size)
        held += size

    try:
        body = await read_body(request, limit, hold, binary)
        clock.mark("receive")

        def work() -> Result:
            clock.mark("thread")
            return call(body)

        weight = OFFLOAD_BYTES + 1 if is_long_work(body) else len(body)
        return await while_connected(request.receive, offload(weight, work)), len(body)
    finally:
        bodies.release(held)


def media_type(request: Request) -> str:
    """What the body is said to be. Nothing said is not taken for JSON: any web page may have a browser send that here,
    while JSON by its name needs the consent that CORS asks for.
    """
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_body(request: Request, limit: int, hold: Callable[[int], None], binary: bool = False) -> bytes:
    """The whole body; ``hold`` is told of each piece before it is kept.

    Raises PayloadTooLargeError before more than ``limit`` bytes are held, and RequestTimeoutError when nothing came for
    ``BODY_SECONDS``.
    """
    kind = media_type(request)
    if kind != "application/json" and not kind.endswith("+json") and not (binary and kind == MEDIA_TYPE):
        known = f"application/json or {MEDIA_TYPE}" if binary else "application/json"
        given = f"content type {kind!r} is not supported" if kind else "the body has no Content-Type"
        raise InvalidRequestError(f"{given}: send {known}")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    chunks: list[bytes] = []
    size = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(size, limit)
                hold(len(chunk))
                chunks.append(chunk)
                deadline.reschedule(loop.time() + BODY_SECONDS)
    except TimeoutError:
        raise RequestTimeoutError(
            f"nothing of the request body came for {BODY_SECONDS:g} s, after {size} bytes: send the request again",
            code="request_timeout",
        ) from None
    return b"".join(chunks)


async def offload(size: int, call: Callable[[], Result]) -> Result:
    """Run ``call`` here for small work, on one of ``OFFLOAD_THREADS`` for large work; ``size`` in bytes of input.

    Cancelled before its turn has come, it does not run.
    """
    if size <= OFFLOAD_BYTES:
        return call()
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body has {size} bytes or more, the limit is {limit} (--max-body-bytes): send less, or raise the limit",
        code="payload_too_large",
    )
