"""``longread bench compare``: verdicts against made truths, refusals, other tools' files, exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_results import AIPERF, VLLM, Made, gate, write

from longread.cli.main import main
from longread.measure.report import ratios
from longread.measure.report.compare import Comparison, Wanted, compare
from longread.measure.report.files import read_all, read_runs
from longread.spec.errors import ConfigError


def pair(folder: Path, a: Made, b: Made, wanted: Wanted | None = None) -> Comparison:
    paths = write(folder / "a.json", a), write(folder / "b.json", b)
    return compare(read_runs(paths[0]), read_runs(paths[1]), wanted)


def verdicts(found: Comparison) -> dict[tuple[str, str], str]:
    return {(row.metric, row.statistic): row.verdict for row in found.rows}


def saved(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_a_slower_b_is_worse_and_a_faster_one_better(tmp_path: Path) -> None:
    found = pair(tmp_path, Made(seed=1), Made(seed=2, slower=1.4))
    assert found.verdict == "worse"
    assert found.pairs == 60
    told = verdicts(found)
    for metric in ("ttft", "tpot", "e2el"):
        assert told[metric, "mean"] == "worse"
        assert told[metric, "p99"] == "inconclusive"
    assert told["output_throughput", "rate"] == "worse"
    row = next(row for row in found.rows if (row.metric, row.statistic) == ("ttft", "mean"))
    assert row.low is not None and row.high is not None and row.low < 1.4 < row.high
    assert row.paired
    p99 = next(row for row in found.rows if (row.metric, row.statistic) == ("ttft", "p99"))
    assert p99.needed == 440  # 500 samples are the least
    assert pair(tmp_path, Made(seed=1), Made(seed=2, slower=0.7)).verdict == "better"


def test_a_thing_with_itself_is_rarely_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows together err in 5 % of comparisons: of 40, four or more wrong ones have a chance of 5 %."""
    monkeypatch.setattr(ratios, "DRAWS", 200)
    wrong = 0
    for round_ in range(40):
        found = pair(tmp_path, Made(seed=2 * round_, shared=round_), Made(seed=2 * round_ + 1, shared=round_))
        wrong += bool({"better", "worse"} & set(verdicts(found).values()))
    assert wrong <= 4


def test_goodput_of_the_same_slos_is_compared_as_a_share(tmp_path: Path) -> None:
    slos = {"ttft": 900.0}
    fast, slow = Made(requests=300, seed=1, slos=slos), Made(requests=300, seed=2, slos=slos, slower=3.0)
    found = pair(tmp_path, fast, slow)
    row = next(row for row in found.rows if row.metric == "goodput")
    assert row.verdict == "worse"
    assert row.a is not None and row.b is not None and row.a > row.b
    other = pair(tmp_path, fast, Made(requests=300, seed=2, slos={"ttft": 800.0}))
    assert "goodput" not in {row.metric for row in other.rows}


def test_enough_requests_make_it_the_same(tmp_path: Path) -> None:
    a, b = (Made(requests=600, seed=seed, noise=0.02) for seed in (1, 2))
    found = pair(tmp_path, a, b)
    assert {row.verdict for row in found.rows if row.metric == "ttft"} <= {"same", "inconclusive"}
    assert verdicts(found)["ttft", "mean"] == "same"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "DeepSeek-V3"}, "model: DeepSeek-V4-Flash and DeepSeek-V3"),
        ({"workload": {"num_prompts": 61}}, "workload num_prompts: 60 and 61"),
        ({"workload_seed": 7}, "workload seed: 0 and 7"),
        ({"concurrency": 8}, "max_concurrency: 4 and 8"),
        ({"rate": 3.0}, "open_loop"),
    ],
)
def test_what_differs_in_more_than_the_change_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="must not be compared") as caught:
        pair(tmp_path, Made(), Made(**change))
    assert said in str(caught.value)
    found = pair(tmp_path, Made(), Made(**change), Wanted(anyway=True))
    assert any(each.grave and said in each.what for each in found.differences)
    if change.keys() & {"workload", "workload_seed"}:
        assert found.pairs == 0  # the same key is not the same ask


