"""The metrics of Longread, vLLM and SGLang under one set of names, old names included.

Knows: what each engine calls a thing, now and before, and how its replicas and ranks are to be added up. Must not know:
what a value means for serving, nor HTTP. A series that is not there is missing, never 0.

Sources: vLLM 0.32 v1/metrics/loggers.py, SGLang metrics/collector.py; renames: vllm-project/vllm#18354, #27133.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from longread.plan.doctor.facts import Latency
from longread.spec.errors import ConfigError

Engine = Literal["longread", "vllm", "sglang"]
ENGINES: tuple[Engine, ...] = ("longread", "vllm", "sglang")
SAMPLES = 200_000
LINE_CHARACTERS = 16_384
# Ranks of one replica tell the same story; what remains (engine, dp_rank, model_name) are replicas or parts of one sum.
RANKS = {"tp_rank", "pp_rank", "moe_ep_rank", "pid"}

# Name here, then the engine's names, newest first. Counters without the "_total" that they carry on the wire.
VLLM_GAUGES = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "kv usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
VLLM_COUNTERS = {
    "prefix queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "prompt tokens": ("prompt_tokens",),
    "generated tokens": ("generation_tokens",),
    "preemptions": ("num_preemptions",),
    "finished": ("request_success",),
}
VLLM_HISTOGRAMS = {
    "TTFT": ("time_to_first_token_seconds",),
    "inter-token": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "TPOT": ("request_time_per_output_token_seconds",),
    "end to end": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds",),
    "prefill": ("request_prefill_time_seconds",),
    "decode": ("request_decode_time_seconds",),
}
# Not every version or deployment has these: their absence is not told.
VLLM_OPTIONAL = {
    "prefix hit rate": ("gpu_prefix_cache_hit_rate",),
    "rejections": ("admission_rejections",),
    "draft tokens": ("spec_decode_num_draft_tokens",),
    "accepted tokens": ("spec_decode_num_accepted_tokens",),
    "drafts": ("spec_decode_num_drafts",),
}
GAUGES: Mapping[Engine, Mapping[str, tuple[str, ...]]] = {
    "longread": VLLM_GAUGES,
    "vllm": VLLM_GAUGES,
    "sglang": {
        "running": ("num_running_reqs", "num_requests_running"),
        "waiting": ("num_queue_reqs", "num_requests_waiting", "queue_req"),
        "kv usage": ("token_usage", "full_token_usage"),
    },
}
COUNTERS: Mapping[Engine, Mapping[str, tuple[str, ...]]] = {
    "longread": VLLM_COUNTERS,
    "vllm": VLLM_COUNTERS,
    "sglang": {
        "prompt tokens": ("prompt_tokens",),
        "generated tokens": ("generation_tokens",),
        "prefix hits": ("cached_tokens",),
        "preemptions": ("num_retracted_requests",),
        "finished": ("num_requests",),
    },
}
HISTOGRAMS: Mapping[Engine, Mapping[str, tuple[str, ...]]] = {
    "longread": VLLM_HISTOGRAMS,
    "vllm": VLLM_HISTOGRAMS,
    "sglang": {
        "TTFT": ("time_to_first_token_seconds",),
        "inter-token": ("inter_token_latency_seconds",),
        "TPOT": ("request_time_per_output_token_seconds", "time_per_output_token_seconds"),
        "end to end": ("e2e_request_latency_seconds",),
        "queue": ("queue_time_seconds",),
    },
}
OPTIONAL: Mapping[Engine, Mapping[str, tuple[str, ...]]] = {
    "longread": VLLM_OPTIONAL,
    "vllm": VLLM_OPTIONAL,
    "sglang": {
        "sliding-window usage": ("swa_token_usage",),
        "full-attention usage": ("full_token_usage",),
        "prefix hit rate": ("cache_hit_rate",),
        "retracted now": ("num_retracted_reqs",),
        "rejections": ("num_aborted_requests",),
        "accepted length": ("spec_accept_length",),
        "acceptance rate": ("spec_accept_rate",),
        "cuda graph": ("is_cuda_graph",),
    },
}
FULLEST = {
    "kv usage",
    "sliding-window usage",
    "full-attention usage",
    "prefix hit rate",
    "accepted length",
    "acceptance rate",
    "cuda graph",
}
COUNTED = {"rejections", "draft tokens", "accepted tokens", "drafts"}


@dataclass(slots=True)
class Reading:
    """One look at /metrics. ``gauges`` and ``counters`` by the names of this module; ``histograms``: bucket bounds with
    cumulative counts, and the sum. ``old``: engine names found under an older spelling. ``tokens``: SGLang's tokens by
    how they were made ("prefill_compute", "prefill_cache", "decode").
    """

    engine: Engine
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, tuple[dict[float, float], float]] = field(default_factory=dict)
    old: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


Samples = dict[str, list[tuple[dict[str, str], float]]]


def read_metrics(text: str) -> Reading:
    """ConfigError for what is not Prometheus text, or has no series of the three engines."""
    samples = _samples(text)
    engine = _engine(samples)
    if engine is None:
        some = ", ".join(sorted(samples)[:5]) or "no series at all"
        raise ConfigError(f"no metrics of Longread, vLLM or SGLang are here (found: {some})")
    reading = Reading(engine)
    for name, names in GAUGES[engine].items():
        _take(reading, samples, name, names, reading.gauges, True)
    for name, names in COUNTERS[engine].items():
        _take(reading, samples, name, names, reading.counters, True)
    for name, names in OPTIONAL[engine].items():
        _take(reading, samples, name, names, reading.counters if name in COUNTED else reading.gauges, False)
    for name, names in HISTOGRAMS[engine].items():
        _take_histogram(reading, samples, name, names)
    return reading


def _samples(text: str) -> Samples:
    """By name, with the engine's prefix as "vllm:" even where a gateway has made it "vllm_"."""
    if max(map(len, text.split("\n"))) > LINE_CHARACTERS:
        raise ConfigError(f"not Prometheus text: a line is longer than {LINE_CHARACTERS:,} characters")
    found: Samples = {}
    number = 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                number += 1
                if number > SAMPLES:
                    raise ConfigError(f"more than {SAMPLES:,} samples at /metrics")
                name = sample.name
                for engine in ENGINES:
                    if name.startswith(f"{engine}_"):
                        name = f"{engine}:{name[len(engine) + 1 :]}"
                found.setdefault(name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"not Prometheus text: {str(error)[:200]}") from None
    return found


