"""Prompts as raw ids, and what the engine is given of every prompt: its bytes and page hashes."""

import struct
from array import array
from collections.abc import Iterator

import httpx
import pytest
from serving import MODEL, Serving, serving

from longread.spec.state import hash_pages

ROOT = b"the root of all!"
IDS = [i * 37 % 1500 + 3 for i in range(3000)]
HEADERS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(cache_root=ROOT) as running:
        yield running


def post(server: Serving, content: bytes, **query: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", params=query, content=content, headers=HEADERS, timeout=20)


def packed(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def test_ids_as_bytes_are_ids_in_json(server: Serving) -> None:
    fields = {"model": MODEL, "max_tokens": 5, "temperature": 0, "seed": 7, "return_token_ids": True}
    plain = httpx.post(f"{server.url}/v1/completions", json={**fields, "prompt": IDS}, timeout=20).json()
    raw = post(server, packed(IDS), **{k: str(v).lower() for k, v in fields.items()}).json()
    assert raw["choices"] == plain["choices"]
    assert raw["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] == len(IDS)
    assert raw["prompt_token_ids"] == plain["prompt_token_ids"] == [IDS]
    first, second = server.answers.seen[-2:]
    assert first.prompt == second.prompt and first.sampling == second.sampling and first.hashed == second.hashed


def test_a_stream_of_ids(server: Serving) -> None:
    answer = post(server, packed(IDS[:5]), stream="true", max_tokens=2)
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.text.endswith("[DONE]\n\n")


@pytest.mark.parametrize(
    ("content", "query", "said"),
    [
        (b"", {}, "empty"),
        (b"abc", {}, "3 bytes"),
        (packed([5, 10**6]), {}, "token id 1000000 at position 1"),
        (packed([5, -1]), {}, "token id -1 at position 1"),
        (packed([5] * 5000), {}, "5000 token ids are given, max_model_len is 4096"),
        (packed([5]), {"prompt": "x"}, "the body holds its ids"),
        (packed([5]), {"max_tokens": "many"}, "max_tokens"),
        (packed([5]), {"max_tokenz": "8"}, "max_tokenz"),
        (packed([5]), {"model": "other"}, "not served"),
    ],
)
def test_refusals(server: Serving, content: bytes, query: dict, said: str) -> None:
    answer = post(server, content, **query)
    assert answer.status_code in (400, 404), answer.text
    assert said in answer.json()["error"]["message"]


def test_other_routes_take_json_only(server: Serving) -> None:
    for route in ("/v1/chat/completions", "/tokenize"):
        answer = httpx.post(server.url + route, content=packed([5]), headers=HEADERS)
        assert answer.status_code == 400 and answer.json()["error"]["message"].endswith("send application/json")
    answer = httpx.post(f"{server.url}/v1/completions", content=b"x", headers={"content-type": "text/plain"})
    assert answer.json()["error"]["message"].endswith("send application/json or application/octet-stream")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}]}),
        ("/v1/completions", {"prompt": "word " * 9000}),
        ("/v1/completions", {"prompt": IDS}),
        ("/v1/completions", {"prompt": [7]}),
    ],
)
def test_the_engine_is_given_bytes_and_hashes(route: str, body: dict) -> None:
    with serving(cache_root=ROOT, max_model_len=100_000) as server:
        for _ in range(2):
            answer = httpx.post(server.url + route, json={**body, "max_tokens": 1, "n": 2}, timeout=20)
            assert answer.status_code == 200, answer.text
        for request in server.answers.seen:
            data = array("i", request.prompt).tobytes()
            hashed = request.hashed
            assert hashed is not None and hashed.fits(ROOT, request.prompt)
            assert (hashed.data, hashed.hashes) == (data, hash_pages(ROOT, data))
            assert (hashed.least, hashed.most) == (min(request.prompt), max(request.prompt))
