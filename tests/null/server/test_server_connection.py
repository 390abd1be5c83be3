"""What one connection may send besides one request at a time, and what is left of it when it goes."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from itertools import product

import pytest
from serving import Serving, serving, wait_until

from longread.server.protocol import MAX_PIPELINED

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


@pytest.fixture
def gate() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def server(gate: threading.Semaphore) -> Iterator[Serving]:
    with serving(gate=gate) as running:
        yield running
        gate.release(10**6)


def connection(server: Serving) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def asking(stream: bool = False, tokens: int = 3, *lines: bytes, chunked: bool = False) -> bytes:
    body = json.dumps({"prompt": "Hello", "max_tokens": tokens, "stream": stream, "ignore_eos": True}).encode()
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    head = (b"POST /v1/completions HTTP/1.1", b"Host: x", b"Content-Type: application/json", length, *lines)
    return b"\r\n".join((*head, b"", sent))


def rest(client: socket.socket) -> bytes:
    """Up to the end of the connection."""
    found = b""
    try:
        while data := client.recv(65536):
            found += data
    except ConnectionResetError:  # it was closed with bytes of ours unread
        pass
    return found


def until(client: socket.socket, text: bytes, count: int = 1) -> bytes:
    found = b""
    while found.count(text) < count:
        data = client.recv(65536)
        assert data, f"{text!r} did not come {count} times: {found!r}"
        found += data
    return found


def answer(client: socket.socket) -> bytes:
    """One that has a length."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    return client.recv(int(head.lower().partition(b"content-length: ")[2].split()[0]), socket.MSG_WAITALL)


def ends(server: Serving, gate: threading.Semaphore) -> bool:
    """Whether nothing is left of 2,000 tokens long before so many steps."""

    def step() -> bool:
        gate.release()
        return server.pending() == 0

    return wait_until(step, 3.0) and server.engine.steps < 1500


def test_pipelined_requests_are_answered_in_order(server: Serving, gate: threading.Semaphore) -> None:
    gate.release(10**6)
    with connection(server) as client:
        last = HEALTH[:-2] + b"Connection: close\r\n\r\n"
        client.sendall(asking(stream=True, tokens=40) + HEALTH + asking(tokens=4) + last)
        found = rest(client)
    parts = [part.partition(b"\r\n\r\n")[2] for part in found.split(b"HTTP/1.1 200 OK")[1:]]
    assert parts[0].count(b"data: ") >= 40 and parts[0].endswith(b"0\r\n\r\n")
    assert parts[1] == parts[3] == b'{"status":"ok"}' and json.loads(parts[2])["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("stream", "behind", "later"),
    [(True, b"", False), (True, HEALTH, False), (False, HEALTH, False), (False, asking() + HEALTH, True)],
)
def test_a_client_that_leaves_has_left_all_its_requests(
    server: Serving, gate: threading.Semaphore, stream: bool, behind: bytes, later: bool
) -> None:
    with connection(server) as client:
        client.sendall(asking(stream, 2000) + (b"" if later else behind))
        assert wait_until(lambda: server.pending() == 1)
        if later and behind:
            client.sendall(behind)
        gate.release(3)
        if stream:
            until(client, b"data: ", 2)
    assert ends(server, gate), "it is computed on for nobody"


def test_more_than_a_few_pipelined_requests_are_cut_off(server: Serving, gate: threading.Semaphore) -> None:
    with connection(server) as client:
        client.sendall(asking(tokens=2000))
        assert wait_until(lambda: server.pending() == 1)
        client.sendall(HEALTH * MAX_PIPELINED)
        time.sleep(0.05)
        assert server.pending() == 1
        client.sendall(HEALTH)
        assert rest(client) == b""
    assert ends(server, gate)


def test_garbage_stands_in_no_answer(server: Serving, gate: threading.Semaphore) -> None:
    with connection(server) as client:
        client.sendall(asking(stream=True, tokens=2000))
        gate.release(3)
        found = until(client, b"data: ", 2)
        client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        found += rest(client)
    assert found.count(b"HTTP/1.1") == 1
    assert ends(server, gate)


NO_HTTP = [
    b"\x16\x03\x01\x00\xa5\x01\x00\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT somewhere:443 HTTP/1.1\r\nHost: somewhere\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    asking(chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\nffffffffffffffffff\r\n",
    HEALTH[:-2] + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
]


def test_what_is_no_http_is_told_so(server: Serving) -> None:
    for sent in NO_HTTP:
        with connection(server) as client:
            client.sendall(sent)
            head, _, body = rest(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), sent
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("offer", [OFFER, (b"Connection: keep-alive, Upgrade", b"Upgrade: websocket")])
def test_an_offer_of_another_protocol_is_ignored_and_the_body_read(
    server: Serving, gate: threading.Semaphore, offer: tuple[bytes, ...]
) -> None:
    gate.release(10**6)
    with connection(server) as client:
        for chunked, apart in product((False, True), (False, True)):
            request = asking(False, 4, *offer, chunked=chunked)
            for part in request.partition(b"\r\n\r\n") if apart else (request,):
                client.sendall(part)
                time.sleep(0.02 * apart)
            assert b'"completion_tokens":4' in answer(client)
        client.sendall(asking(False, 4, b"Connection: Upgrade, Close", *offer[1:]))
        assert b'"completion_tokens":4' in rest(client)
