"""Framed messages over a socket between a server and its engine's process.

Knows bytes and sockets. Must not know what a message means. A frame is a head (kind, two lengths), a JSON text and a
blob: token ids travel as they are in memory, everything else as JSON. No frame can make its reader run code, and a
reader allocates no more than its limits, so that a process gone mad does no harm beyond its own end.
"""

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longread.spec.errors import LongreadError

HEAD = struct.Struct("<cIQ")  # kind, bytes of the JSON text, bytes of the blob
MAX_TEXT = 16 * 2**20  # a step of 512 rows with 20 log-probabilities each has 300 KB
SOCKET_BYTES = 4 * 2**20  # as far as the system allows: a server that is busy for a moment must not stop the engine
_READ_BYTES = 2**20


class ChannelError(LongreadError):
    """The other side is gone, or sent something that is no frame."""


class StalledError(ChannelError):
    """The other side does not read."""


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

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(
        self,
        kind: bytes,
        text: bytes,
        blobs: Sequence[bytes | memoryview] = (),
        *,
        seconds: float | None = None,
        waiting: Callable[[], None] | None = None,
    ) -> None:
        """Send one frame whole. Raises ChannelError when the other side is gone, and StalledError when it has read
        nothing for ``seconds`` (the rest of the stream is lost then). ``waiting`` is called each second of waiting.
        """
        views = [memoryview(part) for part in (HEAD.pack(kind, len(text), sum(map(len, blobs))), text, *blobs)]
        with self._sending:
            since = time.monotonic()
            while views:
                try:
                    sent = self._socket.sendmsg(views)
                except BlockingIOError:
                    if seconds is not None and time.monotonic() - since > seconds:
                        raise StalledError(f"the other side has read nothing for {seconds:g} s") from None
                    if waiting is not None:
                        waiting()
                    _poll(self._socket.fileno(), select.POLLOUT, 1.0)
                    continue
                except OSError as error:
                    raise ChannelError(f"the other side is gone ({error.strerror})") from error
                since = time.monotonic()
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]

    def receive(self, seconds: float | None = None) -> list[Frame] | None:
        """Wait for something to come, at most ``seconds``, and return the frames that are whole, maybe none. None: the
        other side has closed. Raises ChannelError.
        """
        if not _poll(self._socket.fileno(), select.POLLIN, seconds):
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


class Waker:
    """Ends another thread's wait for ``fileno``. Safe from any thread, also after ``close``."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._woken = False

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        with self._lock:  # one byte is enough however often it is called before ``clear``
            if not self._woken and self._write >= 0:
                self._woken = True
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """To be called by the thread that waits, before it looks at what it was woken for."""
        with self._lock:
            if self._woken:
                self._woken = False
                os.read(self._read, 16)

    def close(self) -> None:
        with self._lock:
            if self._write >= 0:
                os.close(self._read)
                os.close(self._write)
                self._read = self._write = -1


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, with room for what one side does not read at once."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    return ends


def readable(files: Sequence[int], seconds: float | None) -> set[int]:
    """Which of the files can be read (or were closed by the other side), waiting at most ``seconds``."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return {file for file, _ in poll.poll(None if seconds is None else max(0, int(seconds * 1000)))}


def _poll(file: int, event: int, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(None if seconds is None else max(0, int(seconds * 1000))))
