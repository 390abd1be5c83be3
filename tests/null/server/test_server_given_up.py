"""What the server gives up: requests whose time is over, clients that do not read. Each ends once, the books balance.

Steps are held back by a gate wherever a time limit should pass, so nothing depends on how fast this machine is.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import Serving, serving, wait_until

from longread.server.admission import Admission
from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.limits import LEAST_BUFFER, Limits
from longread.server.options import ServerOptions
from longread.spec.cost import StepCost
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import AdmissionError

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def options(**limits: object) -> ServerOptions:
    return ServerOptions(limits=Limits(**limits))


def metrics(running: Serving) -> dict[str, float]:
    """Samples by name and the values of their labels but the model's."""
    return {
        sample.name.removeprefix("longread:")
        + "".join(f" {v}" for k, v in sample.labels.items() if k != "model_name"): (sample.value)
        for family in text_string_to_metric_families(httpx.get(running.url + "/metrics").text)
        for sample in family.samples
    }


def ended(found: dict[str, float]) -> dict[str, float]:
    prefix = "request_success_total "
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def assert_balanced(running: Serving) -> dict[str, float]:
    """Every accepted request has ended once, and nothing of it is left."""
    assert wait_until(lambda: running.pending() == 0)
    found = metrics(running)
    assert found["requests_accepted_total"] == sum(ended(found).values())
    admission = running.state.driver.admission
    assert (admission.in_flight, found["num_queued_tokens"], found["num_requests_running"]) == (0, 0, 0)
    return found


@contextmanager
def released(gate: threading.Semaphore) -> Iterator[None]:
    """Whatever happens in there, the engine goes on behind it: the server could not stop."""
    try:
        yield
    finally:
        gate.release(10_000)


@pytest.mark.parametrize("name", ["queue_timeout", "ttft_timeout", "request_timeout"])
def test_a_request_whose_time_is_over_before_its_first_token_is_a_504(name: str) -> None:
    gate = threading.Semaphore(0)
    with serving(options=options(**{name: 0.05}), gate=gate, max_num_seqs=1) as running, released(gate):
        answer = httpx.post(running.url + CHAT, json=HELLO, timeout=10)
        assert answer.status_code == 504
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == (name, "timeout_error")
        assert f"0.05 s ({name})" in error["message"]
        assert running.pending() == 1  # the engine's slot is not free before the engine says so
        gate.release(1000)
        found = assert_balanced(running)
        assert found[f"request_timeouts_total {name.removesuffix('_timeout')}"] == 1
        assert ended(found) == {name: 1}
        assert httpx.post(running.url + CHAT, json=HELLO).status_code in (200, 504)


def test_in_a_stream_it_is_an_error_event_and_the_end() -> None:
    gate = threading.Semaphore(2)
    with serving(options=options(request_timeout=1.0), gate=gate) as running, released(gate):
        with httpx.stream("POST", running.url + CHAT, json=HELLO | {"stream": True, "max_tokens": 50}) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert answer.status_code == 200
        assert lines[-1] == "[DONE]"
        assert json.loads(lines[-2])["error"]["code"] == "request_timeout"
        assert sum("content" in line for line in lines[:-2]) >= 2
        gate.release(1000)
        assert ended(assert_balanced(running)) == {"request_timeout": 1}


def test_the_first_token_ends_the_first_limits() -> None:
    gate = threading.Semaphore(1)
    with serving(options=options(queue_timeout=1.0, ttft_timeout=1.0), gate=gate) as running, released(gate):
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(httpx.post(running.url + CHAT, json=HELLO, timeout=10)))
        asking.start()
        assert wait_until(lambda: metrics(running)["generation_tokens_total"] == 1)
        time.sleep(1.2)  # both limits, and more
        gate.release(1000)
        asking.join(10)
        assert answers[0].status_code == 200
        assert ended(assert_balanced(running)) == {"length": 1}


