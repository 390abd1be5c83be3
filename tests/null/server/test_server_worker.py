"""An engine in a process of its own, without a model: the protocol holds, and each way to die is found and told."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_worker import workers
from serving import wait_until

from longread.server.fake import FakeEngine
from longread.server.worker import child, messages, process
from longread.server.worker import engine as remote
from longread.server.worker.engine import WorkerEngine
from longread.server.worker.supervise import LoadInterruptedError, Workers
from longread.spec.engine import (
    Event,
    FinishEvent,
    GenerationRequest,
    GrammarSpec,
    SamplingParams,
    Standing,
    TokenEvent,
)
from longread.spec.errors import (
    ConfigError,
    ContextLengthError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
)

ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
LONG = {"max_model_len": 10**9}


@contextmanager
def working(made: Workers | None = None, **task: object) -> Iterator[WorkerEngine]:
    engine = (made or workers(**task)).make()
    try:
        yield engine
    finally:
        engine.kill()
        engine.close()


def request(
    name: str, sampling: SamplingParams | None = None, prompt: tuple[int, ...] = (7, 8, 9)
) -> GenerationRequest:
    return GenerationRequest(name, prompt, sampling or SamplingParams(max_tokens=5))


def step(engine: WorkerEngine | FakeEngine) -> list[Event]:
    """What comes next, as a driver would hear of it. Raises EngineLostError."""
    if isinstance(engine, FakeEngine):
        return list(engine.step())
    while True:
        patience = engine.patience()
        events = list(engine.read(5.0 if patience is None else patience))
        if events:
            return events
        if engine.gone or engine.patience() == 0:
            raise engine.lost(hangs=not engine.gone)


def run(engine: WorkerEngine | FakeEngine, ends: int) -> list[Event]:
    """Step until so many requests have ended."""
    events: list[Event] = []
    while sum(isinstance(event, FinishEvent) for event in events) < ends:
        events += step(engine)
    return events


def lost(engine: WorkerEngine, seconds: float = 10.0) -> str:
    """Step until the engine is lost, and say why."""
    end = time.monotonic() + seconds
    with pytest.raises(EngineLostError) as caught:
        while time.monotonic() < end:
            step(engine)
    engine.submit(request("later"))
    told: list[Standing | None] = []
    engine.explain("later", told.append)
    assert told == [None]
    with pytest.raises(EngineLostError):
        step(engine)
    return str(caught.value)


def tokens(events: list[Event]) -> dict[str, list[tuple[int, float | None, int]]]:
    found: dict[str, list[tuple[int, float | None, int]]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            found.setdefault(event.request_id, []).append((event.token_id, event.logprob, len(event.top)))
    return found


def test_it_answers_as_the_engine_beside_us_does() -> None:
    requests = [request(f"r{i}", SamplingParams(max_tokens=1 + i, seed=i), (7, i + 3)) for i in range(20)]
    requests.append(request("logprobs", SamplingParams(max_tokens=4, logprobs=3)))
    here = FakeEngine()
    for each in requests:
        here.submit(each)
    wanted = run(here, len(requests))
    with working() as engine:
        assert engine.info == here.info
        for each in requests:
            engine.submit(each)
        events = run(engine, len(requests))
        assert tokens(events) == tokens(wanted)
        ends = {event.request_id: event for event in events if isinstance(event, FinishEvent)}
        for event in wanted:
            if isinstance(event, FinishEvent):
                got = ends[event.request_id]
                assert replace(got, times=event.times, reuse=event.reuse) == event
                assert got.times.arrived <= got.times.first_token <= got.times.finished <= time.monotonic()
        firsts = [event.first for event in events if isinstance(event, TokenEvent) and event.first is not None]
        assert len(firsts) == len(requests)
        assert engine.stats().generation_tokens == here.stats().generation_tokens
        engine.close()
        assert engine._process.end(0) == 0


def test_what_it_refuses_is_refused_here_and_grammars_there() -> None:
    with working(engine={"max_model_len": 16}) as engine:
        with pytest.raises(ContextLengthError):
            engine.validate(request("a", SamplingParams(max_tokens=100)))
        with pytest.raises(ContextLengthError):
            engine.submit(request("a", SamplingParams(max_tokens=100)))
        good, bad = (GrammarSpec("json_schema", text) for text in ('{"type": "object"}', '{"type": "bad"}'))
        refused: list[InvalidRequestError] = []

        def check() -> None:
            engine.validate(request("a", SamplingParams(max_tokens=1, grammar=good)))
            with pytest.raises(InvalidRequestError, match="cannot be compiled") as caught:
                engine.validate(request("a", SamplingParams(max_tokens=1, grammar=bad)))
            refused.append(caught.value)

        thread = threading.Thread(target=check)
        thread.start()
        while thread.is_alive():
            engine.read(0.05)
        assert refused[0].param == "response_format"
        # One that is refused only there ends like any request, and the next one goes on.
        engine.submit(request("b", SamplingParams(max_tokens=2, grammar=bad)))
        engine.submit(request("c", SamplingParams(max_tokens=2)))
        with pytest.raises(InvalidRequestError, match="in use"):
            engine.submit(request("c", SamplingParams(max_tokens=2)))
        ends = {event.request_id: event for event in run(engine, 2) if isinstance(event, FinishEvent)}
        assert ends["b"].reason == "failed" and "cannot be compiled" in str(ends["b"].error)
        assert ends["c"].reason == "length"


def test_it_cancels_follows_and_explains() -> None:
    with working(engine=LONG, step_seconds=0.01) as engine:
        engine.submit(request("a", ENDLESS))
        assert isinstance(step(engine)[0], TokenEvent)
        engine.computed_tokens("a")
        step(engine)
        assert wait_until(lambda: bool(step(engine)) and engine.computed_tokens("a") == 3)
        told: list[Standing | None] = []
        engine.explain("a", told.append)
        assert wait_until(lambda: bool(step(engine) and told))
        assert told[0] is not None and told[0].phase == "decode" and told[0].prompt_tokens == 3
        engine.explain("nobody", told.append)
        assert told[1] is None
        engine.cancel("a")
        engine.cancel("nobody")
        events = run(engine, 1)
        assert isinstance(events[-1], FinishEvent) and events[-1].reason == "cancelled"
        assert engine.computed_tokens("a") == 0


def test_waiting_takes_no_processor_time() -> None:
    with working() as engine:
        there, here = psutil.Process(engine.pid), time.process_time()
        before = sum(there.cpu_times()[:2])
        begun = time.monotonic()
        assert engine.read(0.4) == []
        assert time.monotonic() - begun > 0.3
        assert sum(there.cpu_times()[:2]) - before < 0.1
        assert time.process_time() - here < 0.1


def test_what_the_process_has_no_room_for_is_sent_later() -> None:
    prompt, later = tuple(range(3, 103)) * 200, []
    with working(engine={"max_model_len": 10**5}) as engine:
        engine._channel._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        engine.keep_unsent(lambda: later.append(True))
        os.kill(engine.pid, signal.SIGSTOP)
        assert wait_until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_STOPPED)
        begun = time.monotonic()
        for number in range(3):
            engine.submit(request(f"r{number}", SamplingParams(max_tokens=1), prompt[number:]))
        assert not engine.flush()
        assert time.monotonic() - begun < 5.0
        assert later == [True]
        os.kill(engine.pid, signal.SIGCONT)
        assert wait_until(engine.flush, 20.0)
        ends = [event for event in run(engine, 3) if isinstance(event, FinishEvent)]
        assert [event.prompt_tokens for event in ends] == [len(prompt) - number for number in range(3)]


def test_a_killed_process_is_lost_behind_the_events_that_it_sent(capfd: pytest.CaptureFixture[str]) -> None:
    with working() as engine:
        engine.submit(request("a", SamplingParams(max_tokens=3)))
        events = step(engine)
        assert wait_until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_SLEEPING)
        os.kill(engine.pid, signal.SIGKILL)
        events += run(engine, 1) if not any(isinstance(event, FinishEvent) for event in events) else []
        assert len(events) == 4
        assert "SIGKILL" in lost(engine)
        with pytest.raises(OverloadedError, match="started again"):
            engine.validate(request("a", SamplingParams(max_tokens=1, grammar=GrammarSpec("json_object"))))


def test_a_check_that_waits_ends_with_the_process() -> None:
    with working(engine=LONG, hang_at=1) as engine:
        engine.submit(request("a", ENDLESS))
        errors: list[OverloadedError] = []

        def check() -> None:
            os.kill(engine.pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (engine.pid, signal.SIGKILL)).start()
            with pytest.raises(OverloadedError) as caught:
                engine.validate(request("b", SamplingParams(max_tokens=1, grammar=GrammarSpec("json_object"))))
            errors.append(caught.value)

        thread = threading.Thread(target=check)
        thread.start()
        lost(engine)
        thread.join(10)
        assert errors[0].code == "engine_restarting"


def test_a_step_that_hangs_is_a_death_with_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    with working(workers(step_timeout=0.5, engine=LONG, hang_at=3)) as engine:
        engine.submit(request("a", ENDLESS))
        assert "--step-timeout" in lost(engine)
    assert "fake_worker.py" in capfd.readouterr().err


def test_steps_that_end_are_no_hang_however_long_they_go_on() -> None:
    with working(workers(step_timeout=0.4, step_seconds=0.1)) as engine:
        engine.submit(request("a", SamplingParams(max_tokens=12)))
        assert len(run(engine, 1)) == 13
        time.sleep(0.8)  # idle for longer than a step may take
        engine.submit(request("b", SamplingParams(max_tokens=2)))
        assert len(run(engine, 1)) == 3


def test_a_process_that_is_stopped_by_the_system_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "SILENCE_MARGIN", 0.2)
    monkeypatch.setattr(process, "ABORT_SECONDS", 0.1)
    with working(workers(step_timeout=0.5, engine=LONG, step_seconds=0.01)) as engine:
        engine.submit(request("a", ENDLESS))
        step(engine)
        os.kill(engine.pid, signal.SIGSTOP)
        assert "did not answer" in lost(engine)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"garble_at": 2}, "messages are broken"),
        ({"lie_at": 1}, "messages are broken"),
        ({"fail_at": 2}, "status 3"),
    ],
)
def test_nonsense_and_failure_are_deaths(task: dict[str, object], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    with working(**task) as engine:
        engine.submit(request("a", SamplingParams(max_tokens=4)))
        engine.submit(request("b", SamplingParams(max_tokens=3)))
        assert says in lost(engine)
    assert not psutil.pid_exists(engine.pid)
    if "fail_at" in task:
        assert "RuntimeError: the fake engine was told to break" in capfd.readouterr().err


def test_what_loading_says_is_raised() -> None:
    with pytest.raises(ConfigError, match="no such thing"):
        workers(refuse="no such thing").make()
    with pytest.raises(EngineLostError, match="while it loaded the model: it ended with status 7"):
        workers(die=7).make()


def test_a_load_can_be_stopped() -> None:
    made = workers(load_seconds=60)
    threading.Timer(0.3, made.stop).start()
    begun = time.monotonic()
    with pytest.raises(LoadInterruptedError):
        made.make()
    with pytest.raises(LoadInterruptedError):
        made.make()
    assert time.monotonic() - begun < 10


def test_another_engine_than_the_first_is_refused() -> None:
    made = workers()
    with working(made) as first:
        made._first = replace(first.info, vocab=17)
    with pytest.raises(ConfigError, match="has changed"):
        made.make()


def test_signals_to_the_group_are_the_servers_business() -> None:
    with working() as engine:
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(engine.pid, sent)
        assert os.getsid(engine.pid) == engine.pid != os.getsid(0)
        engine.submit(request("a"))
        assert len(run(engine, 1)) == 6


def test_it_ends_when_its_server_has_closed_the_channel() -> None:
    engine = workers(engine=LONG).make()
    engine.submit(request("a", ENDLESS))
    step(engine)
    engine._channel.close()
    assert engine._process.end(5.0) == child.ORPHAN_STATUS


PARENT = """
import sys, time
from fake_worker import workers
from longread.spec.engine import GenerationRequest, SamplingParams
engine = workers(engine={"max_model_len": 10**9}, hang_at=2).make()
if sys.argv[1] == "busy":
    engine.submit(GenerationRequest("a", (7,), SamplingParams(max_tokens=None)))
    engine.read(10)
