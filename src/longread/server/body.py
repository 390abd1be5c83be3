"""Reads a request body within the size limit and turns it into JSON.

Knows: ASGI bodies, orjson. Must not know: what the fields mean.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import orjson
from starlette.requests import Request

from longread.spec.errors import InvalidRequestError, PayloadTooLargeError

# Above this many bytes parsing and tokenising take milliseconds: they leave the loop, so that open streams go on.
OFFLOAD_BYTES = 16 * 1024

Result = TypeVar("Result")


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


def decode_json(body: bytes) -> dict[str, object]:
    """Strict JSON: no NaN, no invalid UTF-8, bounded nesting. Raises InvalidRequestError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def offload(size: int, call: Callable[[], Result]) -> Result:
    """Run ``call`` here for small work, on a thread for large work; ``size`` in bytes of input."""
    if size <= OFFLOAD_BYTES:
        return call()
    return await asyncio.to_thread(call)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body has {size} bytes or more, the limit is {limit} (--max-body-bytes): send less, or raise the limit",
        code="payload_too_large",
    )
