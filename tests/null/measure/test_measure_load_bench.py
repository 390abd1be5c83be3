"""``longread bench serve`` as a user runs it: files, table, refusals, Ctrl-C; against scripts and our own server."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from scripted_server import DONE, End, Hang, Head, Wait, answer, delta, refusal, scripted_thread
from serving import MODEL, serving

from longread.cli.main import main
from longread.measure.load.calibrate import calibrate
from longread.measure.load.server import Look, NoServerError, facts, look, only_model
from longread.measure.load.target import Target

_KEYS = """
date backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed failed
total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms
median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
"""
METRICS = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{model_name="m"} %d
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{model_name="m"} %d
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="fp8"} 1
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [
        {
            "messages": [{"role": "user", "content": f"question {i}"}],
            "max_tokens": 6,
            "kind": "short" if i % 2 else "long",
        }
        for i in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def bench(url: str, prompts: Path, *more: str, calibrated: bool = False) -> int:
    arguments = ["bench", "serve", "--base-url", url, "--dataset-name", "custom", "--dataset-path", str(prompts)]
    return main([*arguments, *more, *([] if calibrated else ["--no-calibration"])])


def test_the_result_has_vllms_keys_and_our_block(prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def script(n: int, body: dict) -> list:
        return refusal(429, "busy") if n == 7 else answer(["a"] * 4, first=0.01)

    path = tmp_path / "out" / "r.json"
    with scripted_thread(script, {"/version": '{"version": "0.32.0"}', "/metrics": METRICS % (100, 40)}) as server:
        code = bench(
            server.url,
            prompts,
            *("--max-concurrency", "3", "--goodput", "ttft:500", "tpot:100", "--output", str(path)),
            *("--metadata", "card=H20", "--header", "X-Api-Key: secret-1", "--num-warmups", "2"),
        )
    assert code == 0
    result = json.loads(path.read_text())
    assert set(_KEYS.split()) <= set(result)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (11, 1, 12)
    assert (result["request_rate"], result["max_concurrency"], result["card"]) == ("inf", 3, "H20")
    assert result["request_goodput"] == pytest.approx(11 / result["duration"])
    own = result["longread"]
    assert (own["schema"], own["partial"]) == (1, False)
    assert own["requests"]["by_failure"] == {"http 429": 1}
    assert own["requests"]["by_http_status"] == {"200": 11, "429": 1}
    assert own["requests"]["warmups"] == 2
    p99 = own["metrics"]["ttft"]["percentiles"]["p99"]
    assert (p99["interval"][1], p99["needs_samples"]) == (None, 368)
    assert set(own["kinds"]) == {"short", "long"}
    assert own["server"]["version"] == "0.32.0"
    assert own["server"]["info"] == {"vllm:cache_config_info": {"block_size": "16", "cache_dtype": "fp8"}}
    assert own["server"]["gauges_after"]["kv usage"] == 0.25
    assert any("gpu_cache_usage_perc" in name for name in own["server"]["old_names"])
    assert any(text.startswith("preemptions") for text in own["server"]["missing"])
    assert any(text.startswith("cached_tokens") for text in own["missing"])
    assert own["client"]["loop_lag_ms"]["count"] > 0
    assert own["client"]["added_ttft_ms"] is None
    assert own["provenance"]["workload"]["name"] == "custom"
    assert own["provenance"]["packages"]["aiohttp"]
    assert "empty role chunk does not count" in own["definitions"]["ttft"]
    assert "secret-1" not in path.read_text()
    shown = capsys.readouterr().out
    assert "11 of 12 (1 refused)" in shown
    assert "p99 needs 368" in shown
    assert "TTFT" in shown


def test_each_request_is_a_line_and_texts_only_on_demand(prompts: Path, tmp_path: Path) -> None:
    path, full = tmp_path / "r.json", tmp_path / "full.json"
    with scripted_thread(lambda n, body: answer(["a"] * 4, reasoning=["r"])) as server:
        assert bench(server.url, prompts, "--output", str(path)) == 0
        assert bench(server.url, prompts, "--output", str(full), "--save-detailed") == 0
    rows = [json.loads(line) for line in (tmp_path / "r.requests.jsonl").read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(12))
    assert all(row["status"] == "ok" and row["ttft_ms"] > 0 and row["output_tokens"] == 5 for row in rows)
    assert "text" not in rows[0]
    assert "itls" not in json.loads(path.read_text())
    detailed = json.loads((tmp_path / "full.requests.jsonl").read_text().splitlines()[0])
    assert (detailed["text"], detailed["reasoning"], len(detailed["gaps_ms"])) == ("aaaa", "r", 4)
    assert len(json.loads(full.read_text())["itls"]) == 12
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*"))


def test_names_as_vllms_where_only_save_result_is_given(prompts: Path, tmp_path: Path) -> None:
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        options = ["--save-result", "--result-dir", str(tmp_path), "--request-rate", "400", "--max-concurrency", "4"]
        assert bench(server.url, prompts, *options) == 0
        assert bench(server.url, prompts, *options, "--result-filename", "mine.json") == 0
    names = sorted(path.name for path in tmp_path.glob("*.json"))
    assert names[-1] == "openai-chat-400qps-concurrency4-scripted-" + names[-1][-20:]
    assert names[0] == "mine.json"


def test_a_tokenizer_counts_what_the_server_does_not(prompts: Path, tmp_path: Path) -> None:
    import longread

    tokenizer = Path(longread.__file__).parent / "weights" / "fixture_tokenizer.json"
    script = answer(["the answer is ", "in the document"], counted=False)
    with scripted_thread(lambda n, body: script) as server:
        assert bench(server.url, prompts, "--output", str(tmp_path / "none.json")) == 0
        assert bench(server.url, prompts, "--output", str(tmp_path / "r.json"), "--tokenizer", str(tokenizer)) == 0
    bare, counted = (json.loads((tmp_path / name).read_text()) for name in ("none.json", "r.json"))
    assert bare["total_output_tokens"] is bare["output_throughput"] is bare["mean_tpot_ms"] is None
    assert any("12 of 12 answers came without usage" in text for text in bare["longread"]["missing"])
    assert counted["total_output_tokens"] > 12
    assert counted["total_input_tokens"] > 12
    assert counted["longread"]["tokens_from"] == {"tokenizer": 12}


def test_nothing_answered_is_exit_code_1(prompts: Path, tmp_path: Path) -> None:
    with scripted_thread(lambda n, body: refusal(500, "broken")) as server:
        assert bench(server.url, prompts, "--num-warmups", "0", "--output", str(tmp_path / "r.json")) == 1
    assert json.loads((tmp_path / "r.json").read_text())["mean_ttft_ms"] is None


def test_our_own_server_is_measured_with_what_it_tells(prompts: Path, tmp_path: Path) -> None:
    with serving() as server:
        assert bench(server.url, prompts, "--max-concurrency", "2", "--output", str(tmp_path / "r.json")) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    own = result["longread"]
    assert (result["completed"], result["model_id"]) == (12, MODEL)
    assert result["total_output_tokens"] > 0
    assert own["server"]["engine"] == "longread"
    assert own["server"]["counters"]["finished"] == 12
    assert own["server"]["counters"]["generated tokens"] == result["total_output_tokens"]
    row = json.loads((tmp_path / "r.requests.jsonl").read_text().splitlines()[0])
    assert row["server_timing_ms"]["ttft_ms"] > 0  # taken once the byte is out: a busy client may have read it before
    assert row["cached_tokens"] is not None


def interrupted(prompts: Path, path: Path, times: int) -> tuple[subprocess.CompletedProcess, int]:
    """A run that gets Ctrl-C once five requests came, and again once it has told that it stops."""
    fifth, go = threading.Event(), threading.Event()

    def script(n: int, body: dict) -> list:
        if n == 4:
            fifth.set()
        tail = [Hang()] if n == 4 and times > 1 else [Wait(0.2), delta(content="b", finish="stop"), DONE, End()]
        return answer(["a"]) if n < 3 else [Head(), delta(content="a"), *tail]

    with scripted_thread(script) as server:
        command = [sys.executable, "-m", "longread.cli.main", "bench", "serve", "--base-url", server.url]
        command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--max-concurrency", "1"]
        command += ["--num-warmups", "0", "--no-calibration", "--output", str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert fifth.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = ""
        while "Ctrl-C again" not in said:
            said += process.stderr.readline()
        if times > 1:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        go.set()
        return subprocess.CompletedProcess(command, process.returncode, out, said + err), len(server.seen)


@pytest.mark.parametrize(("times", "ends"), [(1, {"ok": 5}), (2, {"ok": 4, "cancelled": 1})])
def test_ctrl_c_keeps_what_was_measured(prompts: Path, tmp_path: Path, times: int, ends: dict) -> None:
    path = tmp_path / "r.json"
    done, sent = interrupted(prompts, path, times)
    assert done.returncode == 130, done.stderr
    assert sent == 5
    own = json.loads(path.read_text())["longread"]
    assert own["partial"] is True
    assert own["requests"]["planned"] == 12
    assert {name: own["requests"][name] for name in ends} == ends
    assert len((tmp_path / "r.requests.jsonl").read_text().splitlines()) == 5
    assert "partial" in done.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--goodput", "ttft:fast"], "not a number"),
        (["--percentile-metrics", "ttft,speed"], "no metric is called 'speed'"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--request-rate", "-1"], "at least 0"),
        (["--request-rate", "0"], "above 0"),
        (["--burstiness", "2"], "finite request rate"),
        (["--max-concurrency", "0"], "below 1"),
        (["--request-timeout", "0"], "above 0"),
        (["--extra-body", "{oops"], "not JSON"),
        (["--extra-body", "[1]"], "must be a JSON object"),
        (["--extra-body", '{"stream": false}'], "'stream'"),
        (["--extra-body", '{"temperature": 1}', "--temperature", "0"], "both set temperature"),
        (["--header", "no colon"], "NAME:VALUE"),
        (["--header", "X-A: b\r\nX-C: d"], "no header can"),
        (["--endpoint", "v1/chat"], "begins with /"),
        (["--host", "h"], "give one of them"),
        (["--result-dir", "x"], "give --save-result too"),
        (["--save-detailed"], "--save-result or --output"),
        (["--save-result", "--output", "x.json"], "--output names the file"),
        (["--output", "."], "is a folder"),
        (["--metadata", "x"], "KEY=VALUE"),
        (["--isl", "5", "--dataset-option", "isl=7"], "both set isl"),
        (["--random-input-len", "5"], "is of --dataset-name random"),
        (["--trace-speedup", "2"], "is of --dataset-name trace"),
        (["--api-key", "x"], "OPENAI_API_KEY"),
        (["--max-concurency", "2"], "did you mean --max-concurrency"),
        (["--tokenizer", "/nowhere"], "cannot be read"),
    ],
)
def test_what_is_not_honoured_is_refused_before_the_server_is_asked(
    options: list[str], said: str, prompts: Path, capsys: pytest.CaptureFixture
) -> None:
    assert bench("http://127.0.0.1:9", prompts, *options) == 2
    assert said in capsys.readouterr().err


def test_datasets_and_their_paths_belong_together(prompts: Path, capsys: pytest.CaptureFixture) -> None:
    base = ["bench", "serve", "--base-url", "http://127.0.0.1:9"]
    for options, said in (
        (["--dataset-name", "random", "--dataset-path", str(prompts)], "makes its own texts"),
        (["--dataset-name", "trace"], "needs --dataset-path"),
        (["--dataset-name", "trace", "--dataset-path", str(prompts), "--osl", "5"], "says its lengths itself"),
        (["--dataset-name", "nonsense"], "invalid choice"),
    ):
        assert main([*base, *options]) == 2
        assert said in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_with_its_address(prompts: Path, capsys: pytest.CaptureFixture) -> None:
    assert bench("http://127.0.0.1:9", prompts) == 1
    assert "is the server up at http://127.0.0.1:9" in capsys.readouterr().err


def test_the_key_of_the_environment_is_sent_and_not_written(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        assert bench(server.url, prompts, "--output", str(tmp_path / "r.json")) == 0
        assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer secret-key"}
    assert "secret-key" not in (tmp_path / "r.json").read_text()


def test_a_model_must_be_chosen_where_several_are_served() -> None:
    found = Look(models=("a", "b"))
    with pytest.raises(NoServerError, match=r"serves 2 models \(a, b\): choose one with --model"):
        only_model("http://h", found)
    assert only_model("http://h", Look(models=("a",))) == "a"


def test_counters_of_a_server_that_restarted_are_not_subtracted() -> None:
    looks = []
    for queries, hits in ((100, 40), (300, 90), (10, 5)):
        with scripted_thread(lambda n, body: [], {"/metrics": METRICS % (queries, hits)}) as server:
            looks.append(look(Target(server.url, "m")))
    told = facts("http://h", looks[0], looks[1], 2.0)
    assert told["counters"] == {"prefix queries": 200, "prefix hits": 50}
    assert told["prefix_cache_hit_rate"] == 0.25
    again = facts("http://h", looks[1], looks[2], 2.0)
    assert again["restarted"] is True
    assert again["prefix_cache_hit_rate"] is None
    assert set(again["counters"].values()) == {None}
    unread = facts("http://h", Look(unread={"metrics": "404"}), Look(), 2.0)
    assert (unread["engine"], unread["unread"]) == (None, {"metrics": "404"})


def test_a_hostile_metrics_page_is_unread_and_told() -> None:
    for page in ("<html>", "vllm:x{ 1", "x" * 70_000):
        with scripted_thread(lambda n, body: [], {"/metrics": page}) as server:
            found = look(Target(server.url, "m"))
        assert found.metrics is None
        assert found.unread["metrics"]


@pytest.mark.anyio
async def test_the_client_is_measured_against_a_server_that_does_nothing() -> None:
    told = await calibrate(3, 0.003)
    assert told.alone is not None
    assert told.loaded is not None
    assert told.alone.count == 60
    assert told.loaded.count == 60
    assert 0 < told.alone.p50 < 0.05
    assert told.streams == 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_help_is_light() -> None:
    program = (
        "import sys\nfrom longread.cli.main import main\n"
        "try:\n main(['bench', 'serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'aiohttp', 'rich', 'httpx', 'numpy', 'tokenizers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-concurrency" in done.stdout


def test_httpx_and_the_load_client_agree_on_what_a_stream_is() -> None:
    """The same script read by another client: our count of events is not an artefact of our reader."""
    with scripted_thread(lambda n, body: answer(["a"] * 5, reasoning=["r"] * 2)) as server:
        body = {"model": "m", "messages": [], "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert sum("content" in line and '"role"' not in line for line in lines) == 7


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "r.json"
    rows = [(0, [1, 2]), (400, [1, 3]), (200, [1, 2])]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": 600, "output_length": 4, "hash_ids": ids}) for at, ids in rows
        )
    )
    options = ["--dataset-name", "trace", "--dataset-path", str(path), "--trace-speedup", "2", "--output", str(out)]
    with scripted_thread(lambda n, body: answer(["a"])) as server:
        command = ["bench", "serve", "--base-url", server.url, "--backend", "openai-chat", "--num-warmups", "0"]
        assert main([*command, *options, "--no-calibration"]) == 0
        prompts = [seen.body["messages"][0]["content"] for seen in server.seen]
        assert main([*command, *options, "--request-rate", "5"]) == 2  # it has times of its own
    assert prompts[0] == prompts[1] != prompts[2]
    assert prompts[0][:2000] == prompts[2][:2000]
    lines = [json.loads(line) for line in (tmp_path / "r.requests.jsonl").read_text().splitlines()]
    assert sorted(line["due"] for line in lines) == [0.0, 0.1, 0.2]
    own = json.loads(out.read_text())["longread"]
    assert own["provenance"]["schedule"]["trace"] is True
    assert own["provenance"]["workload"]["prompts_sha256"]


def test_every_workload_is_a_dataset_name() -> None:
    from longread.cli.bench_serve import DATASETS
    from longread.measure.workloads import KINDS

    assert set(DATASETS) == set(KINDS)
