"""A live server's metrics: names of three engines, regimes that fire and do not, and every way not to get an answer."""

import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from metrics_pages import answering, histogram, page
from serving import serving

from longread.cli.main import main
from longread.plan.doctor import live as live_module
from longread.plan.doctor.checks_live import check_live
from longread.plan.doctor.diagnose import diagnose
from longread.plan.doctor.facts import Facts, Live
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.live import base_url, compare, read_live
from longread.plan.doctor.series import read_metrics
from longread.spec.errors import ConfigError

# A healthy minute of each engine: before, and what grows in five seconds.
VLLM = {
    "num_requests_running": 8,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0.4,
    "prefix_cache_queries_total": 1_000_000,
    "prefix_cache_hits_total": 700_000,
    "prompt_tokens_total": 1_000_000,
    "generation_tokens_total": 50_000,
    "num_preemptions_total": 3,
    "request_success_total": 100,
    "time_to_first_token_seconds": histogram(100, 0.5),
    "inter_token_latency_seconds": histogram(50_000, 0.02),
    "request_time_per_output_token_seconds": histogram(100, 0.02),
    "e2e_request_latency_seconds": histogram(100, 2.0),
    "request_queue_time_seconds": histogram(100, 0.01),
    "request_prefill_time_seconds": histogram(100, 0.5),
    "request_decode_time_seconds": histogram(100, 1.5),
}
SGLANG = {
    "num_running_reqs": 8,
    "num_queue_reqs": 0,
    "token_usage": 0.4,
    "prompt_tokens_total": 1_000_000,
    "generation_tokens_total": 50_000,
    "cached_tokens_total": 700_000,
    "num_retracted_requests_total": 3,
    "num_requests_total": 100,
    "time_to_first_token_seconds": histogram(100, 0.5),
    "inter_token_latency_seconds": histogram(50_000, 0.02),
    "request_time_per_output_token_seconds": histogram(100, 0.02),
    "e2e_request_latency_seconds": histogram(100, 2.0),
    "queue_time_seconds": histogram(100, 0.01),
}
GROWTH = {
    "prefix_cache_queries_total": 100_000,
    "prefix_cache_hits_total": 70_000,
    "prompt_tokens_total": 100_000,
    "generation_tokens_total": 5_000,
    "cached_tokens_total": 70_000,
    "request_success_total": 10,
    "num_requests_total": 10,
}


