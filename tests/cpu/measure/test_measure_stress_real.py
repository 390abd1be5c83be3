"""``longread stress`` on a real ``longread serve`` with a store: its engine is killed, then the whole server; both come
back with the same answers and with what was read.
"""

import json
from pathlib import Path

import pytest

from longread.cli.main import main
from longread.measure.stress import context
from longread.weights.fixture import write_fixture


def test_a_small_model_under_pressure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(context, "SETTLE", 0.0)
    model, output = tmp_path / "v3", tmp_path / "stress.json"
    write_fixture(model, "v3", quantised=True)
    options = ["--long-tokens", "1K", "--starts", "1", "--context-requests", "13", "--in-flight", "3", "--budget", "5m"]
    options += ["--limit", "leak_bytes_per_request=16777216"]  # an allocator that warms up is no leak
    options += ["--limit", "cached_share_after_min=0.5", "--seed", "3", "-o", str(output)]
    serve = [
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "256",
        "--max-model-len",
        "8K",
        "--snapshot-interval",
        "1K",
    ]
    serve += ["--store", str(tmp_path / "store")]
    code = main(["stress", "--serve", str(model), "--tests", "cold,context,recovery", *options, "--", *serve])
    document = json.loads(output.read_text())
    found = {each["name"]: each for test in document["tests"] for each in test["findings"]}
    assert code in (0, 3), capsys.readouterr().out  # 13 requests may leave a slope open; nothing may fail
    assert found["cold_start_s"]["verdict"] == "PASS" and found["failed_starts"]["verdict"] == "PASS"
    assert found["context_failures"]["value"] == 0 and found["leak_bytes_per_request"]["samples"] == 10
    assert found["memory_now"]["value"] > 2**26
    for what in ("worker", "server"):
        assert found[f"recovery_s ({what})"]["verdict"] == "PASS"
        assert found[f"changed_answers ({what})"]["verdict"] == "PASS"
        assert found[f"changed_answers ({what})"]["samples"] >= 4
        assert found[f"cached_share_after_min ({what})"]["verdict"] == "PASS"
        assert found[f"hung ({what})"]["verdict"] != "FAIL"
    assert not found["left_processes (server)"]["value"]
