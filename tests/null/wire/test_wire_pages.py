"""Page identities made beside the tokens are those that the cache makes."""

import random
from array import array

import pytest

from longread.spec.state import PAGE_TOKENS, hash_pages
from longread.wire import pages as module
from longread.wire.pages import KEPT_PROMPTS, PageHasher, shared_pages

ROOT = b"r" * 16


def data_of(seed, count):
    return array("i", random.Random(seed).choices(range(129280), k=count)).tobytes()


@pytest.mark.parametrize("count", [1, 255, 256, 70 * PAGE_TOKENS, 70 * PAGE_TOKENS + 1])
def test_hashed_as_the_cache_hashes(count):
    data = data_of(count, count)
    made, found = PageHasher().hash(ROOT, data)
    ids = memoryview(data).cast("i").tolist()
    assert made.hashes == hash_pages(ROOT, data) and (made.least, made.most) == (min(ids), max(ids))
    assert made.fits(ROOT, ids) and found == tuple(ids)


def test_what_is_shared_with_a_recent_prompt_is_not_hashed_again(monkeypatch):
    hasher, draw, known = PageHasher(), random.Random(0), []
    monkeypatch.setattr(
        module, "hash_pages", lambda root, data, seen=(): known.append(len(seen)) or hash_pages(root, data, seen)
    )
    document = data_of(1, 100 * PAGE_TOKENS + 17)
    hasher.hash(ROOT, document)
    for _ in range(60):
        cut = 4 * draw.randrange(len(document) // 4)
        prompt = document[:cut] + data_of(draw.random(), draw.randrange(1, 90 * PAGE_TOKENS))
        root = draw.choice([ROOT, ROOT, b"q" * 16])
        made, ids = hasher.hash(root, prompt)
        assert made.hashes == hash_pages(root, prompt) and array("i", ids).tobytes() == prompt == made.data
    assert sum(known) > 30 * 30  # many found something
    known.clear()
    assert hasher.hash(ROOT, document)[0].hashes == hash_pages(ROOT, document)
    assert hasher.hash(ROOT, document + b"\1\0\0\0" * 300)[0].hashes[:100] == hash_pages(ROOT, document)
    assert known[1] == 100
    assert hasher.hash(b"z" * 16, document)[0].hashes == hash_pages(b"z" * 16, document)
    assert known[2] == 0


def test_what_is_kept_is_bounded(monkeypatch):
    hasher = PageHasher()
    for seed in range(40):
        hasher.hash(ROOT, data_of(seed, 70 * PAGE_TOKENS))
    assert len(hasher._kept) == KEPT_PROMPTS
    monkeypatch.setattr(module, "KEPT_BYTES", 3 * 80 * PAGE_TOKENS * 40)
    hasher.hash(ROOT, data_of(99, 80 * PAGE_TOKENS))
    assert 10 * sum(len(kept.data) for kept, _ in hasher._kept) <= module.KEPT_BYTES
    hasher.hash(ROOT, data_of(100, 900 * PAGE_TOKENS))
    assert hasher._kept == []


def test_a_prompt_that_goes_on_takes_the_place_of_its_beginning():
    hasher, document = PageHasher(), data_of(1, 200 * PAGE_TOKENS)
    for end in range(70, 200, 10):
        hasher.hash(ROOT, document[: 4 * PAGE_TOKENS * end])
    assert len(hasher._kept) == 1


@pytest.mark.parametrize("same", [0, 1, 2, 3, 7, 31, 32])
@pytest.mark.parametrize("rest", [0, 1, 5])
def test_shared_pages(same, rest):
    size = 4 * PAGE_TOKENS
    a, b = b"s" * (same * size) + b"a" * (rest * size + 9), b"s" * (same * size) + b"b" * (rest * size)
    assert shared_pages(a, b) == shared_pages(b, a) == same
