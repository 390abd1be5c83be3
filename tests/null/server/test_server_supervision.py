"""A server whose engine dies: what clients, probes and metrics see, and how it comes back or gives up."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import psutil
import pytest
from fake_worker import workers
from serving import wait_until
from worker_serving import WorkerServing, worker_serving, worker_state

from longread.server.app import create_app
from longread.server.options import ServerOptions
from longread.server.restarts import Restarts
from longread.server.runner import bind, serve, url
from longread.spec.engine import EngineInfo
from longread.spec.errors import ConfigError, CrashLoopError, EngineLostError, LongreadError

SLOW = {"engine": {"max_model_len": 10**6}, "step_seconds": 0.01}
ENDLESS = {"model": "fake", "prompt": [7, 8, 9], "ignore_eos": True, "max_tokens": 10**5}


def stream(address: str, began: threading.Event | None = None) -> list[str]:
    """The data lines of an endless answer, whose start is told."""
    lines: list[str] = []
    with httpx.stream("POST", f"{address}/v1/completions", json={**ENDLESS, "stream": True}, timeout=30) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                lines.append(line)
                if began is not None:
                    began.set()
    return lines


def metric(serving: WorkerServing, name: str) -> float:
    text = httpx.get(f"{serving.url}/metrics").text
    line = next(line for line in text.splitlines() if line.startswith(f"longread:{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_a_death_ends_what_was_in_flight_and_the_next_engine_serves() -> None:
    with worker_serving(**SLOW, load_seconds=0.5) as serving, ThreadPoolExecutor(4) as pool:
        began = threading.Event()
        streamed = pool.submit(stream, serving.url, began)
        whole = pool.submit(httpx.post, f"{serving.url}/v1/completions", json=ENDLESS, timeout=30)
        assert began.wait(10)
        assert wait_until(lambda: metric(serving, "num_requests_running") == 2)
        serving.kill()
        lines = streamed.result(10)
        assert lines[-1] == "data: [DONE]" and '"code":"engine_restarting"' in lines[-2]
        answer = whole.result(10)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_restarting"
        assert int(answer.headers["Retry-After"]) >= 1
        ready, health = (httpx.get(f"{serving.url}/{path}") for path in ("ready", "health"))
        assert (ready.status_code, health.status_code) == (503, 200)
        assert int(ready.headers["Retry-After"]) >= 1
        assert "started again" in health.json()["detail"]
        assert metric(serving, "engine_up") == 0
        late = httpx.post(f"{serving.url}/v1/completions", json=ENDLESS)
        assert late.status_code == 503 and late.json()["error"]["code"] == "engine_restarting"
        serving.wait_ready()
        assert httpx.get(f"{serving.url}/health").json() == {"status": "ok"}
        assert (metric(serving, "engine_up"), metric(serving, "engine_restarts_total")) == (1, 1)
        body = {**ENDLESS, "max_tokens": 3}
        assert httpx.post(f"{serving.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert serving.state.driver.pending == 0


def test_a_hang_is_a_death() -> None:
    with worker_serving(step_timeout=0.5, hang_at=3, **SLOW | {"step_seconds": 0.0}) as serving:
        assert '"code":"engine_restarting"' in stream(serving.url)[-2]
        serving.wait_ready()
        assert metric(serving, "engine_restarts_total") == 1


def test_restarts_leave_nothing_behind() -> None:
    here = psutil.Process()
    with worker_serving() as serving:
        counts = []
        for count in range(1, 4):
            assert wait_until(lambda n=count: len(serving.made) == n and serving.ready(), 20)
            assert wait_until(lambda: len(here.children()) == 1)
            counts.append((here.num_fds(), here.num_threads()))
            serving.kill()
        assert max(files for files, _ in counts) <= counts[0][0] + 1  # one for a connection that is closing
        assert max(threads for _, threads in counts) <= counts[0][1] + 1
        assert wait_until(lambda: len(serving.made) == 4 and serving.ready(), 20)
        assert not any(psutil.pid_exists(engine.pid) for engine in serving.made[:-1])


def serve_alone(
    options: ServerOptions, restarts: Restarts, then: object = None, **task: object
) -> tuple[float, LongreadError | None]:
    """``runner.serve`` in this thread, as the command does it: seconds it took, and what it raised."""
    made = workers(**task)
    state, engines = worker_state(made, options, restarts)
    listener = bind("127.0.0.1", 0)

    def on_ready(info: EngineInfo) -> None:
        if callable(then):
            threading.Thread(target=then, args=(WorkerServing(url(listener), state, engines),), daemon=True).start()

    begun = time.monotonic()
    try:
        serve(create_app(state), state.driver, options, listener, on_ready)
        return time.monotonic() - begun, None
    except LongreadError as error:
        return time.monotonic() - begun, error
    finally:
        made.stop()
        state.driver.join(10)


def test_a_crash_loop_ends_the_server_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    def kill_on(serving: WorkerServing) -> None:
        for count in range(1, 4):
            assert wait_until(lambda n=count: len(serving.made) == n and serving.ready(), 10)
            serving.kill()

    restarts = Restarts(first=0.01, deaths=3)
    _, error = serve_alone(ServerOptions(shutdown_timeout=5), restarts, kill_on)
    assert isinstance(error, CrashLoopError)
    assert "SIGKILL" in str(error) and "3 times within 60 s" in str(error)


def test_an_engine_that_never_came_up_is_not_tried_again() -> None:
    _, error = serve_alone(ServerOptions(), Restarts(), die=9)
    assert isinstance(error, EngineLostError) and "status 9" in str(error)
    _, error = serve_alone(ServerOptions(), Restarts(), refuse="no such thing")
    assert isinstance(error, ConfigError) and "no such thing" in str(error)


@pytest.mark.parametrize("phase", ["first load", "reload", "pause"])
def test_a_signal_ends_a_server_without_an_engine(phase: str) -> None:
    restarts = Restarts(first=60.0 if phase == "pause" else 0.01)

    def end(serving: WorkerServing) -> None:
        serving.kill()
        assert wait_until(lambda: serving.state.driver.state == "restarting")
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    if phase == "first load":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    seconds, error = serve_alone(ServerOptions(), restarts, end, load_seconds=1.0 if phase == "reload" else 0.2)
    assert error is None and seconds < 10


def drained(signals: int, max_tokens: int, pause: float = 0.3) -> tuple[float, httpx.Response]:
    answers: list[httpx.Response] = []
    refused: list[httpx.Response] = []
    done = threading.Event()

    def ask_and_end(serving: WorkerServing) -> None:
        def ask_whole() -> None:
            body = {**ENDLESS, "max_tokens": max_tokens}
            answers.append(httpx.post(f"{serving.url}/v1/completions", json=body, timeout=30))
            done.set()

        threading.Thread(target=ask_whole, daemon=True).start()
        with httpx.Client(base_url=serving.url) as client:
            client.get("/health")  # a connection that is there before the server stops listening
            assert wait_until(lambda: serving.state.driver.pending == 1)
            for number in (signal.SIGTERM, signal.SIGINT)[:signals]:
                os.kill(os.getpid(), number)
                time.sleep(pause)
            if signals == 1:
                refused.append(client.post("/v1/completions", json=ENDLESS))
                refused.append(client.get("/ready"))

    seconds, error = serve_alone(ServerOptions(shutdown_timeout=20), Restarts(), ask_and_end, **SLOW)
    assert error is None
    assert done.wait(5)
    assert [answer.status_code for answer in refused] == [503] * len(refused)
    assert all(answer.json()["error"]["code"] == "shutting_down" for answer in refused)
    return seconds, answers[0]


def test_what_runs_may_finish_after_a_signal_and_nothing_new_begins() -> None:
    seconds, answer = drained(1, 100)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 100
    assert seconds < 15


def test_the_second_signal_ends_it_at_once() -> None:
    seconds, answer = drained(2, 10**5)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
    assert seconds < 10


def test_a_second_signal_right_behind_the_first_starts_no_engine(caplog: pytest.LogCaptureFixture) -> None:
    """Before anything was closed: the process that it ended is no loss."""
    seconds, answer = drained(2, 10**5, pause=0.0)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
    assert seconds < 10 and "started again" not in caplog.text


def test_a_hangup_is_handed_on_and_ends_nothing() -> None:
    heard: list[int] = []
    made = workers()
    state, _ = worker_state(made, ServerOptions(), Restarts())

    def on_ready(info: EngineInfo) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    def on_hangup() -> None:
        heard.append(state.driver.pending)
        os.kill(os.getpid(), signal.SIGTERM)

    serve(create_app(state), state.driver, ServerOptions(), bind("127.0.0.1", 0), on_ready, on_hangup)
    assert heard == [0]


def test_the_options_step_timeout_is_checked() -> None:
    assert replace(ServerOptions(), step_timeout=0).step_timeout == 0
    for bad in (-1.0, 0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="step_timeout"):
            ServerOptions(step_timeout=bad)
