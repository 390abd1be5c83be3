"""One request over HTTP: sent once, read to its end, timed, never sent again.

Knows aiohttp and how a request can break. Must not know when requests are due, nor what is made of the figures.

Connections are kept alive and carry one stream at a time; one that lay idle for longer than ``KEEP_ALIVE`` is not used
again, since uvicorn closes idle ones after 5 s and a request that meets the close is lost.
"""

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace, TracebackType

import aiohttp
import orjson

from longread.measure.load.outcome import Outcome
from longread.measure.load.stream import Reader, StreamError, header_timing, said_of
from longread.measure.load.target import Target

KEEP_ALIVE = 4.0  # seconds
ERROR_BYTES = 65_536  # read of an answer that is an error
SLICE_BYTES = 2**18  # of a long body, between which other streams are served
REST_SECONDS = 1.0  # for the end of the body after [DONE]; without it the connection is not used again
CANCELLED = "cancelled"
REFUSALS = range(400, 500)
HEADERS = {
    "Content-Type": "application/json",
    "Accept": "text/event-stream",
    "Accept-Encoding": "identity",  # a compressor between would gather chunks
    "User-Agent": "longread-bench",
}


class Client:
    """Requests to ``target`` with at most ``timeout`` seconds each, connecting included. ``clock``: seconds.

    Use as an async context; ``send`` may run any number of times at once.
    """

    def __init__(self, target: Target, timeout: float, clock: Callable[[], float] = time.perf_counter):
        self.target, self.timeout, self.clock = target, timeout, clock
        self._headers = {**HEADERS, **target.headers}

    async def __aenter__(self) -> "Client":
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_start.append(_new_connection)
        trace.on_connection_reuseconn.append(_old_connection)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=None),
            timeout=aiohttp.ClientTimeout(total=None),
            trace_configs=[trace],
            trust_env=not self.target.local,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**18,
            max_field_size=65_536,
        )
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def send(self, body: bytes, outcome: Outcome, started: float = 0.0) -> None:
        """Ask once and fill ``outcome``; its instants count from ``started``. Whatever the server does is an outcome;
        only cancellation goes through, after the outcome says so.
        """
        reader = Reader(outcome)
        outcome.sent = self.clock() - started
        try:
            async with asyncio.timeout(self.timeout):
                await self._exchange(body, reader, started)
            outcome.status = "ok"
        except TimeoutError:
            outcome.status, outcome.failure = "timeout", _stage(outcome)
            outcome.error = f"no end of the answer within {self.timeout:g} s"
        except asyncio.CancelledError:
            outcome.status, outcome.failure, outcome.error = "cancelled", CANCELLED, "by the client"
            raise
        except StreamError as error:
            outcome.failure, outcome.error = error.kind, str(error)
            outcome.status = "refused" if error.kind.startswith("http ") and _refusal(outcome) else "failed"
        except (aiohttp.ClientError, OSError) as error:
            outcome.status, outcome.failure = "failed", _broken(error, outcome)
            outcome.error = _utf8(f"{type(error).__name__}: {error}"[:300])
        finally:
            reader.keep()
            outcome.ended = reader.heard if outcome.status == "ok" else self.clock() - started

    async def _exchange(self, body: bytes, reader: Reader, started: float) -> None:
        out = reader.outcome
        async with self._session.post(
            self.target.url,
            data=body if len(body) <= SLICE_BYTES else _slices(body),
            headers={**self._headers, "Content-Length": str(len(body))},
            allow_redirects=False,
            trace_request_ctx=out,
        ) as response:
            out.first_byte, out.http_status = self.clock() - started, response.status
            out.request_id = _header(response, "X-Request-Id")
            timing = _header(response, "Server-Timing")
            if timing is not None:
                out.server_timing = header_timing(timing)
            if response.status != 200:
                raise StreamError(f"http {response.status}", await _error_text(response))
            if response.content_type != "text/event-stream":
                raise StreamError("no event stream", f"{_utf8(response.content_type)}: {await _error_text(response)}")
            while not reader.done and (piece := await response.content.readany()):
                reader.feed(piece, self.clock() - started)
            reader.close()
            await _rest(response)


def _header(response: aiohttp.ClientResponse, name: str) -> str | None:
    value = response.headers.get(name)
    return None if value is None else _utf8(value)


def _utf8(text: str) -> str:
    """Headers come with bytes that are no UTF-8 as lone surrogates, which no file takes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _refusal(outcome: Outcome) -> bool:
    return outcome.http_status in REFUSALS or outcome.http_status == 503


def _stage(outcome: Outcome) -> str:
    if outcome.first_byte is None:
        return "timeout before the head"
    return "timeout before the first token" if not outcome.chunk_times else "timeout within the answer"


def _broken(error: Exception, outcome: Outcome) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        if number in (errno.EMFILE, errno.ENFILE):
            return "too many open files"
        return "connection refused" if number == errno.ECONNREFUSED else "no connection"
    if outcome.first_byte is not None:
        return "half a stream"
    return "connection lost" if outcome.new_connection else "connection lost (it was kept alive)"


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), SLICE_BYTES):
        yield body[start : start + SLICE_BYTES]


async def _rest(response: aiohttp.ClientResponse) -> None:
    """Read to the end of a body whose answer is whole, so that its connection can carry the next one."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(REST_SECONDS):
            while await response.content.readany():
                pass


async def _error_text(response: aiohttp.ClientResponse) -> str:
    """What the server says about an error, shortened; the connection is dropped where it says too much."""
    read = b""
    async for piece in response.content.iter_any():
        read += piece
        if len(read) > ERROR_BYTES:
            response.close()
            break
    try:
        return said_of(orjson.loads(read))
    except orjson.JSONDecodeError:
        return said_of(read[:ERROR_BYTES].decode(errors="replace").strip() or "an empty body")


async def _new_connection(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.new_connection = True


async def _old_connection(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
    context.trace_request_ctx.new_connection = False
