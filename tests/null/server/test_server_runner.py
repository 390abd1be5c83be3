"""Binding, loading, signals: how a server starts and ends."""

import os
import signal
import socket
import threading

import httpx
import pytest
import uvicorn
from serving import fixture_tokenizer, make_state

from longread.server import runner
from longread.server.app import create_app
from longread.server.fake import FakeEngine
from longread.server.options import ServerOptions
from longread.server.runner import Server, bind, serve, url
from longread.spec.engine import EngineInfo
from longread.spec.errors import CheckpointError, ConfigError

OPTIONS = ServerOptions(port=0, shutdown_timeout=5)


def test_a_taken_port_is_refused_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="--port"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind("é" * 300, 0)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_serving_server(sig: signal.Signals) -> None:
    engine = FakeEngine()
    state = make_state(lambda: engine, fixture_tokenizer(), OPTIONS)
    listener = bind("127.0.0.1", 0)
    answers: list[int] = []

    def on_ready(info: EngineInfo) -> None:
        assert info.model == "fake"
        address = url(listener)

        def ask() -> None:
            answers.append(httpx.get(f"{address}/ready").status_code)
            os.kill(os.getpid(), sig)

        threading.Thread(target=ask).start()

    before = signal.getsignal(sig)
    serve(create_app(state), state.driver, OPTIONS, listener, on_ready)
    assert answers == [200]
    assert engine.closed
    assert signal.getsignal(sig) is before


def test_open_requests_may_finish_after_a_signal() -> None:
    tokenizer = fixture_tokenizer()
    gate = threading.Semaphore(0)
    state = make_state(lambda: FakeEngine(gate=gate, eos_id=tokenizer.eos_id), tokenizer, OPTIONS)
    listener = bind("127.0.0.1", 0)
    answers: list[httpx.Response] = []

    def on_ready(info: EngineInfo) -> None:
        address = url(listener)

        def ask() -> None:
            with httpx.stream("POST", f"{address}/v1/completions", json={"prompt": [7], "stream": True}) as response:
                gate.release()
                lines = response.iter_lines()
                next(lines)
                os.kill(os.getpid(), signal.SIGTERM)
                gate.release(100)
                response.tail = list(lines)
            answers.append(response)

        threading.Thread(target=ask).start()

    serve(create_app(state), state.driver, OPTIONS, listener, on_ready)
    assert answers[0].tail[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in answers[0].tail[-4]


def test_a_checkpoint_that_does_not_load_ends_the_server() -> None:
    def make() -> FakeEngine:
        raise CheckpointError("model.safetensors: a tensor is missing")

    state = make_state(make, fixture_tokenizer(), OPTIONS)
    with pytest.raises(CheckpointError, match="a tensor is missing"):
        serve(create_app(state), state.driver, OPTIONS, bind("127.0.0.1", 0), lambda info: None)


def test_a_signal_while_loading_ends_the_server() -> None:
    loading = threading.Event()

    def make() -> FakeEngine:
        os.kill(os.getpid(), signal.SIGINT)
        loading.wait(20)
        return FakeEngine()

    ready: list[EngineInfo] = []
    state = make_state(make, fixture_tokenizer(), OPTIONS)
    serve(create_app(state), state.driver, OPTIONS, bind("127.0.0.1", 0), ready.append)
    assert not ready
    loading.set()
    state.driver.join(10)


@pytest.mark.anyio
@pytest.mark.parametrize(("timeout", "drained", "left"), [(9.0, 8.9, 1), (9.0, 2.5, 6), (0.2, 0.2, 1), (9.0, 0.0, 9)])
async def test_connections_get_the_time_that_the_engine_left(
    monkeypatch: pytest.MonkeyPatch, timeout: float, drained: float, left: int
) -> None:
    clock, given = [100.0], []
    state = make_state(FakeEngine, fixture_tokenizer(), OPTIONS)

    async def drain(seconds: float) -> None:
        assert seconds == timeout
        clock[0] += drained

    async def close_connections(self: Server, sockets: object = None) -> None:
        given.append(self.config.timeout_graceful_shutdown)

    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(state.driver, "close", drain)
    monkeypatch.setattr(uvicorn.Server, "shutdown", close_connections)
    await Server(create_app(state), state.driver, ServerOptions(shutdown_timeout=timeout)).shutdown()
    assert given == [left]
