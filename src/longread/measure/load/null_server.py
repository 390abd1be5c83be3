"""A server that does nothing but answer in time, in a process of its own (``python -m`` this module).

It streams as many chunks as the body says, at the gap that it says, and tells when it wrote the first one after the
request was whole. What a client measures beyond that is the client's own. Only the standard library.
"""

import asyncio
import json
import sys
import time

MOST_CHUNKS = 10_000
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_TEXT = {"id": "null", "choices": [{"index": 0, "delta": {"content": "token "}, "finish_reason": None}]}


def _event(document: object) -> bytes:
    data = b"data: " + json.dumps(document).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


_CHUNK = _event(_TEXT)
_TAIL = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class NullServer(asyncio.Protocol):
    """One connection. Bodies: ``{"chunks": N, "gap": SECONDS, "first": SECONDS}``."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
        )
        if len(body) < length:
            return
        self._read = body[length:]
        asyncio.get_running_loop().create_task(self._answer(json.loads(body[:length]), time.perf_counter()))

    async def _answer(self, wanted: dict, received: float) -> None:
        chunks = min(int(wanted["chunks"]), MOST_CHUNKS)
        await asyncio.sleep(wanted["first"])
        wrote = time.perf_counter()
        self._transport.write(_HEAD + _CHUNK)
        for _ in range(chunks - 1):
            await asyncio.sleep(wanted["gap"])
            self._transport.write(_CHUNK)
        usage = {"prompt_tokens": 1, "completion_tokens": chunks}
        self._transport.write(
            _event({"choices": [], "usage": usage, "timings": {"first_ms": (wrote - received) * 1000}}) + _TAIL
        )


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(NullServer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)  # until who started it goes away
    server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