def test_a_prompt_that_is_being_read_is_not_in_the_queue_any_more() -> None:
    """A request behind a full batch is given up, the one in it is not."""
    gate = threading.Semaphore(1)
    with serving(options=options(queue_timeout=1.0), gate=gate, max_num_seqs=1) as running, released(gate):
        codes: dict[str, int] = {}

        def ask(name: str) -> None:
            codes[name] = httpx.post(running.url + CHAT, json=HELLO, timeout=10).status_code

        first = threading.Thread(target=ask, args=("first",))
        first.start()
        assert wait_until(lambda: metrics(running)["num_requests_running"] == 1)
        ask("second")
        gate.release(1000)
        first.join(10)
        assert codes == {"first": 200, "second": 504}
        assert ended(assert_balanced(running)) == {"length": 1, "queue_timeout": 1}


def test_nobody_waits_for_ingest_so_it_has_no_time_limits() -> None:
    gate = threading.Semaphore(0)
    with serving(options=options(request_timeout=0.05), gate=gate) as running, released(gate):
        codes: list[int] = []
        body = HELLO | {"priority": 100}
        asking = threading.Thread(target=lambda: codes.append(httpx.post(running.url + CHAT, json=body).status_code))
        asking.start()
        assert httpx.post(running.url + CHAT, json=HELLO).status_code == 504  # behind it
        gate.release(1000)
        asking.join(10)
        assert codes == [200]
        assert ended(assert_balanced(running)) == {"length": 1, "request_timeout": 1}


def test_a_deadline_that_cannot_be_met_and_a_predicted_wait_are_429() -> None:
    gate, cost = threading.Semaphore(0), StepCost(token=1e-3)
    limits = options(ttft_timeout=5.0)
    with (
        serving(options=limits, gate=gate, step_cost=cost, max_num_seqs=8, max_model_len=100_000) as running,
        released(gate),
    ):
        book = HELLO | {"messages": [{"role": "user", "content": "word " * 10_000}]}
        reading = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=book, timeout=20))
        reading.start()
        assert wait_until(lambda: running.pending() == 1)
        found = metrics(running)
        assert found["num_queued_tokens"] > 8000
        assert found["predicted_queue_seconds"] == pytest.approx(4.096, rel=0.01)  # passes the book, beside it
        other = book | {"messages": [{"role": "user", "content": "other " * 10_000}]}
        answer = httpx.post(running.url + CHAT, json=other)
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("deadline", "rate_limit_error")
        assert "ttft_timeout is 5 s" in error["message"]
        assert 3 <= int(answer.headers["Retry-After"]) <= 30
        short = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=HELLO, timeout=20))
        short.start()
        assert wait_until(lambda: running.pending() == 2)
        gate.release(1000)
        reading.join(10)
        short.join(10)
        assert assert_balanced(running)["admission_rejections_total deadline"] == 1


@pytest.mark.parametrize("limits", [{"max_num_queued_reqs": 0}, {"max_num_queued_tokens": 1}])
def test_a_full_server_refuses_before_it_reads_a_body(limits: dict[str, int]) -> None:
    gate = threading.Semaphore(0)
    with serving(options=options(**limits), gate=gate, max_num_seqs=1) as running, released(gate):
        taking = threading.Thread(target=lambda: httpx.post(running.url + CHAT, json=HELLO, timeout=10))
        taking.start()
        assert wait_until(lambda: running.pending() == 1)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50000000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=10) as mine:
            mine.sendall(head.encode())
            assert b" 429 " in mine.recv(1000)
        reason = "queue_full" if "max_num_queued_reqs" in limits else "queued_tokens"
        assert metrics(running)[f"admission_rejections_total {reason}"] == 1
        gate.release(100)
        taking.join(10)
        assert_balanced(running)


def raw_stream(running: Serving, max_tokens: int, **fields: object) -> socket.socket:
    """A client that asks for a stream and reads nothing."""
    body = json.dumps(HELLO | {"stream": True, "max_tokens": max_tokens} | fields).encode()
    mine = socket.socket()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    mine.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    mine.sendall(head.encode() + body)
    return mine


