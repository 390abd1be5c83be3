"""An HTTP server that answers each request by a script of waits and writes, and remembers when it wrote what.

Its clock is the running loop's, so what a client on the same loop measures can be compared with what was sent and not
with what was meant.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Head:
    status: int = 200
    content_type: str = "text/event-stream"
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None  # instead of chunks


@dataclass(frozen=True)
class Bytes:
    """Part of the body, as one chunk of the transfer encoding. ``label``: what its time is remembered as."""

    data: bytes
    label: str = ""


@dataclass(frozen=True)
class Plain:
    """Bytes on the wire as they are."""

    data: bytes
    label: str = ""


@dataclass(frozen=True)
class End:
    """The body is whole."""


@dataclass(frozen=True)
class Drop:
    """The connection is closed here; ``reset``: without goodbye."""

    reset: bool = False


@dataclass(frozen=True)
class Hang:
    """Nothing more is ever said."""


Step = Wait | Head | Bytes | Plain | End | Drop | Hang
Script = Callable[[int, dict[str, Any]], Sequence[Step]]


@dataclass
class Seen:
    """One request. ``received``: when its body was whole. ``wrote``: (time, label) of each labelled write."""

    number: int
    connection: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    received: float
    wrote: list[tuple[float, str]] = field(default_factory=list)

    def times(self, *labels: str) -> list[float]:
        return [at for at, label in self.wrote if label in labels]


def event(document: object, label: str = "") -> Bytes:
    return Bytes(b"data: " + json.dumps(document).encode() + b"\n\n", label)


def delta(label: str = "", finish: str | None = None, usage: dict | None = None, **fields: object) -> Bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    more = {} if usage is None else {"usage": usage}
    return event({"id": "answer", "object": "chat.completion.chunk", "choices": [choice], **more}, label)


def text(said: str, label: str = "text", finish: str | None = None) -> Bytes:
    """A chunk of /v1/completions."""
    choice = {"index": 0, "text": said, "finish_reason": finish}
    return event({"id": "answer", "object": "text_completion", "choices": [choice]}, label)


def usage(prompt: int, output: int, **more: object) -> Bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output, **more}
    return event({"id": "answer", "choices": [], "usage": told}, "usage")


DONE = Bytes(b"data: [DONE]\n\n", "done")


def answer(
    words: Sequence[str] = ("one", "two", "three"),
    first: float = 0.02,
    gap: float = 0.005,
    role: float | None = 0.0,
    reasoning: Sequence[str] = (),
    tokens: int | None = None,
    prompt_tokens: int = 7,
    counted: bool = True,
    **details: object,
) -> list[Step]:
    """A whole chat answer. ``first``: seconds before the first text; ``role``: before the role chunk, None without it;
    ``tokens``: that usage tells (default: one a chunk).
    """
    steps: list[Step] = [Head()]
    if role is not None:
        steps += [Wait(role), delta("role", role="assistant", content="")]
    steps.append(Wait(first))
    for place, word in enumerate([*reasoning, *words]):
        thought = place < len(reasoning)
        steps += [Wait(gap)] if place else []
        steps.append(delta("reasoning", reasoning_content=word) if thought else delta("text", content=word))
    steps.append(delta("finish", finish="stop"))
    if counted:
        steps.append(usage(prompt_tokens, len(words) + len(reasoning) if tokens is None else tokens, **details))
    return [*steps, DONE, End()]


def refusal(status: int, message: str) -> list[Step]:
    return [Head(status, "application/json"), event_free({"error": {"message": message, "code": status}}), End()]


def event_free(document: object) -> Bytes:
    return Bytes(json.dumps(document).encode())


class ScriptedServer:
    """``script(number, body)`` says how the n-th POST is answered. ``pages``: what a GET of a path gives, as text."""

    def __init__(self, script: Script, pages: dict[str, str] | None = None):
        self.script = script
        self.pages = {"/v1/models": json.dumps({"object": "list", "data": [{"id": "scripted"}]}), **(pages or {})}
        self.seen: list[Seen] = []
        self.in_flight = self.most = 0
        self._connections = 0
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._connections += 1
        number = self._connections
        try:
            while await self._request(reader, writer, number):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method in ("GET", "HEAD"):
            self._page(path, writer, method == "HEAD")
            return True
        seen = Seen(len(self.seen), connection, path, headers, json.loads(body), asyncio.get_running_loop().time())
        self.seen.append(seen)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            for step in self.script(seen.number, seen.body):
                if not await self._step(step, seen, writer):
                    return False
        finally:
            self.in_flight -= 1
        return True

    def _page(self, path: str, writer: asyncio.StreamWriter, bare: bool) -> None:
        found = self.pages.get(path)
        body = (found or "no such page").encode()
        status = b"404 Not Found" if found is None else b"200 OK"
        kind = b"application/json" if body[:1] == b"{" else b"text/plain"
        head = b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
        writer.write(head if bare else head + body)

    async def _step(self, step: Step, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        match step:
            case Wait(seconds):
                if seconds:
                    await asyncio.sleep(seconds)
            case Head(status, kind, headers, length):
                lines = [f"HTTP/1.1 {status} Status", f"content-type: {kind}", *(f"{n}: {v}" for n, v in headers)]
                lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
                await self._write("\r\n".join([*lines, "", ""]).encode(), "head", seen, writer)
            case Bytes(data, label):
                await self._write(b"%x\r\n%s\r\n" % (len(data), data), label, seen, writer)
            case Plain(data, label):
                await self._write(data, label, seen, writer)
            case End():
                await self._write(b"0\r\n\r\n", "end", seen, writer)
            case Drop(reset):
                if reset:
                    writer.transport.abort()
                return False
            case Hang():
                await asyncio.Event().wait()
        return True

    async def _write(self, data: bytes, label: str, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        seen.wrote.append((asyncio.get_running_loop().time(), label))
        await writer.drain()


@asynccontextmanager
async def scripted(script: Script, pages: dict[str, str] | None = None) -> AsyncIterator[ScriptedServer]:
    """On the running loop."""
    server = ScriptedServer(script, pages)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def scripted_thread(script: Script, pages: dict[str, str] | None = None) -> Iterator[ScriptedServer]:
    """On a loop of its own, for code that runs one itself."""
    server, loop, ready = ScriptedServer(script, pages), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        await server.start()
        ready.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
