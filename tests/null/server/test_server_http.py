"""The server over plain HTTP: hostile bodies, keys, limits, metrics, disconnects, failure and shutdown."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import MODEL, Serving, serving, wait_until

from longread.server import body, protocol
from longread.server.limits import Limits
from longread.server.options import ServerOptions

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
LIMIT = 12 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(options=ServerOptions(max_body_bytes=LIMIT)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text[:300]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def raw_exchange(server: Serving, data: bytes, half_close: bool = False) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        connection.settimeout(2)
        try:
            while chunk := connection.recv(65536):
                answer += chunk
                if b"}" in chunk:
                    break
        except TimeoutError:
            pass
        return answer


NESTED = b'{"messages":' + b"[" * (10 << 20)
BODIES = {
    "nested arrays, 10 MB": NESTED,
    "nested objects": b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "closed nesting": b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "cut in the middle": json.dumps(HELLO).encode()[:-20],
    "empty": b"",
    "not an object": b"[1,2]",
    "a bare number": b"3",
    "NaN": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "infinity": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    "invalid UTF-8": b'{"model":"fake","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "lone surrogate": b'{"model":"fake","messages":[{"role":"user","content":"\\ud800"}]}',
    "huge integer": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":1' + b"0" * 4000 + b"}",
    "wrong types": b'{"model":"fake","messages":"hello"}',
    "text for a number": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":"5"}',
    "true for a number": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":true}',
    "negative": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":-1}',
    "unknown field": b'{"model":"fake","messages":[{"role":"user","content":"x"}],"tempratur":1}',
    "unknown role": b'{"model":"fake","messages":[{"role":"wizard","content":"x"}]}',
    "no messages": b'{"model":"fake","messages":[]}',
    "an image": b'{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}',
}
SAYS = {
    "nested arrays, 10 MB": ("more than 100000 objects and arrays", None),
    "nested objects": ("more than 100000 objects and arrays", None),
    "closed nesting": ("not valid JSON", None),
    "cut in the middle": ("line 1, column", None),
    "empty": ("body is empty", None),
    "not an object": ("must be a JSON object, got a list of 2", None),
    "a bare number": ("must be a JSON object, got 3", None),
    "NaN": ("not valid JSON", None),
    "infinity": ("infinity", None),
    "invalid UTF-8": ("not UTF-8 at byte", None),
    "lone surrogate": ("surrogate", None),
    "huge integer": ("infinity", None),
    "wrong types": ("got 'hello'", "messages"),
    "text for a number": ("got '5'", "max_tokens"),
    "true for a number": ("got True", "max_tokens"),
    "negative": ("greater than or equal to 1, got -1", "max_tokens"),
    "unknown field": ("did you mean 'temperature'?", "tempratur"),
    "unknown role": ("got 'wizard'", "messages[0].role"),
    "no messages": ("at least 1 item", "messages"),
    "an image": ("'image_url' is not supported; this server reads text only", "messages[0].content"),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies_are_a_400_and_the_server_goes_on(server: Serving, http: httpx.Client, name: str) -> None:
    response = http.post(CHAT, content=BODIES[name], headers={"Content-Type": "application/json"})
    error, (words, param) = error_of(response, 400), SAYS[name]
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert error["param"] == param
    assert http.post(CHAT, json=HELLO).status_code == 200
    assert server.pending() == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize", "/detokenize"])
def test_other_routes_refuse_the_same(http: httpx.Client, route: str) -> None:
    for name in ("cut in the middle", "not an object", "invalid UTF-8", "empty"):
        error_of(http.post(route, content=BODIES[name], headers={"Content-Type": "application/json"}), 400)


def test_a_body_over_the_limit_is_a_413_before_it_is_read(server: Serving, http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, content=b" " * (LIMIT + 1), headers={"Content-Type": "application/json"}), 413)
    assert str(LIMIT) in error["message"]
    # Nothing but the head is sent: the answer cannot wait for the body.
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {1 << 40}\r\n\r\n"
    assert b"413" in raw_exchange(server, head.encode()).split(b"\r\n")[0]


def test_a_body_that_a_web_page_may_have_sent_unasked_is_refused(http: httpx.Client) -> None:
    """What a browser sends to other sites without asking them first: a blob without a type, or one of three types."""
    sent = json.dumps(HELLO).encode()
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        headers = {"Content-Type": kind} if kind else {}
        for route in (CHAT, "/v1/completions", "/tokenize"):
            answer = http.post(route, content=sent, headers=headers)
            assert answer.status_code == 400, (route, kind)
    assert "no Content-Type: send application/json" in http.post(CHAT, content=sent).json()["error"]["message"]


def test_a_chunked_body_is_read_and_limited(http: httpx.Client) -> None:
    def chunks(body: bytes) -> Iterator[bytes]:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    headers = {"Content-Type": "application/json"}
    assert http.post(CHAT, content=chunks(json.dumps(HELLO).encode()), headers=headers).status_code == 200
    error_of(http.post(CHAT, content=chunks(b" " * (LIMIT + 65536)), headers=headers), 413)


def test_a_head_that_is_too_long_is_refused_before_it_ends(server: Serving, http: httpx.Client) -> None:
    for head in (b"GET /health HTTP/1.1\r\nX: ", b"GET /", b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 3000):
        answer = raw_exchange(server, head + b"x" * (protocol.MAX_HEAD_BYTES + 1 - min(len(head), 30)))
        assert b" 431 " in answer.split(b"\r\n")[0] and str(protocol.MAX_HEAD_BYTES).encode() in answer
    assert http.get("/health", headers={"X": "x" * 32_000}).status_code == 200


def test_an_empty_line_behind_a_body_does_not_end_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    gate = threading.Semaphore(0)
    with serving(gate=gate) as running:
        ask = json.dumps(HELLO).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        head += f"Content-Length: {len(ask)}\r\n\r\n".encode()
        threading.Timer(0.3, gate.release, [100]).start()
        assert raw_exchange(running, head + ask + b"\r\n").startswith(b"HTTP/1.1 200")


def test_lines_after_a_chunked_body_are_limited_too(server: Serving, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\nX: "
        connection.sendall(head.encode())
        with pytest.raises(ConnectionError):  # closed: a write after it fails, a timeout would be another error
            for _ in range(1000):
                connection.sendall(b"x" * protocol.MAX_HEAD_BYTES)
    assert http.get("/health").status_code == 200


def test_a_head_or_a_body_that_stops_coming_is_a_408(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(body, "BODY_SECONDS", 0.2)
    assert b" 408 " in raw_exchange(server, b"GET /health HTTP/1.1\r\nHost:").split(b"\r\n")[0]
    assert raw_exchange(server, b"") == b""
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{{"
    answer = raw_exchange(server, head.encode())
    assert (
        b" 408 " in answer.split(b"\r\n")[0] and b"after 1 bytes" in answer and b"connection: close" in answer.lower()
    )
    assert server.state.bodies.held == 0


async def test_bodies_on_their_way_are_limited_together() -> None:
    with serving(options=ServerOptions(max_body_bytes=20_000)) as running, httpx.Client(base_url=running.url) as http:
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20000\r\n\r\n"
        host, port = running.url.removeprefix("http://").split(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(4)]
        for connection in slow:
            connection.sendall(head.encode() + b" " * 19_950)
        assert wait_until(lambda: running.state.bodies.held == 4 * 19_950)
        refused = http.post("/tokenize", json={"prompt": "word " * 100})
        assert error_of(refused, 503)["code"] == "too_many_bodies" and refused.headers["Retry-After"] == "1"
        assert http.post("/tokenize", json={"prompt": "word"}).status_code == 200
        for connection in slow:
            connection.close()
        assert wait_until(lambda: running.state.bodies.held == 0)


def test_a_client_that_leaves_in_the_body_leaves_nothing(server: Serving, http: httpx.Client) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n{{"
    raw_exchange(server, head.encode(), half_close=True)
    assert http.get("/health").status_code == 200
    assert server.pending() == 0


def test_garbage_instead_of_http(server: Serving, http: httpx.Client) -> None:
    assert b"400" in raw_exchange(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n}").split(b"\r\n")[0]
    assert http.get("/health").status_code == 200


def test_forms_are_refused(http: httpx.Client) -> None:
    response = http.post(CHAT, content=json.dumps(HELLO), headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(response, 400)["message"]


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert "/v2/x" in error_of(http.get("/v2/x"), 404)["message"]
    response = http.get(CHAT)
    assert "GET" in error_of(response, 405)["message"]
    assert "POST" in response.headers["Allow"]
    error_of(http.post("/v1/models"), 405)


def test_the_request_id_comes_back(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    made = http.get("/health", headers={"X-Request-Id": "<script>" * 40}).headers["X-Request-Id"]
    assert len(made) == 32
    assert http.post(CHAT, content=b"x", headers={"X-Request-Id": "abc-2"}).headers["X-Request-Id"] == "abc-2"


def test_tokenize_and_detokenize_round_trip(server: Serving, http: httpx.Client) -> None:
    text = "Grüße, <｜User｜> 你好"
    made = http.post("/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False}).json()
    assert made["count"] == len(made["tokens"])
    assert made["max_model_len"] == server.engine.info.max_model_len
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == text
    chat = http.post("/tokenize", json={"messages": HELLO["messages"]}).json()
    http.post(CHAT, json=HELLO)
    assert tuple(chat["tokens"]) == server.answers.seen[-1].prompt
    error_of(http.post("/detokenize", json={"tokens": [10**6]}), 400)


@pytest.mark.parametrize(
    ("route", "field", "wrap"),
    [
        (CHAT, "messages", lambda text: [{"role": "user", "content": text}]),
        ("/v1/completions", "prompt", str),
        ("/v1/completions", "prompt", lambda text: ["short", text]),
        ("/tokenize", "prompt", str),
        ("/tokenize", "messages", lambda text: [{"role": "user", "content": text}]),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    server: Serving, http: httpx.Client, route: str, field: str, wrap: Callable[[str], object]
) -> None:
    text = "word " * 200_000
    assert server.state.tokenizer.least_tokens([text]) > server.engine.info.max_model_len
    error = error_of(http.post(route, json={field: wrap(text)}), 400)
    assert "max_model_len is 4096 tokens, but the text has 1000" in error["message"]
    assert "at least" in error["message"] and "output" not in error["message"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_more_ids_than_a_context_holds_are_not_detokenized(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": [300] * 4096}).status_code == 200
    error = error_of(http.post("/detokenize", json={"tokens": [300] * 4097}), 400)
    assert "4097 token ids are given, max_model_len is 4096" in error["message"]
    assert error["param"] == "tokens"


def test_health_ready_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").status_code == 200
    assert http.get("/version").json() == {"version": "0.0.0"}


def test_metrics_parse_and_count(server: Serving, http: httpx.Client) -> None:
    def read() -> dict[str, float]:
        response = http.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(response.text)
        return {
            sample.name + "".join(sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
        }

    before = read()
    for _ in range(3):
        http.post(CHAT, json=HELLO)
    after = read()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown(f"longread:request_success_total{MODEL}length") == 3
    assert grown(f"longread:time_to_first_token_seconds_count{MODEL}") == 3
    assert grown(f"longread:e2e_request_latency_seconds_count{MODEL}") == 3
    assert grown(f"longread:request_queue_time_seconds_count{MODEL}") == 3
    assert grown(f"longread:request_time_per_output_token_seconds_count{MODEL}") == 3
    assert grown(f"longread:inter_token_latency_seconds_count{MODEL}") == 6
    assert grown(f"longread:generation_tokens_total{MODEL}") == 9
    assert grown(f"longread:prompt_tokens_total{MODEL}") > 0
    assert grown(f"longread:http_responses_total{CHAT}200") == 3
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "memory_predicted_bytes"):
        assert after[f"longread:{name}{MODEL}"] == 0
    assert f"longread:prefix_cache_queries_total{MODEL}" in after
    for reason in ("queue_full", "queued_tokens", "predicted_wait", "deadline"):
        assert after["longread:admission_rejections_total" + "".join(sorted((MODEL, reason)))] == 0
    assert grown(f"longread:requests_accepted_total{MODEL}") == 3
    assert after[f"longread:num_queued_tokens{MODEL}"] == 0


def test_many_prompts_in_one_call_are_bounded(http: httpx.Client) -> None:
    error = error_of(http.post("/v1/completions", json={"prompt": ["a"] * 100, "n": 128}), 400)
    assert "100 prompts" in error["message"] and "2048" in error["message"]


def test_scanners_create_no_series(http: httpx.Client) -> None:
    http.get("/wp-admin/1")
    http.get("/wp-admin/2")
    assert "wp-admin" not in http.get("/metrics").text


def test_continuous_usage_and_keep_of_the_stream_end(http: httpx.Client) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    lines = [line for line in http.post(CHAT, json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3
    assert chunks[-1]["timings"]["e2e_ms"] >= chunks[-1]["timings"]["ttft_ms"]


def test_keys_guard_everything_but_health() -> None:
    options = ServerOptions(api_key=("first", "second", *(f"key {i}" for i in range(1000)), "first"))
    with serving(options=options) as running, httpx.Client(base_url=running.url, timeout=10) as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first"},
            {"Authorization": "Basic first"},
        ):
            response = http.post(CHAT, json=HELLO, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert "first" not in response.text
        error_of(http.get("/metrics"), 401)
        error_of(http.get("/no/such/route"), 401)
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        for key in ("first", "second", "key 999"):
            assert http.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_cors_is_off_unless_told() -> None:
    origin = {"Origin": "https://app.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    with serving() as running:
        response = httpx.get(f"{running.url}/health", headers=origin)
        assert "access-control-allow-origin" not in response.headers
        assert httpx.options(f"{running.url}{CHAT}", headers=preflight).status_code == 405
    with serving(options=ServerOptions(allowed_origins=("https://app.example",), api_key=("k",))) as running:
        response = httpx.options(f"{running.url}{CHAT}", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-origin" not in httpx.get(
            f"{running.url}/health", headers={"Origin": "https://evil.example"}
        ).headers  # fmt: skip


def test_a_loading_server_answers_503_and_then_serves() -> None:
    loading = threading.Event()
    with serving(loading=loading) as running, httpx.Client(base_url=running.url, timeout=10) as http:
        assert http.get("/health").status_code == 200
        error_of(http.get("/ready"), 503)
        response = http.post(CHAT, json=HELLO)
        assert error_of(response, 503)["code"] == "model_loading"
        assert "Retry-After" in response.headers
        assert "num_requests_running" not in http.get("/metrics").text
        loading.set()
        assert wait_until(lambda: http.get("/ready").status_code == 200)
        assert http.post(CHAT, json=HELLO).status_code == 200


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    gate = threading.Semaphore(0)
    options = ServerOptions(limits=Limits(max_num_queued_reqs=1))
    with serving(options=options, gate=gate, max_num_seqs=1) as running, httpx.Client(base_url=running.url) as http:
        answers: list[int] = []
        waiting = [
            threading.Thread(target=lambda: answers.append(httpx.post(running.url + CHAT, json=HELLO).status_code))
            for _ in range(2)
        ]
        for thread in waiting:
            thread.start()
        assert wait_until(lambda: running.pending() == 2)
        response = http.post(CHAT, json=HELLO)
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["Retry-After"] == "1"
        assert (
            'longread:admission_rejections_total{model_name="fake",reason="queue_full"} 1.0'
            in http.get("/metrics").text
        )
        gate.release(1000)
        for thread in waiting:
            thread.join(10)
        assert answers == [200, 200]


def test_more_choices_than_the_server_ever_holds_are_the_requests_fault() -> None:
    with (
        serving(options=ServerOptions(limits=Limits(max_num_queued_reqs=1)), max_num_seqs=1) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        error = error_of(http.post(CHAT, json=HELLO | {"n": 3}), 400)
        assert "asks for 3 answers at once, but this server holds at most 2" in error["message"]
        assert error["param"] == "n"
        assert http.post(CHAT, json=HELLO | {"n": 2}).status_code == 200
        assert running.pending() == 0


@pytest.mark.parametrize(
    ("field", "constraint"),
    [
        ("structured_outputs", {"json": {"type": "bad"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "bad"}}}),
    ],
)
def test_a_grammar_error_names_the_field_that_was_sent(
    http: httpx.Client, field: str, constraint: dict[str, object]
) -> None:
    assert error_of(http.post(CHAT, json=HELLO | {field: constraint}), 400)["param"] == field


def test_a_broken_engine_fails_its_requests_and_turns_health_red() -> None:
    with serving(fail_at_step=3) as running, httpx.Client(base_url=running.url, timeout=10) as http:
        body = {**HELLO, "max_tokens": 50}
        assert error_of(http.post(CHAT, json=body), 500)["code"] == "engine_failed"
        assert http.get("/health").status_code == 503
        error_of(http.post(CHAT, json=body), 500)
        assert running.pending() == 0


def test_a_broken_engine_ends_a_stream_with_an_error() -> None:
    with serving(fail_at_step=3) as running:
        text = httpx.post(running.url + CHAT, json={**HELLO, "max_tokens": 50, "stream": True}).text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_failed"


def test_a_bug_is_a_500_without_a_traceback(monkeypatch: pytest.MonkeyPatch, server: Serving) -> None:
    def broken(self: object) -> bytes:
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr(type(server.state.metrics), "render", broken)
    response = httpx.get(f"{server.url}/metrics", headers={"X-Request-Id": "bug-1"})
    assert "bug-1" in error_of(response, 500)["message"]
    assert "secret" not in response.text
    monkeypatch.undo()
    assert httpx.get(f"{server.url}/metrics").status_code == 200


def test_stopping_ends_open_streams_and_the_server() -> None:
    with serving(max_model_len=10**7) as running:
        with httpx.stream(
            "POST", running.url + CHAT, json={**HELLO, "max_tokens": 10**6, "stream": True}, timeout=10
        ) as response:
            lines = response.iter_lines()
            next(lines)
            asyncio.run_coroutine_threadsafe(_close(running), running.loop).result(10)
            said = list(lines)
        assert "shutting down" in "\n".join(said)
        assert "data: [DONE]" in said


async def _close(running: Serving) -> None:
    await running.state.driver.close(0.1)


async def test_requests_with_random_disconnects_leave_nothing(server: Serving) -> None:
    chance = random.Random(5)
    server.answers.text = None
    host, port = server.url.removeprefix("http://").split(":")
    endings = {"full": 0, "left": 0}
    at_once = asyncio.Semaphore(50)

    async def one(number: int) -> None:
        fields = {
            "prompt": [7 + number % 500, 8, 9],
            "max_tokens": chance.choice([1, 5, 100]),
            "stream": chance.random() < 0.5,
            "n": chance.choice([1, 1, 2]),
        }
        leave_after = chance.choice([None, None, 0.0, 0.002, 0.01])
        body = json.dumps(fields)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        async with at_once:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write((head + body).encode())
                async with asyncio.timeout(leave_after):
                    answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"finish_reason" in answer
                endings["full"] += 1
            except TimeoutError:
                endings["left"] += 1
            finally:
                writer.transport.abort()

    await asyncio.gather(*map(one, range(250)))
    assert endings["full"] > 50 and endings["left"] > 50, endings
    assert await asyncio.to_thread(wait_until, lambda: server.pending() == 0)
    assert await asyncio.to_thread(wait_until, lambda: not server.engine.has_work())
    assert httpx.post(server.url + CHAT, json=HELLO).status_code == 200


def test_options_refuse_what_cannot_work() -> None:
    from longread.spec.errors import ConfigError

    for bad in ({"port": 70000}, {"max_body_bytes": 3}, {"api_key": (" ",)}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ServerOptions(**bad)
    assert not ServerOptions().exposed
    assert ServerOptions(host="0.0.0.0").exposed
    assert not replace(ServerOptions(host="0.0.0.0"), api_key=("k",)).exposed