def test_a_client_that_never_reads_is_cut_off_in_time() -> None:
    """It has the whole server: what is ready for it grows until the socket is full, then the limit runs."""
    limits = options(stream_timeout=0.2, max_stream_buffer=10**6)
    with serving(options=limits, max_model_len=10**7) as running, closing(raw_stream(running, 10**6)):
        assert wait_until(lambda: metrics(running)["slow_readers_total time"] == 1, 30)
        assert ended(assert_balanced(running)) == {"cancelled": 1}
        assert httpx.post(running.url + CHAT, json=HELLO).status_code == 200


def test_a_whole_answer_that_nobody_reads_is_cut_off_too() -> None:
    large = {"stream": False, "logprobs": True, "top_logprobs": 20}
    with (
        serving(options=options(stream_timeout=0.2), max_model_len=10**6) as running,
        closing(raw_stream(running, 3000, **large)),
    ):
        assert wait_until(lambda: metrics(running)["slow_readers_total time"] == 1, 30)
        assert ended(assert_balanced(running)) == {"length": 1}


def test_a_client_that_never_reads_holds_a_bounded_part_of_its_answer() -> None:
    limits = options(stream_timeout=None, max_stream_buffer=LEAST_BUFFER)
    with serving(options=limits, max_model_len=10**7) as running, closing(raw_stream(running, 10**6)) as stuck:
        assert wait_until(lambda: metrics(running)["slow_readers_total buffer"] == 1, 30)
        found = assert_balanced(running)
        assert ended(found) == {"slow_reader": 1}
        # What was made goes to the socket, to the server's own buffer, and to at most that many tokens beside it.
        assert found["generation_tokens_total"] < 60_000
        received = b""
        stuck.settimeout(10)
        while b"[DONE]" not in received and (data := stuck.recv(1 << 20)):
            received = received[-4096:] + data
        assert b"max_stream_buffer is 256" in received and b'"slow_reader"' in received


def test_a_slow_client_that_reads_is_served() -> None:
    limits = options(stream_timeout=1.0, max_stream_buffer=10**6)
    with serving(options=limits, max_model_len=10**7) as running, closing(raw_stream(running, 1500)) as slow:
        received = 0
        slow.settimeout(10)
        while data := slow.recv(32 * 1024):
            received += len(data)
            if b"[DONE]" in data:
                break
            time.sleep(0.02)
        assert received > 150_000
        assert metrics(running)["slow_readers_total time"] == 0
        assert ended(assert_balanced(running)) == {"length": 1}


# The driver alone, so that every stage can be met on purpose.

pytestmark = pytest.mark.anyio


class Books:
    """Counts as the metrics do."""

    def __init__(self) -> None:
        self.accepted_count = 0
        self.refused = 0
        self.ends: list[str] = []
        self.names: list[str] = []

    def gaps(self, seconds: Sequence[float]) -> None: ...

    def accepted(self, count: int) -> None:
        self.accepted_count += count

    def rejected(self, count: int, reason: str) -> None:
        self.refused += count

    def finish(self, event: FinishEvent, reason: str) -> None:
        self.ends.append(reason)
        self.names.append(event.request_id)

    def slow_reader(self, reason: str) -> None: ...

    def lost(self) -> None: ...


def made(name: str, max_tokens: int = 5, first: int = 7) -> GenerationRequest:
    return GenerationRequest(name, (first, 8, 9), SamplingParams(max_tokens=max_tokens))


async def settled(driver: EngineDriver) -> None:
    async with asyncio.timeout(10):
        while driver.pending:
            await asyncio.sleep(0.001)


@pytest.fixture
def gated() -> Iterator[tuple[threading.Semaphore, Callable[..., FakeEngine]]]:
    gate = threading.Semaphore(0)
    yield gate, lambda **engine: FakeEngine(gate=gate, **engine)
    gate.release(10_000)


