"""``longread serve --profiler-config`` and ``longread bench profile`` as a user runs them, on a tiny v4."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from longread.cli.main import main
from longread.weights.fixture import write_fixture


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("profiled") / "v4-flash"
    write_fixture(path, "v4-flash")
    command = [sys.executable, "-m", "longread.cli.main", "serve", str(path), "--port", "0", "--max-num-seqs", "4"]
    command += ["--profiler-config", '{"profiler": "torch", "max_iterations": 3}']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            if found := re.match(r"serving \S+ on (http://\S+)", line):
                break
        assert found is not None
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_three_levels_add_up(url: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "p.json"
    base = ["bench", "profile", "--base-url", url, "--dataset-option", "vocab_size=400", "--isl", "100", "--osl", "4"]
    more = ["--num-prompts", "3", "--num-steps", "8", "--hardware", "cpu", "--no-calibration", "--output", str(output)]
    assert main([*base, *more]) == 0
    said = capsys.readouterr().out
    found = json.loads(output.read_text())
    told, kernels = found["attribution"], found["kernels"]
    assert told["source"] == "each answer"
    assert sum(part["ms"] for part in told["parts"]) == pytest.approx(told["ttft_ms"], rel=1e-6)
    assert told["ttft_ms"] == pytest.approx(found["result"]["mean_ttft_ms"], rel=1e-6)
    parts = {part["name"]: part["ms"] for part in told["parts"]}
    assert parts["prefill"] > 0
    assert kernels["steps"] == 8
    assert sum(each["self_ms"] for each in kernels["groups"]) == pytest.approx(kernels["step_ms"], rel=1e-6)
    assert sum(each["prompt_share"] for each in kernels["groups"]) == pytest.approx(1)
    calls = {row["op"]: row["calls"] for row in kernels["rows"]}
    assert calls["sampler"] == 8
    assert {each["bound"] for each in kernels["groups"] if each["flops"]} <= {"FLOPs", "bytes"}
    assert all(each["of_roofline"] > 0 for each in kernels["groups"] if each["flops"])
    assert found["kernels_missing"] is None
    assert re.search(r"kernels +of it: attention", said)


def test_routes_are_vllms(url: str) -> None:
    none = httpx.post(f"{url}/stop_profile", timeout=60)
    assert (none.status_code, none.json()["error"]["code"]) == (400, "no_profile")
    begun = httpx.post(f"{url}/start_profile", timeout=60)
    assert begun.json() == {"status": "started", "num_steps": 3}  # as --profiler-config says
    again = httpx.post(f"{url}/start_profile", json={"num_steps": 2}, timeout=60)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_running")
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 5, "ignore_eos": True}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    told = httpx.post(f"{url}/stop_profile", timeout=60).json()
    assert [each["segments"] for each in told["shapes"]] == [[[0, 4]], [[4, 1]], [[5, 1]]]
