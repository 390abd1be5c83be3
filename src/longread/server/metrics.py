"""The Prometheus series of one server.

Knows: prometheus_client, EngineStats, the driver's observations. Must not know: routes, text, models.
Names are vLLM's with the prefix ``longread:`` instead of ``vllm:``, so that a dashboard moves by replacing the prefix.
Gauges and counters of the engine are read when scraped, by a collector over the last ``EngineStats``; histograms are
observed as tokens and ends arrive. Every server has its own registry: nothing is global.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from longread.spec.engine import EngineInfo, EngineStats, FinishEvent

PREFIX = "longread:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds. The long ends are for documents: a cold prompt of a million tokens takes minutes.
_TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_TOKEN_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    80,
)
_REQUEST_BUCKETS = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV pages in use, 0 to 1.",
    "pages_free": "KV pages without content.",
    "pages_cached": "KV pages kept for reuse, evictable.",
    "pages_held": "KV pages held by running requests.",
    "snapshots_held": "Ring snapshots held.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "pages_evicted": "KV pages evicted to make room.",
    "snapshots_evicted": "Ring snapshots evicted to make room.",
    "num_preemptions": "Requests preempted to free KV pages.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generation_tokens": "Tokens generated.",
}


ReadEngine = Callable[[], tuple[EngineInfo, EngineStats] | None]


class EngineCollector(Collector):
    """Reads the engine's last stats at scrape time. While the model loads it yields nothing: missing, not 0."""

    def __init__(self, model_name: str, read: ReadEngine):
        self._model_name = model_name
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """No names in advance: registering must not read an engine that is not there yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One family a gauge and counter of EngineStats, and the engine's fixed sizes."""
        current = self._read()
        if current is None:
            return
        info, stats = current
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], getattr(stats, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(stats, name))
            yield counter
        for name, text, value in (
            ("predicted", "Planned memory of the process, workspace and program included.", info.predicted_bytes),
            ("allocated", "Weights and cache as allocated.", info.allocated_bytes),
        ):
            memory = GaugeMetricFamily(f"{PREFIX}memory_{name}_bytes", text, labels=["model_name"])
            memory.add_metric([self._model_name], value)
            yield memory
        config = GaugeMetricFamily(
            PREFIX + "cache_config_info",
            "Cache configuration; always 1.",
            labels=["model_name", "block_size", "num_gpu_blocks", "max_model_len"],
        )
        values = (info.page_tokens, info.num_pages, info.max_model_len)
        config.add_metric([self._model_name, *map(str, values)], 1)
        yield config


class ServerMetrics:
    """The server's own series; also the driver's observer. Loop thread only."""

    def __init__(self, model_name: str, read: ReadEngine):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(model_name=model_name)

        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._itl = histogram("inter_token_latency_seconds", "Between output tokens of a request.", _TOKEN_BUCKETS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "(E2E - TTFT) / (output tokens - 1), a request.", _TOKEN_BUCKETS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "First scheduling to first token.", _REQUEST_BUCKETS)
        self._decode = histogram("request_decode_time_seconds", "First token to end.", _REQUEST_BUCKETS)
        self._model_name = model_name
        self._success = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._rejections = Counter(
            PREFIX + "admission_rejections",
            "Requests refused because the queue was full.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name=model_name)
        self._http = Counter(
            PREFIX + "http_responses",
            "HTTP responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )

    def token(self, gap: float | None) -> None:
        """One output token, ``gap`` seconds behind the one before it; None for the first."""
        if gap is not None:
            self._itl.observe(gap)

    def finish(self, event: FinishEvent, reason: str) -> None:
        """A request ended. Times count only where a token came, end-to-end and decode only where it ended itself."""
        self._success.labels(model_name=self._model_name, finished_reason=reason).inc()
        times = event.times
        if not times.first_token:
            return
        self._ttft.observe(times.first_token - times.arrived)
        self._queue.observe(times.scheduled - times.arrived)
        self._prefill.observe(times.first_token - times.scheduled)
        if reason in ("cancelled", "failed"):
            return
        self._decode.observe(times.finished - times.first_token)
        self._e2e.observe(times.finished - times.arrived)
        if event.completion_tokens > 1:
            self._tpot.observe((times.finished - times.first_token) / (event.completion_tokens - 1))

    def rejected(self, count: int) -> None:
        """``count`` requests met a full queue."""
        self._rejections.inc(count)

    def responded(self, route: str, status: int) -> None:
        """``route`` is the route's pattern, never the raw path: a scanner must not create series."""
        self._http.labels(route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """The exposition text. Costs a few milliseconds; the caller runs it off the loop when that matters."""
        return generate_latest(self.registry)
