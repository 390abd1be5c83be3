"""``longread serve`` with a real model and a store: its engine is killed in the middle of a prompt, and comes back with
what it had read; a server that is told to end keeps what was computed.
"""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from longread.weights.fixture import write_fixture

WORDS = "The river runs through the valley, past the mill and the old bridge. "
KNOWN, KILLED, DRAINED = ("".join(f"{name} {i}: {WORDS}" for i in range(64)) for name in ("Known", "Killed", "Drained"))


class Served:
    def __init__(self, address: str, process: "subprocess.Popen[str]", log: Path):
        self.url = address
        self.process = process
        self.log = log

    def ask(self, text: str, max_tokens: int = 6) -> httpx.Response:
        body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        found = re.search(rf"^longread:{name}{{[^}}]*}} (\S+)$", text, re.M)
        return float(found[1]) if found is not None else 0.0

    def wait(self, name: str, least: float, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while self.metric(name) < least:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}; {self.log.read_text()}"
            time.sleep(0.05)

    def worker(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        assert len(children) == 1
        return children[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("restart") / "v3"
    write_fixture(path, "v3", quantised=True)
    return path


@contextmanager
def serving(model: Path, log: Path) -> Iterator[Served]:
    # Small steps: a prompt takes many, and something can happen between them.
    command = [sys.executable, "-m", "longread.cli.main", "serve", str(model), "--port", "0", "--max-num-seqs", "2"]
    command += ["--max-num-batched-tokens", "256", "--snapshot-interval", "1K", "--max-model-len", "16K"]
    command += ["--store", str(model.parent / "store"), "--shutdown-timeout", "0.2"]
    with log.open("a") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                yield Served(found[1], process, log)
                break
        else:
            pytest.fail(f"the server ended: {log.read_text()}")
    finally:
        process.kill()
        process.communicate()


def begun(server: Served, text: str) -> tuple[threading.Thread, list[httpx.Response]]:
    """A prompt that is being read: some of its steps are done. Its answer would take minutes."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(server.ask(text, 8000)))
    pages = server.metric("pages_held") + server.metric("pages_cached")
    thread.start()
    end = time.monotonic() + 60
    while server.metric("pages_held") + server.metric("pages_cached") < pages + 3:
        assert thread.is_alive() and time.monotonic() < end
    return thread, answers


def reused(answer: httpx.Response) -> dict[str, int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["longread"]["reuse"]


def test_a_killed_engine_comes_back_with_what_it_had_read(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(model, log) as server:
        before = server.ask(KNOWN)
        assert reused(before)["prompt_tokens"] > 1400 and reused(before)["disk_tokens"] == 0
        server.wait("store_written_bytes_total", 1)
        written = 0.0
        while (now := server.metric("store_written_bytes_total")) != written:
            written = now
            time.sleep(0.3)
        worker = server.worker()
        thread, answers = begun(server, KILLED)
        worker.kill()
        thread.join(20)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "engine_restarting"
        assert int(answers[0].headers["Retry-After"]) >= 1
        server.wait("engine_up", 1)
        assert server.worker().pid != worker.pid and server.metric("engine_restarts_total") == 1
        after = server.ask(KNOWN)
        assert after.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
        assert reused(after)["disk_tokens"] > 0.8 * reused(after)["prompt_tokens"]
        assert server.ask(KILLED).status_code == 200
        assert "killed by SIGKILL" in log.read_text()
        last = server.worker()
        server.process.kill()
        server.process.wait()
        assert not psutil.wait_procs([last], timeout=10)[1]
        with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
            pass  # nobody holds the port


def test_a_server_that_ends_keeps_what_was_computed(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(model, log) as server:
        worker = server.worker()
        thread, answers = begun(server, DRAINED)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        thread.join(10)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
        assert not worker.is_running()
    with serving(model, log) as server:
        assert reused(server.ask(DRAINED))["disk_tokens"] >= 2 * 256
    assert "did not end in order" not in log.read_text()
