"""The Prometheus series of one server.

Knows: prometheus_client, EngineStats, the driver's observations. Must not know: routes, text, models.
Names are vLLM's with the prefix ``longread:`` instead of ``vllm:``, so that a dashboard moves by replacing the prefix.
Gauges and counters of the engine are read when scraped, by a collector over the last ``EngineStats``; histograms are
observed as tokens and ends arrive. Every server has its own registry: nothing is global.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from longread.server import poison
from longread.server.admission import REASONS
from longread.server.calls import Call, told_reason
from longread.server.clock import PARTS
from longread.server.deadlines import CLIENT
from longread.server.limits import TIMEOUTS
from longread.spec.engine import EngineInfo, EngineStats, FinishEvent
from longread.spec.reuse import MISS_REASONS

PREFIX = "longread:"
SLOW_READERS = ("time", "buffer")  # stream_timeout, max_stream_buffer
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
_PART_BUCKETS = (0.0001, 0.0005, *_TTFT_BUCKETS)
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
    "num_requests_loading": "Waiting requests whose pages are on the way from host memory or disk.",
    "host_cache_bytes": "Size of the host tier.",
    "host_cache_used_bytes": "Bytes of the host tier in use.",
}
_QUEUE_GAUGES = {
    "num_queued_tokens": "Prompt tokens of accepted requests that are still to be computed.",
    "predicted_queue_seconds": "What an interactive prompt of 4,096 tokens would wait for others now, as predicted.",
    "max_num_queued_tokens": "Prompt tokens that may come before an interactive prompt, as given or by --slo ttft=.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "pages_evicted": "KV pages evicted to make room.",
    "snapshots_evicted": "Ring snapshots evicted to make room.",
    "num_preemptions": "Requests preempted to free KV pages.",
    "prompt_tokens": "Prompt tokens read or reused, step by step.",
    "generation_tokens": "Tokens generated.",
    "store_written_bytes": "Bytes of pages and snapshots written to the store.",
    "store_skipped_writes": "Landing points that were not written because the writer was behind.",
    "store_errors": "Errors of the store; service went on without it.",
    "store_corrupt_records": "Records of the store that failed their checksum and were dropped.",
}


ReadEngine = Callable[[], tuple[EngineInfo, EngineStats] | None]


class EngineCollector(Collector):
    """Reads the engine's last stats at scrape time. While the model loads there is only ``engine_up``: missing, not 0.

    An engine that was started again counts from 0 again, as Prometheus expects it of counters.
    """

    def __init__(self, model_name: str, read: ReadEngine, shared: bool):
        self._model_name = model_name
        self._read = read
        self._shared = shared

    def describe(self) -> Iterable[Metric]:
        """No names in advance: registering must not read an engine that is not there yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One family a gauge and counter of EngineStats, and the engine's fixed sizes."""
        current = self._read()
        up = GaugeMetricFamily(PREFIX + "engine_up", "1 while requests are accepted.", labels=["model_name"])
        up.add_metric([self._model_name], int(current is not None))
        yield up
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
        yield from self._reuse(stats)
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
            labels=["model_name", "block_size", "num_gpu_blocks", "max_model_len", "dtype", "cache_dtype"],
        )
        values = (info.page_tokens, info.num_pages, info.max_model_len, info.dtype, info.cache_dtype)
        config.add_metric([self._model_name, *map(str, values)], 1)
        yield config

    def _reuse(self, stats: EngineStats) -> Iterable[Metric]:
        """Where the prompts' tokens came from, and why no more of them did."""
        labels = ["model_name", "tier"]
        reused = CounterMetricFamily(PREFIX + "reused_tokens", "Prompt tokens that were not computed.", labels=labels)
        tiers = {
            "device": stats.reused_device_tokens,
            "host": stats.reused_host_tokens,
            "disk": stats.reused_disk_tokens,
        }
        for tier, count in tiers.items():
            reused.add_metric([self._model_name, tier], count)
        yield reused
        labels = ["model_name", "reason"]
        text = "Admitted requests by why no more of the prompt was reused; complete: all of it was."
        missed = CounterMetricFamily(PREFIX + "prefix_cache_misses", text, labels=labels)
        counts = {told_reason(reason, self._shared): 0 for reason in MISS_REASONS}
        for reason, count in stats.misses:
            counts[told_reason(reason, self._shared)] += count
        for told, count in counts.items():
            missed.add_metric([self._model_name, told.replace(" ", "_")], count)
        yield missed


