"""A program that is an OpenAI-compatible server without a model: ``python fake_openai.py --port N [OPTIONS]``.

Answers follow from the prompt (and ``--salt``); its pace, memory and mishaps are options. What it did is in
``--record``, so that a test need not conclude it from times.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).resolve())
WORDS = ("north", "south", "east", "west", "mill", "oak", "elm", "ash", "gate", "rent", "clause", "permit", "metre")
LEAKED: list[bytearray] = []


def command(*options: str) -> str:
    """As given to ``--start``."""
    return " ".join([sys.executable, PROGRAM, "--port", "{port}", *options])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else small chunks wait for the client's acknowledgement
    options: argparse.Namespace
    seen: dict[str, int] = {}  # noqa: RUF012
    began = time.monotonic()
    lock = threading.Lock()
    requests = 0
    toy: Any = None
    start = 0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        ready = time.monotonic() - self.began >= self.options.ready_after
        if self.path in ("/health", "/ready"):
            self._whole(200 if ready else 503, {})
        elif self.path == "/v1/models":
            self._whole(200, {"data": [{"id": "fake", "max_model_len": self.options.max_model_len}]})
        elif self.path == "/version":
            self._whole(200, {"version": "1.2.3"})
        else:
            self._whole(404, {"error": {"message": "no such page"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps(body.get("messages") or body.get("prompt"))
        with Handler.lock:
            Handler.requests += 1
            number = Handler.requests
            cached = Handler.seen.get(said, 0)
            Handler.seen[said] = len(said) // 4
            if self.options.keep:
                beside = Path(f"{self.options.keep}.new")  # this program is killed at any moment
                beside.write_text(json.dumps(Handler.seen))
                beside.replace(self.options.keep)
            if self.options.leak:
                LEAKED.append(bytearray(os.urandom(1024) * (self.options.leak // 1024)))
        if self.options.locked:
            self._whole(401, {"error": {"message": "no key"}})
            return
        if self.options.refuse_over and len(said) // 4 > self.options.refuse_over:
            self._whole(400, {"error": {"message": "too long"}})
            return
        if self.toy is not None and not body.get("stream"):
            with Handler.lock:
                status, reply = self.toy(self.path, body)
            self._whole(status, reply)
            return
        began = time.monotonic()
        digest = hashlib.sha256((said + self.options.salt).encode()).digest()
        count = min(body.get("max_tokens", 16), self.options.tokens)
        words = [WORDS[digest[i % 32] % len(WORDS)] + (" " if i + 1 < count else ".") for i in range(count)]
        time.sleep(self.options.first + (self.options.per_token * len(said) / 4) * (not cached))
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "".join(words)}, "finish_reason": "stop"}
            usage = {"prompt_tokens": len(said) // 4, "completion_tokens": count}
            self._whole(200, {"choices": [choice], "usage": usage})
            return
        if self.start == self.options.hold:
            note(self.options.record, {"held": self.start})
            while not Path(f"{self.options.record}.go").exists():
                time.sleep(0.01)
        thinks = self.options.think and number % 10 < self.options.think * 10
        self._stream(words, ["so ", "then "] if thinks else [], len(said) // 4, cached)
        note(self.options.record, {"answered": self.start, "seconds": time.monotonic() - began})

    def _stream(self, words: Sequence[str], thoughts: Sequence[str], prompt: int, cached: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for place, word in enumerate([*thoughts, *words]):
            if place:
                time.sleep(self.options.gap)
            name = "reasoning_content" if place < len(thoughts) else "content"
            self._event({"choices": [{"index": 0, "delta": {name: word}, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        told = {"prompt_tokens": prompt, "completion_tokens": len(words) + len(thoughts)}
        self._event({"choices": [], "usage": {**told, "prompt_tokens_details": {"cached_tokens": cached}}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document: object) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _whole(self, status: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def note(record: str | None, what: dict[str, Any]) -> None:
    if record is not None:
        with Path(record).open("a") as lines:
            lines.write(json.dumps(what) + "\n")


def recorded(record: Path) -> list[dict[str, Any]]:
    """What servers noted there so far: each start ("started", its options), request that is held ("held") and streamed
    answer ("answered", "seconds" from its request to its end), with the number of the start.
    """
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def toy_of(faults: dict[str, Any]) -> Callable[[str, object], tuple[int, Any]]:
    import httpx  # most starts need neither, and a start is most of what a test waits for
    from toy_server import Toy

    toy = Toy(**faults)

    def asked(path: str, body: object) -> tuple[int, Any]:
        reply = toy.handle(httpx.Request("POST", f"http://fake{path}", json=body))
        return reply.status_code, reply.json()

    return asked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ready-after", type=float, default=0.0)
    parser.add_argument("--first", type=float, default=0.01, help="seconds before the first token")
    parser.add_argument("--per-token", type=float, default=0.0, help="of the prompt, where it was not seen before")
    parser.add_argument("--gap", type=float, default=0.002)
    parser.add_argument("--tokens", type=int, default=6, help="of an answer at most")
    parser.add_argument("--leak", type=int, default=0, help="bytes a request")
    parser.add_argument("--think", type=float, default=0.0, help="share of answers with reasoning")
    parser.add_argument("--salt", default="", help="'start': another one each start")
    parser.add_argument("--keep", help="a file in which seen prompts outlive the process")
    parser.add_argument("--child", action="store_true", help="a process that outlives this one")
    parser.add_argument("--die", type=int, help="status to end with at once")
    parser.add_argument("--locked", action="store_true", help="nobody's key is right")
    parser.add_argument("--toy", help="answers that are not streamed are the toy's (toy_server.py), with these faults")
    parser.add_argument("--refuse-over", type=int, default=0, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--record", help="a file of what servers did, one after the other")
    parser.add_argument("--hold", type=int, help="the record's n-th start streams nothing until RECORD.go exists")
    options = parser.parse_args()
    if options.die is not None:
        print("the fake server was told to end", file=sys.stderr)
        sys.exit(options.die)
    if options.salt == "start":
        options.salt = str(time.time())
    if options.keep and Path(options.keep).exists():
        Handler.seen = json.loads(Path(options.keep).read_text())
    if options.child:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Handler.options = options
    if options.toy is not None:
        Handler.toy = staticmethod(toy_of(json.loads(options.toy)))
    if options.record is not None:
        Handler.start = 1 + sum("started" in each for each in recorded(Path(options.record)))
        note(options.record, {"started": Handler.start, "first": options.first, "gap": options.gap})
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
