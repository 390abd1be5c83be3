"""A client that costs little: raw HTTP/1.1 on asyncio's transports, each piece kept with the time of its arrival.

Nothing is parsed while it runs, so that one process can take tens of thousands of chunks a second beside the server
that it measures. One connection a stream, kept alive; a stream's next request follows its last answer at once.
"""

import asyncio
import bisect
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

_END = b"0\r\n\r\n"  # of a chunked body: an event before it ends in an empty line of its own
_LENGTH = re.compile(rb"content-length: (\d+)", re.I)
_ID = re.compile(rb'"id":"([^"]+)"')


@dataclass(slots=True)
class Answer:
    """One response: when it was asked for, and the pieces with the times at which they came."""

    asked: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    @property
    def seconds(self) -> float:
        return self.pieces[-1][0] - self.asked

    def status(self) -> int:
        return int(self.pieces[0][1][9:12])

    def answer_id(self) -> str:
        found = _ID.search(self.raw)
        if found is None:
            raise SystemExit(f"an answer without id: {self.raw[:400]!r}")
        return found[1].decode()

    def matches(self, pattern: "re.Pattern[bytes]") -> list[tuple[float, bytes]]:
        """The first group of each match, with the time at which its last byte came."""
        ends = list(itertools.accumulate(len(data) for _, data in self.pieces))
        return [
            (self.pieces[bisect.bisect_left(ends, match.end())][0], match[1]) for match in pattern.finditer(self.raw)
        ]


def request(path: str, body: dict[str, object]) -> bytes:
    """As it is on the wire."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    return head.encode() + b"\r\n\r\n" + text


class Connection(asyncio.Protocol):
    """Asks the same again and again while ``go_on()``."""

    def __init__(self, asked: bytes, go_on: Callable[[], bool], answers: list[Answer]):
        self._asked, self._go_on, self._answers = asked, go_on, answers
        self._pieces: list[tuple[float, bytes]] = []
        self._left = 0  # bytes of a body that is not chunked
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        if not self._go_on():
            self._transport.close()
            self.done.set_result(None)
            return
        answer = Answer(time.monotonic())
        self._pieces = answer.pieces
        self._answers.append(answer)
        self._transport.write(self._asked)

    def data_received(self, data: bytes) -> None:
        pieces = self._pieces
        pieces.append((time.monotonic(), data))
        if len(pieces) == 1:
            head, _, rest = data.partition(b"\r\n\r\n")
            found = _LENGTH.search(head)
            self._left = int(found[1]) - len(rest) if found is not None else -1
        elif self._left > 0:
            self._left -= len(data)
        if self._left == 0 or (self._left < 0 and self._ends()):
            self._ask()

    def _ends(self) -> bool:
        data = self._pieces[-1][1]
        return data.endswith(_END) or (
            len(data) < len(_END) and b"".join(data for _, data in self._pieces[-3:]).endswith(_END)
        )

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))


async def drive(address: tuple[str, int], requests: Sequence[bytes], seconds: float) -> tuple[list[Answer], float]:
    """One stream for each of ``requests``, asked again and again for that long, and until the last answers have ended.
    Returns the answers, and seconds.
    """
    loop, answers = asyncio.get_running_loop(), list[Answer]()
    begun = time.monotonic()
    end = begun + seconds
    connections = []
    for asked in requests:
        make = partial(Connection, asked, lambda: time.monotonic() < end, answers)
        _, connection = await loop.create_connection(make, *address)
        connections.append(connection)
    await asyncio.gather(*(connection.done for connection in connections))
    return answers, time.monotonic() - begun
