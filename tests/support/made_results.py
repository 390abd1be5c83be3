"""Results of ``longread bench serve`` that nobody measured, written by the bench's own code: what the schema says, they
hold. Latencies are drawn by a seed; what is slow, broken or missing is asked for.
"""

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longread.measure.files import write_json
from longread.measure.load.metrics import Wanted, flat, summarise
from longread.measure.load.outcome import Outcome, Overhead, Run, Spread
from longread.measure.load.result import Lines, block, lines_path

KINDS = ("short", "document")
PARTS = ("receive", "parse", "tokenise", "lookup", "queue", "load_disk", "prefill", "sample", "first_byte")


@dataclass
class Made:
    """A run to be made. ``slower``: every latency times this. ``failing``: the share that is not answered. ``shared``:
    the seed of what the asks themselves cost, the same for two runs of the same asks; ``seed``: of everything else.
    """

    requests: int = 60
    seed: int = 0
    shared: int = 0
    slower: float = 1.0
    failing: float = 0.0
    concurrency: int | None = 4
    rate: float = float("inf")
    model: str = "DeepSeek-V4-Flash"
    workload: Mapping[str, Any] = field(default_factory=lambda: {"num_prompts": 60})
    workload_seed: int = 0
    kinds: Sequence[str] = KINDS
    isl: int = 4096
    ttft: float = 0.4
    noise: float = 0.2
    timing: bool = True
    usage: bool = True
    cached: float = 0.5
    slos: Mapping[str, float] | None = None
    samples: Mapping[str, Any] | None = None
    url: str = "http://127.0.0.1:8000"
    warnings: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


def outcomes(made: Made) -> list[Outcome]:
    own, common = random.Random(made.seed), random.Random(made.shared)
    lanes = [0.0] * (made.concurrency or 4)
    found = []
    for index in range(made.requests):
        weight = common.lognormvariate(0, 0.5)
        kind = made.kinds[index % len(made.kinds)]
        lane = min(range(len(lanes)), key=lanes.__getitem__)
        out = Outcome(f"ask-{index}", kind, index, sent=lanes[lane], due=lanes[lane], new_connection=index < len(lanes))
        scale = made.slower * weight * own.lognormvariate(0, made.noise) * (4 if kind == "document" else 1)
        _fill(out, made, scale, own)
        lanes[lane] = out.ended or 0.0
        found.append(out)
    return sorted(found, key=lambda out: out.ended or 0.0)


def _fill(out: Outcome, made: Made, scale: float, own: random.Random) -> None:
    if own.random() < made.failing:
        out.status, out.http_status = ("refused", 429) if own.random() < 0.5 else ("timeout", None)
        out.failure, out.error = ("http 429", "busy") if out.status == "refused" else ("timeout", "no end")
        out.ended = out.sent + 0.05
        return
    ttft, tokens = made.ttft * scale, own.randint(8, 40)
    gap = 0.03 * made.slower * own.lognormvariate(0, 0.1)
    times = [out.sent + ttft + gap * place for place in range(tokens)]
    out.status, out.http_status = "ok", 200
    out.first_byte, out.first_chunk = out.sent + 0.9 * ttft, out.sent + 0.92 * ttft
    out.first_answer, out.last, out.ended = times[0], times[-1] + 0.001, times[-1] + 0.001
    out.chunk_times, out.finish_reason = array("d", times), "stop"
    if made.usage:
        out.prompt_tokens, out.output_tokens, out.tokens_from = made.isl, tokens, "usage"
        out.cached_tokens = int(made.isl * made.cached)
    if made.timing:
        shares = (0.002, 0.004, 0.03, 0.004, 0.2, 0.05, 0.6, 0.01, 0.02)
        out.server_timing = {part: ttft * 1000 * share for part, share in zip(PARTS, shares, strict=True)}


def document(made: Made, lines: str | None = None) -> tuple[dict[str, Any], list[Outcome]]:
    rows = outcomes(made)
    duration = max((out.ended or 0.0 for out in rows), default=0.0)
    lag = Spread(100, 0.0005, 0.002, 0.004)
    run = Run(
        rows, [], 1_790_000_000.0, duration, made.requests, False, Overhead(lag, lag, 0.2, 4), made.concurrency or 4
    )
    summary = summarise(run, Wanted(slos=made.slos))
    provenance = {
        "command": f"longread bench serve --base-url {made.url} --max-concurrency {made.concurrency}",
        "commit": "0123456789ab",
        "date": "2026-09-01T12:00:00+0000",
        "machine": {"host": "bench-1", "cpu": "a CPU", "cores": 8, "system": "Linux"},
        "python": "3.11.2",
        "packages": {"longread": "0.1.0"},
        "endpoint": "/v1/chat/completions",
        "extra_body": {"temperature": 0},
        "workload": {"name": "mixed", "seed": made.workload_seed, **made.workload},
        "schedule": {
            "open_loop": made.rate < float("inf"),
            "trace": False,
            "rate": made.rate if made.rate < float("inf") else "inf",
            "burstiness": 1.0,
            "max_concurrency": made.concurrency,
            "seed": 0,
        },
        "request_timeout_s": 21600.0,
    }
    server = {"url": made.url, "version": "0.1.0", "engine": "longread", "restarted": False, "missing": ["preemptions"]}
    own = block(
        summary,
        provenance=provenance,
        server=server,
        calibration=None,
        warnings=list(made.warnings),
        requests_file=lines,
    )
    if made.samples is not None:
        own["samples"] = dict(made.samples)
    head = {
        "date": "20260901-120000",
        "backend": "openai-chat",
        "model_id": made.model,
        "tokenizer_id": None,
        "num_prompts": made.requests,
        "request_rate": made.rate if made.rate < float("inf") else "inf",
        "burstiness": 1.0,
        "max_concurrency": made.concurrency,
    }
    return {**head, **flat(summary), "longread": {**own, **made.more}}, rows


