"""Reads a request body within the size limit, and moves long work off the loop.

Knows: ASGI bodies, threads. Must not know: what is in a body.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from longread.spec.errors import InvalidRequestError, PayloadTooLargeError

# Above this many bytes parsing and tokenising take milliseconds: they leave the loop, so that open streams go on.
OFFLOAD_BYTES = 16 * 1024

# Few texts at a time: each costs memory while it is read, and together they must leave the engine its cores.
OFFLOAD_THREADS = 2

Result = TypeVar("Result")

_threads = ThreadPoolExecutor(OFFLOAD_THREADS, thread_name_prefix="longread-prompt")


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises PayloadTooLargeError before more than ``limit`` bytes are held."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequestError(f"content type {media_type!r} is not supported: send application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(size, limit)
        chunks.append(chunk)
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
