"""``longread trace``: a call's waterfall and the list of calls, from a running server; what goes wrong, in one line."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console
from serving import MODEL, Serving, serving, wait_until
from worker_serving import worker_serving

from longread.cli import explain as explain_command
from longread.cli import main as cli
from longread.cli.parser import Parser
from longread.measure import explain, trace
from longread.measure.calls import Source, reuse_line
from longread.server.clock import PARTS
from longread.server.options import ServerOptions
from longread.spec.printing import printable
from longread.spec.reuse import MISS_REASONS

Capture = pytest.CaptureFixture[str]
CHAT = "/v1/chat/completions"
PAGE = "A page of its own about rivers and what lies beside them. " * 40


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


def ask(server: Serving, text: str, **options: object) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **options}
    return httpx.post(server.url + CHAT, json=body, timeout=20)


def run(capsys: Capture, *argv: str) -> str:
    assert cli.main(list(argv)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def failing(capsys: Capture, code: int, *argv: str) -> str:
    assert cli.main(list(argv)) == code
    lines = capsys.readouterr().err.strip().split("\n")
    assert len(lines) == 1, lines
    return lines[0]


def test_every_part_and_reason_has_words() -> None:
    assert set(trace.NAMES) == set(PARTS)
    assert set(explain.ADVICE) == set(MISS_REASONS)


def test_trace_draws_a_stream(server: Serving, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    name = ask(server, PAGE, stream=True).headers["x-request-id"]
    told = run(capsys, "trace", name, "--url", server.url)
    for words in (CHAT, MODEL, "finished", "tokenise", "prefill", "tokens in 1 chunks", "first byte after", "4 tokens"):
        assert words in told
    lines = told.splitlines()
    bars = [line for line in lines if any("▏" <= c <= "▏" or c in "█▉▊▋▌▍▎▏" for c in line)]
    starts = [min(i for i, c in enumerate(line) if c in "█▉▊▋▌▍▎▏") for line in bars]
    assert len(bars) >= 8 and starts == sorted(starts)


def test_a_call_that_runs_shows_what_is_known(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    slow = {"engine": {"max_model_len": 10**6, "max_num_seqs": 1}, "step_seconds": 0.02}
    endless = {"prompt": list(range(3, 203)), "max_tokens": 10**5, "ignore_eos": True, "stream": True}

    def leave(url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=endless, timeout=20) as answer:
            for _ in answer.iter_lines():
                if done.is_set():
                    return

    done = threading.Event()
    with worker_serving(**slow) as held:
        for _ in range(2):
            threading.Thread(target=leave, args=(held.url,), daemon=True).start()
        source = Source(held.url)
        assert wait_until(lambda: len(source.newest(5)) == 2 and any(call["ttft_ms"] for call in source.newest(5)))
        listed = run(capsys, "trace", "--url", held.url)
        assert listed.count("running") == 2 and listed.count(" ms so far") == 2 and listed.count("200") >= 2
        waits, runs = sorted(source.newest(5), key=lambda call: call["ttft_ms"] is not None)
        told = run(capsys, "trace", runs["id"], "--url", held.url)
        assert "tokens so far" in told and "prefill" in told and "decode for" in told
        told = run(capsys, "trace", waits["id"], "--url", held.url)
        assert "no first token yet," in told and "all 1 slots are taken" in told and "not yet" in told
        done.set()


def test_a_call_that_has_not_begun_says_how_long_it_waits(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    record = {"id": "a", "route": CHAT, "model": MODEL, "state": "running", "error": None, "choices": 1}
    record |= {"prompt_tokens": 81_000, "completion_tokens": 0, "elapsed_ms": 1234.5, "standing": [dict(STANDING)]}
    parts = dict.fromkeys(PARTS) | {"tokenise": 12.5}
    timing = {"ttft_ms": None, "total_ms": None, "parts_ms": parts, "prefill_tokens": None, "prefill_chunks": None}
    console = Console(record=True, width=160, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    with console.file:
        trace.draw(record | {"longread": {"reuse": None, "timing": timing}}, console)
    told = console.export_text()
    assert "81,000 prompt tokens" in told and "12.50" in told and "not yet" in told and "not measured" not in told
    assert "40,000 of 81,000 prompt tokens done" in told
    assert "no first token yet, 1,234.5 ms after the first byte in" in told


STANDING = {
    "choice": 0,
    "phase": "prefill",
    "reason": "step",
    "detail": "its prompt is being read",
    "class": "interactive",
    "position": 0,
    "num_waiting": 0,
    "num_running": 1,
    "prompt_tokens": 81_000,
    "computed_tokens": 40_000,
    "preemptions": 0,
    "waited_ms": 900.0,
    "starts_in_ms": None,
    "first_token_in_ms": 800.0,
}


def test_trace_lists_the_last_calls_and_prints_json(
    server: Serving, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    ids = [ask(server, f"question {i}").json()["id"] for i in range(3)]
    told = run(capsys, "trace", "--url", server.url, "--last", "2")
    assert ids[2] in told and ids[1] in told and ids[0] not in told
    assert told.index(ids[2]) < told.index(ids[1])
    record = json.loads(run(capsys, "trace", ids[0], "--url", server.url, "--json"))
    assert record["id"] == ids[0] and list(record["longread"]["timing"]["parts_ms"]) == list(PARTS)


@pytest.mark.parametrize("columns", ["80", "20"])
def test_no_id_of_the_list_is_cut(
    server: Serving, capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ids = [ask(server, f"list {i}").json()["id"] for i in range(2)]
    lines = run(capsys, "trace", "--url", server.url, "--last", "2").splitlines()
    assert len(lines) == 3 and all(name in line for name, line in zip(reversed(ids), lines[1:], strict=True))
    assert all(len(line) < 200 and "…" not in line and "finished" in line for line in lines[1:])


def test_the_difference_is_shown_and_a_terminal_is_not_obeyed(server: Serving) -> None:
    ask(server, PAGE + "The cat \x1b]0;owned\x07 sat on the mat.")
    name = ask(server, PAGE + "The dog sat on the mat.").json()["id"]
    console = Console(record=True, width=200, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    with console.file:
        explain.draw(Source(server.url).one(name), console)
    told = console.export_text()
    assert "differs at token" in told and "put what changes" in told
    asked, known = (next(line for line in told.splitlines() if word in line) for word in ("asked  ", "known  "))
    assert "The dog" in asked and "The cat" in known
    assert "\x1b" not in told and "\x07" not in told and "\\x1b" in known


def test_store_explain_as_a_command(server: Serving, capsys: Capture) -> None:
    ask(server, "Twice. " + PAGE)
    name = ask(server, "Twice. " + PAGE).headers["x-request-id"]
    parser = Parser(prog="longread store")
    explain_command.add_store_parser(parser.add_subparsers(), "explain")
    for flags, words in (
        ((), ("complete", "the last token is always computed")),
        (("--json",), ('"difference": null',)),
    ):
        args = parser.parse_args(["explain", name, "--url", server.url, *flags])
        assert args.run(args) == 0
        told = capsys.readouterr().out
        assert all(word in told for word in words), told
    assert json.loads(told)["reuse"]["reason"] == "complete"


def test_a_running_call_and_an_idle_server() -> None:
    gate = threading.Semaphore(0)
    with serving(gate=gate) as running:
        console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file, httpx.Client(base_url=running.url) as client:
            assert cli.main(["trace", "--url", running.url]) == 0
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2}
            with client.stream("POST", CHAT, json=body) as response:
                name = response.headers["x-request-id"]
                trace.draw(Source(running.url).one(name), console)
                explain.draw(Source(running.url).one(name), console)
            gate.release(50)
        told = console.export_text()
        assert "no first token yet" in told and "running" in told and "never admitted" in told
        assert "0.0 %" not in told.partition("look up")[2].partition("first byte")[0], "missing is not 0"


def test_what_goes_wrong_is_one_line(server: Serving, capsys: Capture) -> None:
    assert "no record of request 'nothing'" in failing(capsys, 1, "trace", "nothing", "--url", server.url)
    assert "start `longread serve`" in failing(capsys, 1, "trace", "--url", "http://127.0.0.1:9")
    assert "does not answer" in failing(capsys, 1, "trace", "--url", "nonsense")
    assert "another server" in failing(capsys, 1, "trace", "--url", f"{server.url}/v1/models?x=")
    assert "header" in failing(capsys, 2, "trace", "--api-key", "schlüssel")
    assert "cannot be read" in failing(capsys, 2, "trace", "--api-key-file", "/nowhere")


def test_a_key_is_sent(capsys: Capture, tmp_path: object) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    with serving(options=ServerOptions(api_key=("secret",))) as running:
        assert "401" in failing(capsys, 1, "trace", "--url", running.url)
        assert "no call" in run(capsys, "trace", "--url", running.url, "--api-key-file", str(path))


def test_lines_for_people() -> None:
    assert printable("a\nb\x1b[0m\u202e") == "a⏎b\\x1b[0m\\u202e"
    tiers = {"prompt_tokens": 10, "device_tokens": 0, "host_tokens": 4, "disk_tokens": 5, "recomputed_tokens": 1}
    line = reuse_line({**tiers, "reason": "complete", "at": 9, "note": ""})
    assert line == "10 prompt tokens: 4 from host, 5 from disk, 1 computed; complete"
