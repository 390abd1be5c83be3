"""POST /start_profile and /stop_profile: what they refuse, and that nobody waits for ever."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import wait_until
from worker_serving import worker_serving

from longread.server import profile
from longread.server.options import ServerOptions
from longread.spec.profiler import profiler_config

OPTIONS = ServerOptions(profiler=profiler_config({"profiler": "torch"}))


def test_what_is_no_number_of_steps_is_refused_and_a_body_may_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "BODY_SECONDS", 0.3)
    with worker_serving(options=OPTIONS) as serving:
        for body in (b"[", b"[]", b'{"steps": 3}', b'{"num_steps": 0}', b'{"num_steps": true}', b"1" * 5000):
            answer = httpx.post(f"{serving.url}/start_profile", content=body)
            assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        host, port = serving.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(b"POST /start_profile HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{")
            assert client.recv(65536).startswith(b"HTTP/1.1 408 ")
        for route in ("start_profile", "stop_profile"):  # the fake engine has no profiler
            assert httpx.post(f"{serving.url}/{route}").json()["error"]["code"] == "profiler_off"


def test_an_engine_that_dies_leaves_nobody_waiting_for_its_profile() -> None:
    with worker_serving(options=OPTIONS) as serving, ThreadPoolExecutor(2) as pool:
        os.kill(serving.made[-1].pid, signal.SIGSTOP)
        asked = [pool.submit(httpx.post, f"{serving.url}/stop_profile", timeout=20) for _ in range(2)]
        assert wait_until(lambda: len(serving.made[-1]._profiled) == 2)
        serving.kill()
        for each in asked:
            answer = each.result(10)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_restarting"
        serving.wait_ready()


def test_a_profile_that_fails_or_takes_long_costs_nobody_else_anything() -> None:
    engine = {"max_model_len": 10**6}
    task = {"profile_seconds": 2.0, "step_seconds": 0.01, "step_timeout": 1.0}
    with worker_serving(options=OPTIONS, engine=engine, **task) as serving, ThreadPoolExecutor(1) as pool:
        body = {"prompt": [7, 8, 9], "ignore_eos": True, "max_tokens": 100}
        other = pool.submit(httpx.post, f"{serving.url}/v1/completions", json=body, timeout=30)
        assert httpx.post(f"{serving.url}/start_profile").status_code == 200
        answer = httpx.post(f"{serving.url}/stop_profile", timeout=20)  # longer than the watchdog allows a step
        assert answer.json()["error"]["code"] == "profile_failed" and "RuntimeError" in answer.text
        assert other.result(20).status_code == 200 and len(serving.made) == 1
