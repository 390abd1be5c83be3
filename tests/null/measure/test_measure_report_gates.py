"""A gate in a file that was edited by hand, or that contradicts itself, says the worst of what stands there."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_results import Made, write

from longread.cli.main import main
from longread.measure.report.files import read_runs
from longread.measure.report.gates import gate_in, gate_of

PASS: dict[str, Any] = {
    "kind": "longread-gate",
    "verdict": "PASS",
    "profile": {"name": "lossless"},
    "levels": [
        {"level": 1, "verdict": "PASS", "findings": [{"name": "kl", "verdict": "PASS"}, {"name": "n", "verdict": None}]}
    ],
}
RED_FINDING = {"level": 1, "verdict": "PASS", "findings": [{"name": "kl", "verdict": "FAIL"}]}
QUALITY: dict[str, Any] = {
    "verdict": "PASS",
    "profile": {"name": "lossless"},
    "levels": {"1": "PASS", "2": "not asked for"},
    "speed_counts": True,
    "gate": PASS,
}


@pytest.mark.parametrize(
    ("edited", "verdict"),
    [
        ({}, "PASS"),
        ({"verdict": "FAIL"}, "FAIL"),
        ({"levels": [{"level": 1, "verdict": "FAIL"}]}, "FAIL"),
        ({"levels": [RED_FINDING]}, "FAIL"),
        ({"levels": [*PASS["levels"], {"level": 2, "verdict": "INCONCLUSIVE"}]}, "INCONCLUSIVE"),
        ({"levels": []}, "INCONCLUSIVE"),
        ({"levels": "all fine"}, "INCONCLUSIVE"),
        ({"levels": [], "verdict": "FAIL"}, "FAIL"),
        ({"verdict": "GREEN"}, "INCONCLUSIVE"),
        ({"verdict": None}, "PASS"),
        ({"verdict": ["PASS"]}, "INCONCLUSIVE"),
    ],
)
def test_a_gate_is_as_red_as_its_reddest_word(edited: dict[str, Any], verdict: str) -> None:
    assert gate_of({**PASS, **edited}, "g.json").verdict == verdict


@pytest.mark.parametrize(
    ("edited", "verdict"),
    [
        ({}, "PASS"),
        ({"verdict": "FAIL"}, "FAIL"),
        ({"verdict": "FAIL", "gate": None}, "FAIL"),
        ({"speed_counts": False}, "FAIL"),
        ({"levels": {"1": "FAIL"}}, "FAIL"),
        ({"gate": {**PASS, "verdict": "FAIL"}}, "FAIL"),
        ({"gate": {**PASS, "kind": "other"}}, "INCONCLUSIVE"),
        ({"gate": None}, "INCONCLUSIVE"),
    ],
)
def test_a_results_own_gate_is_as_red_as_its_reddest_word(edited: dict[str, Any], verdict: str) -> None:
    found = gate_in({"quality": {**QUALITY, **edited}}, "r.json")
    assert found is not None and (found.verdict, found.profile) == (verdict, "lossless")


def test_without_a_gate_there_is_none() -> None:
    assert gate_in({}, "r.json") is None and gate_in({"quality": None}, "r.json") is None
    older = gate_in({"gate": PASS}, "r.json")
    assert older is not None and older.verdict == "PASS"


def test_a_result_that_says_something_else_than_its_requests_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", Made(seed=1))
    assert not [text for text in read_runs(path)[0].warnings if "disagree" in text]
    document = json.loads(path.read_text())
    document["longread"]["metrics"]["ttft"]["mean"] /= 2
    path.write_text(json.dumps(document))
    assert [text for text in read_runs(path)[0].warnings if "disagree about TTFT" in text]
    document["longread"]["metrics"]["ttft"]["mean"] *= 2
    document["longread"]["metrics"]["e2el"]["samples"] -= 1
    path.write_text(json.dumps(document))
    assert [text for text in read_runs(path)[0].warnings if "disagree about E2EL" in text]


def test_a_file_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "a.json", Made(seed=1))
    (tmp_path / "b.json").symlink_to(path)
    assert main(["bench", "compare", str(path), str(tmp_path / "b.json")]) == 2
    assert "are the same file" in capsys.readouterr().err