def test_a_red_gate_is_no_speed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = [str(write(tmp_path / name, Made(seed=seed))) for name, seed in (("a.json", 1), ("b.json", 2))]
    red = str(saved(tmp_path / "gate.json", gate("FAIL")))
    assert main(["bench", "compare", *paths, "--gate", red]) == 2
    assert "failed the quality gate fp8-class" in capsys.readouterr().err
    assert main(["bench", "compare", *paths, "--gate", red, "--anyway"]) == 0
    assert "DIFFERENT: B failed the quality gate" in capsys.readouterr().out
    assert main(["bench", "compare", *paths]) == 0
    assert "A has no quality gate" in capsys.readouterr().out
    other = str(saved(tmp_path / "gate.json", gate("FAIL", url="http://127.0.0.1:9")))
    assert main(["bench", "compare", *paths, "--gate", other]) == 0  # another server's


def test_a_gate_inside_the_result_counts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="failed the quality gate"):
        pair(tmp_path, Made(), Made(more={"gate": gate("FAIL")}))


def test_what_happened_meanwhile_is_told(tmp_path: Path) -> None:
    found = pair(tmp_path, Made(cached=0.1), Made(cached=0.9, failing=0.2, warnings=["the client was busy"]))
    told = " | ".join(each.what for each in found.differences if not each.grave)
    for text in ("from the prefix cache: 10.0 % in A, 90.0 % in B", "not answered", "B: the client was busy"):
        assert text in told
    assert verdicts(found)["answered", "share"] == "worse"


def test_an_open_loops_rate_is_not_judged(tmp_path: Path) -> None:
    found = pair(tmp_path, Made(rate=5.0), Made(rate=5.0, slower=2.0))
    assert verdicts(found)["output_throughput", "rate"] == "not judged"
    assert verdicts(found)["ttft", "mean"] == "worse"


def test_repeats_in_folders(tmp_path: Path) -> None:
    for side, slower in (("a", 1.0), ("b", 1.5)):
        (tmp_path / side).mkdir()
        for number in range(4):
            write(tmp_path / side / f"{number}.json", Made(seed=10 * number + (side == "b"), slower=slower))
    found = compare(read_runs(tmp_path / "a"), read_runs(tmp_path / "b"))
    assert verdicts(found)["ttft", "mean"] == "worse"
    assert {row.samples for row in found.rows if row.metric == "ttft"} == {4}
    write(tmp_path / "b" / "9.json", Made(model="another"))
    with pytest.raises(ConfigError, match="the repeats of B differ: model"):
        compare(read_runs(tmp_path / "a"), read_runs(tmp_path / "b"))


def test_vllms_ttft_is_compared_with_our_first_chunk_only(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "ours.json", Made()), saved(tmp_path / "vllm.json", VLLM)
    found = compare(read_runs(ours), read_runs(theirs), Wanted(anyway=True))
    metrics = {row.metric for row in found.rows}
    assert {"ttfc", "tpot_chunk", "e2el"} <= metrics
    assert not metrics & {"ttft", "tpot"}
    assert any(text.startswith("TTFT (to the first reasoning or answer text") for text in found.left_out)
    (mean,) = (row for row in found.rows if (row.metric, row.statistic) == ("ttfc", "mean"))
    assert (mean.b, mean.note) == (900.0, "called ttfc and ttft")
    assert mean.low is not None
    (p99,) = (row for row in found.rows if (row.metric, row.statistic) == ("ttfc", "p99"))
    assert (p99.verdict, p99.b) == ("not judged", 3000.0)
    assert "--save-detailed" in p99.note


def test_aiperfs_files_by_their_own_words(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "ours.json", Made(), detailed=True), saved(tmp_path / "aiperf.json", AIPERF)
    found = compare(read_runs(ours), read_runs(theirs), Wanted(anyway=True))
    by_metric = {row.metric: row for row in found.rows if row.statistic == "mean"}
    assert {"ttft", "tpot_text", "e2el_text"} == set(by_metric)
    assert by_metric["e2el_text"].b == 1550.0  # its seconds are ms here
    assert by_metric["tpot_text"].note == "called inter_token_latency and tpot_text"
    vllm = saved(tmp_path / "vllm.json", VLLM)
    with pytest.raises(ConfigError, match="share no quantity"):
        compare(read_runs(vllm), read_runs(theirs), Wanted(anyway=True))


