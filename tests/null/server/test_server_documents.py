"""The document routes over a shelf in memory, and requests that name documents."""

import itertools
import threading
from dataclasses import replace

import httpx
import pytest
from serving import Serving, serving, wait_until
from shelf import MemoryShelf

from longread.server import named, reading
from longread.server.fake import FakeEngine
from longread.server.options import ServerOptions
from longread.wire.documents.prefix import document_pieces

TEXT = "Clause 1. The rent is 1,200.\n" * 40
ROUTE = "/v1/longread/documents"


@pytest.fixture(scope="module")
def shelf():
    return MemoryShelf()


@pytest.fixture(scope="module")
def server(shelf):
    with serving(shelf=shelf, max_model_len=8192) as running:
        yield running


@pytest.fixture(autouse=True)
def reset(request, shelf):
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.answers.seen.clear()
    shelf.full = shelf.broken = shelf.damaged = False
    shelf.written = True


def post(server: Serving, **body: object) -> httpx.Response:
    return httpx.post(server.url + ROUTE, json=body, timeout=20)


def ask(server: Serving, *parts: object, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)


def part(document_id: str) -> dict[str, str]:
    return {"type": "document", "document_id": document_id}


def test_a_document_whose_state_was_evicted_is_incomplete(server, shelf):
    key = post(server, text="Clause 7. " * 300).json()["id"]
    document, kept = shelf._kept[key]
    for whole, status in ((False, "incomplete"), (True, "ready")):
        shelf._kept[key] = replace(document, whole=whole), kept
        one = httpx.get(f"{server.url}{ROUTE}/{key}").json()
        listed = next(each for each in httpx.get(server.url + ROUTE).json()["data"] if each["id"] == key)
        assert one["status"] == listed["status"] == status
        assert ask(server, part(key), text("Why?")).status_code == 200
    shelf.remove(key)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_read_in_then_asked_by_id_and_by_text(server):
    answer = post(server, text=TEXT, name="lease.txt")
    assert answer.status_code == 200
    document = answer.json()
    assert (document["status"], document["name"], document["bytes"]) == ("ready", "lease.txt", len(TEXT.encode()))
    assert document["object"] == "longread.document"
    assert document["id"].startswith("doc-")
    assert document["pinned"] is False
    prefix = tuple(server.state.tokenizer.encode_prompt(document_pieces(TEXT, server.state.encoding)))
    assert document["tokens"] == len(prefix)
    assert [request.prompt for request in server.answers.seen] == [prefix]
    assert server.answers.seen[0].sampling.max_tokens == 1
    assert ask(server, part(document["id"]), text("How much?")).status_code == 200
    answer = ask(server, text(TEXT), text("How much?"))
    by_id, by_text = server.answers.seen[1:]
    assert by_id.prompt == by_text.prompt
    assert by_id.prompt[: len(prefix)] == prefix
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prefix) // 256 * 256


def test_named_documents_in_tokenize(server):
    key = post(server, text=TEXT).json()["id"]
    counts = [
        httpx.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in ([part(key), text("?")], [text(TEXT), text("?")])
    ]
    assert counts[0] == counts[1]


def test_the_same_text_is_the_same_document(server):
    first = post(server, text=TEXT + "x", name="a").json()
    again = post(server, text=TEXT + "x", name="b", pinned=True).json()
    assert again["id"] == first["id"]
    assert (again["name"], again["pinned"]) == ("b", True)
    assert again["reused_tokens"] > 0
    third = post(server, text=TEXT + "x").json()
    assert (third["pinned"], third["name"]) == (True, third["id"])
    listed = httpx.get(server.url + ROUTE).json()["data"]
    assert [entry["id"] for entry in listed].count(first["id"]) == 1


def test_get_list_and_delete(server):
    document = post(server, text="A short one.", name="short").json()
    found = httpx.get(f"{server.url}{ROUTE}/{document['id']}")
    assert found.status_code == 200
    assert found.json() == {k: v for k, v in document.items() if k != "reused_tokens"}
    assert document["id"] in [entry["id"] for entry in httpx.get(server.url + ROUTE).json()["data"]]
    gone = httpx.delete(f"{server.url}{ROUTE}/{document['id']}")
    assert gone.json() == {"id": document["id"], "object": "longread.document", "deleted": True}
    assert httpx.delete(f"{server.url}{ROUTE}/{document['id']}").status_code == 404
    assert httpx.get(f"{server.url}{ROUTE}/{document['id']}").status_code == 404
    assert ask(server, part(document["id"])).status_code == 404