async def test_who_is_given_up_hears_it_before_the_engine_does(gated: tuple) -> None:
    gate, make = gated
    books = Books()
    driver = EngineDriver(make, admission=Admission(Limits(ttft_timeout=0.05)), observer=books)
    driver.start()
    await driver.loaded()
    subscription = driver.submit([made("a"), made("b")])
    events = await asyncio.wait_for(subscription.take(), 10)
    while subscription.open:
        events += await asyncio.wait_for(subscription.take(), 10)
    assert [type(event) for event in events] == [FinishEvent, FinishEvent]
    assert {error.code for error in subscription.refusals.values()} == {"ttft_timeout"}
    assert (driver.pending, books.ends) == (2, [])
    driver.cancel(subscription)  # as the HTTP side does, whatever happened
    driver.stop("a")
    gate.release(100)
    await settled(driver)
    assert await subscription.take() == []
    assert books.ends == ["ttft_timeout"] * 2
    assert driver.admission.in_flight == 0
    await driver.close()


async def test_a_broken_engine_does_not_end_again_what_was_given_up(gated: tuple) -> None:
    gate, make = gated
    books = Books()
    driver = EngineDriver(
        lambda: make(fail_at_step=1), admission=Admission(Limits(request_timeout=0.05)), observer=books
    )
    driver.start()
    await driver.loaded()
    subscription = driver.submit([made("a")])
    await asyncio.wait_for(subscription.take(), 10)
    gate.release(100)
    await settled(driver)
    assert books.ends == ["request_timeout"]
    assert subscription.refusals["a"].code == "request_timeout"
    assert await subscription.take() == []
    await driver.close()


async def test_closing_ends_what_waits_for_its_time(gated: tuple) -> None:
    gate, make = gated
    driver = EngineDriver(make, admission=Admission(Limits(request_timeout=3600.0)))
    driver.start()
    await driver.loaded()
    driver.submit([made("a")])
    gate.release(1000)
    await driver.close(drain_seconds=5)
    assert (driver.pending, driver.admission.in_flight) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_the_books_balance_whatever_happens(seed: int) -> None:
    """Cancels and stops at each stage, requests that fail, time limits, a full queue, late refusals."""
    rng, books, gate = random.Random(seed), Books(), threading.Semaphore(0)
    limits = Limits(max_num_queued_reqs=6, ttft_timeout=0.02, request_timeout=0.04)
    engine = FakeEngine(max_num_seqs=4, max_model_len=64, fail_requests=frozenset({13}), gate=gate)
    driver = EngineDriver(lambda: engine, admission=Admission(limits), observer=books)
    driver.start()
    await driver.loaded()
    submitted, refused = 0, 0
    open_ones: list = []
    for i in range(300):
        count = rng.randint(1, 3)
        too_long = rng.random() < 0.05
        batch = [made(f"{i}-{n}", 1000 if too_long else rng.randint(1, 40), rng.choice((7, 13))) for n in range(count)]
        try:
            open_ones.append(driver.submit(batch))
            submitted += count
        except AdmissionError as error:
            assert error.code == "queue_full"
            refused += count
        for subscription in rng.sample(open_ones, min(len(open_ones), 2)):
            if rng.random() < 0.3:
                driver.cancel(subscription)
            if rng.random() < 0.2:
                driver.stop(rng.choice(sorted(subscription.choice)))
        gate.release(rng.randint(1, 4))
        await asyncio.sleep(0.05 if i % 100 == 99 else rng.choice((0, 0, 0.0005, 0.002)))
    gate.release(10_000)
    for subscription in open_ones:
        ends: list[str] = []
        tokens: dict[str, int] = {}
        while events := await asyncio.wait_for(subscription.take(), 10):
            for event in events:
                assert event.request_id not in ends, "an event behind the end"
                if isinstance(event, TokenEvent):
                    tokens[event.request_id] = tokens.get(event.request_id, 0) + 1
                else:
                    ends.append(event.request_id)
        assert sorted(ends) == sorted(subscription.choice)
    await settled(driver)
    assert (books.accepted_count, books.refused) == (submitted, refused)
    assert len(books.ends) == submitted == len(set(books.names))
    assert refused > 0 and {"cancelled", "failed", "length", "request_timeout"} <= set(books.ends)
    assert (driver.admission.in_flight, driver.admission.queued_tokens) == (0, 0)
    await driver.close()
