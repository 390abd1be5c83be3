"""The TTFT divided: parts that add up, and what is missing told; a profile held against peak rates."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from queues import answered
from scripted_server import refusal, scripted_thread
from serving import serving, wait_until
from worker_serving import worker_serving

from longread.cli.main import main
from longread.measure.load.outcome import SERVER_PARTS, Outcome
from longread.measure.load.target import Target
from longread.measure.profile import kernels
from longread.measure.profile.attribution import FRONT, HEAD, REST, TEXT, WAY, Attribution, attribute
from longread.plan.cards import parse_hardware
from longread.server.clock import PARTS as SERVERS_OWN
from longread.server.options import ServerOptions
from longread.spec.errors import ConfigError
from longread.spec.profiler import ProfilerConfig

PARTS = {
    "receive": 1.0,
    "parse": 2.0,
    "queue": 10.0,
    "prefill": 70.0,
    "sample": 1.0,
    "first_byte": 4.0,
    "ttft_ms": 88.0,
}


def test_the_parts_are_the_servers_own() -> None:
    assert SERVER_PARTS == SERVERS_OWN


def outcome(ttft: float, timing: dict[str, float] | None, chunk: float = 0.0, head: float = 0.01) -> Outcome:
    """``chunk``: seconds from the first event to the first text."""
    found = answered(0, 1.0, ttft, 0.1)
    found.first_chunk, found.first_byte = 1.0 + ttft - chunk, 1.0 + head
    found.server_timing, found.new_connection = timing, True
    return found


def sums(told: Attribution | None) -> Attribution:
    assert told is not None
    assert sum(part.ms for part in told.parts) == pytest.approx(told.ttft_ms)
    assert sum(part.share for part in told.parts) == pytest.approx(1)
    return told


def test_parts_of_each_answer_add_up_to_what_the_client_saw() -> None:
    rows = [outcome(0.100, PARTS, chunk=0.005), outcome(0.120, {**PARTS, "prefill": 80.0, "lookup": 3.0})]
    told = sums(attribute(rows, None))
    parts = {part.name: part.ms for part in told.parts}
    assert told.ttft_ms == pytest.approx(110)
    assert parts["prefill"] == pytest.approx(75)
    assert parts["lookup"] == pytest.approx(1.5)  # of one of two
    assert parts[WAY] == pytest.approx(((95 - 88) + (120 - 101)) / 2)
    assert parts[TEXT] == pytest.approx(2.5)
    assert (told.source, told.head_ms, told.connections_opened) == ("each answer", pytest.approx(10), 2)
    assert "ttft_ms" not in parts


def test_a_rest_below_zero_is_shown() -> None:
    parts = {part.name: part.ms for part in sums(attribute([outcome(0.080, PARTS)], None)).parts}
    assert parts[WAY] == pytest.approx(-8)


def test_answers_without_times_are_left_out_and_told() -> None:
    told = sums(attribute([outcome(0.1, PARTS), outcome(9.0, None)], None))
    assert told.ttft_ms == pytest.approx(100)
    assert told.missing == ("1 of 2 answers told no times of the server's; left out",)


def test_histograms_stand_in_and_what_they_lack_is_missing() -> None:
    rows = [outcome(0.1, None), outcome(0.2, None)]
    latencies = {"TTFT": {"mean": 0.12, "count": 2}, "queue": {"mean": 0.03, "count": 2}}
    told = sums(attribute(rows, {"latencies_s": {**latencies, "prefill": {"mean": 0.07, "count": 2}}}))
    parts = {part.name: part.ms for part in told.parts}
    assert [parts[name] for name in ("queue", "prefill", FRONT)] == pytest.approx([30, 70, 20])
    assert told.missing == ()
    sglang = sums(attribute(rows, {"latencies_s": {**latencies, "TTFT": {"mean": 0.12, "count": 5}}}))
    assert sglang.missing == (
        "the server's histograms hold 5 first tokens, this client saw 2: others asked too",
        "server: it has no histogram of its prefill time",
    )
    alone = sums(attribute(rows, None))
    assert [part.name for part in alone.parts] == [HEAD, REST]
    assert "server: it tells no times" in alone.missing[0]
    rows[0].first_byte = None
    assert len(sums(attribute(rows, {})).parts) == 1


def test_without_any_text_there_is_nothing_to_divide() -> None:
    silent = answered(0, 1.0, 0.1, 0.1)
    silent.status = "failed"
    assert attribute([silent], None) is None
    assert attribute([], None) is None


PROFILE = {
    "steps": 2,
    "step_ms": 20.0,
    "prompt_step_ms": 15.0,
    "rows": [
        {"op": "linear.linear", "group": "linears", "calls": 8, "self_ms": 6.0, "share": 0.3, "prompt_ms": 5.0},
        {"op": "moe.mlp", "group": "linears", "calls": 2, "self_ms": 2.0, "share": 0.1, "prompt_ms": 1.0},
        {"op": "norm", "group": "norms", "calls": 9, "self_ms": 12.0, "share": 0.6, "prompt_ms": 9.0},
    ],
    "counts": {
        "linears": {"flops": 1e9, "bytes": 1e6, "rate": "fp32"},
        "norms": {"flops": 0.0, "bytes": 1e6, "rate": "bf16"},
    },
}


def test_groups_are_held_against_the_roofline() -> None:
    hardware = parse_hardware("cpu")
    card = hardware.card
    found = {each.name: each for each in kernels.groups(PROFILE, hardware)}
    linears = found["linears"]
    floor = max(1e9 / kernels.peak_of(card, "fp32"), 1e6 / kernels.bandwidth_of(card)) * 1000
    assert (linears.calls, linears.self_ms, linears.share, linears.prompt_share) == (10, 8.0, 0.4, 0.4)
    assert linears.floor_ms == pytest.approx(floor)
    assert linears.of_roofline == pytest.approx(floor / 8)
    assert found["norms"].floor_ms is None  # bytes alone: what stays in a cache is not known
    bare = {each.name: each for each in kernels.groups(PROFILE, None)}
    assert (bare["linears"].floor_ms, bare["linears"].flops) == (None, 1e9)
    assert kernels.document(PROFILE, hardware)["rates"]["hardware"] == "1xcpu"
    with pytest.raises(ConfigError, match="one device"):
        kernels.check_hardware(parse_hardware("8xH20-96"))


def test_a_server_that_does_not_profile_says_why() -> None:
    with (
        scripted_thread(lambda n, body: refusal(404, "no such route")) as server,
        pytest.raises(kernels.NoProfileError, match=r"start_profile: status 404: no such route"),
    ):
        kernels.start(Target(server.url, "m"), 4)
    for status, said, wrong in ((200, "x", "tells no table"), (500, "y", "status 500: y")):
        with (
            scripted_thread(lambda n, body, s=status, t=said: refusal(s, t)) as server,  # type: ignore[misc]
            pytest.raises(kernels.NoProfileError, match=wrong),
        ):
            kernels.stop(Target(server.url, "m"))
    with pytest.raises(kernels.NoProfileError, match="start_profile"):
        kernels.start(Target("http://127.0.0.1:9", "m"), 4)


def test_the_table_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with serving() as server:
        base = [
            "bench",
            "profile",
            "--base-url",
            server.url,
            "--dataset-option",
            "vocab_size=200",
            "--num-prompts",
            "3",
        ]
        options = ["--isl", "20", "--osl", "3", "--no-calibration", "--output", str(tmp_path / "p.json")]
        assert main([*base, *options]) == 0
        said = capsys.readouterr().out
        assert "kernels missing: /start_profile: status 404: the profiler is off" in said
        assert "network, HTTP, client" in said
        assert (tmp_path / "p.json").is_file()
        for bad, wrong in (
            (["--hardware", "8xH20-96"], "one device"),
            (["--hardware", "nonsense"], "nonsense"),
            (["--num-steps", "1000"], "at most 32"),
            (["--save-result"], "one file"),
            (["--output", str(tmp_path)], "is a folder"),
        ):
            assert main([*base, *bad]) == 2
            assert wrong in capsys.readouterr().err


def test_an_engine_that_was_not_loaded_for_it_and_one_that_dies() -> None:
    with worker_serving(options=ServerOptions(profiler=ProfilerConfig("torch")), step_seconds=0.4) as server:
        off = httpx.post(f"{server.url}/start_profile", timeout=30)
        assert (off.status_code, off.json()["error"]["code"]) == (400, "profiler_off")
        body = {"model": "fake", "prompt": "x", "max_tokens": 50}
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=30)
            assert wait_until(lambda: server.state.driver.pending == 1, 10)
            os.kill(server.made[-1].pid, signal.SIGSTOP)  # it answers nothing any more
            waiting = pool.submit(httpx.post, f"{server.url}/stop_profile", timeout=30)
            assert wait_until(lambda: bool(server.made[-1]._profiled), 10)
            server.kill()
            assert waiting.result().json()["error"]["code"] == "engine_restarting"
            assert asked.result().status_code == 503


def test_routes_of_a_server_without_an_engine_of_its_own_process() -> None:
    with serving(options=ServerOptions(profiler=ProfilerConfig("torch"))) as server:
        for body, said in (
            (b"{", "not JSON"),
            (b"[]", "no JSON object"),
            (b'{"steps": 3}', "'steps' is not honoured"),
            (b'{"num_steps": 0}', "from 1 to 32"),
            (b'{"num_steps": true}', "from 1 to 32"),
            (b'{"num_steps": 1e400}', ""),
            (b" " * 5000, "larger than 4,096"),
        ):
            found = httpx.post(f"{server.url}/start_profile", content=body)
            assert found.status_code == 400
            assert said in found.json()["error"]["message"]
        assert httpx.post(f"{server.url}/start_profile").status_code == 503
        assert httpx.get(f"{server.url}/start_profile").status_code == 405