class ServerMetrics:
    """The server's own series; also the driver's observer. Loop thread only.

    ``shared``: several parties may read them, as in ``ServerOptions``: counts by reason tell as much as answers do.
    """

    def __init__(self, model_name: str, read: ReadEngine, shared: bool = False):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read, shared))

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
        self._first_byte = histogram(
            "time_to_first_byte_seconds", "A call's first byte in to its stream's first byte out.", _TTFT_BUCKETS
        )
        parts = Histogram(
            PREFIX + "time_to_first_byte_part_seconds",
            "The parts that the time to the first byte is the sum of; whole answers have no first_byte.",
            ["model_name", "part"],
            buckets=_PART_BUCKETS,
            registry=self.registry,
        )
        self._parts = {part: parts.labels(model_name=model_name, part=part) for part in PARTS}
        self._model_name = model_name
        self._queue_gauges: dict[str, Gauge] = {}
        self._success = Counter(
            PREFIX + "request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for name, text in _QUEUE_GAUGES.items():
            self._queue_gauges[name] = Gauge(PREFIX + name, text, ["model_name"], registry=self.registry)
        self._accepted = Counter(
            PREFIX + "requests_accepted",
            "Requests that were accepted; each ends once and is in request_success then.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name=model_name)
        self._rejections = Counter(
            PREFIX + "admission_rejections",
            "Requests refused because too much waits, or for what their prompts did to the engine, by reason.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        self._timeouts = Counter(
            PREFIX + "request_timeouts",
            "Accepted requests that were given up, by the time limit.",
            ["model_name", "timeout"],
            registry=self.registry,
        )
        self._slow_readers = Counter(
            PREFIX + "slow_readers",
            "Answers cut off because their clients did not read: for too much time, or too much in the buffer.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for reason in (*REASONS, *poison.REASONS):  # a rate needs the 0 before the first one
            self._rejections.labels(model_name=model_name, reason=reason)
        for timeout in (*TIMEOUTS, CLIENT):
            self._timeouts.labels(model_name=model_name, timeout=timeout.removesuffix("_timeout"))
        for reason in SLOW_READERS:
            self._slow_readers.labels(model_name=model_name, reason=reason)
        self._lost = Counter(
            PREFIX + "engine_restarts",
            "Times that the engine died and was started again.",
            ["model_name"],
            registry=self.registry,
        ).labels(model_name=model_name)
        self._http = Counter(
            PREFIX + "http_responses",
            "HTTP responses by route and status.",
            ["route", "status"],
            registry=self.registry,
        )

    def gaps(self, seconds: Sequence[float]) -> None:
        """Output tokens came, so many seconds behind the ones before them."""
        for gap in seconds:
            self._itl.observe(gap)

    def finish(self, event: FinishEvent, reason: str) -> None:
        """A request ended. Times count only where a token came, end-to-end and decode only where it ended itself."""
        self._success.labels(model_name=self._model_name, finished_reason=reason).inc()
        if reason in (*TIMEOUTS, CLIENT):
            self._timeouts.labels(model_name=self._model_name, timeout=reason.removesuffix("_timeout")).inc()
        times = event.times
        if not times.first_token:
            return
        self._ttft.observe(times.first_token - times.arrived)
        self._queue.observe(times.scheduled - times.arrived)
        self._prefill.observe(times.first_token - times.scheduled)
        if reason not in ("stop", "length"):
            return
        self._decode.observe(times.finished - times.first_token)
        self._e2e.observe(times.finished - times.arrived)
        if event.completion_tokens > 1:
            self._tpot.observe((times.finished - times.first_token) / (event.completion_tokens - 1))

    def called(self, call: Call) -> None:
        """A call ended. Its parts count once a first token has come; a part that was not measured is not observed."""
        timing = call.timing
        if timing.ttft is None:
            return
        if timing.parts["first_byte"] is not None:
            self._first_byte.observe(timing.ttft)
        for part, seconds in timing.parts.items():
            if seconds is not None:
                self._parts[part].observe(max(0.0, seconds))

    def queue(self, outlook: Mapping[str, float | None]) -> None:
        """The admission's gauges, before they are scraped; what is not known is left out."""
        for name, value in outlook.items():
            if value is not None:
                self._queue_gauges[name].labels(model_name=self._model_name).set(value)

    def accepted(self, count: int) -> None:
        """``count`` requests were accepted."""
        self._accepted.inc(count)

    def rejected(self, count: int, reason: str) -> None:
        """``count`` requests met a limit."""
        self._rejections.labels(model_name=self._model_name, reason=reason).inc(count)

    def slow_reader(self, reason: str) -> None:
        """A client was cut off; ``reason`` is one of SLOW_READERS."""
        self._slow_readers.labels(model_name=self._model_name, reason=reason).inc()

    def lost(self) -> None:
        """The engine died; it is started again."""
        self._lost.inc()

    def responded(self, route: str, status: int) -> None:
        """``route`` is the route's pattern, never the raw path: a scanner must not create series."""
        self._http.labels(route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """The exposition text. Costs a few milliseconds; the caller runs it off the loop when that matters."""
        return generate_latest(self.registry)
