"""Experiments on a server without a model whose speed is an option: the table says what the options give."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_openai import command, recorded

from longread.cli.main import main
from longread.measure.experiment.speedups import closed, speedup, spread
from longread.measure.report.files import read_runs
from longread.measure.report.run import Request, Run

FAST = "osl = 4\nmax-concurrency = 6\nnum-warmups = 0\nsample-interval = 0\n"


def write(tmp_path: Path, steps: str, more: str = "", visits: int = 2, prompts: int = 6, base: str = "") -> Path:
    path = tmp_path / "x.toml"
    server = command("--first", "0.5", "--gap", "0.1", "--record", str(tmp_path / "record"))
    path.write_text(
        f"[base]\ncommand = '{server}'\n{base}\n{steps}\n"
        f"[[workload]]\nname = 'chat'\ndataset-name = 'chat'\nnum-prompts = {prompts}\n{FAST}\n{more}\n"
        f"[run]\nvisits = {visits}\nready-timeout = '60s'\n"
    )
    return path


def result(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "x" / "experiment.json").read_text())


def table(document: dict[str, Any], metric: str) -> dict[str, dict[str, Any]]:
    found = next(each for each in document["tables"] if each["metric"] == metric)
    return {row["step"]: row for row in found["rows"]}


TWO = "[[step]]\nname = 'first token'\noptions = '--first 0.02'\n[[step]]\nname = 'decode'\noptions = {gap = 0.005}\n"


def test_speed_ups_are_what_the_options_give(tmp_path, capsys):
    assert main(["experiment", str(write(tmp_path, TWO))]) == 0
    document = result(tmp_path)
    assert document["complete"] and [each["label"] for each in document["configurations"]] == [
        "base",
        "first token",
        "decode",
        "first token + decode",
    ]
    starts = [(each["first"], each["gap"]) for each in recorded(tmp_path / "record") if "started" in each]
    order = [(0.5, 0.1), (0.02, 0.1), (0.5, 0.005), (0.02, 0.005)]
    assert starts == order + order[::-1]
    # Of the clock: 20 times as fast is at least twice as fast, on a machine that adds a tenth of a second to each wait.
    decode, first = table(document, "tpot")["decode"], table(document, "tpot")["first token"]
    assert decode["alone"]["speedup"] > 2 and decode["added"]["speedup"] > 2 and 0.5 < first["alone"]["speedup"] < 2
    assert table(document, "ttft")["first token"]["alone"]["speedup"] > 2
    e2el = table(document, "e2el")
    first, decode = e2el["first token"], e2el["decode"]
    assert decode["stacked"]["speedup"] == pytest.approx(first["stacked"]["speedup"] * decode["added"]["speedup"])
    assert decode["product"] == pytest.approx(first["alone"]["speedup"] * decode["alone"]["speedup"])
    assert decode["stacked"]["visits"] == 2 and decode["stacked"]["asks"] == 6
    means = {each["label"]: visit_means(tmp_path / "x", each) for each in document["configurations"]}
    by_hand = math.sqrt(math.prod(means["base"]) / math.prod(means["first token + decode"]))
    assert decode["stacked"]["speedup"] == pytest.approx(by_hand)
    for start, mean in ((1, means["base"][0]), (5, means["first token + decode"][1]), (8, means["base"][1])):
        took = [each["seconds"] for each in recorded(tmp_path / "record") if each.get("answered") == start]
        assert len(took) == 6 and mean > 1000 * sum(took) / 6 - 5  # the usage and [DONE] are not in it
    said = (tmp_path / "x" / "experiment.md").read_text()
    assert "| decode | " in said and "not checked" in said and "~~" not in said
    assert "faster" in capsys.readouterr().out


def visit_means(folder: Path, configuration: dict[str, Any]) -> list[float]:
    """Mean E2E of each visit, from the requests' own lines."""
    found = []
    for visit in configuration["visits"]:
        lines = (folder / visit["folder"] / "bench-chat.requests.jsonl").read_text().splitlines()
        values = [json.loads(line)["e2el_ms"] for line in lines]
        found.append(sum(values) / len(values))
    return found


def test_no_speed_on_red(tmp_path):
    """A step that makes half of the answers wrong: its figures are struck out, with the reason; the others' are not."""
    base = "options = ['--toy', '{}', '--first', '0', '--gap', '0.002']\n"
    steps = "[[step]]\nname = 'fine'\noptions = '--gap 0.001'\n"
    steps += "[[step]]\nname = 'wrong'\noptions = ['--toy', '{\"wrong_every\": 2}']\n"
    gate = "[gate]\nprofile = 'lossless'\nlevels = [4]\ndocuments = 2\n"
    assert main(["experiment", str(write(tmp_path, steps, gate, visits=1, prompts=4, base=base))]) == 0
    document = result(tmp_path)
    verdicts = {each["label"]: (each["quality"] or {}).get("verdict") for each in document["configurations"]}
    assert verdicts == {"base": None, "fine": "INCONCLUSIVE", "wrong": "FAIL", "fine + wrong": "FAIL"}
    rows = table(document, "e2el")
    assert rows["fine"]["alone"]["struck"] is None
    for place in ("alone", "added", "stacked"):
        assert "critical" in rows["wrong"][place]["struck"]
    said = (tmp_path / "x" / "experiment.md").read_text()
    line = next(each for each in said.splitlines() if each.startswith("| wrong | ") and "x (" in each)
    assert line.count("~~") == 10 and "## Struck out" in said


