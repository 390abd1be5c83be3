"""HTTP/1.1 as uvicorn speaks it, with limits on what comes before and between the parts of a request that an app sees.

Knows: uvicorn's protocol class, bytes, seconds. Must not know: routes, bodies. A head is parsed before anyone can look
at its API key, and the parser keeps a line until it ends: without a limit, one connection could fill the memory.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from longread.spec.errors import HeadTooLargeError, InvalidRequestError, RequestError, RequestTimeoutError
from longread.wire.responses import error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 60.0
MAX_PIPELINED = 16  # requests behind the one that is being answered: each is kept, with its head, until its turn
PIECES = "longread.pieces"

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


@dataclass(frozen=True, slots=True)
class Patience:
    """``seconds()``: how long a client may read nothing of what is ready for it, None: for ever; ``over()`` is called
    when one is cut off.
    """

    seconds: Callable[[], float | None]
    over: Callable[[], None]


class PieceWriter:
    """Writes pieces of an answer that has begun, past ASGI: one call of the transport for each, no coroutine.

    What ASGI's ``send`` keeps is not touched: a piece of a chunked body is counted nowhere. An app finds it under
    ``PIECES`` in its scope's extensions; other servers have none.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    @property
    def ready(self) -> bool:
        """Whether a piece can be written: ``send`` would not wait, and a chunked body is under way."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.transport.is_closing():
            return False
        under_way = cycle.response_started and not cycle.response_complete
        return under_way and cycle.chunked_encoding is True and cycle.scope["method"] != "HEAD"

    def write(self, piece: bytes) -> None:
        """Only where it is ready, and not an empty one: that would end the body."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class RefusedHeadError(Exception):
    """Ends the parser's work from one of its callbacks."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head, or the lines between the pieces of a chunked body, may be ``MAX_HEAD_BYTES`` long (give
    or take one read of the socket); a head may take ``HEAD_SECONDS``, from the connection or from its first byte. What
    waits to be sent is bounded by the app, which waits while it is much; for how long, by ``patience``.

    A client may send ``MAX_PIPELINED`` requests before it has its answer. One that leaves has left all of them: uvicorn
    tells only the last, so that the others would be computed to their end for nobody. What is no HTTP ends the
    connection, and stands in no answer that is under way. An offer of another protocol is ignored: Java's client makes
    one with each request (h2c), and the body behind it is to be read.
    """

    def __init__(self, *args: Any, patience: Patience | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._open: deque[RequestResponseCycle] = deque()  # not answered yet; the oldest is being answered

    _unparsed = 0  # bytes since the last thing that the app will see
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _unsent = 0  # bytes when that was started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_waiting()
        self.pipeline.clear()
        for cycle in self._open:
            cycle.disconnected = True
            cycle.message_event.set()
        self._open.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(InvalidRequestError("what came is no HTTP/1.1 request: speak plain HTTP, not TLS or HTTP/2"))
            return
        if self.transport.is_closing():
            return
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(
                HeadTooLargeError(f"the request head is longer than {MAX_HEAD_BYTES} bytes: send fewer headers")
            )
        elif self._in_head and self._unparsed and self._head_timer is None:
            self._start_timer()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # the parser has left out the body
                head = self._head_without_offer()
                data = data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the old one reads nothing behind "Connection: close"
                self.parser.feed_data(head)

    def _head_without_offer(self) -> bytes:
        """The head that the parser has just read, of a client that would speak another protocol, too."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in map(bytes.strip, value.lower().split(b",")) else b"keep-alive"
            if name not in _UPGRADE_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT" or len(self._open) > MAX_PIPELINED:
            raise RefusedHeadError
        if self.parser.should_upgrade():
            return  # it comes again, without the offer
        self._in_head, self._unparsed = False, 0
        self._stop_timer()
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()  # else nobody would see that the client leaves
        self._open.append(self.cycle)
        pieces: Any = PieceWriter(self.cycle)
        self.scope["extensions"] = {PIECES: pieces}  # the app's task begins later

    def on_response_complete(self) -> None:
        if self._open:
            self._open.popleft()
        super().on_response_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head, self._unparsed = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def _wait_for_reader(self) -> None:
        seconds = self._patience.seconds() if self._patience is not None else None
        if seconds is not None:
            self._unsent = self.transport.get_write_buffer_size()
            self._read_timer = self.loop.call_later(seconds, self._reader_is_late)

    def _stop_waiting(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _reader_is_late(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:  # it reads, if slowly
            self._wait_for_reader()
            return
        if self._patience is not None:
            self._patience.over()
        self.transport.abort()  # closing would wait for what is unsent

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _head_is_late(self) -> None:
        if self._answering:  # the next request may wait; some clients send an empty line behind a body
            self._start_timer()
            return
        if not self._unparsed:  # a connection that nothing came on
            self.transport.close()
            return
        self._refuse(RequestTimeoutError(f"the request head was not complete within {HEAD_SECONDS:g} s: send it again"))

    def _refuse(self, error: RequestError) -> None:
        """Close; with an answer, unless one is under way, or an earlier request has none yet."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if len(self._open) < 2 and not any(cycle.response_started for cycle in self._open):
            body = orjson.dumps(error_body(error))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, _PHRASES[error.status], len(body), body)
            )
        self.transport.close()
