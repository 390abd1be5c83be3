"""The servers of benchmarks/http_layer.py, and the program of their engine's process.

``fake``: longread's server as ``longread serve`` puts it together, with a fake engine, in a process of its own or on a
thread. ``floor``: the least that can send such a stream: ready-made chunks on asyncio's transports, at each step one to
every stream. What the client measures with it is the client's and the system's own share.

Engines log when each step ended and which step brought a request's first token; a stream's n-th token is of the n-th
step from there on.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import longread
from longread.server.admission import Admission
from longread.server.app import create_app
from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.limits import Limits
from longread.server.metrics import ServerMetrics
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import bind, serve, url
from longread.server.state import ServerState
from longread.server.worker.child import attend
from longread.server.worker.supervise import Workers
from longread.spec.engine import Engine, Event, FirstToken, TokenEvent
from longread.wire.encoding import ENCODINGS
from longread.wire.tokenizer import Tokenizer

LETTER = "a"  # each token is this text
TOKENIZER = Path(longread.__file__).parent / "weights" / "fixture_tokenizer.json"


def tokenizer() -> Tokenizer:
    probe = Tokenizer(TOKENIZER.read_bytes(), bos_id=0, eos_id=1)
    bos, eos = probe.id_of("<｜begin▁of▁sentence｜>"), probe.id_of("<｜end▁of▁sentence｜>")
    if bos is None or eos is None:
        raise SystemExit(f"{TOKENIZER}: no markup")
    return Tokenizer(TOKENIZER.read_bytes(), bos_id=bos, eos_id=eos)


class PacedEngine(FakeEngine):
    """A step each ``seconds`` (0: as fast as it can), which brings the same letter to each stream. ``log``: where
    ``close`` writes when what happened.
    """

    def __init__(self, *, seconds: float, log: str, letter: int, **options: Any):
        super().__init__(script=lambda request: _Endless(letter), **options)
        self._seconds, self._log = seconds, log
        self._due = 0.0
        self._ends: list[float] = []
        self._firsts: dict[str, int] = {}

    def step(self) -> Sequence[Event]:
        if self._seconds:
            self._due = max(self._due + self._seconds, time.monotonic())
            time.sleep(max(0.0, self._due - time.monotonic()))
        events = super().step()
        self._ends.append(time.monotonic())
        for event in events:
            if isinstance(event, TokenEvent) and isinstance(event.first, FirstToken):
                self._firsts[event.request_id] = len(self._ends) - 1
        return events

    def close(self) -> None:
        super().close()
        write_log(self._log, self._ends, self._firsts)


class _Endless(Sequence[int]):
    """A script of one id without end."""

    def __init__(self, token: int):
        self._token = token

    def __getitem__(self, index: Any) -> Any:
        return self._token

    def __len__(self) -> int:
        return sys.maxsize


def write_log(path: str, ends: Sequence[float], firsts: dict[str, int]) -> None:
    Path(path).write_text(json.dumps({"ends": ends, "firsts": firsts}))


def load(task: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    return PacedEngine(**task), {}


def serve_fake(kind: str, task: dict[str, Any]) -> None:
    """``kind``: process or thread."""
    text = tokenizer()
    (letter,) = text.encode(LETTER)
    task |= {"letter": letter, "vocab": text.vocab_size, "eos_id": text.eos_id}
    workers = Workers((sys.executable, os.path.abspath(__file__)), task)
    options = ServerOptions(port=0, limits=Limits(max_num_queued_reqs=None))
    metrics = ServerMetrics("fake", lambda: driver.current, options.shared)
    driver = EngineDriver(
        workers.make if kind == "process" else lambda: PacedEngine(**task),
        admission=Admission(options.limits),
        observer=metrics,
        restarts=Restarts(),
    )
    state = ServerState(driver, metrics, text, ENCODINGS["v3.1"], options, ("fake",), "benchmark")
    listener = bind("127.0.0.1", 0)
    serve(create_app(state), driver, options, listener, lambda info: print(url(listener), flush=True))


class _Floor(asyncio.Protocol):
    """One connection: what it is asked does not matter but for the number of tokens."""

    streams: "set[_Floor]"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.left, self.chunk = 0, b""

    def data_received(self, data: bytes) -> None:
        self.begin(json.loads(data.partition(b"\r\n\r\n")[2])["max_tokens"])

    def begin(self, tokens: int) -> None:
        self.left, self.fresh = tokens, True
        self.streams.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)


async def floor(task: dict[str, Any]) -> None:
    streams = _Floor.streams = set()
    ends: list[float] = []
    firsts: dict[str, int] = {}
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(15, stop.set)
    server = await loop.create_server(_Floor, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    due = 0.0
    while not stop.is_set():
        due = max(due + task["seconds"], time.monotonic())
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if streams:
            ends.append(time.monotonic())
        for stream in list(streams):
            if stream.fresh:
                stream.fresh, name = False, f"cmpl-{len(firsts):032x}"
                firsts[name + "-0"] = len(ends) - 1
                text = (
                    f'data: {{"id":"{name}","object":"text_completion","created":1,"model":"fake","choices":'
                    f'[{{"index":0,"text":"{LETTER}","logprobs":null,"finish_reason":null}}]}}\n\n'
                ).encode()
                stream.chunk = b"%x\r\n%b\r\n" % (len(text), text)
                stream.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            stream.transport.write(stream.chunk)
            stream.left -= 1
            if not stream.left:
                streams.discard(stream)
                stream.transport.write(b"e\r\ndata: [DONE]\n\n\r\n")
                stream.transport.write(b"0\r\n\r\n")
    write_log(task["log"], ends, firsts)


def main() -> None:
    if len(sys.argv) == 2:  # an engine's process
        attend(int(sys.argv[1]), load)
    kind, task = sys.argv[1], json.loads(sys.argv[2])
    if kind == "floor":
        asyncio.run(floor(task))
    else:
        serve_fake(kind, task)


if __name__ == "__main__":
    main()
