"""The time that a client gives its request: it can only tighten the server's limits; nonsense is refused at once."""

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
from serving import Serving, serving, wait_until

from longread.server.limits import Limits
from longread.server.options import ServerOptions
from longread.spec.cost import StepCost

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
OURS, ENVOYS = "X-Request-Timeout-S", "x-envoy-expected-rq-timeout-ms"


@pytest.fixture
def stuck() -> Iterator[Serving]:
    """A server whose engine takes no step, with a limit of its own."""
    gate = threading.Semaphore(0)
    options = ServerOptions(limits=Limits(request_timeout=0.2))
    with serving(options=options, gate=gate, step_cost=StepCost(token=0.01)) as running:
        yield running
        gate.release(10_000)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({OURS: "0.05"}, "client_deadline"),
        ({ENVOYS: "50"}, "client_deadline"),
        ({OURS: "3600", ENVOYS: "50.5"}, "client_deadline"),
        ({OURS: "86400"}, "request_timeout"),  # the server's own is tighter
        ({OURS: "0.001"}, "client_deadline"),
    ],
)
def test_the_shortest_time_holds(stuck: Serving, headers: dict[str, str], code: str) -> None:
    answer = httpx.post(stuck.url + CHAT, json=HELLO, headers=headers, timeout=10)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
    assert int(answer.headers["Retry-After"]) >= 1


def test_the_time_to_come_back_is_what_others_take() -> None:
    gate = threading.Semaphore(0)
    with serving(gate=gate, step_cost=StepCost(token=0.01), max_num_seqs=8, max_model_len=100_000) as running:
        book = HELLO | {"messages": [{"role": "user", "content": "word " * 10_000}]}
        reading = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=book, timeout=20))
        reading.start()
        assert wait_until(lambda: running.pending() == 1)
        answer = httpx.post(running.url + CHAT, json=HELLO, headers={OURS: "0.3"}, timeout=10)
        gate.release(10_000)
        reading.join(10)
        assert answer.status_code == 504
        assert 30 <= int(answer.headers["Retry-After"]) <= 60  # as predicted_queue_seconds: 4,096 tokens of the book


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "1e3", "86401", "5s", "1,5", "9" * 400, "٣"])
@pytest.mark.parametrize("name", [OURS, ENVOYS])
def test_nonsense_is_refused_before_a_body_is_read(stuck: Serving, name: str, value: str) -> None:
    if name == ENVOYS and value == "86401":
        value = "86400001"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000000\r\n"
    with socket.create_connection(("127.0.0.1", int(stuck.url.rpartition(":")[2])), timeout=10) as mine:
        mine.sendall(f"{head}{name}: {value}\r\n\r\n".encode())
        answer = ""
        while not answer.endswith("}}"):
            answer += mine.recv(4000).decode()
    assert answer.startswith("HTTP/1.1 400") and "invalid_deadline" in answer
    assert ("0.001..86400:" if name == OURS else "1..86400000:") in answer


def test_a_wait_that_the_client_does_not_allow_is_a_429() -> None:
    gate, cost = threading.Semaphore(0), StepCost(token=1e-3)
    with serving(gate=gate, step_cost=cost, max_num_seqs=8, max_model_len=100_000) as running:
        book = HELLO | {"messages": [{"role": "user", "content": "word " * 10_000}]}
        reading = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=book, timeout=20))
        reading.start()
        assert wait_until(lambda: running.pending() == 1)
        other = book | {"messages": [{"role": "user", "content": "other " * 10_000}]}
        answer = httpx.post(running.url + CHAT, json=other, headers={OURS: "5"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline")
        assert "its own deadline leaves" in answer.json()["error"]["message"]
        gate.release(10_000)
        reading.join(10)
