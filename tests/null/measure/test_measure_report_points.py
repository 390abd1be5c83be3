"""The requests of a sweep's points, which lie in a folder beside the sweep."""

import json
from pathlib import Path

from made_results import Made, write

from longread.measure.report.files import read_all


def test_requests_of_a_sweeps_points_are_found(tmp_path: Path) -> None:
    points = tmp_path / "base.points"
    points.mkdir()
    result = json.loads(write(points / "concurrency-1.json", Made(requests=5)).read_text())
    told = {"longread_sweep": 1, "axis": "concurrency", "partial": False, "points": [{"value": 1, "result": result}]}
    (tmp_path / "base.json").write_text(json.dumps(told))
    (run,) = read_all([tmp_path / "base.json"]).all_runs
    assert run.requests is not None and len(run.requests) == 5
