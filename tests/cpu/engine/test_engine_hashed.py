"""Prompts that come with their bytes and page hashes: same tokens, same reuse, and nothing hashed by the engine."""

import random
from array import array
from dataclasses import replace

import pytest
from toy_model import MLA_GROUPS, RING_GROUPS, VOCAB, toy_engine

from longread.kv import chain as chain_module
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages

ROOT = b"toy"
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def hashed_for(root, ids):
    data = array("i", ids).tobytes()
    return HashedTokens(root, data, hash_pages(root, data), min(ids), max(ids))


def prompts():
    draw = random.Random(3)
    document = [draw.randrange(2, VOCAB) for _ in range(1100)]
    return [
        tuple(document[:cut] + [draw.randrange(2, VOCAB) for _ in range(draw.choice([1, 5, 300]))])
        for cut in (0, 10, 255, 256, 600, 1024, 1100, 1024, 600, 256, 1100)
    ]


def run(groups, hashed):
    """Tokens and reused tokens of each prompt, asked one after the other."""
    engine, found = toy_engine(groups, num_pages=24), []
    for i, prompt in enumerate(prompts()):
        engine.submit(GenerationRequest(str(i), prompt, GREEDY, hashed(prompt)))
        tokens, end = [], None
        while end is None:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens.append(event.token_id)
                else:
                    end = event
        assert isinstance(end, FinishEvent) and end.reason == "length"
        found.append((tokens, end.cached_tokens))
    while engine.has_work():
        engine.step()  # audits the cache
    return found


@pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["rows", "rings"])
def test_hashes_that_come_along_change_nothing(groups):
    alone = run(groups, lambda prompt: None)
    assert sum(cached for _, cached in alone) > 2000
    assert run(groups, lambda prompt: hashed_for(ROOT, prompt)) == alone


@pytest.mark.parametrize(
    "wrong",
    [
        lambda prompt: hashed_for(b"another model", prompt),
        lambda prompt: hashed_for(ROOT, (*prompt[:-1], prompt[-1] ^ 1)),
        lambda prompt: hashed_for(ROOT, (*prompt, 5)),
        lambda prompt: replace(hashed_for(ROOT, prompt), hashes=tuple(b"x" * 16 for _ in range(len(prompt) // 256))),
    ],
    ids=["root", "tokens", "length", "hashes"],
)
def test_hashes_of_something_else_are_not_used(wrong):
    found = run(MLA_GROUPS, lambda prompt: wrong(prompt) if len(prompt) >= PAGE_TOKENS else None)
    assert found == run(MLA_GROUPS, lambda prompt: None)


def test_the_engine_hashes_no_prompt_page_that_came_along(monkeypatch):
    hashed = []
    original = chain_module.page_hash
    monkeypatch.setattr(chain_module, "page_hash", lambda *a: hashed.append(1) or original(*a))
    run(MLA_GROUPS, lambda prompt: hashed_for(ROOT, prompt))
    assert not hashed
    run(MLA_GROUPS, lambda prompt: None)
    assert hashed
