"""Calls as OpenTelemetry spans: the parts as children that add up, the caller's trace, and what configures them."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from serving import MODEL, serving, wait_until

from longread.server.clock import PARTS
from longread.server.spans import ENDPOINTS, PROTOCOLS, Spans, from_environment

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[Spans]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = Spans(provider)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, *PROTOCOLS, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


def root_of(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    assert wait_until(lambda: any(span.name.startswith("POST") for span in exporter.get_finished_spans()))
    found = exporter.get_finished_spans()
    (root,) = (span for span in found if span.name.startswith("POST"))
    return root, sorted((span for span in found if span is not root), key=lambda span: span.start_time)


def test_a_stream_is_one_span_and_its_parts(spans: Spans, exporter: InMemorySpanExporter) -> None:
    with serving(observe=spans) as running:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        sent = BODY | {"stream": True}
        name = httpx.post(running.url + CHAT, json=sent, headers=headers).headers["x-request-id"]
        root, children = root_of(exporter)
        record = httpx.get(f"{running.url}/v1/longread/requests/{name}").json()
    assert root.name == f"POST {CHAT}"
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == PARENT
    assert all(span.parent.span_id == root.context.span_id for span in children)
    parts = [span.name.removeprefix("longread.") for span in children if span.name != "longread.decode"]
    assert set(parts) <= set(PARTS) and {"receive", "tokenise", "queue", "prefill", "first_byte"} <= set(parts)
    assert children[0].start_time == root.start_time
    spent = sum(span.end_time - span.start_time for span in children if span.name != "longread.decode")
    assert spent == pytest.approx(record["longread"]["timing"]["ttft_ms"] * 1e6, abs=20_000)
    assert root.end_time - root.start_time == pytest.approx(record["longread"]["timing"]["total_ms"] * 1e6, abs=2_000)
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == MODEL
    assert (told["gen_ai.response.id"], told["gen_ai.usage.output_tokens"]) == (record["id"], 4)
    assert told["longread.reuse.reason"] == "never seen"
    assert told["gen_ai.usage.input_tokens"] == told["longread.reuse.recomputed_tokens"]
    assert "hi" not in map(str, told.values())


def test_a_failed_call_is_an_error(spans: Spans, exporter: InMemorySpanExporter) -> None:
    with serving(observe=spans, fail_at_step=1) as running:
        httpx.post(running.url + CHAT, json=BODY, headers={"traceparent": "nonsense"})
        root, children = root_of(exporter)
    assert root.status.status_code is StatusCode.ERROR and root.attributes["error.type"] == "engine_failed"
    assert root.parent is None
    assert "longread.prefill" not in {span.name for span in children}


def test_a_client_that_left(spans: Spans, exporter: InMemorySpanExporter) -> None:
    gate = threading.Semaphore(0)
    with serving(observe=spans, gate=gate) as running:
        with httpx.stream("POST", running.url + CHAT, json=BODY | {"stream": True}):
            pass
        root, _ = root_of(exporter)
        gate.release(20)
    assert root.attributes["longread.state"] == "cancelled" and root.end_time > root.start_time


def test_spans_reach_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        monkeypatch.setenv(ENDPOINTS[1], f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        made = from_environment()
        assert made is not None
        with serving(observe=made) as running:
            httpx.post(running.url + CHAT, json=BODY)
        made.close()
        collector.shutdown()
        thread.join(10)
    (resource,) = ExportTraceServiceRequest.FromString(bodies[0]).resource_spans
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert f"POST {CHAT}" in names and "longread.tokenise" in names
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "longread"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, None),
        ({ENDPOINTS[1]: "http://x", "OTEL_SDK_DISABLED": "true"}, None),
        ({ENDPOINTS[1]: "http://x", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({ENDPOINTS[0]: "http://x", PROTOCOLS[1]: "grpc"}, "only http/protobuf is supported"),
        ({ENDPOINTS[0]: "http://x", "without": "it"}, "pip install longread[otel]"),
    ],
)
def test_what_cannot_be_honoured_is_said(
    variables: dict[str, str], words: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in variables.items():
        if name == "without":
            monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        else:
            monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert from_environment() is None
    assert [record.getMessage() for record in caplog.records if words is None or words not in record.getMessage()] == []
    assert bool(caplog.records) == (words is not None)


def test_without_configuration_nothing_is_loaded() -> None:
    code = (
        "import sys, longread.server.spans as spans\n"
        "assert spans.from_environment() is None\n"
        "assert 'opentelemetry' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
