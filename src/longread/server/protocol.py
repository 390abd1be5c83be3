"""HTTP/1.1 as uvicorn speaks it, with limits on what comes before and between the parts of a request that an app sees.

Knows: uvicorn's protocol class, bytes, seconds. Must not know: routes, bodies. A head is parsed before anyone can look
at its API key, and the parser keeps a line until it ends: without a limit, one connection could fill the memory.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from longread.spec.errors import HeadTooLargeError, RequestError, RequestTimeoutError
from longread.wire.responses import error_body

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 60.0
PIECES = "longread.pieces"

_PHRASES = {408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


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


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A head, or the lines between the pieces of a chunked body, may be ``MAX_HEAD_BYTES`` long (give
    or take one read of the socket); a head may take ``HEAD_SECONDS``, from the connection or from its first byte. What
    waits to be sent is bounded by the app, which waits while it is much; for how long, by ``patience``.
    """

    def __init__(self, *args: Any, patience: Patience | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._patience = patience

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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unparsed > MAX_HEAD_BYTES:
            self._refuse(
                HeadTooLargeError(f"the request head is longer than {MAX_HEAD_BYTES} bytes: send fewer headers")
            )
        elif self._in_head and self._unparsed and self._head_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head, self._unparsed = False, 0
        self._stop_timer()
        super().on_headers_complete()
        pieces: Any = PieceWriter(self.cycle)
        self.scope["extensions"] = {PIECES: pieces}  # the app's task begins later

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
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
        self._refuse(RequestTimeoutError(f"the request head was not complete within {HEAD_SECONDS:g} s: send it again"))

    def _refuse(self, error: RequestError) -> None:
        """Close; with an answer, unless one to an earlier request is still on its way."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._unparsed and not self._answering:
            body = orjson.dumps(error_body(error))
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (error.status, _PHRASES[error.status], len(body), body)
            )
        self.transport.close()
