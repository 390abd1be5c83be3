"""``longread serve`` with a real model and a store: clients vanish, the store is removed, the engine is killed.

The engine audits its books whenever it has nothing to do, and dies of what does not balance: as many restarts as kills
means that every audit held. Greedy answers are the same before and afterwards.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from longread.weights.fixture import write_fixture

TEXT = "The river runs through the valley, past the mill and the old bridge. " * 14
CLIENTS, TURNS = 6, 4


@contextmanager
def serving(model: Path, store: Path, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "longread.cli.main", "serve", str(model), "--port", "0", "--max-num-seqs", "3"]
    command += ["--max-num-batched-tokens", "256", "--snapshot-interval", "1K", "--max-model-len", "4K"]
    command += ["--store", str(store), "--max-num-queued-reqs", "4", "--shutdown-timeout", "1"]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        found = next((m for line in process.stdout if (m := re.search(r"serving \S+ on (http://\S+)", line))), None)
        assert found is not None, log.read_text()
        yield found[1], psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()


def body_of(kind: int) -> dict[str, object]:
    return {"prompt": f"Part {kind}: {TEXT}", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def vanish(address: str, kind: int, draw: random.Random) -> None:
    """A reset, some time after the whole request was sent."""
    host, port = address.removeprefix("http://").split(":")
    text = json.dumps({**body_of(kind), "stream": draw.random() < 0.5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(head % len(text) + text)
        time.sleep(draw.uniform(0, 0.2))


async def one(client: httpx.AsyncClient, address: str, seed: int, texts: dict[int, str], ends: Counter[str]) -> None:
    draw = random.Random(seed)
    for turn in range(TURNS):
        kind = (seed + turn) % len(texts)
        if draw.random() < 0.4:
            await asyncio.to_thread(vanish, address, kind, draw)
            ends["vanished"] += 1
            continue
        answer = await client.post("/v1/completions", json=body_of(kind))
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == texts[kind]
            ends["served"] += 1
        else:
            assert answer.status_code in (429, 503) and int(answer.headers["Retry-After"]) >= 1, answer.text
            ends[answer.json()["error"]["code"]] += 1
            await asyncio.sleep(0.3)


async def crowd(address: str, server: psutil.Process, store: Path, texts: dict[int, str]) -> Counter[str]:
    """The store goes, then the engine, both while there is much to do."""
    ends: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        clients = [asyncio.create_task(one(client, address, seed, texts, ends)) for seed in range(CLIENTS)]
        while ends.total() < 3:
            await asyncio.sleep(0.01)
        shutil.rmtree(store)
        while ends.total() < 9:
            await asyncio.sleep(0.01)
        (worker,) = server.children()
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.gather(*clients)
    return ends


def counters(address: str) -> Counter[str]:
    """Sums over labels."""
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^longread:(\w+)\{.*\} (\S+)$", httpx.get(f"{address}/metrics").text, re.M):
        found[name] += int(float(value))
    return found


def settled(address: str, seconds: float = 60.0) -> Counter[str]:
    """The counters once the next engine is there and has nothing to do."""
    end = time.monotonic() + seconds
    while True:
        found = counters(address)
        busy = found["num_requests_running"] + found["num_requests_waiting"] + found["num_requests_loading"]
        if (
            found["engine_restarts_total"]
            and found["engine_up"]
            and not busy
            and found["requests_accepted_total"] == found["request_success_total"]
        ):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def ask(address: str, kind: int) -> str:
    answer = httpx.post(f"{address}/v1/completions", json=body_of(kind), timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_a_server_without_store_and_engine_and_with_rude_clients_comes_back_whole(tmp_path: Path) -> None:
    model, store, log = tmp_path / "model", tmp_path / "store", tmp_path / "log"
    write_fixture(model, "v4-flash")
    with serving(model, store, log) as (address, server):
        texts = {number: ask(address, number) for number in range(3)}
        ends = asyncio.run(crowd(address, server, store, texts))
        assert set(ends) <= {"served", "vanished", "engine_restarting", "queue_full"}, ends
        found = settled(address)
        assert {number: ask(address, number) for number in range(3)} == texts
        time.sleep(0.2)  # for an audit: the engine has nothing to do
        found = settled(address)
        assert found["engine_restarts_total"] == 1, log.read_text()
        assert found["pages_held"] == 0
    assert "do not balance" not in log.read_text() and "Traceback" not in log.read_text(), log.read_text()