print(engine.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_it_does_not_outlive_a_server_that_is_killed(state: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        worker = psutil.Process(int(server.stdout.readline()))
    finally:
        server.kill()
        server.communicate()
    assert not psutil.wait_procs([worker], timeout=5)[1]


def test_closing_ends_what_runs_and_the_process() -> None:
    engine = workers(engine=LONG).make()
    for name in "abc":
        engine.submit(request(name, ENDLESS))
    step(engine)
    engine.close()
    engine.close()
    assert engine._process.end(0) == 0


def test_one_that_does_not_end_in_its_time_is_killed() -> None:
    engine = workers(engine=LONG, step_seconds=0.01).make()
    engine.submit(request("a", ENDLESS))
    step(engine)
    os.kill(engine.pid, signal.SIGSTOP)
    begun = time.monotonic()
    engine.close(0.3)
    assert time.monotonic() - begun < 5.0
    assert not psutil.pid_exists(engine.pid)


def test_a_prompt_with_many_choices_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    with working() as engine:
        send = engine._channel.send

        def counted(kind: bytes, text: bytes, blobs: tuple[bytes, ...] = (), **options: float) -> None:
            if kind == messages.SUBMIT:
                sent.append(sum(map(len, blobs)))
            send(kind, text, blobs, **options)

        monkeypatch.setattr(engine._channel, "send", counted)
        prompt = tuple(range(3, 2003))
        for number in range(4):
            engine.submit(request(f"r{number}", SamplingParams(max_tokens=1, seed=number), prompt))
        ends = [event for event in run(engine, 4) if isinstance(event, FinishEvent)]
        assert sent == [8000, 0, 0, 0]
        assert {event.prompt_tokens for event in ends} == {2000}


def test_the_program_is_found_whatever_folder_the_server_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "orjson.py").write_text("raise SystemExit(9)")
    (tmp_path / "pydantic.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with working() as engine:
        engine.submit(request("a"))
        assert len(run(engine, 1)) == 6