def test_what_fails_is_told_and_does_not_end_it(tmp_path):
    steps = "[[step]]\nname = 'broken'\noptions = '--die 4'\n[[step]]\nname = 'good'\noptions = '--gap 0.01'\n"
    steps += "[[step]]\nname = 'refusing'\noptions = '--refuse-over 100'\n"
    steps += "[[step]]\nname = 'locked'\noptions = {locked = true}\n"
    path = write(tmp_path, steps, visits=1, prompts=3)
    path.write_text(path.read_text().replace("visits = 1", "visits = 1\nstacked = false"))
    assert main(["experiment", str(path)]) == 1
    document = result(tmp_path)
    assert not document["complete"]
    visits = {each["label"]: each["visits"][0] for each in document["configurations"]}
    assert visits["broken"]["status"] == "failed" and "status 4" in visits["broken"]["reason"]
    assert "was told to end" in visits["broken"]["reason"]
    assert visits["refusing"]["status"] == "failed" and "no request was answered" in visits["refusing"]["reason"]
    assert visits["locked"]["status"] == "failed" and "(401: " in visits["locked"]["reason"]
    assert visits["good"]["status"] == "ok"
    rows = table(document, "e2el")
    assert rows["broken"]["alone"]["verdict"] == "missing" and "good" in rows
    means = {
        each["label"]: visit_means(tmp_path / "x", each)
        for each in document["configurations"]
        if each["label"] in ("base", "good")
    }
    assert rows["good"]["alone"]["speedup"] == pytest.approx(means["base"][0] / means["good"][0])
    said = (tmp_path / "x" / "experiment.md").read_text()
    assert "## What is missing" in said and "- broken, round 1: failed" in said


