"""Framed messages over a socket between a server and its engine's process.

Knows bytes and sockets. Must not know what a message means. A frame is a head (kind, two lengths), a JSON text and a
blob: token ids travel as they are in memory, everything else as JSON. No frame can make its reader run code, and a
reader allocates no more than its limits, so that a process gone mad does no harm beyond its own end.
"""

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longread.spec.errors import LongreadError

HEAD = struct.Struct("<cIQ")  # kind, bytes of the JSON text, bytes of the blob
MAX_TEXT = 16 * 2**20  # a step of 512 rows with 20 log-probabilities each has 300 KB
SOCKET_BYTES = 4 * 2**20  # as far as the system allows: a server that is busy for a moment must not stop the engine
_READ_BYTES = 2**20
_VIEWS_AT_ONCE = 64  # of one call to the system, which takes 1,024 at most


class ChannelError(LongreadError):
    """The other side is gone, or sent something that is no frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. ``kind``: one byte."""

    kind: bytes
    text: bytes
    blob: bytes = b""


class FrameCutter:
    """Cuts a stream of bytes into frames. Raises ChannelError for a kind that is not in ``kinds`` or a length beyond
    the limits, before anything of that length is kept.
    """

    def __init__(self, kinds: bytes, max_blob: int):
        self._kinds = kinds
        self._max_blob = max_blob
        self._held = bytearray()

    def cut(self, data: bytes) -> list[Frame]:
        """The frames that are whole now."""
        self._held += data
        frames: list[Frame] = []
        start = 0
        while len(self._held) - start >= HEAD.size:
            kind, text, blob = HEAD.unpack_from(self._held, start)
            if kind not in self._kinds or text > MAX_TEXT or blob > self._max_blob:
                raise ChannelError(f"not a frame: kind {kind!r}, {text} and {blob} bytes")
            middle, end = start + HEAD.size + text, start + HEAD.size + text + blob
            if len(self._held) < end:
                break
            view = memoryview(self._held)
            frames.append(Frame(kind, bytes(view[start + HEAD.size : middle]), bytes(view[middle:end])))
            view.release()
            start = end
        del self._held[:start]
        return frames


class Channel:
    """One end of the socket. ``send`` and ``close`` are safe from any thread, ``receive`` belongs to one.

    ``kinds``: what may come from the other side; ``max_blob``: bytes of the largest blob that may.
    """

    def __init__(self, end: socket.socket, kinds: bytes, max_blob: int):
        end.setblocking(False)
        self._socket = end
        self._cutter = FrameCutter(kinds, max_blob)
        self._sending = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._later: Callable[[], None] | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def keep_unsent(self, later: Callable[[], None] | None) -> None:
        """From now on ``send`` does not wait: what the other side has no room for is kept, and ``later`` called, on
        whatever thread, so that somebody calls ``flush`` when there is room. None: ``send`` waits again.
        """
        with self._sending:
            self._later = later

    def send(
        self,
        kind: bytes,
        text: bytes,
        blobs: Sequence[bytes | memoryview] = (),
        *,
        waiting: Callable[[], None] | None = None,
    ) -> None:
        """Send one frame whole, behind what was kept. Raises ChannelError when the other side is gone. ``waiting`` is
        called each second of waiting, and ends it by raising.
        """
        parts = (HEAD.pack(kind, len(text), sum(map(len, blobs))), text, *blobs)
        with self._sending:
            waits_already = bool(self._unsent)
            self._unsent.extend(memoryview(part) for part in parts if part)
            if self._later is not None:
                if not waits_already and not self._send_some():
                    self._later()
                return
            while not self._send_some():
                if waiting is not None:
                    waiting()
                _poll(self._socket.fileno(), select.POLLOUT, 1.0)

    def flush(self) -> bool:
        """Send of what was kept as much as there is room for; True: nothing is left. Raises ChannelError."""
        with self._sending:
            return self._send_some()

    def _send_some(self) -> bool:
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.sendmsg([unsent[i] for i in range(min(len(unsent), _VIEWS_AT_ONCE))])
            except BlockingIOError:
                return False
            except OSError as error:
                unsent.clear()
                raise ChannelError(f"the other side is gone ({error.strerror})") from error
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.popleft())
            if sent:
                unsent[0] = unsent[0][sent:]
        return True

    def receive(self, seconds: float | None = None) -> list[Frame] | None:
        """Wait for something to come, at most ``seconds``, and return the frames that are whole, maybe none. None: the
        other side has closed. Raises ChannelError.
        """
        if seconds != 0 and not _poll(self._socket.fileno(), select.POLLIN, seconds):
            return []
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:  # reset: it died with our bytes unread
            return None
        return self._cutter.cut(data) if data else None

    def close(self) -> None:
        self._socket.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, with room for what one side does not read at once."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return ends


def _poll(file: int, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(None if seconds is None else max(0, int(seconds * 1000))))