def _engine(samples: Samples) -> Engine | None:
    counts = {engine: sum(name.startswith(f"{engine}:") for name in samples) for engine in ENGINES}
    best = max(ENGINES, key=lambda engine: counts[engine])
    return best if counts[best] else None


def _take(
    reading: Reading, samples: Samples, name: str, names: tuple[str, ...], into: dict[str, float], wanted: bool
) -> None:
    for spelling in names:
        for full in (f"{reading.engine}:{spelling}_total", f"{reading.engine}:{spelling}"):
            if full in samples:
                value = _together(samples[full], name in FULLEST)
                if value is not None:
                    into[name] = value
                    if spelling != names[0] and wanted:
                        reading.old.append(full)
                    return
    if wanted:
        reading.missing.append(f"{name} ({', '.join(f'{reading.engine}:{spelling}' for spelling in names)})")


def _together(rows: Iterable[tuple[dict[str, str], float]], fullest: bool) -> float | None:
    """The ranks of a replica once (their largest), replicas summed; or the largest of all."""
    replicas: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in rows:
        if not math.isfinite(value):
            continue
        key = tuple(sorted((name, text) for name, text in labels.items() if name not in RANKS))
        replicas[key] = max(value, replicas.get(key, value))
    if not replicas:
        return None
    return max(replicas.values()) if fullest else sum(replicas.values())


def _take_histogram(reading: Reading, samples: Samples, name: str, names: tuple[str, ...]) -> None:
    for spelling in names:
        full = f"{reading.engine}:{spelling}"
        rows = samples.get(f"{full}_bucket")
        if not rows:
            continue
        by_bound: dict[float, list[tuple[dict[str, str], float]]] = {}
        for labels, value in rows:
            try:
                bound = float(labels.get("le", ""))
            except ValueError:
                continue
            by_bound.setdefault(bound, []).append(({k: v for k, v in labels.items() if k != "le"}, value))
        buckets = {bound: _together(found, False) or 0.0 for bound, found in by_bound.items()}
        if math.inf not in buckets:
            continue
        reading.histograms[name] = (buckets, _together(samples.get(f"{full}_sum", ()), False) or 0.0)
        if spelling != names[0]:
            reading.old.append(full)
        return
    reading.missing.append(f"{name} ({', '.join(f'{reading.engine}:{spelling}' for spelling in names)})")


def latencies(before: Reading, after: Reading) -> dict[str, Latency]:
    """Of what ended between two readings, or since the server's start where nothing did. None at all: left out."""
    found = {}
    for name, (buckets, total) in after.histograms.items():
        old, old_total = before.histograms.get(name, ({}, 0.0))
        grown = {bound: count - old.get(bound, 0.0) for bound, count in buckets.items()}
        if grown[math.inf] > 0 and min(grown.values()) >= 0:
            found[name] = _latency(grown, total - old_total, "interval")
        elif buckets[math.inf] > 0:
            found[name] = _latency(buckets, total, "start")
    return found


def _latency(buckets: Mapping[float, float], total: float, since: Literal["interval", "start"]) -> Latency:
    count = buckets[math.inf]
    return Latency(
        count=int(count),
        mean=total / count,
        p50=_percentile(buckets, 0.5),
        p90=_percentile(buckets, 0.9),
        p99=_percentile(buckets, 0.99),
        since=since,
    )


def _percentile(buckets: Mapping[float, float], share: float) -> float | None:
    """Straight inside a bucket, as PromQL's histogram_quantile; None in the last one, which has no end."""
    wanted = share * buckets[math.inf]
    low, below = 0.0, 0.0
    for bound in sorted(buckets):
        count = buckets[bound]
        if count >= wanted:
            if math.isinf(bound):
                return None
            return low + (bound - low) * ((wanted - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return None
