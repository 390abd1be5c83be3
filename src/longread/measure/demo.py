"""``longread demo``: one long text, asked twice through the real server, and what the second asking saved.

Starts ``longread serve`` as a user would, in a process of its own, and speaks HTTP to it. Knows nothing of the engine.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from longread.spec.config_json import read_config, spec_from_config
from longread.spec.errors import ConfigError, LongreadError

QUESTIONS = ("Which promises does this text make?", "What is measured, and on which machine?")
READY_SECONDS = 120.0
MIN_CHARACTERS = 2000  # a page of the cache or two: less leaves nothing to reuse, and nothing to show
ROOM_TOKENS = 1024  # question, chat markup and answer


class DemoError(LongreadError):
    """The server did not start or did not answer; the message carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question's figures; seconds and tokens."""

    ttft: float
    decode_rate: float
    prompt_tokens: int
    cached_tokens: int
    answer: str


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint's line of the table; memory in bytes, None where the system does not tell."""

    name: str
    cold: Asked
    warm: Asked
    peak: int | None
    planned: int | None


def run(checkpoints: list[Path], text: str, max_tokens: int = 64) -> None:
    """Ask ``QUESTIONS`` about ``text`` of each checkpoint in turn and print one table.

    Raises DemoError when a server fails.
    """
    console = Console()
    console.print(f"{len(text):,} characters, asked twice of {', '.join(path.name for path in checkpoints)}")
    room = len(text.encode()) + ROOM_TOKENS  # a token is a byte at least, so the text fits whatever the tokenizer
    rows: list[Row] = []
    for checkpoint in checkpoints:
        with console.status(f"{checkpoint.name}: reading the text, twice"), serving(checkpoint, room) as server:
            cold, warm = (ask(server.url, checkpoint.name, text, question, max_tokens) for question in QUESTIONS)
            rows.append(Row(checkpoint.name, cold, warm, server.peak_bytes(), server.planned_bytes()))
        console.print(f"{checkpoint.name}: {cold.prompt_tokens:,} tokens, first token after {cold.ttft:.1f} s")
        console.print(f"{checkpoint.name} says: [dim]{warm.answer[:100]!r}[/]")
    console.print(table(rows))


def read_documents(files: list[Path]) -> str:
    """Join text files, each under its name. Raises ConfigError for one that is missing, a folder or not UTF-8, and for
    a text that is too short to show anything.
    """
    parts = []
    for file in files:
        try:
            parts.append(f"# {file.name}\n\n{file.read_text(encoding='utf-8')}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{file}: cannot be read as UTF-8 text ({error}); name a UTF-8 text file (convert others with iconv)"
            ) from error
    text = "\n\n".join(parts)
    if len(text) < MIN_CHARACTERS:
        raise ConfigError(
            f"the text has {len(text)} characters; the demo needs {MIN_CHARACTERS} to have something to reuse"
        )
    return text


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``longread serve``."""

    url: str
    process: psutil.Process

    def peak_bytes(self) -> int | None:
        """Highest resident memory of the server so far; None where the system does not tell."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found.group(1)) * 1024 if found else None

    def planned_bytes(self) -> int | None:
        """What the planner predicted, from the server's metrics; None when the series is missing."""
        found = re.search(
            r"^longread:memory_predicted_bytes(?:\{.*\})? (\S+)$", httpx.get(f"{self.url}/metrics").text, re.M
        )
        return int(float(found.group(1))) if found else None


@contextmanager
def serving(checkpoint: Path, room: int) -> Iterator[Server]:
    """Run ``longread serve`` with a cache for one sequence of ``room`` tokens on a free loopback port until the block
    ends. Raises DemoError if it never gets ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        longest = min(room, spec_from_config(read_config(checkpoint)).max_position)
        command = [sys.executable, "-m", "longread.cli.main", "serve", str(checkpoint), "--port", str(port)]
        command += ["--max-model-len", str(longest), "--max-num-seqs", "1"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_ready(f"http://127.0.0.1:{port}", process, log)
            yield Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid))
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
    raise DemoError(f"the server did not get ready within {READY_SECONDS:.0f} s; it said:\n{said}")


def ask(url: str, model: str, text: str, question: str, max_tokens: int) -> Asked:
    """Stream one chat completion about ``text``. Raises DemoError when the server refuses it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"{text}\n\n{question}"}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first, last, usage, said = time.perf_counter(), 0.0, 0.0, None, []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=None) as response:
        if response.status_code != 200:
            raise DemoError(
                f"the server answered {response.status_code}: {response.read().decode(errors='replace')[:500]}"
            )
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[len("data: ") :])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                delta = choice["delta"].get("content") or choice["delta"].get("reasoning_content")
                if delta:
                    last = time.perf_counter()
                    first = first or last
                    said.append(delta)
    if usage is None or not first:
        raise DemoError("the stream ended without a token or without usage")
    rate = (usage["completion_tokens"] - 1) / (last - first) if last > first else 0.0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(first - started, rate, usage["prompt_tokens"], cached, "".join(said))


def table(rows: list[Row]) -> Table:
    """A column a checkpoint: cold against warm, and memory against the plan."""
    out = Table(title="The same text, asked twice")
    out.add_column("")
    for row in rows:
        out.add_column(row.name, justify="right")
    lines: dict[str, Callable[[Row], str]] = {
        "prompt tokens": lambda row: f"{row.warm.prompt_tokens:,}",
        "cold TTFT": lambda row: f"{row.cold.ttft:.2f} s",
        "warm TTFT, another question": lambda row: f"{row.warm.ttft * 1000:.0f} ms",
        "cold : warm": lambda row: f"{row.cold.ttft / row.warm.ttft:.0f}x",
        "cached tokens": lambda row: f"{row.warm.cached_tokens:,}",
        "decode": lambda row: f"{row.warm.decode_rate:.0f} tokens/s",
        "peak memory of the server": lambda row: _mib(row.peak),
        "planned (an upper bound)": lambda row: _mib(row.planned),
    }
    for label, cell in lines.items():
        out.add_row(label, *(cell(row) for row in rows))
    return out


def _mib(size: int | None) -> str:
    return "not known" if size is None else f"{size / 2**20:,.0f} MiB"
