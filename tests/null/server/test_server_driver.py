"""The driver: every request ends once, in order, whatever the engine does, and an idle server does nothing."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from longread.server.admission import Admission
from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.limits import Limits
from longread.server.subscription import Subscription
from longread.spec.engine import Event, FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import ConfigError, ContextLengthError, EngineFailedError, OverloadedError, RequestError

pytestmark = pytest.mark.anyio


def request(name: str, max_tokens: int | None = 5, prompt: tuple[int, ...] = (7, 8, 9)) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens))


@asynccontextmanager
async def driving(engine: FakeEngine, **options: object) -> AsyncIterator[EngineDriver]:
    driver = EngineDriver(lambda: engine, **options)
    driver.start()
    await driver.loaded()
    try:
        yield driver
    finally:
        await driver.close()


async def drain(subscription: Subscription) -> list[Event]:
    events: list[Event] = []
    while batch := await asyncio.wait_for(subscription.take(), 10):
        events += batch
    return events


def ends(events: list[Event]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, FinishEvent):
            found.setdefault(event.request_id, []).append(event.reason)
    return found


async def test_tokens_come_in_order_and_then_one_end() -> None:
    async with driving(FakeEngine()) as driver:
        events = await drain(driver.submit([request("a"), request("b", 3)]))
        assert ends(events) == {"a": ["length"], "b": ["length"]}
        assert [type(e) for e in events if e.request_id == "b"] == [TokenEvent] * 3 + [FinishEvent]
        assert driver.pending == 0
        assert driver.stats.generation_tokens == 8


async def test_the_stats_are_the_engines_before_the_first_step() -> None:
    engine = FakeEngine()
    async with driving(engine) as driver:
        assert engine.steps == 0
        assert driver.stats.pages_free == engine.info.num_pages


async def test_cancel_ends_within_a_step_and_drops_late_tokens() -> None:
    gate = threading.Semaphore(0)
    engine = FakeEngine(gate=gate)
    async with driving(engine) as driver:
        subscription = driver.submit([request("a", None)])
        gate.release()
        assert isinstance((await subscription.take())[0], TokenEvent)
        driver.cancel(subscription)
        driver.cancel(subscription)
        gate.release(2)  # the step that may already have begun, and the one that sees the cancel
        events = await drain(subscription)
        assert [type(e) for e in events] == [FinishEvent]
        assert ends(events) == {"a": ["cancelled"]}
        assert engine.steps <= 3


async def test_stop_gives_the_finish_event_without_more_tokens() -> None:
    async with driving(FakeEngine()) as driver:
        subscription = driver.submit([request("a", None), request("b", 20)])
        events = await subscription.take()
        driver.stop("a")
        later = await drain(subscription)
        assert not [e for e in later if isinstance(e, TokenEvent) and e.request_id == "a"]
        events += later
        assert ends(events) == {"a": ["cancelled"], "b": ["length"]}


async def test_a_broken_step_fails_all_requests_and_the_server_stays_red() -> None:
    async with driving(FakeEngine(fail_at_step=3)) as driver:
        subscription = driver.submit([request("a", 50), request("b", 50)])
        events = await drain(subscription)
        assert ends(events) == {"a": ["failed"], "b": ["failed"]}
        assert isinstance(subscription.refusals["a"], EngineFailedError)
        assert driver.state == "failed"
        with pytest.raises(EngineFailedError, match="RuntimeError"):
            driver.submit([request("c")])


async def test_one_failed_request_leaves_the_others() -> None:
    async with driving(FakeEngine(fail_requests=frozenset({666}))) as driver:
        events = await drain(driver.submit([request("a", 4), request("bad", 4, (666, 1))]))
        assert ends(events) == {"a": ["length"], "bad": ["failed"]}
        assert driver.state == "ready"


async def test_a_request_that_the_engine_refuses_late_ends_with_that_error() -> None:
    async with driving(FakeEngine(max_model_len=16)) as driver:
        subscription = driver.submit([request("a", 100)])
        assert ends(await drain(subscription)) == {"a": ["failed"]}
        assert isinstance(subscription.refusals["a"], ContextLengthError)


def test_the_fake_engine_accepts_what_the_real_one_accepts() -> None:
    engine = FakeEngine(max_model_len=16, vocab=100)
    for sampling, says in (
        (SamplingParams(logprobs=21), "logprobs must lie in 0..20"),
        (SamplingParams(stop_token_ids=(100,)), r"stop_token_ids must lie in 0..99"),
        (SamplingParams(min_tokens=20), "max_model_len is 16 tokens"),
    ):
        with pytest.raises(RequestError, match=says):
            engine.validate(GenerationRequest("a", (7, 8), sampling))


async def test_the_queue_limit_refuses_all_or_none() -> None:
    gate = threading.Semaphore(0)
    async with driving(
        FakeEngine(gate=gate, max_num_seqs=2), admission=Admission(Limits(max_num_queued_reqs=1))
    ) as driver:
        subscription = driver.submit([request("a", 1), request("b", 1)])
        with pytest.raises(OverloadedError, match="max_num_queued_reqs is 1"):
            driver.submit([request("c", 1), request("d", 1)])
        assert driver.pending == 2
        gate.release(100)
        assert len(ends(await drain(subscription))) == 2


async def test_requests_are_refused_while_the_model_loads() -> None:
    loading = threading.Event()

    def make() -> FakeEngine:
        loading.wait(10)
        return FakeEngine()

    driver = EngineDriver(make)
    driver.start()
    with pytest.raises(OverloadedError, match="still loading"):
        driver.submit([request("a")])
    loading.set()
    await driver.loaded()
    assert len(ends(await drain(driver.submit([request("a")])))) == 1
    await driver.close()


async def test_a_failed_load_is_raised_to_who_waits() -> None:
    def make() -> FakeEngine:
        raise ConfigError("no such checkpoint")

    driver = EngineDriver(make)
    driver.start()
    with pytest.raises(ConfigError, match="no such checkpoint"):
        await driver.loaded()
    with pytest.raises(EngineFailedError):
        driver.submit([request("a")])
    await driver.close()


async def test_close_lets_requests_finish_when_there_is_time() -> None:
    async with driving(FakeEngine()) as driver:
        subscription = driver.submit([request("a", 100)])
        await driver.close(drain_seconds=10)
        assert ends(await drain(subscription)) == {"a": ["length"]}


async def test_close_cuts_off_what_does_not_end() -> None:
    engine = FakeEngine(max_model_len=10**9)
    async with driving(engine) as driver:
        subscription = driver.submit([request("a", None)])
        await driver.close(drain_seconds=0.05)
        assert ends(await drain(subscription)) == {"a": ["failed"]}
        assert "shutting down" in subscription.refusals["a"].message
        assert engine.closed
        with pytest.raises(OverloadedError, match="shutting down"):
            driver.submit([request("b")])


async def test_an_idle_driver_uses_no_processor_time() -> None:
    engine = FakeEngine()
    async with driving(engine) as driver:
        await drain(driver.submit([request("a")]))
        steps, before = engine.steps, time.process_time()
        await asyncio.sleep(0.3)
        assert engine.steps == steps
        assert time.process_time() - before < 0.1
