"""Ended calls as OpenTelemetry spans: one for the call, a child for each part of its time.

Knows: OpenTelemetry's SDK, which is an extra and is only loaded where it is configured; records of calls. Must not
know: routes, text. The spans are made when a call has ended, with the times that were measured anyway: a call costs
nothing more while it runs. They carry counts and reasons, never text.
"""

import logging
import os
import time
from typing import TYPE_CHECKING

from longread.server.calls import Call

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger("longread.server")

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Spans:
    """Told of each ended call; ``provider`` is its own, nothing global is set."""

    def __init__(self, provider: "TracerProvider"):
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("longread")
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, call: Call) -> None:
        """Make the spans of one call."""
        from opentelemetry import trace

        timing = call.timing
        wall = time.time() - time.monotonic()
        begun = timing.begun + wall
        total = timing.total if timing.total is not None else time.monotonic() - timing.begun
        parent = self._propagator.extract({"traceparent": call.traceparent} if call.traceparent else {})
        root = self._tracer.start_span(
            f"POST {call.route}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(call),
            start_time=_nanoseconds(begun),
        )
        inside, at = trace.set_span_in_context(root), begun
        for part, seconds in [*timing.parts.items(), ("decode", timing.decode)]:
            if part == "decode" and timing.parts["first_byte"] is not None:
                at -= timing.parts["first_byte"]  # the first byte goes out while the next token is computed
            if not seconds:
                continue
            child = self._tracer.start_span(f"longread.{part}", context=inside, start_time=_nanoseconds(at))
            at += seconds
            child.end(_nanoseconds(at))
        if call.state == "failed":
            root.set_status(trace.StatusCode.ERROR, call.error)
            root.set_attribute("error.type", call.error or "failed")
        root.end(_nanoseconds(begun + total))

    def close(self) -> None:
        """Send what waits and stop."""
        self._provider.shutdown()


def from_environment() -> Spans | None:
    """Spans to where OTEL_EXPORTER_OTLP_ENDPOINT points (the SDK reads that and its other variables); None where it is
    not set, or where it cannot be honoured, which is said.
    """
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None or off:
        return None
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        logger.warning("no spans are sent: the OTLP protocol is set to %r, only %s is supported", protocol, PROTOCOL)
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("no spans are sent: %s is set, but `pip install longread[otel]` was not done", endpoint)
        return None
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "longread"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)


def _attributes(call: Call) -> "dict[str, AttributeValue]":
    """Names of the semantic conventions for generative AI and HTTP where they have one."""
    timing, reuse = call.timing, call.reuse
    told: dict[str, AttributeValue | None] = {
        "http.request.method": "POST",
        "http.route": call.route,
        "gen_ai.operation.name": OPERATIONS.get(call.route),
        "gen_ai.provider.name": "longread",
        "gen_ai.request.model": call.model,
        "gen_ai.response.id": call.answer_id,
        "gen_ai.usage.output_tokens": call.completion_tokens,
        "longread.request_id": call.request_id,
        "longread.state": call.state,
        "longread.ttft_ms": None if timing.ttft is None else timing.ttft * 1000,
        "longread.prefill.tokens": timing.prefill_tokens,
        "longread.prefill.chunks": timing.prefill_chunks,
        "longread.preemptions": call.preemptions,
    }
    if reuse is not None:
        told |= {
            "gen_ai.usage.input_tokens": reuse.prompt_tokens,
            "longread.reuse.device_tokens": reuse.device_tokens,
            "longread.reuse.host_tokens": reuse.host_tokens,
            "longread.reuse.disk_tokens": reuse.disk_tokens,
            "longread.reuse.recomputed_tokens": reuse.recomputed_tokens,
            "longread.reuse.reason": reuse.reason,
            "longread.reuse.at": reuse.at,
        }
    return {name: value for name, value in told.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
