"""``longread bench serve`` against servers that mean harm or know no better: nothing they say ends a run without a
result, moves a terminal, or becomes a figure that cannot be.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from scripted_server import DONE, End, Head, Plain, answer, delta, refusal, scripted_thread, usage

from longread.cli.main import main
from longread.measure.load import bench as bench_module
from longread.measure.load.calibrate import Calibration
from longread.measure.load.server import Look, NoServerError, only_model

ATTACK = "\x1b[2J\x1b]0;owned\x07\u202e"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"q{i}", "max_tokens": 9, "kind": ATTACK + str(i)}) + "\n" for i in "ab")
    )
    return path


def bench(url: str, prompts: Path, *more: str) -> int:
    arguments = ["bench", "serve", "--base-url", url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    return main([*arguments, "--num-warmups", "0", *more])


def test_headers_of_any_bytes_end_no_run(prompts: Path, tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    strange = b"X-Request-Id: \xff\xfe\r\nServer-Timing: \xff;dur=1, a;dur=inf, b;dur=nan, c;dur=2\r\n\r\n"
    other = b"HTTP/1.1 200 OK\r\nContent-Type: text/\xff\r\nContent-Length: 1\r\n\r\nx"
    steps = [[Plain(head + strange), *answer(["a"], role=None)[1:]], [Plain(other)]]
    path = tmp_path / "r.json"
    with scripted_thread(lambda n, body: steps[n]) as server:
        assert bench(server.url, prompts, "--no-calibration", "--max-concurrency", "1", "--output", str(path)) == 0
    rows = [json.loads(line) for line in (tmp_path / "r.requests.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert rows[0]["request_id"] == "\ufffd\ufffd" and rows[0]["server_timing_ms"] == {"\ufffd": 1.0, "c": 2.0}
    assert rows[1]["failure"] == "no event stream"


def test_counts_that_cannot_be_are_told(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    told = usage(3, 1, prompt_tokens_details={"cached_tokens": 4})
    steps = [Head(), *(delta("text", content="x") for _ in range(8)), delta(finish="stop"), told, DONE, End()]
    with scripted_thread(lambda n, body: steps) as server:
        assert bench(server.url, prompts, "--no-calibration", "--output", str(tmp_path / "r.json")) == 0
    warned = json.loads((tmp_path / "r.json").read_text())["longread"]["warnings"]
    assert any("2 of 2 answers had more events with text than the server counts output tokens" in one for one in warned)
    assert any("2 answers tell more cached tokens than their prompt has" in one for one in warned)


def test_nothing_that_a_server_or_a_file_says_reaches_the_terminal_raw(
    prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    models = {"/v1/models": json.dumps({"data": [{"id": ATTACK}, {"id": "b"}]})}
    with scripted_thread(lambda n, body: refusal(400, ATTACK), models) as server:
        assert bench(server.url, prompts, "--no-calibration") == 1  # which of the models?
        assert bench(server.url, prompts, "--no-calibration", "--model", ATTACK, "--num-warmups", "1") == 1
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--no-calibration") == 0  # kinds have tables of their own
    shown = "".join(capsys.readouterr())
    assert r"\x1b[2J" in shown and "no warm-up request was answered" in shown
    assert not [letter for letter in shown if not letter.isprintable() and letter != "\n"]


@pytest.mark.parametrize("where", ["look", "calibrate"])
def test_an_interruption_after_the_run_keeps_the_run(
    where: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def interrupting_look(target: object) -> Look:
        looked.append(1)
        if where == "look" and len(looked) == 3:  # which model, before the run, after it
            os.kill(os.getpid(), signal.SIGINT)
        return Look(models=("m",))

    async def interrupting_calibrate(streams: int, gap: float) -> Calibration:
        os.kill(os.getpid(), signal.SIGINT)
        return Calibration(None, None, streams, gap)

    monkeypatch.setattr(bench_module, "look", interrupting_look)
    monkeypatch.setattr(bench_module, "calibrate", interrupting_calibrate)
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--sample-interval", "0", "--output", str(tmp_path / "r.json")) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 2 and result["longread"]["client"]["calibration"] is None


def test_a_server_that_wants_a_key_or_lists_too_much_is_told_as_such() -> None:
    with pytest.raises(NoServerError, match="give its API key as OPENAI_API_KEY"):
        only_model("http://h", Look(unread={"models": "http://h/v1/models: status 401"}))
    with pytest.raises(NoServerError, match="serves 100 models or more"):
        only_model("http://h", Look(models=tuple(f"m{i}" for i in range(100))))


@pytest.mark.parametrize("body", ['{"temperature": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000])
def test_a_body_that_json_cannot_carry_is_refused_before_any_request(
    body: str, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--extra-body", body) == 2
        assert not server.seen
    assert "--extra-body is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("field", ['"extra": {"x": NaN}', '"key": "\\ud800"', '"extra": {"x": "\\udfff"}'])
def test_a_line_that_json_cannot_carry_is_refused_before_any_request(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "q", "max_tokens": 4, ' + field + "}")
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        code = bench(server.url, path, "--no-calibration")
        assert (code, len(server.seen)) in ((2, 0), (0, 1))
    assert "this is a bug" not in capsys.readouterr().err


def test_a_command_line_that_is_no_utf_8_is_kept_as_it_was(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--no-calibration", "--metadata", "k=\udcff", "--output", str(path)) == 0
    assert json.loads(path.read_text())["k"] == "\udcff"


def test_a_disk_that_fills_up_stops_the_run_and_names_the_file(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("longread.measure.load.result.line", lambda outcome, detailed: os.write(full, b"x"))
    full = os.open("/dev/full", os.O_WRONLY)
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--no-calibration", "--output", str(tmp_path / "r.json")) == 1
    os.close(full)
    told = capsys.readouterr().err
    assert "r.requests.jsonl.part: cannot be written: No space left on device" in told
