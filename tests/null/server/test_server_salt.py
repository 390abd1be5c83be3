"""``cache_salt`` over HTTP: chat, completions, raw ids; refusals; what the engine is given."""

import json
from collections.abc import Iterator

import httpx
import pytest
from serving import Serving, serving
from shelf import MemoryShelf

from longread.spec.state import hash_pages, salted_root

ROOT = b"the root of all!"
TEXT = "word " * 900


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(cache_root=ROOT) as running:
        yield running


def ask(server: Serving, way: str, salt: object, text: str = TEXT) -> httpx.Response:
    body: dict = {"max_tokens": 2, "temperature": 0} | ({} if salt is ... else {"cache_salt": salt})
    if way == "chat":
        body["messages"] = [{"role": "user", "content": text}]
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20)
    if way == "completions":
        return httpx.post(f"{server.url}/v1/completions", json=body | {"prompt": text}, timeout=20)
    query = {name: json.dumps(value) for name, value in body.items()}
    ids = b"".join((number % 900 + 300).to_bytes(4, "little") for number in range(len(text) // 4))
    headers = {"content-type": "application/octet-stream"}
    return httpx.post(f"{server.url}/v1/completions", params=query, content=ids, headers=headers, timeout=20)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("way", ["chat", "completions", "ids"])
def test_the_same_salt_shares_and_another_does_not(server: Serving, way: str) -> None:
    salts = [..., "a", "b", "ключ 🔑", " ", "1"]
    assert [cached(ask(server, way, salt)) for salt in salts] == [0] * len(salts)
    assert all(cached(ask(server, way, salt)) > 256 for salt in salts)
    assert cached(ask(server, way, None)) > 256  # null is none, as in vLLM
    for request, salt in zip(server.answers.seen[-7:], [*salts, None], strict=True):
        salt = None if salt is ... else salt
        assert request.cache_salt == salt and request.hashed is not None
        assert request.hashed.root == salted_root(ROOT, salt)
        assert request.hashed.hashes == hash_pages(salted_root(ROOT, salt), request.hashed.data)


@pytest.mark.parametrize("way", ["chat", "completions", "ids"])
@pytest.mark.parametrize("salt", ["", 7, True, ["a"], {"a": 1}, "x" * 1025])
def test_what_is_no_salt_is_refused(server: Serving, way: str, salt: object) -> None:
    answer = ask(server, way, salt)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt", answer.text


def test_a_stored_document_has_no_salt() -> None:
    shelf = MemoryShelf(ROOT, "fake")
    with serving(cache_root=ROOT, shelf=shelf) as running:
        document = shelf.add(TEXT, name="words", tokens=range(3, 600), pinned=False)
        content = [{"type": "document", "document_id": document.id}, {"type": "text", "text": "?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answers = [
            httpx.post(f"{running.url}/v1/chat/completions", json=body | more, timeout=20)
            for more in ({}, {"cache_salt": None}, {"cache_salt": "a"})
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        error = answers[2].json()["error"]
        assert error["param"] == "cache_salt" and "without a salt" in error["message"]
