"""What /metrics of vLLM, SGLang and Longread says, in their own words, and a server that says it.

Values are made up. ``page`` takes values by the engine's own names; a dictionary of bucket bounds is a histogram.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Value = float | Mapping[str, float] | Sequence[tuple[str, float]]
LABELS = {
    "vllm": 'engine="0",model_name="deepseek-ai/DeepSeek-V3"',
    "longread": 'model_name="V3"',
    "sglang": 'engine_type="unified",model_name="deepseek-ai/DeepSeek-V3",pp_rank="0",tp_rank="0"',
}


def page(engine: str, values: Mapping[str, Value], labels: str | None = None) -> str:
    """A number: one sample; counters by their name on the wire ("..._total"). Pairs: samples with more labels."""
    labels = LABELS[engine] if labels is None else labels
    lines = ["# HELP python_info Python platform information", "# TYPE python_info gauge", "python_info 1.0"]
    for name, value in values.items():
        full = f"{engine}:{name}"
        if isinstance(value, Mapping):
            lines += [f"# HELP {full} Histogram of something.", f"# TYPE {full} histogram"]
            lines += [
                f'{full}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in value.items() if bound != "sum"
            ]
            lines += [f"{full}_count{{{labels}}} {value['+Inf']}", f"{full}_sum{{{labels}}} {value['sum']}"]
        else:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {full} Something.", f"# TYPE {full} {kind}"]
            if isinstance(value, float | int):
                lines.append(f"{full}{{{labels}}} {float(value)}")
            else:
                lines += [f"{full}{{{more}}} {float(number)}" for more, number in value]
    return "\n".join(lines) + "\n"


def histogram(count: float, mean: float, bounds: Sequence[float] = (0.1, 1, 10, 100)) -> dict[str, float]:
    """``count`` observations, all in the bucket that holds ``mean``."""
    buckets = {str(float(bound)): float(count if bound >= mean else 0) for bound in bounds}
    return {**buckets, "+Inf": float(count), "sum": count * mean}


Answer = tuple[int, str, bytes]


class _Server(ThreadingHTTPServer):
    answers: dict[str, list[Answer]]
    seen: list[tuple[str, str | None]]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        found = self.server.answers.get(self.path)
        status, kind, body = (found.pop(0) if len(found) > 1 else found[0]) if found else (404, "text/plain", b"")
        self.send_response(status)
        self.send_header("Location" if status in (302, 307) else "Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Nothing: the tests look at ``seen``."""


@contextmanager
def answering(answers: Mapping[str, Sequence[str | Answer]]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server whose answers by path are given in turn, the last one for ever. Yields its address and what was
    asked."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.seen = []
    server.answers = {
        path: [(200, "text/plain; version=0.0.4", one.encode()) if isinstance(one, str) else one for one in given]
        for path, given in answers.items()
    }
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
