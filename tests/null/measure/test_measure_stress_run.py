"""The pressure tests against a server without a model, which is started, killed and started again."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from fake_openai import command

from longread.cli.main import main
from longread.measure import started
from longread.measure.load.outcome import Outcome
from longread.measure.stress import context
from longread.measure.stress.limits import LIMITS, limits_of
from longread.measure.stress.mixed import Seen, judge, stalls, starved
from longread.measure.stress.recovery import Kill, changed, end_of
from longread.measure.stress.recovery import judge as judge_kill
from longread.spec.errors import ConfigError

SMALL = ["--long-tokens", "1K", "--starts", "2", "--interval", "0.01", "--context-requests", "14", "--shorts", "24"]
SMALL += ["--short-rate", "20", "--reasoning-requests", "40", "--in-flight", "4", "--budget", "10m", "--seed", "1"]


@pytest.fixture(autouse=True)
def shorter_waits(monkeypatch):
    monkeypatch.setattr(started, "ORPHAN_SECONDS", 1.0)
    monkeypatch.setattr(context, "SETTLE", 0.01)


def run(tmp_path: Path, *options: str) -> tuple[int, dict]:
    output = tmp_path / "stress.json"
    code = main(["stress", *SMALL, *options, "-o", str(output)])
    return code, json.loads(output.read_text())


def findings(document: dict, test: str) -> dict[str, dict]:
    found = next(each for each in document["tests"] if each["test"] == test)
    assert found["not_run"] is None, found["not_run"]
    return {each["name"]: each for each in found["findings"]}


def test_all_five_on_a_server_that_is_started(tmp_path, capsys):
    code, document = run(tmp_path, "--start", command("--think", "1", "--ready-after", "0.3"))
    assert {each["test"] for each in document["tests"]} == {"cold", "context", "mixed", "reasoning", "recovery"}
    cold = findings(document, "cold")
    assert cold["cold_start_s"]["verdict"] == "PASS" and cold["cold_start_s"]["samples"] == 2
    assert 0.3 <= cold["ready_s"]["value"] <= cold["cold_start_s"]["value"]
    context = findings(document, "context")
    assert context["context_failures"]["value"] == 0 and context["leak_bytes_per_request"]["samples"] >= 10
    reasoning = findings(document, "reasoning")
    assert reasoning["reasoning_share_min"]["value"] == 1.0
    recovery = findings(document, "recovery")
    assert recovery["recovery_s (server)"]["verdict"] == "PASS"
    assert recovery["changed_answers (server)"]["verdict"] == "PASS"
    assert recovery["cached_share_after_min (server)"]["value"] == 0.0  # nothing outlives this server
    assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}[document["verdict"]]
    assert document["provenance"]["server"]["model"] == "fake"
    lines = [json.loads(line) for line in (tmp_path / "stress.requests.jsonl").read_text().splitlines()]
    counts = Counter(each["phase"] for each in lines)
    # 2 starts with 2 shapes of 4 requests; 3 lengths, then 14; 8 asks twice before the kill and once after it.
    assert (counts["cold"], counts["context"], counts["reasoning"]) == (16, 17, 40)
    assert counts["recovery: before"] == counts["recovery: after"] == 8 and counts["recovery: in flight"] == 4
    assert counts["mixed: alone"] == 24 and counts["mixed: beside"] > 24
    said = capsys.readouterr().out
    assert "Verdict: " in said and "failure recovery" in said
    assert not [each for each in psutil.Process().children(recursive=True) if "fake_openai" in " ".join(each.cmdline())]


def test_a_leak_and_a_late_start_fail(tmp_path):
    options = ["--start", command("--leak", "400000"), "--tests", "cold,context", "--limit", "cold_start_s=0.001"]
    code, document = run(tmp_path, *options, "--context-requests", "24")
    assert code == 1 and document["verdict"] == "FAIL"
    leaked = findings(document, "context")["leak_bytes_per_request"]
    assert leaked["verdict"] == "FAIL" and 300_000 < leaked["value"] < 500_000
    assert findings(document, "cold")["cold_start_s"]["verdict"] == "FAIL"


def test_what_a_restart_changes_is_found(tmp_path):
    """Other answers after it, a process left behind; and what a store keeps is seen."""
    keep = tmp_path / "kept.json"
    options = ["--start", command("--salt", "start", "--child", "--keep", str(keep)), "--tests", "recovery"]
    code, document = run(tmp_path, *options, "--limit", "cached_share_after_min=0.9")
    found = findings(document, "recovery")
    assert code == 1
    assert found["changed_answers (server)"]["verdict"] == "FAIL" and found["changed_answers (server)"]["value"] == 8
    assert found["left_processes (server)"]["verdict"] == "FAIL" and found["left_processes (server)"]["value"] == 1
    assert found["cached_share_after_min (server)"]["verdict"] == "PASS"


def test_a_server_that_does_not_start_says_why(tmp_path, capsys):
    code, document = run(tmp_path, "--start", command("--die", "3"), "--tests", "cold,context")
    assert code == 1
    failed = findings(document, "cold")["failed_starts"]
    assert failed["verdict"] == "FAIL" and "status 3" in failed["note"] and "was told to end" in failed["note"]
    assert document["tests"][1]["not_run"] is not None and document["tests"][1]["verdict"] == "INCONCLUSIVE"


def test_a_server_that_was_there_is_not_touched(tmp_path):
    """Tests that would start or kill it are not made; with --pid that process is killed, and no other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [word.replace("{port}", str(port)) for word in command("--think", "0.5").split()]
    server = subprocess.Popen(argv)
    try:
        wait_port(port)
        url = f"http://127.0.0.1:{port}"
        code, document = run(tmp_path, "--base-url", url, "--tests", "context,reasoning", "--pid", str(server.pid))
        assert server.poll() is None
        assert findings(document, "reasoning")["reasoning_share_min"]["verdict"] == "FAIL" and code == 1
        assert findings(document, "context")["memory_now"]["value"] > 2**20
        for wanted in ("cold", "recovery"):
            assert main(["stress", "--base-url", url, "--tests", wanted]) == 2
        assert server.poll() is None
        code, document = run(
            tmp_path, "--base-url", url, "--tests", "recovery", "--pid", str(server.pid), "--limit", "recovery_s=0.3"
        )
        assert server.wait(5) == -signal.SIGKILL
        back = findings(document, "recovery")["recovery_s (pid)"]
        assert (back["verdict"], back["value"]) == ("FAIL", None) and "not ready within" in back["note"]
    finally:
        server.kill()
        server.wait()