def test_an_unknown_id_is_answered_with_near_ones(server):
    key = post(server, text="Another short one.", name="notes.md").json()["id"]
    typo = key[:-1] + ("0" if key[-1] != "0" else "1")
    for given in (typo, "notes.md"):
        answer = ask(server, text("x"), part(given))
        error = answer.json()["error"]
        assert answer.status_code == 404
        assert error["param"] == "messages[0].content[1].document_id"
        assert error["code"] == "document_not_found"
        assert f"did you mean {key} ('notes.md')?" in error["message"]
    answer = ask(server, part("\u0000" * 5000))
    assert answer.status_code == 404
    assert len(answer.json()["error"]["message"]) < 1200
    assert httpx.get(f"{server.url}{ROUTE}/nothing/like/it").status_code == 404


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "text", "required"),
        ({"text": " \n"}, "text", "empty"),
        ({"text": 5}, "text", "string"),
        ({"text": "x", "name": ""}, "name", "at least 1"),
        ({"text": "x", "name": "n" * 201}, "name", "at most 200"),
        ({"text": "x", "name": "a\nb"}, "name", "printable"),
        ({"text": "x", "pinned": "yes"}, "pinned", "bool"),
        ({"text": "x", "title": "t"}, "title", "Extra"),
        ({"text": "x", "model": "other"}, "model", "not served"),
        ({"text": "a b " * 9000}, "text", "max_model_len is 8192"),
        ({"text": "a b " * 4096}, "text", "8192"),
    ],
)
def test_what_cannot_be_read_in_is_refused(server, body, param, says):
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert error["param"] == param
    assert says in error["message"]
    assert server.pending() == 0


def test_many_and_long_documents_are_refused(server, monkeypatch):
    key = post(server, text=TEXT).json()["id"]
    answer = ask(server, *(part(f"doc-{i}") for i in range(named.MAX_NAMED + 1)))
    assert (answer.status_code, "65 documents" in answer.text) == (400, True)
    assert ask(server, *[part(key)] * 3).status_code == 200  # one document, however often it is named
    options = ServerOptions(max_body_bytes=1024)
    with serving(shelf=server.state.shelf, options=options) as small:
        answer = ask(small, part(key))
        assert answer.status_code == 413
        assert "the limit is 1024" in answer.json()["error"]["message"]


def test_a_document_named_often_is_refused_before_its_text_is_there(server, shelf, monkeypatch):
    key = post(server, text=TEXT).json()["id"]
    size = len(TEXT.encode())
    unpacked: list[str] = []
    text_of = shelf.text
    monkeypatch.setattr(shelf, "text", lambda document_id: unpacked.append(document_id) or text_of(document_id))
    with serving(shelf=shelf, options=ServerOptions(max_body_bytes=3 * size), max_model_len=8192) as small:
        assert ask(small, *[part(key)] * 3).status_code == 200
        assert unpacked == [key]
        answer = ask(small, *[part(key)] * 4)
        assert answer.status_code == 413
        assert f"{4 * size} bytes" in answer.json()["error"]["message"]
        tokenize = {"messages": [{"role": "user", "content": [part(key)]}] * 4}
        assert httpx.post(f"{small.url}/tokenize", json=tokenize).status_code == 413
    assert unpacked == [key]


def test_without_a_store():
    with serving() as plain:
        for answer in (
            post(plain, text="x"),
            httpx.get(plain.url + ROUTE),
            httpx.delete(f"{plain.url}{ROUTE}/doc-1"),
            ask(plain, part("doc-1")),
        ):
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "no_document_store"
            assert "--store" in answer.json()["error"]["message"]


def test_a_failing_store_is_told_without_paths(server, shelf, caplog):
    key = post(server, text=TEXT).json()["id"]
    shelf.full = True
    answer = post(server, text="Something new.")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_failed")
    shelf.full = False
    failed = [entry for entry in httpx.get(server.url + ROUTE).json()["data"] if entry["status"] == "failed"]
    assert failed[0]["error"]["code"] == "store_failed"
    assert httpx.get(f"{server.url}{ROUTE}/{failed[0]['id']}").json()["status"] == "failed"
    assert post(server, text="Something new.").json()["status"] == "ready"
    shelf.broken = True
    server.answers.seen.clear()
    assert post(server, text="Not even begun.").json()["error"]["code"] == "store_failed"
    assert not server.answers.seen
    for answer in (ask(server, part(key)), httpx.get(server.url + ROUTE), httpx.get(f"{server.url}{ROUTE}/{key}")):
        assert answer.status_code == 503
        assert "/secret" not in answer.text
        assert "StoreFullError" in answer.text
    assert "/secret/path" in caplog.text  # the operator's log has it