def test_resume_makes_only_what_is_left(tmp_path, capsys):
    """Ctrl-C in the middle: what was made is kept and reported, and the second call makes the rest."""
    path = write(tmp_path, TWO, visits=1, prompts=2, base="options = '--hold 2'")
    argv = [sys.executable, "-m", "longread.cli.main", "experiment", str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    made, record = tmp_path / "x", tmp_path / "record"
    while not any("held" in each for each in recorded(record)) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    (tmp_path / "record.go").touch()  # what is in flight is waited for
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    (first,) = made.glob("*/visit.json")
    when = first.stat().st_mtime_ns
    assert json.loads(first.read_text())["label"] == "base" and not result(tmp_path)["complete"]
    assert main(["experiment", str(path)]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["experiment", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "3 to be made" in said and "predicted: about" in said
    assert main(["experiment", str(path), "--resume"]) == 0
    assert result(tmp_path)["complete"] and first.stat().st_mtime_ns == when
    assert sum("started" in each for each in recorded(record)) == 2 + 3
    first.write_text("{")
    assert main(["experiment", str(path), "--resume", "--only", "decode"]) == 0
    assert json.loads(first.read_text())["status"] == "ok"
    assert sum("started" in each for each in recorded(record)) == 2 + 3 + 1
    assert [each["label"] for each in result(tmp_path)["configurations"]] == ["base", "decode", "first token + decode"]


def test_nothing_starts_where_the_command_line_is_wrong(tmp_path, capsys):
    path = write(tmp_path, TWO)
    assert main(["experiment", str(path), "--only", "decoding"]) == 2
    assert "no step is called so (all: first token, decode)" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("a file")
    assert main(["experiment", str(path)]) == 2
    assert main(["experiment", str(tmp_path / "none.toml")]) == 2
    assert main(["experiment", str(write(tmp_path, TWO)), "--dry-run", "-o", str(tmp_path / "y")]) == 0
    assert "not known before the first visit" in capsys.readouterr().out


def run_of(values: dict[str, float], rate: float = 10.0, open_loop: bool = False) -> Run:
    requests = [
        Request(key, "chat", "ok", sent=float(i), values={"e2el": v}) for i, (key, v) in enumerate(values.items())
    ]
    own = {"provenance": {"schedule": {"open_loop": open_loop}}}
    return Run(
        label="x",
        tool="longread",
        source="x",
        model="m",
        date=None,
        figures={},
        rates={"output_throughput": rate},
        load={},
        ends={"ok": len(requests)},
        planned=len(requests),
        duration=1.0,
        partial=False,
        requests=requests,
        no_requests=None,
        own=own,
        missing=(),
        warnings=(),
    )


def test_asks_are_paired_over_visits():
    """Asks differ a hundredfold among themselves; the speed-up is of each, and one that a side lost does not count."""
    base = {f"k{i}": 10.0 * 1.5**i for i in range(12)}
    fast = {key: value / 2 for key, value in base.items() if key != "k11"}
    found = speedup([run_of(base), run_of(base)], [run_of(fast), run_of(fast)], "e2el", None)
    assert found.value == pytest.approx(2.0) and found.asks == 11
    few = {key: value for key, value in fast.items() if key in ("k0", "k1")}
    other = {f"z{i}": 1.0 for i in range(12)}
    assert speedup([run_of(base)], [run_of(few | other)], "e2el", None).verdict == "missing"


def test_a_throughput_of_an_open_loop_is_not_compared():
    runs = [run_of({"a": 1.0}, 10.0, True)], [run_of({"a": 1.0}, 20.0, True)]
    assert not closed(runs[0][0])
    assert speedup(*runs, "output_throughput", None).verdict == "missing"
    shut = [run_of({"a": 1.0}, 10.0)], [run_of({"a": 1.0}, 20.0)]
    assert speedup(*shut, "output_throughput", None).value == pytest.approx(2.0)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Three visits of four configurations, each visit off by 3 %; requests off by 20 %: the interval of the visits'
    spread covers, one of the requests of single visits would not.
    """
    draw, inside, narrow = random.Random(5), 0, 0
    for _ in range(200):
        sides = []
        for _ in range(4):
            visits = []
            for _ in range(3):
                off = draw.gauss(0, 0.03)
                visits.append(run_of({f"k{i}": 100 * math.exp(off + draw.gauss(0, 0.2)) for i in range(40)}))
            sides.append(visits)
        found = speedup(sides[0], sides[1], "e2el", spread(sides, "e2el"))
        assert found.low is not None and found.high is not None
        inside += found.low <= 1 <= found.high
        narrow += found.high / found.low < 1.5
    assert 180 <= inside <= 199
    assert narrow == 200


def test_one_visit_each_has_an_interval_of_requests_and_says_so():
    draw = random.Random(1)
    base = {f"k{i}": 100 * math.exp(draw.gauss(0, 0.1)) for i in range(60)}
    fast = {key: value / 1.3 * math.exp(draw.gauss(0, 0.02)) for key, value in base.items()}
    found = speedup([run_of(base)], [run_of(fast)], "e2el", spread([[run_of(base)], [run_of(fast)]], "e2el"))
    assert found.verdict == "faster" and "one visit each" in found.why
    assert found.low is not None and found.high is not None and found.low < 1.3 < found.high


def test_bench_runs_the_gate_first_and_marks_red(tmp_path, capsys):
    """Against a base: the same server passes or is open, one that answers wrong is red, and all say so."""
    from longread.measure.started import Started, launch_of

    def serve(*options: str) -> Started:
        server = Started(launch_of(command("--first", "0", "--gap", "0", *options)), tmp_path / "log")
        import asyncio

        asyncio.run(server.wait_ready(20, {}, asyncio.Event()))
        return server

    base, out = tmp_path / "base.json", tmp_path / "out.json"
    server = serve("--toy", "{}")
    bench = ["bench", "serve", "--dataset-name", "chat", "--num-prompts", "2", "--osl", "4", "--no-calibration"]
    bench += ["--gate", "lossless", "--gate-levels", "4", "--output", str(out)]
    try:
        argv = ["gate", "base", "--base-url", server.base_url, "--levels", "4", "--lengths", "1024", "--documents", "2"]
        assert main([*argv, "-o", str(base)]) == 0
        code = main([*bench, "--base-url", server.base_url, "--gate-base", str(base)])
        told = json.loads(out.read_text())["longread"]["quality"]
        assert code == 0 and told["verdict"] != "FAIL" and told["speed_counts"] and told["base"] == "base.json"
    finally:
        server.stop()
    server = serve("--toy", "'{\"wrong_every\":2}'")
    try:
        capsys.readouterr()
        assert main([*bench, "--base-url", server.base_url, "--gate-base", str(base)]) == 1
        own = json.loads(out.read_text())["longread"]
        assert own["quality"]["verdict"] == "FAIL" and not own["quality"]["speed_counts"] and own["quality"]["failed"]
        assert read_runs(out)[0].red
        assert any("the speed figures count for nothing" in each for each in own["warnings"])
        assert "count for nothing" in " ".join(capsys.readouterr().out.split())
    finally:
        server.stop()


@pytest.mark.parametrize(
    "options",
    [
        ["--gate", "lossles"],
        ["--gate-base", "x"],
        ["--gate", "lossless", "--gate-levels", "9"],
        ["--gate", "lossless", "--gate-base", "no-such-file"],
        ["--gate", "lossless", "--gate-budget", "0"],
    ],
)
def test_a_gate_that_cannot_be_is_refused_before_any_request(options, capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