def wait_port(port: int) -> None:
    for _ in range(400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError("the server did not come up")


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    """As a user has it: one SIGINT to the program, which judges, writes, and leaves no server behind."""
    output = tmp_path / "stress.json"
    argv = [sys.executable, "-m", "longread.cli.main", "stress", *SMALL, "--tests", "context,recovery"]
    argv += ["--start", command("--first", "0.1"), "--context-requests", "5000", "-o", str(output)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = tmp_path / "stress.requests.jsonl"

    def interrupt() -> None:
        while not (lines.exists() and lines.read_text().count("\n") >= 5):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    document = json.loads(output.read_text())
    assert document["interrupted"] and document["tests"][0]["stopped"] == "interrupted"
    assert len(document["tests"][0]["books"]["requests"]) >= 1
    assert document["tests"][1]["not_run"] == "interrupted before"
    assert "interrupted" in out


def outcome(key: str, **fields: object) -> Outcome:
    made = Outcome(key, "chat", status="ok")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_ends_of_requests_in_flight_are_told_apart():
    assert end_of(outcome("a")) == "answered"
    assert end_of(outcome("a", status="failed", failure="http 503")) == "told"
    assert end_of(outcome("a", status="failed", failure="error in the stream")) == "told"
    assert end_of(outcome("a", status="failed", failure="half a stream")) == "broken"
    assert end_of(outcome("a", status="failed", failure="connection lost")) == "broken"
    assert end_of(outcome("a", status="cancelled")) == "hung"
    assert end_of(outcome("a", status="timeout")) == "hung"


def test_only_answers_that_were_stable_before_are_compared():
    first = [outcome("a", text="x"), outcome("b", text="x"), outcome("c", text="x"), outcome("d", text="")]
    second = [outcome("a", text="x"), outcome("b", text="y"), outcome("c", text="x"), outcome("d", text="")]
    after = [outcome("a", text="x"), outcome("b", text="z"), outcome("c", status="failed")]
    assert changed(first, second, after) == (2, ["c"])


def test_the_books_of_a_kill():
    limits = limits_of(None, [])
    kill = Kill("server", ends=Counter(answered=2, told=1, broken=4, hung=1), back=3.0, left=0, comparable=5)
    found = {each.name: each for each in judge_kill(kill, limits)}
    assert found["hung (server)"].verdict == "FAIL" and found["hung (server)"].samples == 6
    assert found["lost (server)"].value == 6
    assert found["lost (server)"].note == "2 answered, 1 told, 4 broken, 1 hung"
    assert found["recovery_s (server)"].verdict == "PASS"
    calm = Kill("server", ends=Counter(answered=8), back=200.0, comparable=0)
    found = {each.name: each for each in judge_kill(calm, limits)}
    assert found["hung (server)"].verdict == "INCONCLUSIVE"  # nothing was in flight at the kill
    assert found["changed_answers (server)"].verdict == "INCONCLUSIVE"
    assert found["recovery_s (server)"].verdict == "FAIL"


def short(at: float, chunks: list[float], **fields: object) -> Outcome:
    made = outcome("s", sent=at, **fields)
    made.chunk_times.extend(chunks)
    made.last = chunks[-1] if chunks else None
    return made


def long(at: float, first: float) -> Outcome:
    made = outcome("l", sent=at, kind="document")
    made.chunk_times.append(first)
    return made


def test_only_pauses_while_a_long_prompt_is_read_are_stalls():
    running = short(0.0, [0.1, 0.2, 1.7, 2.1, 9.0])  # 1.5 s beside the long prompt, 6.9 s after it
    before = short(0.0, [0.1, 0.2])
    windows = [("alone", [short(0, [0.1, 5.0])]), ("beside", [running, before, long(0.5, 2.0)])]
    assert stalls(windows) == [pytest.approx(1.5)]


def test_short_requests_that_wait_too_long_are_starved():
    limits = limits_of(None, [])
    rows = [short(0, [1.0]), short(0, [61.0]), short(0, [], status="timeout"), short(0, [], status="refused")]
    found = starved(rows, [long(0, 90.0)], limits)
    assert (found.verdict, found.value, found.samples) == ("FAIL", 3.0, 5)
    assert starved(rows[:1], [long(0, 90.0)], limits).verdict == "PASS"


def test_a_tail_needs_its_samples_and_failures_are_in_it():
    limits = limits_of(None, [])
    few = Seen([("beside", [short(0, [0.1]) for _ in range(100)])], [])
    found = {each.name: each for each in judge(few, limits)}["short_ttft_p99_ms"]
    assert (found.verdict, found.needed) == ("INCONCLUSIVE", 368)
    enough = Seen([("beside", [short(0, [0.1]) for _ in range(368)])], [])
    assert {each.name: each for each in judge(enough, limits)}["short_ttft_p99_ms"].verdict == "PASS"
    lost = [short(0, [], status="failed") for _ in range(40)]
    broken = Seen([("beside", [short(0, [0.1]) for _ in range(368)] + lost)], [])
    found = {each.name: each for each in judge(broken, limits)}["short_ttft_p99_ms"]
    assert found.verdict == "FAIL" and found.document()["value"] is None


def test_limits_from_a_file_and_the_command_line(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("# ours\nrecovery_s = 5\nshort_ttft_p99_ms = 300\n")
    found = limits_of(path, ["recovery_s=7"])
    assert (found["recovery_s"], found["short_ttft_p99_ms"]) == (7.0, 300.0)
    assert set(found) == {each.name for each in LIMITS}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recovery_s = 5\n\nrecovry_s = 3\n", "line 3: unknown key 'recovry_s'; did you mean recovery_s?"),
        ("hung = true\n", "line 1: hung must be a number"),
        ("hung = -1\n", "line 1: hung must be a number from 0"),
        ("hung = nan\n", "line 1: hung must be"),
        ("hung = \n", "is no TOML"),
        ("[cold]\nhung = 1\n", "line 1: unknown key 'cold'"),
    ],
)
def test_a_limits_file_that_is_wrong_says_where(tmp_path, text, said):
    path = tmp_path / "limits.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r".") as error:
        limits_of(path, [])
    assert said in str(error.value)


@pytest.mark.parametrize("given", ["recovery", "x=1", "hung=a", "hung=inf", "reasoning_share_min=2"])
def test_a_limit_that_is_wrong_is_refused(given):
    with pytest.raises(ConfigError):
        limits_of(None, [given])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--start", "x --port 80"],
        ["--start", "x {port}", "--pid", "1"],
        ["--base-url", "x", "--pid", str(os.getpid())],
        ["--base-url", "x", "--pid", "1"],
        ["--base-url", "x", "--tests", "warm"],
        ["--base-url", "x", "--env", "A=1"],
        ["--start", "x {port}", "--kill", "all"],
        ["--start", "x {port}", "--", "--max-num-seqs", "4"],
        ["--start", "'x {port}"],
        ["--serve", "reader-v4", "--", "--port", "80"],
        ["--base-url", "x", "--limits", "no-such.toml"],
    ],
)
def test_a_command_line_that_cannot_be_is_refused_before_anything_starts(options, capsys):
    assert main(["stress", *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
