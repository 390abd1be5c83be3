"""What a live server is bound by, from two readings of its metrics.

Pure: facts in, findings out. A series that the server does not have is never judged. Thresholds without a source are
our own. A server can be bound by several things: each has its finding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longread.plan.doctor.facts import Facts, Latency, Live
from longread.plan.doctor.finding import Finding, Severity
from longread.plan.figures import seconds

FULL = 0.95  # of the KV cache: from here on new requests wait for room
ROOMY = 0.8
HALF = 0.5
MOSTLY = 0.8
FEW_HITS, GOOD_HITS = 0.2, 0.5
ENOUGH_TOKENS = 10_000  # looked up in the prefix cache, before a hit rate says anything
LOW_ACCEPTANCE = 0.4
LEAST_RANKED = 5  # requests of a histogram, below which a percentile is the bucket of one of them
STILL_SECONDS = 2.0  # without any token, before that is worth a word

KV_REMEDY = {
    "longread": "raise --kv-cache-memory-bytes, keep what is evicted in --host-cache-size and --store, or lower "
    "--max-num-seqs",
    "vllm": "raise --gpu-memory-utilization, --kv-cache-dtype fp8, lower --max-num-seqs, or offload "
    "(--kv-transfer-config)",
    "sglang": "raise --mem-fraction-static, --schedule-conservativeness 1.3 if requests are retracted, lower "
    "--max-running-requests, or --enable-hierarchical-cache; DeepSeek-V4: --swa-full-tokens-ratio",
}
QUEUE_ROOM_REMEDY = {
    "longread": "raise --max-num-seqs; more replicas; --max-num-queued-reqs refuses early what would wait too long",
    "vllm": "raise --max-num-seqs; more replicas; --max-num-queued-reqs refuses early what would wait too long",
    "sglang": "--schedule-conservativeness 0.3 (usage is low and requests wait), raise --max-running-requests; "
    "replicas",
}
QUEUE_REMEDY = {
    "longread": "more replicas or GPUs; --max-num-queued-reqs refuses early what would wait too long",
    "vllm": "more replicas or GPUs; --max-num-queued-reqs and --max-num-queued-tokens refuse early "
    "(vllm-project/vllm#49445)",
    "sglang": "more replicas or GPUs; --max-queued-requests refuses early",
}
PREFILL_REMEDY = {
    "longread": "reuse more (documents through /v1/documents, --store); a larger --max-num-batched-tokens; more GPUs",
    "vllm": "reuse more of the prompts (--enable-prefix-caching); a larger --max-num-batched-tokens; context or "
    "pipeline parallelism for single long prompts; --long-prefill-token-threshold lets short ones pass",
    "sglang": "reuse more of the prompts (radix cache on, --enable-hierarchical-cache); a larger "
    "--chunked-prefill-size; --attn-cp-size or pipeline parallelism for single long prompts",
}
DECODE_REMEDY = {
    "longread": "more GPUs share the bandwidth; fewer sequences at once (--max-num-seqs) for a shorter TPOT",
    "vllm": "speculative decoding (--speculative-config); a lower --max-num-seqs for a shorter TPOT, a higher one for "
    "throughput",
    "sglang": "speculative decoding (--speculative-algorithm); a lower --max-running-requests for a shorter TPOT, a "
    "higher one for throughput",
}
MISS_REMEDY = {
    "longread": "longread:prefix_cache_misses says why, `longread store explain` for one call; put what is shared "
    "first in the prompt; --store, --host-cache-size",
    "vllm": "put what is shared first in the prompt, byte for byte (no time stamps, no changing ids); on DeepSeek-V4 "
    "hits can be all or nothing (vllm-project/vllm#42948, #54567)",
    "sglang": "put what is shared first in the prompt, byte for byte; on DeepSeek-V4 long agent sessions could get 0 "
    "cached tokens (sgl-project/sglang#35129): update; --enable-hierarchical-cache keeps more",
}


@dataclass(frozen=True, slots=True)
class Load:
    """The numbers that regimes are told by; None where the server does not say."""

    running: float | None
    waiting: tuple[float, float] | None
    usage: float | None
    prompt_rate: float | None
    token_rate: float | None
    preempted: float | None
    hit_rate: float | None
    looked_up: float
    queue_share: float | None
    prefill_share: float | None
    prefill_since: str


def check_live(facts: Facts) -> Iterator[Finding]:
    live = facts.live
    if live is None:
        return
    load = read_load(live)
    yield from _reading(live)
    if _idle(live, load):
        yield Finding(
            "note",
            "regime",
            "idle: no request ran between the two readings, so nothing can be said of what bounds it",
            f"0 running, 0 waiting, no token in {live.seconds:g} s",
            "look again under load",
        )
    else:
        full = list(_kv(live, load))  # then the queue is a consequence
        found = [*_stuck(live, load), *(full or _queue(live, load)), *_phases(live, load)]
        found += [*_misses(live, load), *_refused(live), *_graphs(live, load)]
        yield from found
        if not any(finding.severity == "warning" for finding in found):
            yield Finding("ok", "regime", "healthy: nothing waits, the cache has room", _state(live, load))
    yield from _speculation(live)
    yield from _latency(live)


def read_load(live: Live) -> Load:
    grown, totals, over = live.grown, live.totals, max(live.seconds, 1e-9)

    def rate(name: str) -> float | None:
        return grown[name] / over if name in grown else None

    queries = "prefix queries" if "prefix queries" in totals else "prompt tokens" if live.engine == "sglang" else ""
    since = grown if grown.get(queries, 0) > 0 else totals
    hits, looked_up = since.get("prefix hits"), since.get(queries, 0.0)
    usage = [
        live.gauges[name]
        for name in ("kv usage", "full-attention usage", "sliding-window usage")
        if name in live.gauges
    ]
    usage += [live.gauges_before[name] for name in ("kv usage",) if name in live.gauges_before]
    hit_rate = hits / looked_up if hits is not None and looked_up > 0 else live.gauges.get("prefix hit rate")
    prefill_share, prefill_since = _prefill_share(live.latencies)
    return Load(
        running=max((g["running"] for g in (live.gauges_before, live.gauges) if "running" in g), default=None),
        waiting=(live.gauges_before["waiting"], live.gauges["waiting"])
        if "waiting" in live.gauges and "waiting" in live.gauges_before
        else None,
        usage=max(usage, default=None),
        prompt_rate=rate("prompt tokens"),
        token_rate=rate("generated tokens"),
        preempted=grown.get("preemptions"),
        hit_rate=hit_rate,
        looked_up=looked_up,
        queue_share=_queue_share(live.latencies),
        prefill_share=prefill_share,
        prefill_since=prefill_since,
    )


def _queue_share(latencies: Mapping[str, Latency]) -> float | None:
    queue, first = latencies.get("queue"), latencies.get("TTFT")
    if queue is None or first is None or first.mean <= 0 or queue.since != first.since:
        return None
    return min(1.0, queue.mean / first.mean)


def _prefill_share(latencies: Mapping[str, Latency]) -> tuple[float | None, str]:
    """Of the time that requests are worked on, and since when. Without such histograms: from TTFT, queue and end."""
    prefill, decode = latencies.get("prefill"), latencies.get("decode")
    if prefill is not None and decode is not None and prefill.since == decode.since:
        worked = prefill.mean * prefill.count + decode.mean * decode.count
        return (prefill.mean * prefill.count / worked if worked > 0 else None), prefill.since
    first, end, queue = latencies.get("TTFT"), latencies.get("end to end"), latencies.get("queue")
    if first is None or end is None or first.since != end.since:
        return None, ""
    waited = queue.mean if queue is not None and queue.since == first.since else 0.0
    worked = end.mean - waited
    return (min(1.0, max(0.0, first.mean - waited) / worked) if worked > 0 else None), first.since


def _idle(live: Live, load: Load) -> bool:
    moved = any(live.grown.get(name, 0) > 0 for name in ("prompt tokens", "generated tokens", "finished"))
    return not load.running and not any(load.waiting or ()) and not moved


def _state(live: Live, load: Load) -> str:
    parts = []
    if load.running is not None:
        parts.append(f"{load.running:g} running")
    if load.waiting is not None:
        parts.append(f"{load.waiting[0]:g} then {load.waiting[1]:g} waiting")
    if load.usage is not None:
        parts.append(f"KV cache {load.usage:.0%} used")
    if load.prompt_rate is not None:
        parts.append(f"{load.prompt_rate:,.0f} prompt tokens/s")
    if load.token_rate is not None:
        parts.append(f"{load.token_rate:,.0f} tokens/s out")
    return ", ".join(parts) + f" over {live.seconds:g} s"


def _reading(live: Live) -> Iterator[Finding]:
    served = f", serving {', '.join(live.models)}" if live.models else ""
    longest = f", up to {live.max_model_len:,} tokens" if live.max_model_len else ""
    yield Finding(
        "ok", "server", f"{live.engine} {live.version or ''} answers".replace("  ", " ") + served + longest, live.url
    )
    if live.restarted:
        yield Finding(
            "warning",
            "server",
            "counters went backwards between the readings: the server restarted, or a load balancer chose another one",
            live.url,
            "give the address of one server, not of a balancer",
        )
    if live.missing:
        yield Finding(
            "note",
            "metrics",
            "series are missing, so what rests on them is not judged (they are not 0)",
            "; ".join(live.missing),
            "renamed by the version? SGLang needs --enable-metrics; some series appear with the first request",
        )
    if live.old_names:
        yield Finding(
            "note", "metrics", "read under names that newer versions no longer use", ", ".join(live.old_names)
        )


def _stuck(live: Live, load: Load) -> Iterator[Finding]:
    still = (
        live.seconds >= STILL_SECONDS and load.token_rate == 0 and not live.grown.get("finished") and bool(load.running)
    )
    if still and live.gauges.get("running"):
        yield Finding(
            "warning",
            "regime",
            "requests run and no token came out between the readings: one long prompt is being read, or it hangs",
            _state(live, load),
            "look again with a longer --interval; one long prompt blocks the others where prefill is not shared fairly "
            "(smaller chunks help)",
            "vllm-project/vllm#51454; sgl-project/sglang#34623",
        )


def _kv(live: Live, load: Load) -> Iterator[Finding]:
    waits = bool(load.waiting and max(load.waiting) > 0)
    # vLLM's num_requests_waiting_by_reason{reason="capacity"} counts whatever waits for a place in the batch too.
    if load.preempted or (load.usage is not None and load.usage >= FULL and waits):
        lost = f"{load.preempted:g} preemptions, " if load.preempted else ""
        yield Finding(
            "warning",
            "regime",
            "KV-bound: requests wait for room in the KV cache, or lose theirs and are read again",
            lost + _state(live, load),
            KV_REMEDY[live.engine],
            "SGLang hyperparameter tuning guide; vLLM optimization guide",
        )


def _queue(live: Live, load: Load) -> Iterator[Finding]:
    waits = load.waiting is not None and min(load.waiting) > 0
    share = load.queue_share or 0.0
    recent = "queue" in live.latencies and live.latencies["queue"].since == "interval"
    if not waits and not (share >= HALF and recent):
        return
    room = load.usage is not None and load.usage < ROOMY
    told = f"{share:.0%} of TTFT is waiting, " if load.queue_share is not None else ""
    yield Finding(
        "warning",
        "regime",
        "queue-bound: requests wait to be scheduled" + (" although the KV cache has room" if room else ""),
        told + _state(live, load),
        (QUEUE_ROOM_REMEDY if room else QUEUE_REMEDY)[live.engine],
        "SGLang hyperparameter tuning guide (usage < 0.9 and a queue)"
        if live.engine == "sglang" and room
        else "vllm-project/vllm#49445",
    )


def _phases(live: Live, load: Load) -> Iterator[Finding]:
    share = load.prefill_share
    if share is None:
        return
    since = " (since the start)" if load.prefill_since == "start" else ""
    if share >= HALF:
        yield Finding(
            "note",
            "regime",
            "prefill-bound: most of a request's working time goes into reading its prompt",
            f"{share:.0%} of the time is prefill{since}; {_state(live, load)}",
            PREFILL_REMEDY[live.engine],
        )
    elif share <= 1 - MOSTLY:
        tpot = live.latencies.get("TPOT") or live.latencies.get("inter-token")
        pace = f", {tpot.mean * 1000:.1f} ms a token" if tpot else ""
        yield Finding(
            "note",
            "regime",
            "decode-bound: most of a request's working time goes into writing",
            f"{1 - share:.0%} of the time is decode{pace}{since}; {_state(live, load)}",
            DECODE_REMEDY[live.engine],
        )


def _misses(live: Live, load: Load) -> Iterator[Finding]:
    if load.hit_rate is None or load.looked_up < ENOUGH_TOKENS:
        return
    evidence = f"{load.hit_rate:.1%} of {load.looked_up:,.0f} prompt tokens came out of the cache"
    queries = "prompt tokens" if live.engine == "sglang" else "prefix queries"
    if not live.grown.get(queries):
        evidence += ", since the start"
    if load.hit_rate < FEW_HITS:
        bound = (load.prefill_share or 0) >= HALF
        severity: Severity = "warning" if bound else "note"
        yield Finding(
            severity,
            "prefix cache",
            "prefix-miss: hardly anything of the prompts is reused"
            + (", and reading them is what takes the time" if bound else ": fine where prompts share nothing"),
            evidence,
            MISS_REMEDY[live.engine],
        )
    elif load.hit_rate >= GOOD_HITS:
        yield Finding("ok", "prefix cache", "prompts are reused", evidence)


def _refused(live: Live) -> Iterator[Finding]:
    count = live.grown.get("rejections", 0)
    if count > 0:
        what = "aborted" if live.engine == "sglang" else "refused because the queue was full"
        yield Finding(
            "warning",
            "requests",
            f"requests were {what} between the readings",
            f"{count:g} in {live.seconds:g} s",
            "more replicas, or a longer queue if waiting is acceptable",
        )


def _graphs(live: Live, load: Load) -> Iterator[Finding]:
    if load.running and live.gauges.get("cuda graph") == 0:
        yield Finding(
            "note",
            "CUDA graphs",
            "the last batch ran without a CUDA graph",
            "sglang:is_cuda_graph 0",
            "a larger --cuda-graph-max-bs, or start without --disable-cuda-graph (prefill batches show 0 too)",
        )


def _speculation(live: Live) -> Iterator[Finding]:
    since = live.grown if live.grown.get("draft tokens", 0) > 0 else live.totals
    drafted, accepted, drafts = (since.get(name, 0.0) for name in ("draft tokens", "accepted tokens", "drafts"))
    rate = accepted / drafted if drafted > 0 else live.gauges.get("acceptance rate")
    length = 1 + accepted / drafts if drafts > 0 else live.gauges.get("accepted length")
    if not rate and not length:
        return
    told = [f"{rate:.0%} of drafted tokens accepted"] if rate else []
    told += [f"{length:.2f} tokens a step"] if length else []
    low = rate is not None and 0 < rate < LOW_ACCEPTANCE
    yield Finding(
        "note" if low else "ok",
        "speculative decoding",
        "few drafted tokens are accepted: at many streams it costs more than it gives"
        if low
        else "drafts are accepted",
        ", ".join(told),
        "fewer speculative tokens, or none at high concurrency" if low else "",
    )


def _latency(live: Live) -> Iterator[Finding]:
    """A note, not a judgement: what is long depends on what was promised."""
    rows = [f"{name} {_told(latency)}" for name, latency in live.latencies.items()]
    if rows:
        yield Finding(
            "note",
            "latency",
            "as the server's histograms have it (percentiles are interpolated inside a bucket)",
            "; ".join(rows),
        )


def _told(latency: Latency) -> str:
    def shown(value: float | None) -> str:
        return "past the last bucket" if value is None else seconds(value)

    where = "" if latency.since == "interval" else ", since the start"
    ranks = {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99} if latency.count >= LEAST_RANKED else {}
    told = [f"mean {shown(latency.mean)}", *(f"{name} {shown(value)}" for name, value in ranks.items())]
    return f"{', '.join(told)} (n = {latency.count:,}{where})"
