"""Everything at once, for some seconds: clients that vanish at any stage, an engine that is killed, a clock that jumps.

What must hold afterwards: nothing is in flight anywhere, what was accepted has ended once, for a reason that is known,
the counters say the same as the clients, and who was served got exactly what he would have got in peace.
"""

import asyncio
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
from serving import wait_until
from worker_serving import WorkerServing, worker_serving

from longread.server.limits import Limits
from longread.server.options import ServerOptions

CLIENTS, REQUESTS, KILLS = 24, 8, 3
SUSPECTED = ("prompt_crashes_engine", "prompt_in_quarantine")


def body_of(number: int) -> dict[str, object]:
    prompt = [7, 8, number % 11 + 3]
    return {"model": "fake", "prompt": prompt, "max_tokens": 5 + number % 11 * 4, "ignore_eos": True}


def expected(address: str) -> dict[int, str]:
    """What each kind of request gets in peace; nothing where its prompt was in flight in two deaths of the engine."""
    texts = {}
    for number in range(11):
        answer = httpx.post(f"{address}/v1/completions", json=body_of(number), timeout=30).json()
        if "error" in answer:
            assert answer["error"]["code"] in SUSPECTED, answer
        else:
            texts[number] = answer["choices"][0]["text"]
    return texts


def vanish(address: str, number: int, draw: random.Random) -> None:
    """A client whose machine goes away: a reset, at any point of the request or of the answer."""
    host, port = address.removeprefix("http://").split(":")
    text = json.dumps({**body_of(number), "stream": draw.random() < 0.5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    wire = head % len(text) + text
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stage = draw.randrange(4)
        if stage < 2:
            connection.sendall(wire[: draw.randrange(len(wire))])
            time.sleep(draw.uniform(0, 0.01))
        else:
            connection.sendall(wire)
            time.sleep(draw.uniform(0, 0.05))
            if stage == 3:
                connection.settimeout(0.2)
                with suppress(TimeoutError, ConnectionError):
                    connection.recv(draw.randrange(1, 400))


def streamed(data: str) -> tuple[str, str | None]:
    """The text and the error of a stream. It ends once."""
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    assert data.endswith("data: [DONE]\n\n") and data.count("data: [DONE]") == 1, data[-300:]
    errors = [event["error"]["code"] for event in events if "error" in event]
    choices = [choice for event in events for choice in event.get("choices", [])]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(errors) + len(ends) == 1, (errors, ends)
    return "".join(choice["text"] for choice in choices), errors[0] if errors else None


async def ask(client: httpx.AsyncClient, number: int, draw: random.Random, texts: dict[int, str]) -> str:
    """One request of a client that stays: how it ended."""
    stream = draw.random() < 0.5
    answer = await client.post("/v1/completions", json={**body_of(number), "stream": stream})
    if answer.status_code != 200:
        assert answer.status_code in (429, 503), answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        await asyncio.sleep(draw.uniform(0.01, 0.1))
        return f"{answer.status_code} {answer.json()['error']['code']}"
    if stream:
        text, error = streamed(answer.text)
        if error is not None:
            return f"stream {error}"
    else:
        text = answer.json()["choices"][0]["text"]
    assert text == texts[number % 11]
    return "served"


async def crowd(serving: WorkerServing, texts: dict[int, str]) -> Counter[str]:
    """Clients of both kinds, and somebody who kills engines meanwhile."""
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=serving.url, timeout=30, limits=limits) as client:

        async def one(seed: int) -> None:
            draw = random.Random(seed)
            for turn in range(REQUESTS):
                number = seed * REQUESTS + turn
                if draw.random() < 0.4:
                    await asyncio.to_thread(vanish, serving.url, number, draw)
                    ends["vanished"] += 1
                else:
                    ends[await ask(client, number, draw, texts)] += 1

        async def kill() -> None:
            for count in range(KILLS):
                while len(serving.made) <= count:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(random.Random(count).uniform(0.1, 0.3))
                serving.kill()

        await asyncio.gather(kill(), *(one(seed) for seed in range(CLIENTS)))
    return ends


def counters(address: str) -> dict[str, Counter[str]]:
    """Metric name -> label of interest -> value."""
    found: dict[str, Counter[str]] = {}
    for name, labels, value in re.findall(
        r"^longread:(\w+)\{(.*)\} (\S+)$", httpx.get(f"{address}/metrics").text, re.M
    ):
        reason = re.search(r'reason="(\w+)"', labels)
        found.setdefault(name, Counter())[reason[1] if reason else ""] += int(float(value))
    return found


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The wall clock is anywhere within a year, and stands somewhere else each time one looks."""
    draw, real = random.Random(1), time.time
    monkeypatch.setattr(time, "time", lambda: real() + draw.uniform(-3e7, 3e7))
    yield


def test_the_books_balance_whatever_happens(jumping_clock: None) -> None:
    limits = Limits(max_num_queued_reqs=6, queue_timeout=20, ttft_timeout=20, request_timeout=20)
    engine = {"max_model_len": 4096, "max_num_seqs": 6}
    with worker_serving(options=ServerOptions(limits=limits), engine=engine, step_seconds=0.002) as serving:
        texts = expected(serving.url)
        ends = asyncio.run(crowd(serving, texts))
        serving.wait_ready()
        driver = serving.state.driver
        assert wait_until(lambda: driver.pending == 0, 20)
        allowed = {"served", "vanished", "503 engine_restarting", "stream engine_restarting", "429 queue_full"}
        allowed |= {f"{status} {code}" for status, code in zip((422, 503), SUSPECTED, strict=True)}
        assert set(ends) <= allowed, ends
        assert ends["served"] and ends["vanished"]
        assert any(end.endswith("engine_restarting") for end in ends), "the kills met requests"
        assert (driver.admission.in_flight, driver.admission.queued_tokens) == (0, 0)
        assert wait_until(lambda: '"running"' not in httpx.get(f"{serving.url}/v1/longread/requests?limit=500").text)
        assert wait_until(lambda: serving.state.bodies.held == 0)
        found = counters(serving.url)
        finished = found["request_success_total"]
        assert found["requests_accepted_total"][""] == finished.total(), (found["requests_accepted_total"], finished)
        assert set(finished) <= {"length", "cancelled", "failed"}, finished
        assert finished["length"] >= ends["served"] + len(texts)
        assert found["engine_restarts_total"][""] == KILLS
        assert found["admission_rejections_total"]["queue_full"] >= ends["429 queue_full"]
        assert found["request_timeouts_total"].total() == 0
        assert found["num_requests_running"].total() == found["num_requests_waiting"].total() == 0
        after = expected(serving.url)
        assert after.items() <= texts.items() and len(after) >= len(texts) - KILLS