def test_a_damaged_text_is_told(server, shelf):
    key = post(server, text=TEXT).json()["id"]
    shelf.damaged = True
    answer = ask(server, part(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "document_not_found")
    assert "damaged in the store: read it in again" in answer.json()["error"]["message"]


def test_the_shelf_is_never_asked_on_the_loop(server, shelf):
    shelf.threads.clear()
    key = post(server, text="A third one.").json()["id"]
    ask(server, part(key))
    httpx.get(server.url + ROUTE)
    httpx.get(f"{server.url}{ROUTE}/{key}")
    httpx.delete(f"{server.url}{ROUTE}/{key}")
    assert shelf.threads
    assert "test-server" not in shelf.threads


class TestReading:
    """Documents on their way, on an engine whose steps the test releases."""

    @pytest.fixture
    def gate(self):
        return threading.Semaphore(0)

    @pytest.fixture
    def slow(self, gate):
        with serving(shelf=MemoryShelf(), gate=gate) as running:
            yield running
            for _ in range(100):
                gate.release()

    def test_without_waiting(self, slow, gate):
        answer = post(slow, text=TEXT, name="lease", wait=False)
        assert answer.status_code == 202
        key = answer.json()["id"]
        told = httpx.get(f"{slow.url}{ROUTE}/{key}").json()
        assert (answer.json()["status"], told["status"], told["tokens_read"]) == ("reading", "reading", 0)
        assert [entry["status"] for entry in httpx.get(slow.url + ROUTE).json()["data"]] == ["reading"]
        post(slow, text=TEXT, name="lease 2", pinned=True, wait=False)  # joins the first
        assert slow.pending() == 1
        for _ in range(4):
            gate.release()
        assert wait_until(lambda: httpx.get(f"{slow.url}{ROUTE}/{key}").json()["status"] == "ready")
        document = httpx.get(f"{slow.url}{ROUTE}/{key}").json()
        assert (document["name"], document["pinned"]) == ("lease 2", True)
        assert len(slow.answers.seen) == 1

    def test_it_can_be_named_while_it_is_read(self, slow, gate):
        key = post(slow, text=TEXT, wait=False).json()["id"]
        results: list[int] = []
        asking = threading.Thread(target=lambda: results.append(ask(slow, part(key), text("?")).status_code))
        asking.start()
        assert wait_until(lambda: len(slow.answers.seen) == 2 or slow.pending() == 2)
        for _ in range(10):
            gate.release()
        asking.join(10)
        assert results == [200]

    def test_it_goes_on_without_its_client(self, slow, gate):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(slow.url + ROUTE, json={"text": TEXT}, timeout=0.3)
        assert slow.pending() == 1
        for _ in range(4):
            gate.release()
        assert wait_until(lambda: [e["status"] for e in httpx.get(slow.url + ROUTE).json()["data"]] == ["ready"])

    def test_it_is_ready_when_it_is_stored_and_no_sooner(self, slow, gate):
        shelf = slow.state.shelf
        shelf.written = False
        key = post(slow, text=TEXT, wait=False).json()["id"]
        for _ in range(4):
            gate.release()
        assert wait_until(lambda: slow.pending() == 0)
        assert httpx.get(f"{slow.url}{ROUTE}/{key}").json()["status"] == "reading"
        assert shelf.list() == []
        shelf.written = True
        assert wait_until(lambda: httpx.get(f"{slow.url}{ROUTE}/{key}").json()["status"] == "ready")
        assert [document.id for document in shelf.list()] == [key]

    def test_deleting_it_stops_it(self, slow, gate):
        key = post(slow, text=TEXT, wait=False).json()["id"]
        assert httpx.delete(f"{slow.url}{ROUTE}/{key}").status_code == 200
        for _ in range(4):
            gate.release()
        assert httpx.get(f"{slow.url}{ROUTE}/{key}").status_code == 404
        assert wait_until(lambda: slow.pending() == 0)
        assert httpx.get(slow.url + ROUTE).json()["data"] == []
        assert httpx.delete(f"{slow.url}{ROUTE}/{key}").status_code == 404
        assert post(slow, text=TEXT).json()["status"] == "ready"  # it may come again

    def test_one_that_was_removed_while_it_was_entered_does_not_take_its_successor_along(self, slow, gate, monkeypatch):
        shelf, entering, go_on = slow.state.shelf, threading.Semaphore(0), threading.Semaphore(0)
        add = shelf.add

        def held(*given: object, **fields: object) -> object:
            document = add(*given, **fields)
            entering.release()
            assert go_on.acquire(timeout=10)
            return document

        monkeypatch.setattr(shelf, "add", held)
        for _ in range(8):
            gate.release()
        key = post(slow, text=TEXT, wait=False).json()["id"]
        assert entering.acquire(timeout=10)
        assert httpx.delete(f"{slow.url}{ROUTE}/{key}").status_code == 200
        assert post(slow, text=TEXT, wait=False).json()["status"] == "reading"
        assert wait_until(lambda: slow.pending() == 0)
        go_on.release(2)
        assert wait_until(lambda: httpx.get(f"{slow.url}{ROUTE}/{key}").json().get("status") == "ready")
        assert [document.id for document in shelf.list()] == [key]

    def test_one_that_is_removed_while_it_is_entered_is_gone(self, slow, gate, monkeypatch):
        shelf, add = slow.state.shelf, slow.state.shelf.add
        entering, go_on = threading.Semaphore(0), threading.Semaphore(0)

        def held(*given: object, **fields: object) -> object:
            entering.release()
            assert go_on.acquire(timeout=10)
            return add(*given, **fields)

        monkeypatch.setattr(shelf, "add", held)
        for _ in range(8):
            gate.release()
        key = post(slow, text=TEXT, wait=False).json()["id"]
        assert entering.acquire(timeout=10)
        assert httpx.delete(f"{slow.url}{ROUTE}/{key}").status_code == 200
        go_on.release()
        assert wait_until(lambda: slow.state.readings._tasks == set())
        assert shelf.list() == []

    def test_what_is_read_at_once_is_limited(self, gate):
        options = ServerOptions(max_body_bytes=2048)
        with serving(shelf=MemoryShelf(), gate=gate, options=options) as small:
            statuses = [post(small, text=f"{i}" + "x " * 900, wait=False).status_code for i in range(5)]
            assert statuses == [202, 202, 202, 202, 503]
            for _ in range(100):
                gate.release()


def test_what_the_store_does_not_keep_is_told(monkeypatch):
    monkeypatch.setattr(reading, "STORE_SECONDS", 0.05)
    shelf = MemoryShelf()
    shelf.written = False
    with serving(shelf=shelf) as full:
        answer = post(full, text=TEXT, pinned=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "document_not_kept")
        assert "--store-size" in answer.json()["error"]["message"]
        assert shelf.list() == []
        told = httpx.get(full.url + ROUTE).json()["data"][0]
        assert (told["status"], told["bytes"], told["tokens"] > 256) == ("failed", len(TEXT.encode()), True)
        kept = full.state.readings.find(told["id"])
        assert (kept.text, kept.ids, kept.hashed) == ("", (), None)
        shelf.written = True
        assert post(full, text=TEXT).json()["status"] == "ready"


def test_a_store_that_fails_meanwhile_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(reading, "FAULT_SECONDS", 0.05)
    counted, stats = itertools.count(), FakeEngine.stats
    monkeypatch.setattr(FakeEngine, "stats", lambda engine: replace(stats(engine), store_errors=next(counted)))
    shelf = MemoryShelf()
    shelf.written = False
    with serving(shelf=shelf) as failing:
        answer = post(failing, text=TEXT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "document_not_kept")
        assert "writing failed, see the server's log" in answer.json()["error"]["message"]


def test_an_engine_failure_is_the_documents_end():
    bos = serving_bos()
    with serving(shelf=MemoryShelf(), fail_requests=frozenset({bos})) as failing:
        answer = post(failing, text="x")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_failed")
        assert httpx.get(failing.url + ROUTE).json()["data"][0]["status"] == "failed"


def serving_bos() -> int:
    from serving import fixture_tokenizer

    return fixture_tokenizer().bos_id