def test_vllms_zero_is_missing(tmp_path: Path) -> None:
    empty = {**VLLM, "completed": 0, "failed": 60, "mean_ttft_ms": 0.0, "mean_tpot_ms": 0, "mean_e2el_ms": 0}
    (run,) = read_all([saved(tmp_path / "v.json", empty)]).runs
    assert run.figures == {}
    assert any("which it writes for nothing" in text for text in run.missing)


def test_vllms_detailed_lists_are_requests(tmp_path: Path) -> None:
    lists = {
        "ttfts": [0.5 + 0.01 * i for i in range(59)] + [0.0],
        "itls": [[0.03] * 19] * 59 + [[]],
        "input_lens": [4096] * 60,
        "output_lens": [20] * 59 + [0],
        "errors": [""] * 59 + ["Too Many Requests"],
        "start_times": [100.0 + i for i in range(60)],
    }
    (run,) = read_all([saved(tmp_path / "v.json", {**VLLM, **lists})]).runs
    assert run.requests is not None
    assert (run.requests[1].sent, run.requests[59].status) == (1.0, "failed")
    assert run.figures["ttfc"].count == 59
    assert run.requests[0].values == pytest.approx({"ttfc": 500.0, "tpot_chunk": 30.0, "e2el": 1070.0})


@pytest.mark.parametrize(
    ("options", "slower", "code"),
    [
        ([], 1.5, 0),
        (["--fail-on", "worse"], 1.5, 1),
        (["--fail-on", "worse"], 0.5, 0),
        (["--fail-on", "inconclusive"], 1.0, 3),
        (["--fail-on", "inconclusive"], 1.5, 1),
    ],
)
def test_exit_codes(tmp_path: Path, options: list[str], slower: float, code: int) -> None:
    a, b = write(tmp_path / "a.json", Made(seed=1)), write(tmp_path / "b.json", Made(seed=2, slower=slower))
    output = tmp_path / "out.json"
    assert main(["bench", "compare", str(a), str(b), *options, "-o", str(output)]) == code
    document = json.loads(output.read_text())
    assert (document["kind"], document["schema"]) == ("longread-compare", 1)
    assert document["a"][0]["file"] == "a.json"
    assert {"verdict", "ratio", "low", "high", "needed"} <= set(document["rows"][0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("[1]", "a JSON list"),
        ("{}", "not known what this is"),
        ("[" * 100_000, "not JSON"),
        ('{"longread": {"kind": "bench serve", "schema": 99}}', "schema 99"),
        ('{"longread_sweep": 1, "axis": "moon", "points": []}', "over moon"),
        ('{"longread_sweep": 1, "axis": "rate", "points": []}', "without points"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "x.json").write_text(text)
    ours = write(tmp_path / "a.json", Made())
    assert main(["bench", "compare", str(ours), str(tmp_path / "x.json")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", '"text"'])
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    ours = write(tmp_path / "a.json", Made())
    with (tmp_path / "a.requests.jsonl").open("a") as out:
        out.write(f"{line}\n")
    with pytest.raises(ConfigError, match="line 61"):
        read_runs(ours)


@pytest.mark.parametrize("name", ["../a.requests.jsonl", "/etc/passwd", "", None, 3, "no.jsonl", "a\0b"])
def test_requests_are_read_from_beside_the_result_only(tmp_path: Path, name: object) -> None:
    path = write(tmp_path / "a.json", Made())
    document = json.loads(path.read_text())
    document["longread"]["requests_file"] = name
    (run,) = read_runs(saved(path, document))
    assert run.requests is None
    assert run.no_requests
    assert run.figures["ttft"].mean is not None


def test_the_command_line_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    ours = str(write(tmp_path / "a.json", Made()))
    for options, said in (
        (["--margin", "200%"], "not a share below 1"),
        (["--metrics", "ttftt"], "did you mean ttft?"),
        (["--statistics", "p999"], "--statistics: nothing is called"),
        (["-o", str(tmp_path)], "is a folder"),
    ):
        assert main(["bench", "compare", ours, ours, *options]) == 2
        assert said in capsys.readouterr().err
    assert main(["bench", "compare", ours, str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err
