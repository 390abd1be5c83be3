"""What is sampled while a run goes on: by looks that the test makes, against fakes of the server and of the driver."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fake_nvml import FakeNvml, NVMLError
from scripted_server import answer, scripted_thread

from longread.cli.main import main
from longread.measure.load import samples
from longread.measure.load.samples import GPU_NAMES, Sampler
from longread.measure.load.target import Target

PAGE = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 2.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} broken
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def page(text: str = PAGE, status: int = 200) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(status, text=text)))


def sampler(url: str = "http://127.0.0.1:8000", nvml: Any = None, **more: Any) -> Sampler:
    nvml = nvml if nvml is not None else FakeNvml(0, initialises=9)
    found = Sampler(Target(url, "m"), nvml=lambda: nvml, clock=Clock(), **more)
    found.open()
    return found


def test_gauges_of_all_replicas_under_old_names_too() -> None:
    found = sampler()
    found.look(page())
    found.look(page(PAGE.replace("2.0", "7.0")))
    block = found.block(1000.0)
    assert block["at"] == [1.0, 2.0]
    assert block["series"] == {"kv usage": [0.25, 0.25], "running": [4.0, 4.0], "waiting": [2.0, 7.0]}
    assert set(block["missing"]) == {"rss", "gpus"}
    assert "--server-pid" in block["missing"]["rss"]
    assert "Driver Not Loaded" in block["missing"]["gpus"]


@pytest.mark.parametrize(
    ("text", "status", "why"),
    [("", 404, "status 404"), ("nothing", 200, "no metrics"), ("vllm:num_requests_running{ 1", 200, "no metrics")],
)
def test_what_the_server_does_not_tell_is_missing(text: str, status: int, why: str) -> None:
    found = sampler()
    found.look(page(text, status))
    block = found.block(1000.0)
    assert block["series"] == {}
    assert why in block["missing"]["kv usage"]


def test_a_server_that_falls_silent_leaves_holes_not_zeros() -> None:
    found = sampler()
    found.look(page())
    found.look(page("", 503))
    assert found.block(1000.0)["series"]["running"] == [4.0, None]


def test_gpus_by_the_driver() -> None:
    nvml = FakeNvml(2, changes={1: {"PowerUsage": NVMLError(3)}})
    found = sampler(nvml=nvml)
    found.look(page())
    first, second = found.block(1000.0)["gpus"]
    assert first["series"] == {"temperature": [31], "power": [76.5], "sm clock": [345], "memory": [4 * 2**20]}
    assert (first["name"], first["memory_total"], first["power_limit"]) == ("NVIDIA H200", 143_771 * 2**20, 700.0)
    assert "power" not in second["series"]
    assert second["missing"] == {"power": "Not Supported"}


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    found = sampler(nvml=FakeNvml(2, changes={0: {"lost": True}}))
    found.look(page())
    first, second = found.block(1000.0)["gpus"]
    assert (first["series"], set(first["missing"])) == ({}, set(GPU_NAMES))
    assert second["series"]["temperature"] == [31]


def test_gpus_of_this_machine_say_nothing_of_a_server_elsewhere() -> None:
    found = sampler("http://10.1.2.3:8000", nvml=FakeNvml(2))
    found.look(page())
    block = found.block(1000.0)
    assert (block["gpus"], block["missing"]["gpus"]) == ([], "the server is not on this machine")


def test_memory_of_a_process_and_of_one_that_is_gone() -> None:
    found = sampler(pid=os.getpid())
    found.look(page())
    (rss,) = found.block(1000.0)["series"]["rss"]
    assert rss >= psutil.Process().memory_info().rss / 2
    gone = sampler(pid=2**22 + 5)
    gone.look(page())
    assert "process 4194309" in gone.block(1000.0)["missing"]["rss"]


def test_a_long_run_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST", 8)
    found = sampler()
    client = page()
    for _ in range(100):
        found.look(client)
    block = found.block(1000.0)
    assert len(block["at"]) < 8
    assert block["every_s"] == 16.0
    gaps = {after - before for before, after in zip(block["at"], block["at"][1:], strict=False)}
    assert gaps == {16.0}


def test_the_bench_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"messages": [{"role": "user", "content": f"q{i}"}], "max_tokens": 4} for i in range(3)]
    prompts, path = tmp_path / "p.jsonl", tmp_path / "r.json"
    prompts.write_text("\n".join(map(json.dumps, rows)))

    def bench(*more: str) -> int:
        server_and_prompts = ["--base-url", server.url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
        return main(["bench", "serve", *server_and_prompts, "--no-calibration", "--output", str(path), *more])

    with scripted_thread(
        lambda n, body: answer(["a"] * 3, first=0.4), {"/metrics": PAGE.split("# TYPE vllm:e2e")[0]}
    ) as server:
        assert bench("--server-pid", str(os.getpid())) == 0
        block = json.loads(path.read_text())["longread"]["samples"]
        assert block["schema"] == 1
        assert block["series"]["running"][0] == 4.0
        assert block["series"]["rss"][0] > 1e6
        assert abs(block["at"][0]) < 60  # on the run's clock, not a date
        assert bench("--sample-interval", "0") == 0
        assert "samples" not in json.loads(path.read_text())["longread"]
        assert bench("--sample-interval", "0.01") == 2
    assert "at least 0.1 s" in capsys.readouterr().err
