"""``longread bench cpu`` with tiny settings: the document it writes carries what a figure needs to be believed.

The tasks of the whole run are measured in this process (seven processes would each load torch again); that a task also
runs in a process of its own, as the command does it, is tested with one.
"""

import json
from pathlib import Path
from statistics import median

import pytest

from longread.cli import main as cli
from longread.measure import cpu, result, worker
from longread.weights.fixture import write_fixture

FIGURE = {
    "model": str,
    "quantity": str,
    "unit": str,
    "context": int,
    "batch": int,
    "better": str,
    "samples": list,
    "peer": str,
    "peer_samples": list,
    "aim": float,
    "ratio": float,
}


def test_a_run_writes_its_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(cpu, "measure", worker.measure)
    checkpoint, output = tmp_path / "tiny", tmp_path / "results" / "cpu.json"
    write_fixture(checkpoint, "v2-lite")
    argv = ["bench", "cpu", str(checkpoint), "--context", "64", "--decode-context", "32", "--new-tokens", "4"]
    argv += ["--rounds", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/longread", *argv])
    assert cli.main() == 0

    document = json.loads(output.read_text())
    assert set(document) == {
        "schema",
        "benchmark",
        "commit",
        "command",
        "date",
        "machine",
        "figures",
        "notes",
        "models",
    }
    assert (document["schema"], document["benchmark"]) == (1, "cpu")
    assert document["command"] == " ".join(["longread", *argv])
    assert document["commit"] == result.this_commit()
    machine = document["machine"]
    assert set(machine) == {"cpu", "cores", "system", "python", "packages"}
    assert machine["cores"] >= 1 and machine["cpu"] and machine["packages"].keys() >= {"torch", "transformers"}
    figures = document["figures"]
    for figure in figures:
        assert {name: type(value) for name, value in figure.items()} == FIGURE
        assert figure["model"] == "tiny" and len(figure["samples"]) == len(figure["peer_samples"]) == 1
        ours, theirs = median(figure["samples"]), median(figure["peer_samples"])
        assert min(ours, theirs) > 0
        won = ours / theirs if figure["better"] == "higher" else theirs / ours
        assert figure["ratio"] == round(won, 3)
    assert [(f["quantity"], f["context"], f["batch"], f["peer"]) for f in figures] == [
        ("TTFT, cold", 64, 1, "transformers"),
        ("peak memory", 64, 1, "transformers"),
        ("decode", 32, 1, "transformers"),
        ("decode", 32, 8, "transformers"),
        ("TTFT, warm", 64, 1, "longread, cold"),
    ]
    said = capsys.readouterr().out
    assert all(figure["quantity"] in said for figure in figures) and str(output.name) in said


def test_a_task_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_fixture(tmp_path / "tiny", "v2-lite")
    answer = cpu.measure(worker.Task("longread", str(tmp_path / "tiny"), "warm", 32, 1, 1, repeats=2, seed=3))
    assert set(answer) == {"samples", "cold", "peak_bytes"}
    assert len(answer["samples"]) == len(answer["cold"]) == 2 and min(answer["samples"] + answer["cold"]) > 0
    assert answer["peak_bytes"] > 2**24


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    write_fixture(tmp_path / "tiny", "v2-lite")
    (tmp_path / "tiny" / "config.json").unlink()
    task = worker.Task("longread", str(tmp_path / "tiny"), "prefill", 32, 1, 1, repeats=1, seed=3)
    with pytest.raises(cpu.BenchError, match=r"longread failed on prefill: (?s:.*)config\.json"):
        cpu.measure(task)


def test_a_missing_checkpoint_is_found_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unexpected(task: worker.Task) -> dict:
        raise AssertionError(task)

    monkeypatch.setattr(cpu, "measure", unexpected)
    write_fixture(tmp_path / "tiny", "v2-lite")
    assert cli.main(["bench", "cpu", str(tmp_path / "tiny"), str(tmp_path / "nothing")]) == 2
    said = capsys.readouterr().err.strip()
    assert "nothing: no such folder" in said and "\n" not in said