def write(path: Path, made: Made, detailed: bool = False, lines: bool = True) -> Path:
    """The result at ``path`` and its requests beside it."""
    place = lines_path(path)
    found, rows = document(made, place.name if lines else None)
    if lines:
        with Lines(place, detailed) as out:
            for row in rows:
                out.add(row)
    write_json(path, found)
    return path


def gate(verdict: str = "PASS", model: str = "DeepSeek-V4-Flash", url: str = "http://127.0.0.1:8000") -> dict[str, Any]:
    finding = {
        "level": 1,
        "name": "mean KL",
        "verdict": verdict,
        "value": 0.0021 if verdict == "PASS" else 0.31,
        "low": 0.0012,
        "high": 0.0034,
        "limit": 0.01,
        "samples": 512,
        "needed": 900 if verdict == "INCONCLUSIVE" else None,
        "note": "" if verdict == "PASS" else "largest at 16,384 tokens",
    }
    return {
        "kind": "longread-gate",
        "schema": 1,
        "verdict": verdict,
        "profile": {"name": "fp8-class"},
        "stopped": None,
        "interrupted": False,
        "levels": [
            {
                "level": 1,
                "verdict": verdict,
                "needed": finding["needed"],
                "not_run": None,
                "notes": [],
                "findings": [finding],
            }
        ],
        "provenance": {
            "date": "2026-09-01T11:50:00+00:00",
            "command": "longread gate run",
            "base_url": f"{url}/v1",
            "model": model,
        },
    }


def samples(seconds: int = 60, gpus: int = 2) -> dict[str, Any]:
    """As ``measure/load/samples.py`` writes them."""
    noise = random.Random(5)
    times = [float(second) for second in range(seconds)]
    ramp = [min(second / 20, 1.0) for second in times]
    series = {
        "kv usage": [0.1 + 0.6 * r + noise.uniform(0, 0.02) for r in ramp],
        "running": [round(4 * r) for r in ramp],
        "waiting": [0.0 if second < 30 else 3.0 for second in times],
        "rss": [2e9 + 3e7 * second for second in times],
    }
    cards = [
        {
            "index": index,
            "name": "NVIDIA H20",
            "memory_total": 96 * 2**30,
            "power_limit": 500.0,
            "missing": {},
            "series": {
                "temperature": [40 + 30 * r + index + noise.uniform(0, 1) for r in ramp],
                "power": [120 + 330 * r + noise.uniform(0, 10) for r in ramp],
                "sm clock": [1980 - 100 * r for r in ramp],
                "memory": [60e9 + 2e9 * r for r in ramp],
            },
        }
        for index in range(gpus)
    ]
    return {"schema": 1, "every_s": 1.0, "at": times, "series": series, "gpus": cards, "missing": {}}


# Files of other tools, as they write them.
VLLM: dict[str, Any] = {
    "date": "20260901-100000",
    "backend": "openai-chat",
    "model_id": "DeepSeek-V4-Flash",
    "num_prompts": 60,
    "request_rate": "inf",
    "max_concurrency": 4,
    "duration": 30.0,
    "completed": 60,
    "failed": 0,
    "total_input_tokens": 60 * 4096,
    "total_output_tokens": 1200,
    "request_throughput": 2.0,
    "request_goodput": None,
    "output_throughput": 40.0,
    "mean_ttft_ms": 900.0,
    "median_ttft_ms": 700.0,
    "std_ttft_ms": 500.0,
    "p99_ttft_ms": 3000.0,
    "mean_tpot_ms": 30.0,
    "median_tpot_ms": 30.0,
    "std_tpot_ms": 3.0,
    "p99_tpot_ms": 37.0,
    "mean_itl_ms": 30.0,
    "mean_e2el_ms": 1600.0,
    "std_e2el_ms": 600.0,
}
AIPERF: dict[str, Any] = {
    "time_to_first_token": {"unit": "ms", "avg": 880.0, "p50": 690.0, "p99": 2900.0, "std": 480.0, "count": 60},
    "inter_token_latency": {"unit": "ms", "avg": 29.0, "p99": 36.0, "std": 3.0},
    "request_latency": {"unit": "s", "avg": 1.55, "p99": 4.0, "std": 0.6},
    "request_count": {"unit": "requests", "avg": 60.0},
    "request_throughput": {"unit": "requests/sec", "avg": 2.0},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 39.0},
    "input_config": {"endpoint": {"model_names": ["DeepSeek-V4-Flash"]}, "loadgen": {"concurrency": 4}},
    "start_time": "2026-09-01T10:00:00",
}
