"""A gate in a file that was edited by hand, or that contradicts itself, says the worst of what stands there."""

from typing import Any

import pytest

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
