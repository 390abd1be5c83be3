"""What a benchmark's figure says: a ratio of medians, above 1 for a win, whichever direction wins."""

import json
from pathlib import Path

import pytest

from longread.measure.result import Figure, Machine, Report


def figure(better: str, ours: list[float], theirs: list[float]) -> Figure:
    return Figure("m", "q", "s", 64, 1, better, ours, "peer", theirs)


@pytest.mark.parametrize(
    ("better", "ours", "theirs", "ratio"),
    [
        ("lower", [1.0, 2.0, 90.0], [4.0, 8.0, 5000.0], 4.0),
        ("higher", [1.0, 2.0, 90.0], [4.0, 8.0, 5000.0], 0.25),
        ("lower", [1.0, 3.0], [1.0], 0.5),
        ("higher", [30.0], [10.0], 3.0),
    ],
)
def test_a_ratio_is_of_medians_and_above_1_for_a_win(
    better: str, ours: list[float], theirs: list[float], ratio: float
) -> None:
    assert figure(better, ours, theirs).ratio == ratio


def test_the_written_report_keeps_samples_and_ratio(tmp_path: Path) -> None:
    machine = Machine("a cpu", 2, "Linux", "3.11", {"torch": "2"})
    report = Report("cpu", "abc", "longread bench", "2026-01-01", machine, [figure("lower", [3.0], [10.0])], ["note"])
    report.write(tmp_path / "new" / "cpu.json")
    document = json.loads((tmp_path / "new" / "cpu.json").read_text())
    (row,) = document["figures"]
    assert (row["samples"], row["peer_samples"], row["ratio"], row["aim"]) == ([3.0], [10.0], 3.333, None)
    assert (document["schema"], document["machine"]["packages"], document["notes"]) == (1, {"torch": "2"}, ["note"])
