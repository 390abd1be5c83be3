"""Own result files: read by schema, fitted, compared before and after, refused where they say too little."""

import json
from pathlib import Path
from typing import Any

import pytest

from longread.plan.bench_file import read_runs
from longread.plan.calibrate import calibrate, default_factors, path_of
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.timing import ttft_cold
from longread.spec.errors import ConfigError
from longread.spec.releases import release

RESULTS = Path(__file__).parents[3] / "results" / "cpu.json"


def figure(**changes: Any) -> dict[str, Any]:
    return {
        "model": "V4-Flash",
        "quantity": "TTFT, cold",
        "unit": "s",
        "context": 131072,
        "batch": 1,
        "samples": [16.0, 15.0, 30.0],
    } | changes


def written(tmp_path: Path, *figures: dict[str, Any], **changes: Any) -> Path:
    document = {
        "schema": 1,
        "date": "2026-11-29",
        "commit": "abc",
        "figures": list(figures),
        "deployment": {"hardware": "8xH20-96", "strategy": {"cp": 8}, "cache": "fp8_ds_mla", "chunk": 8192},
    } | changes
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    return path


def test_the_cpu_results_of_this_repository() -> None:
    calibration = calibrate([RESULTS])
    assert {row.run.name for row in calibration.rows} == {"v3", "v4-flash"}
    assert len(calibration.rows) == 8
    for row in calibration.rows:
        assert row.before.holds(row.run.value), row.line()
        assert row.before.provenance == "roofline"
        assert row.after.provenance == "measured here"
    assert calibration.error("after") < 0.15 < calibration.error("before")
    assert calibration.error("held_out") < calibration.error("before")


def test_own_runs_decide_a_deployment_and_inform_its_kind(tmp_path: Path) -> None:
    path = written(tmp_path, figure(), figure(context=262144, samples=[33.0]))
    factors = calibrate([path]).factors
    own = Deployment(release("V4-Flash"), parse_hardware("8xH20-96"), Strategy(cp=8))
    fitted, published = (ttft_cold(own, 131072, factors=f).total for f in (factors, default_factors()))
    assert fitted.provenance == "measured here"
    assert published.provenance == "interpolated"
    assert abs(fitted.centre - 16.0) < abs(published.centre - 16.0)
    assert fitted.high / fitted.low < published.high / published.low
    sibling = Deployment(release("V4-Pro"), parse_hardware("8xH20-141"), Strategy(cp=8))
    assert ttft_cold(sibling, 131072, factors=factors).total != ttft_cold(sibling, 131072).total


def test_own_runs_replace_published_ones_of_the_same_deployment(tmp_path: Path) -> None:
    deployment = {"hardware": "8xH20-141", "strategy": {"tp": 8}, "engine": "sglang", "cache": "bfloat16"}
    path = written(tmp_path, figure(model="V3.1", samples=[60.0]), deployment=deployment)
    d = Deployment(release("V3.1"), parse_hardware("8xH20-141"), Strategy(tp=8), engine="sglang", cache="bfloat16")
    factors = calibrate([path]).factors
    assert factors.runs == default_factors().runs
    assert factors.scale(path_of(d, "prefill")).provenance == "measured here"
    assert ttft_cold(d, 131072, factors=factors).total.centre > ttft_cold(d, 131072).total.centre


def test_what_a_figure_means(tmp_path: Path) -> None:
    decode = figure(quantity="decode", unit="tokens/s", context=8192, batch=8, samples=[400.0])
    warm = figure(quantity="TTFT, warm", samples=[0.5])
    runs = read_runs(written(tmp_path, figure(), decode, warm, figure(quantity="peak memory")))
    assert [(r.metric, r.value, r.isl, r.cached, r.batch) for r in runs] == [
        ("ttft", 16.0, 131072, 0, 1),
        ("tpot", 0.02, 8192, 0, 8),
        ("ttft", 0.5, 131104, 131072, 1),
    ]
    assert all(r.here and r.source == "run.json (2026-11-29, commit abc)" for r in runs)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, "schema 1"),
        ({"figures": []}, "no figure in it is a time"),
        ({"figures": [figure(model="V9")]}, "neither in the file"),
        ({"figures": [figure(samples=[])]}, "without model"),
        ({"figures": [figure(samples=[0.0])]}, "no measurement"),
        ({"deployment": {"gpus": 8}}, "unknown keys gpus"),
    ],
)
def test_files_that_say_too_little(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        calibrate([written(tmp_path, figure(), **change)])


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no result file"):
        calibrate([])
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ConfigError, match="not a readable"):
        calibrate([tmp_path / "x.json"])
    with pytest.raises(ConfigError, match="not a readable"):
        calibrate([tmp_path / "missing.json"])
