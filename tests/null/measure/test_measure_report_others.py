"""Files that the other tools really wrote (tests/support/real_results, shortened): six requests to a server that waits
10 ms to the role chunk, 30 ms and more to the first of 16 texts of two tokens, 15 ms to the finish reason and 25 ms to
usage. Their own sums are the oracle for what is read from their requests.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_results import Made, write

from longread.measure.report.compare import Wanted, compare
from longread.measure.report.files import read_runs
from longread.measure.report.run import Run
from longread.spec.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "support" / "real_results"
VLLM, AIPERF = FOLDER / "vllm-bench-serve-0.32.json", FOLDER / "aiperf-0.13" / "profile_export_aiperf.json"


def one(path: Path) -> tuple[Run, dict[str, Any]]:
    (run,) = read_runs(path)
    return run, json.loads(path.read_text())


def test_vllms_requests_add_up_to_its_own_figures() -> None:
    run, told = one(VLLM)
    assert (run.model, run.load["concurrency"], run.load["rate"], run.answered) == ("scripted", 2.0, None, 6)
    assert run.requests is not None
    assert [each.output_tokens for each in run.requests] == [32] * 6
    for ours, theirs in (("ttfc", "ttft"), ("tpot_chunk", "tpot"), ("e2el", "e2el")):
        assert all(ours in each.values for each in run.requests)
        assert run.figures[ours].mean == pytest.approx(told[f"mean_{theirs}_ms"], rel=1e-4)
        for percent in (50, 90, 99):
            assert run.figures[ours].percentiles[percent] == pytest.approx(told[f"p{percent}_{theirs}_ms"], rel=1e-4)
    assert run.figures["itl_chunk"].mean == pytest.approx(told["mean_itl_ms"])
    assert run.rates["output_throughput"] == told["output_throughput"]
    assert max(each.ended or 0.0 for each in run.requests) <= told["duration"]


def test_an_older_file_of_vllm_without_latencies_gives_the_same(tmp_path: Path) -> None:
    run, told = one(VLLM)
    del told["latencies"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(told))
    old, _ = one(path)
    for name in ("ttfc", "tpot_chunk", "e2el"):
        assert old.figures[name].mean == pytest.approx(run.figures[name].mean, rel=1e-4)


def test_aiperfs_requests_add_up_to_its_own_figures_without_warm_ups() -> None:
    run, told = one(AIPERF)
    assert (run.model, run.load["concurrency"], run.load["rate"], run.answered) == ("scripted", 2.0, None, 6)
    assert run.requests is not None
    assert len(AIPERF.with_name("profile_export.jsonl").read_text().splitlines()) == 8  # two of them warm-ups
    assert len(run.requests) == 6
    names = {
        "ttft": "time_to_first_token",
        "ttfat": "time_to_first_output_token",
        "tpot_text": "inter_token_latency",
        "e2el_text": "request_latency",
    }
    for ours, theirs in names.items():
        assert run.figures[ours].count == 6
        assert run.figures[ours].mean == pytest.approx(told[theirs]["avg"], rel=1e-4)
        for percent in (50, 90, 99):
            assert run.figures[ours].percentiles[percent] == pytest.approx(told[theirs][f"p{percent}"], rel=1e-4)
    assert (run.figures["itl"].count, run.figures["itl"].mean) == (90, told["inter_chunk_latency"]["avg"])
    for each in run.requests:
        assert (each.status, each.output_tokens, len(each.gaps)) == ("ok", 32, 15)
        assert each.values["ttft"] + sum(each.gaps) == pytest.approx(each.values["e2el_text"])
    sent = [each.sent or 0.0 for each in run.requests]
    assert sent[0] == 0.0
    assert all(a <= b for a, b in pairwise(sent))
    assert max(each.ended or 0.0 for each in run.requests) == pytest.approx(told["benchmark_duration"]["avg"], abs=0.1)


def test_aiperfs_failed_and_cancelled_requests_have_no_latencies(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in AIPERF.with_name("profile_export.jsonl").read_text().splitlines()]
    rows[3]["error"] = {"code": 429, "type": "Too Many Requests", "message": "busy"}
    rows[4]["metadata"]["was_cancelled"] = True
    shutil.copy(AIPERF, tmp_path / "mine_aiperf.json")
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, _ = one(tmp_path / "mine_aiperf.json")
    assert run.requests is not None
    ends = [(each.status, each.failure, bool(each.values)) for each in run.requests]
    assert sorted(ends) == [
        ("cancelled", None, False),
        ("failed", "Too Many Requests", False),
        *[("ok", None, True)] * 4,
    ]
    assert run.figures["ttft"].count == 4


def test_aiperfs_summary_alone_says_why_there_are_no_requests(tmp_path: Path) -> None:
    shutil.copy(AIPERF, tmp_path)
    run, told = one(tmp_path / AIPERF.name)
    assert run.requests is None
    assert run.no_requests == "profile_export.jsonl is not beside it"
    assert run.figures["ttft"].mean == told["time_to_first_token"]["avg"]
    (tmp_path / "profile_export.jsonl").write_text("{\n")
    with pytest.raises(ConfigError, match=r"line 1 is not JSON"):
        read_runs(tmp_path / AIPERF.name)


@pytest.mark.parametrize(
    ("theirs", "metrics"),
    [(VLLM, {"ttfc", "tpot_chunk", "e2el"}), (AIPERF, {"ttft", "tpot_text", "e2el_text"})],
    ids=["vllm", "aiperf"],
)
def test_ours_is_compared_with_theirs_without_being_forced(tmp_path: Path, theirs: Path, metrics: set[str]) -> None:
    ours = write(tmp_path / "ours.json", Made(model="scripted", concurrency=2), detailed=True)
    found = compare(read_runs(ours), read_runs(theirs))
    assert {row.metric for row in found.rows if row.statistic == "mean"} == metrics
    assert any("whether both sent the same prompts" in each.what for each in found.differences)
    rate = next(row for row in found.rows if row.metric == "output_throughput")
    assert rate.samples == 6  # its interval would be that of its requests, were there 10
    other = write(tmp_path / "other.json", Made(model="scripted", concurrency=4), detailed=True)
    with pytest.raises(ConfigError, match="concurrency 4 and 2"):
        compare(read_runs(other), read_runs(theirs), Wanted())
