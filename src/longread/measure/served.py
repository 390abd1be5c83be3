"""A ``longread serve`` in a process of its own, as a user would start it, and one question asked of it over HTTP.

Knows the command line, the wire and the clock. Knows nothing of the engine, nor of what is asked.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from longread.spec.errors import LongreadError

READY_SECONDS = 120.0


class ServedError(LongreadError):
    """The server did not start or did not answer; the message carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer and its figures. ``ttft``: seconds from sending to the first text; ``decode_seconds``: from there to
    the last, in which all tokens but the first came.
    """

    answer: str
    thought: str
    ttft: float
    decode_seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``longread serve``; ``model`` is the name that it serves."""

    url: str
    model: str
    process: psutil.Process

    def ask(self, content: str, max_tokens: int, template: Mapping[str, object]) -> Asked:
        """Stream the answer to one user turn, greedy. Raises ServedError when the server refuses it."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "chat_template_kwargs": template,
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started, first, last, usage = time.perf_counter(), 0.0, 0.0, None
        said: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        for chunk in self._chunks(body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                for field, parts in said.items():
                    if choice["delta"].get(field):
                        last = time.perf_counter()
                        first = first or last
                        parts.append(choice["delta"][field])
        if usage is None:
            raise ServedError("the stream ended without usage")
        # A model may end its answer at once: then nothing but the end of the stream tells when.
        first = first or time.perf_counter()
        return Asked(
            "".join(said["content"]),
            "".join(said["reasoning_content"]),
            first - started,
            max(last - first, 0.0),
            usage["completion_tokens"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )

    def _chunks(self, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=body, timeout=None) as response:
            if response.status_code != 200:
                said = response.read().decode(errors="replace")[:500]
                raise ServedError(f"the server answered {response.status_code}: {said}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[len("data: ") :])

    def peak_bytes(self) -> int | None:
        """Highest resident memory so far of the server and its engine's process, added up; None where the system does
        not tell. Pages that both have mapped count twice.
        """
        total = 0
        for process in (self.process, *self.process.children(recursive=True)):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return None
            found = re.search(r"VmHWM:\s+(\d+) kB", status)
            if found is None:
                return None
            total += int(found.group(1)) * 1024
        return total

    def planned_bytes(self) -> int | None:
        """What the planner predicted, from the server's metrics; None when the series is missing."""
        found = re.search(
            r"^longread:memory_predicted_bytes(?:\{.*\})? (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M
        )
        return int(float(found.group(1))) if found else None


@contextmanager
def serving(checkpoint: Path, max_model_len: int) -> Iterator[Server]:
    """Run ``longread serve`` with a cache for one sequence of ``max_model_len`` tokens on a free loopback port until
    the block ends. Raises ServedError if it never gets ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "longread.cli.main", "serve", str(checkpoint), "--port", str(port)]
        command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "1"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_ready(url, process, log)
            yield Server(url, checkpoint.resolve().name, psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", timeout=2.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    log.seek(0)
    said = log.read().decode(errors="replace")[-2000:]
    raise ServedError(f"the server did not get ready within {READY_SECONDS:.0f} s; it said:\n{said}")