def later(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Five seconds on: counters and histograms have grown; ``changes`` replace a value, or are added to a counter."""
    after = {}
    for name, value in values.items():
        if isinstance(value, dict):
            new = changes.get(name, {bound: count * 0.1 for bound, count in value.items()})
            after[name] = {bound: value[bound] + new[bound] for bound in value}
        elif name.endswith("_total"):
            after[name] = value + changes.get(name, GROWTH.get(name, 0))
        else:
            after[name] = changes.get(name, value)
    return after


def live_of(engine: str, changes: Mapping[str, Any] | None = None, before: Mapping[str, Any] | None = None) -> Live:
    base = {**(SGLANG if engine == "sglang" else VLLM), **(before or {})}
    first, second = (read_metrics(page(engine, values)) for values in (base, later(base, changes or {})))
    return compare("http://x", first, second, 5.0)


def findings(live: Live) -> list[Finding]:
    return list(check_live(Facts(origin="http://x", live=live)))


def told(live: Live) -> list[str]:
    """Regimes and defects, in a word each: what stands before the colon."""
    return [f.statement.partition(":")[0] for f in findings(live) if f.subject not in ("latency", "server")]


@pytest.mark.parametrize("engine", ["longread", "vllm", "sglang"])
def test_a_healthy_server_is_healthy_in_each_engines_words(engine: str) -> None:
    live = live_of(engine)
    assert live.engine == engine and live.missing == () and live.old_names == ()
    assert live.grown["generated tokens"] == 5_000 and live.gauges["running"] == 8
    assert told(live) == ["prompts are reused", "healthy"]
    assert all(finding.severity in ("ok", "note") for finding in findings(live))
    latency = next(f for f in findings(live) if f.subject == "latency").evidence
    assert "TTFT mean 500 ms, p50 550 ms" in latency and "(n = 10)" in latency


IDLE = dict.fromkeys(GROWTH, 0)


@pytest.mark.parametrize(
    ("engine", "changes", "before", "regime"),
    [
        ("vllm", {"num_preemptions_total": 5}, {}, "KV-bound"),
        ("sglang", {"num_retracted_requests_total": 5}, {}, "KV-bound"),
        ("longread", {"num_preemptions_total": 5}, {}, "KV-bound"),
        ("vllm", {"kv_cache_usage_perc": 0.99, "num_requests_waiting": 4}, {}, "KV-bound"),
        ("sglang", {"token_usage": 0.99, "num_queue_reqs": 4}, {}, "KV-bound"),
        ("sglang", {"num_queue_reqs": 4, "swa_token_usage": 1.0}, {"swa_token_usage": 1.0}, "KV-bound"),
        ("vllm", {}, {"num_requests_waiting": 4}, "queue-bound"),
        ("longread", {}, {"num_requests_waiting": 4}, "queue-bound"),
        ("sglang", {}, {"num_queue_reqs": 4}, "queue-bound"),
        (
            "vllm",
            {"request_queue_time_seconds": histogram(10, 5.0), "time_to_first_token_seconds": histogram(10, 6.0)},
            {},
            "queue-bound",
        ),
        ("vllm", {"request_prefill_time_seconds": histogram(10, 30.0)}, {}, "prefill-bound"),
        ("sglang", {"time_to_first_token_seconds": histogram(10, 1.8)}, {}, "prefill-bound"),
        ("vllm", {"request_prefill_time_seconds": histogram(10, 0.05)}, {}, "decode-bound"),
        ("sglang", {"time_to_first_token_seconds": histogram(10, 0.1)}, {}, "decode-bound"),
        ("longread", {"request_prefill_time_seconds": histogram(10, 0.05)}, {}, "decode-bound"),
        ("vllm", {"prefix_cache_hits_total": 100}, {}, "prefix-miss"),
        ("sglang", {"cached_tokens_total": 100}, {}, "prefix-miss"),
        ("longread", {"prefix_cache_hits_total": 100}, {}, "prefix-miss"),
        (
            "vllm",
            {"admission_rejections_total": 2},
            {"admission_rejections_total": 1},
            "requests were refused because the queue was full between the readings",
        ),
        (
            "sglang",
            {"num_aborted_requests_total": 2},
            {"num_aborted_requests_total": 1},
            "requests were aborted between the readings",
        ),
        ("sglang", {}, {"is_cuda_graph": 0}, "the last batch ran without a CUDA graph"),
        (
            "vllm",
            {**IDLE, "num_requests_running": 1},
            {"num_requests_running": 1},
            "requests run and no token came out between the readings",
        ),
        ("vllm", IDLE, {"num_requests_running": 0}, "idle"),
        ("sglang", IDLE, {"num_running_reqs": 0}, "idle"),
        ("longread", IDLE, {"num_requests_running": 0}, "idle"),
    ],
)
def test_each_regime_fires_where_it_holds(
    engine: str, changes: dict[str, Any], before: dict[str, Any], regime: str
) -> None:
    live = live_of(engine, changes, before)
    assert regime in told(live)
    found = next(f for f in findings(live) if f.statement.startswith(regime))
    assert found.evidence and found.remedy
    other = {"KV-bound", "queue-bound", "prefill-bound", "decode-bound", "prefix-miss", "idle"} - {regime}
    assert not other & set(told(live)) or regime == "requests run and no token came out between the readings"


def test_a_tenth_of_a_second_without_a_token_is_nothing() -> None:
    live = live_of("vllm", {**IDLE, "num_requests_running": 1}, {"num_requests_running": 1})
    assert "healthy" in told(replace(live, seconds=0.1))


def test_a_queue_beside_an_empty_cache_is_another_remedy_than_beside_a_full_one() -> None:
    room = next(f for f in findings(live_of("sglang", {}, {"num_queue_reqs": 4})) if "queue-bound" in f.statement)
    full = next(
        f
        for f in findings(live_of("sglang", {}, {"num_queue_reqs": 4, "token_usage": 0.9}))
        if "queue-bound" in f.statement
    )
    assert "although the KV cache has room" in room.statement and "--schedule-conservativeness 0.3" in room.remedy
    assert "although" not in full.statement and "replicas" in full.remedy


def test_a_server_elsewhere_is_all_that_is_looked_at(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(live_module, "is_local", lambda _: False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with answering({"/metrics": [page("sglang", {**SGLANG, "token_usage": 0.99, "num_queue_reqs": 9})]}) as (url, _):
        assert main(["doctor", "--json", "--url", url, "--interval", "0.1"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["origin"] == url and report["facts"]["host"] is None
    assert not {"GPUs", "NVIDIA driver"} & {finding["subject"] for finding in report["findings"]}
    # The queue is what a full cache makes: said once.
    assert [f["statement"][:8] for f in report["findings"] if f["severity"] == "warning"] == ["KV-bound"]


def test_waiting_for_a_place_in_the_batch_is_no_full_cache() -> None:
    """vLLM 0.32, run: with --max-num-seqs 2 and an empty cache, what waits has the reason "capacity"."""
    by_reason = [('reason="capacity"', 3.0), ('reason="deferred"', 0.0)]
    live = live_of("vllm", {}, {"num_requests_waiting": 3, "num_requests_waiting_by_reason": by_reason})
    assert [regime for regime in told(live) if "bound" in regime] == ["queue-bound"]


def test_a_prefix_miss_that_costs_is_a_warning() -> None:
    slow = {"prefix_cache_hits_total": 0, "request_prefill_time_seconds": histogram(10, 30.0)}
    severities = {f.subject: f.severity for f in findings(live_of("vllm", slow))}
    assert severities["prefix cache"] == "warning"
    assert {f.subject: f.severity for f in findings(live_of("vllm", {"prefix_cache_hits_total": 0}))}[
        "prefix cache"
    ] == "note"


def test_speculation() -> None:
    base = {
        "spec_decode_num_drafts_total": 10,
        "spec_decode_num_draft_tokens_total": 30,
        "spec_decode_num_accepted_tokens_total": 20,
    }
    grown = {
        "spec_decode_num_drafts_total": 100,
        "spec_decode_num_draft_tokens_total": 300,
        "spec_decode_num_accepted_tokens_total": 30,
    }
    good = next(f for f in findings(live_of("vllm", base, base)) if f.subject == "speculative decoding")
    poor = next(f for f in findings(live_of("vllm", grown, base)) if f.subject == "speculative decoding")
    assert (good.severity, good.evidence) == ("ok", "67% of drafted tokens accepted, 3.00 tokens a step")
    assert (poor.severity, poor.evidence) == ("note", "10% of drafted tokens accepted, 1.30 tokens a step")
    gauges = {"spec_accept_length": 2.5, "spec_accept_rate": 0.6}
    found = next(f for f in findings(live_of("sglang", {}, gauges)) if f.subject == "speculative decoding")
    assert found.evidence == "60% of drafted tokens accepted, 2.50 tokens a step"


def test_old_names_are_read_and_told_and_missing_ones_are_not_zero() -> None:
    old = {
        "num_requests_running": 3,
        "gpu_cache_usage_perc": 0.99,
        "num_requests_waiting": 2,
        "time_per_output_token_seconds": histogram(10, 0.02),
    }
    reading = read_metrics(page("vllm", old))
    live = compare("http://x", reading, reading, 5.0)
    assert live.gauges["kv usage"] == 0.99
    assert live.old_names == ("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds")
    assert "preemptions" not in live.grown and "TTFT" not in live.latencies
    notes = {f.subject: f for f in findings(live) if f.severity == "note"}
    assert "preemptions (vllm:num_preemptions)" in next(
        f.evidence for f in findings(live) if "series are missing" in f.statement
    )
    assert "metrics" in notes and "KV-bound" in told(live)
    # Nothing rests on what is not there.
    empty = compare("http://x", *[read_metrics("vllm:num_requests_running 1.0\n")] * 2, 5.0)
    assert [s for s in told(empty) if "bound" in s or s == "prefix-miss"] == []


def test_replicas_are_summed_ranks_are_not() -> None:
    ranks = [(f'dp_rank="0",tp_rank="{rank}"', 4.0) for rank in range(8)]
    replicas = [(f'dp_rank="{rank}",tp_rank="{rank}"', 4.0) for rank in range(8)]
    usage = [('dp_rank="0"', 0.2), ('dp_rank="1"', 0.97)]
    assert read_metrics(page("sglang", {"num_running_reqs": ranks})).gauges["running"] == 4
    reading = read_metrics(page("sglang", {"num_running_reqs": replicas, "token_usage": usage}))
    assert reading.gauges == {"running": 32, "kv usage": 0.97}
    # A gateway's spelling, and values that are none.
    assert read_metrics("sglang_num_running_reqs 2\nsglang_token_usage NaN\n").gauges == {"running": 2}


@pytest.mark.parametrize(("count", "ranked"), [(2, False), (4, False), (5, True)])
def test_few_requests_have_no_percentiles(count: int, ranked: bool) -> None:
    buckets = {"0.1": 1.0, "1.0": float(count), "10.0": float(count), "+Inf": float(count), "sum": 0.6 * count}
    reading = read_metrics(page("vllm", {"time_to_first_token_seconds": buckets}))
    live = compare("http://x", read_metrics(page("vllm", {"num_requests_running": 1})), reading, 5)
    told = next(f.evidence for f in findings(live) if f.subject == "latency")
    assert f"TTFT mean 600 ms{', p50' if ranked else ' (n ='}" in told and f"(n = {count})" in told


def test_percentiles() -> None:
    buckets = {"0.1": 50.0, "1.0": 90.0, "10.0": 98.0, "+Inf": 100.0, "sum": 60.0}
    reading = read_metrics(page("vllm", {"time_to_first_token_seconds": buckets}))
    latency = compare("http://x", read_metrics(page("vllm", {"num_requests_running": 1})), reading, 5).latencies["TTFT"]
    assert (latency.count, latency.mean) == (100, 0.6)
    assert latency.p50 == pytest.approx(0.1) and latency.p90 == pytest.approx(1.0) and latency.p99 is None
    same = compare("http://x", reading, reading, 5).latencies["TTFT"]
    assert same.since == "start" and same.count == 100
    assert "past the last bucket (n = 100, since the start)" in next(
        f.evidence for f in findings(compare("http://x", reading, reading, 5)) if f.subject == "latency"
    )


def test_a_restart_between_the_readings_is_told() -> None:
    before, after = (read_metrics(page("vllm", {**VLLM, "generation_tokens_total": count})) for count in (500, 20))
    live = compare("http://x", before, after, 5)
    assert live.restarted and live.grown["generated tokens"] == 0
    assert any("counters went backwards" in f.statement for f in findings(live))
    with pytest.raises(ConfigError, match="load balancer"):
        compare("http://x", before, read_metrics(page("sglang", SGLANG)), 5)


@pytest.mark.parametrize("engine", ["longread", "vllm", "sglang"])
def test_over_http(engine: str) -> None:
    base = SGLANG if engine == "sglang" else VLLM
    models = json.dumps({"object": "list", "data": [{"id": "V3", "object": "model", "max_model_len": 131072}]})
    pages = {
        "/metrics": [page(engine, base), page(engine, later(base, {}))],
        "/v1/models": [models],
        "/version": ['{"version": "0.32.0"}'],
    }
    slept, said = [], []
    with answering(pages) as (url, seen):
        live = read_live(url + "/v1/", "sk-1", 5.0, said.append, slept.append)
    version = None if engine == "sglang" else "0.32.0"
    assert (live.engine, live.models, live.max_model_len, live.version) == (engine, ("V3",), 131072, version)
    assert live.grown["generated tokens"] == 5_000
    assert [path for path, _ in seen if path != "/version"] == ["/metrics", "/v1/models", "/metrics"]
    assert {key for _, key in seen} == {"Bearer sk-1"}
    assert len(slept) == 1 and 0 < slept[0] <= 5 and len(said) == 2
    assert "sk-1" not in str(live)


def test_models_and_version_may_be_missing() -> None:
    with answering(
        {"/metrics": [page("vllm", VLLM)], "/v1/models": ["["], "/version": [(500, "text/plain", b"no")]}
    ) as (url, _):
        live = read_live(url, seconds=0, sleep=lambda _: None)
    assert live.models is None and live.version is None and set(live.unread) == {"models", "version"}
    notes = [f.statement for f in diagnose(Facts(origin=url, live=live)) if f.subject == "server not read"]
    assert notes == ["not judged: models", "not judged: version"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((401, "text/plain", b"no"), "--api-key"),
        ((403, "text/plain", b"no"), "--api-key"),
        ((404, "text/plain", b""), "--enable-metrics"),
        ((503, "text/plain", b"loading"), "status 503, 'loading'"),
        ((200, "text/html", b"<html>hello</html>"), "a web page"),
        ((200, "text/plain", b"<!doctype html>"), "a web page"),
        ((200, "text/plain", b"not a metric at all {"), "not Prometheus text"),
        ((200, "text/plain", b'vllm:x{a="b 1'), "not Prometheus text"),
        ((200, "text/plain", b"x{" + b"a" * 20_000), "longer than 16,384"),
        (
            (200, "text/plain", b"node_cpu_seconds_total 1\n"),
            "no metrics of Longread, vLLM or SGLang are here (found: node",
        ),
        ((200, "text/plain", b""), "no series at all"),
        ((307, "/metrics", b""), "more than 3 redirects"),
    ],
)
def test_what_is_no_servers_metrics(answer: tuple[int, str, bytes], says: str) -> None:
    with answering({"/metrics": [answer]}) as (url, _), pytest.raises(ConfigError) as caught:
        read_live(url, sleep=lambda _: None)
    assert says in str(caught.value) and url in str(caught.value)


def test_a_redirect_to_metrics_with_a_slash_is_followed() -> None:
    pages = {"/metrics": [(307, "/metrics/", b"")], "/metrics/": [page("sglang", SGLANG)]}
    with answering(pages) as (url, _):
        assert read_live(url, seconds=0, sleep=lambda _: None).engine == "sglang"


def test_no_server_a_silent_one_and_an_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="is the server up"):
        read_live(f"127.0.0.1:{port}")
    monkeypatch.setattr(live_module, "READ_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ConfigError, match=r"no answer within 0.2 s"):
        read_live(f"127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(live_module, "BODY_BYTES", 1000)
    with answering({"/metrics": ["# x\n" * 1000]}) as (url, _), pytest.raises(ConfigError, match="more than 0 MiB"):
        read_live(url)


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/metrics", "http://h:1"),
        ("https://h/v1/", "https://h"),
        ("http://[::1]:8000/base/metrics", "http://[::1]:8000/base"),
    ],
)
def test_addresses(text: str, base: str) -> None:
    assert base_url(text) == base


@pytest.mark.parametrize("text", ["", "ftp://h", "http://", "http://h:99999", "http://h:port", "http://u:p@h"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        base_url(text)


def test_longreads_own_server_is_read_under_load(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        stop = threading.Event()

        def load() -> None:
            with httpx.Client(trust_env=False) as client:
                while not stop.is_set():
                    body = {"model": "fake", "prompt": "hello world " * 40, "max_tokens": 8}
                    client.post(f"{server.url}/v1/completions", json=body).raise_for_status()

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        try:
            live = read_live(server.url, seconds=0.5)
        finally:
            stop.set()
            thread.join(10)
        assert live.engine == "longread" and live.missing == () and live.old_names == ()
        assert live.models == ("fake",) and live.max_model_len == 4096 and live.version is not None
        assert live.grown["generated tokens"] > 0 and live.latencies["TTFT"].since == "interval"
        assert "idle" not in told(live)
        code = main(["doctor", "--json", "--url", server.url, "--interval", "0.1"])
        out, err = capsys.readouterr()
    report = json.loads(out)
    assert code == report["exit_code"] and report["facts"]["live"]["engine"] == "longread"
    assert report["facts"]["origin"] == "this machine" and "/metrics again in 0.1 s" in err


def test_the_command_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("sk-file\n")
    log = tmp_path / "log"
    log.write_text("INFO hello\n")
    with answering({"/metrics": [page("vllm", VLLM)]}) as (url, seen):
        assert main(["doctor", "--from", str(log), "--url", url, "--interval", "0.1", "--api-key-file", str(key)]) == 0
        assert {given for _, given in seen} == {"Bearer sk-file"}
    out = capsys.readouterr().out
    assert "vllm answers" in out and "sk-file" not in out
    for words in (["--api-key", "x"], ["--url", url, "--interval", "0"], ["--url", url, "--interval", "soon"]):
        assert main(["doctor", *words]) == 2
    assert main(["doctor", "--url", url, "--api-key", "x", "--api-key-file", str(key)]) == 2
    assert main(["doctor", "--url", url]) == 2  # nobody answers there any more
    assert "is the server up" in capsys.readouterr().err


def test_findings_are_the_same_out_of_a_report() -> None:
    live = live_of("vllm", {"num_preemptions_total": 5})
    assert findings(replace(live)) == findings(live)
