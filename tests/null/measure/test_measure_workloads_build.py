"""Workloads by name: the same asks for the same seed, options refused before any work, prefixes that are shared."""

import json
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.workloads import KINDS, Ask, build
from longread.measure.workloads.documents import plan
from longread.measure.workloads.sequence import GENERATOR, Asks, Kept
from longread.spec.errors import ConfigError

# What a seed gives: the first prompts' sha256. Whoever changes one of these raises GENERATOR in sequence.py.
PINS: dict[tuple[str, tuple[tuple[str, object], ...]], str] = {
    (
        "documents",
        (("isl", 2048), ("language", "mixed")),
    ): "0a7bad3d87e107871887df92f2cbc98546c79d0e433b1e1dc48daf92233286d6",
    (
        "documents",
        (("audience", "reader"), ("domains", "contract,statute,log,code,table"), ("isl", 1024)),
    ): "0c4f60371a1655ebf651174740dad7b55066635d7f36d4f491e8bb9efbf8869a",
    ("chat", (("language", "mixed"),)): "2717b3fc3d4c466849a3d2aa23075dc90b01a018d46679354182557eb6271e91",
    (
        "shared-prefix",
        (("prefixes", 2), ("prefix_len", 1024)),
    ): "d2dc5683b2c1a4851f7aeaa957ae74f930c9ad339c1804a8be308718584f4ec2",
    ("agent", (("sessions", 2), ("turns", 4))): "33daedff4359559e373bd4cb3b18259840549a0022dcc067db9a325db3f30cb4",
    (
        "mixed",
        (("isl_long", 4096), ("num_prompts", 16)),
    ): "ad7e9d49b7423f9f7e228ca466060f4e59d3fc041ad0c83351bffe6a2fc8cf0c",
    (
        "security",
        (("isl", 2048), ("language", "mixed")),
    ): "bf7e2682de2011b3bd67db1636f053b6c31b56166c87c66df641e0be14258e1f",
    (
        "random",
        (("vocab_size", 1000), ("range_ratio", 0.5)),
    ): "630c70f44bdab88953cbed95922e3885bbe41ec5fe974f0105a64162da9f87df",
}


def fake(path: Path) -> dict[str, dict[str, object]]:
    """Options that a workload cannot do without."""
    rows = [{"timestamp": 10 * n, "input_length": 700, "output_length": 9, "hash_ids": [1, n + 2]} for n in range(3)]
    (path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "own.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    return {
        "trace": {"path": path / "trace.jsonl"},
        "custom": {"path": path / "own.jsonl"},
        "random": {"vocab_size": 99},
    }


@pytest.mark.parametrize(("name", "options"), PINS)
def test_a_seed_gives_the_same_prompts_everywhere(name: str, options: tuple[tuple[str, object], ...]) -> None:
    made = build(name, dict(options))
    assert made.described["prompts_sha256"] == PINS[name, options], "prompts changed: raise GENERATOR and pin again"
    assert made.described["generator"] == GENERATOR


@pytest.mark.parametrize("name", KINDS)
def test_asks_are_the_same_in_any_order_and_another_seed_gives_others(name: str, tmp_path: Path) -> None:
    options = {"num_prompts": 12} if name not in ("agent", "custom", "trace") else {}
    options |= {"turns": 3, "sessions": 4} if name == "agent" else {}
    options |= {"isl": 2048} if name in ("documents", "security") else {}
    options |= {"isl_long": 2048, "long_share": 0.25} if name == "mixed" else {}
    options |= fake(tmp_path).get(name, {})
    one, again, other = build(name, options), build(name, options), build(name, {**options, "seed": 1})
    forwards = list(one.asks)
    backwards = [again.asks[place] for place in reversed(range(len(again.asks)))][::-1]
    assert forwards == backwards and len(forwards) == len(one.asks)
    assert len({ask.key for ask in forwards}) == len(forwards)
    if name != "custom":
        assert [ask.messages or ask.prompt for ask in other.asks] != [ask.messages or ask.prompt for ask in forwards]
    json.dumps(one.described)
    assert str(tmp_path) not in json.dumps(one.described)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("documnts", {}, "did you mean documents"),
        ("documents", {"quest": 1}, "did you mean questions"),
        ("documents", {"isl": 255}, "from 256 to 1,048,576"),
        ("documents", {"isl": 1 << 21}, "from 256 to 1,048,576"),
        ("documents", {"osl": 0}, "from 1 to"),
        ("documents", {"seed": -1}, "seed=-1"),
        ("documents", {"seed": 1.5}, "whole number"),
        ("documents", {"num_prompts": True}, "whole number"),
        ("documents", {"range_ratio": 1}, "below 1"),
        ("documents", {"range_ratio": "nan"}, "range_ratio"),
        ("documents", {"range_ratio": 0.5, "isl": "uniform:300:400"}, "needs a fixed isl"),
        ("documents", {"language": "fr"}, "en, zh, mixed"),
        ("documents", {"domains": "poem"}, "'poem'"),
        ("documents", {"domains": []}, "some of"),
        ("documents", {"questions": 3, "prefix_share": 0.5}, "give one"),
        ("documents", {"audience": "reader"}, "not taught report"),
        ("documents", {"tokenizer": "/nowhere/at/all"}, "cannot be read"),
        ("documents", {"tokenizer": 5}, "no encode"),
        ("random", {}, "vocab_size=N"),
        ("random", {"vocab_size": 99, "form": "chat"}, "take form=ids"),
        ("random", {"vocab_size": 99, "prefix_len": 1 << 20}, "at most 1,048,576"),
        ("mixed", {"long_share": 0.001}, "num_prompts >= 1000"),
        ("agent", {"turns": 512, "turn_tokens": "100K"}, "take fewer turns"),
        ("agent", {"system_tokens": 5}, "0 or at least 256"),
        ("trace", {}, "path=FILE"),
        ("custom", {}, "path=FILE"),
    ],
)
def test_bad_options_are_refused(name: str, options: Mapping[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(name, options)
    assert told in str(raised.value)


def text(ask: Ask) -> str:
    assert ask.messages is not None
    return "".join(str(message["content"]) for message in ask.messages)


def test_warm_questions_share_their_document_and_fresh_documents_nothing() -> None:
    asks = list(build("documents", {"isl": 2048, "questions": 3, "num_prompts": 9}).asks)
    assert [ask.kind for ask in asks] == ["document", "document-again", "document-again"] * 3
    for one, other in pairwise(asks):
        shared = next((i for i, (a, b) in enumerate(zip(text(one), text(other), strict=False)) if a != b), 0)
        same = one.key.split("/")[0] == other.key.split("/")[0]
        assert (shared > 5000) is same
    assert all(ask.expected is not None for ask in asks) and len({text(ask) for ask in asks}) == 9


@given(st.integers(1, 60), st.floats(0, 0.99), st.sampled_from(["grouped", "mixed"]), st.integers(0, 9))
def test_the_share_of_warm_asks_is_met(count: int, share: float, order: str, seed: int) -> None:
    documents = max(round(count * (1 - share)), 1)
    places = plan(count, documents, order, Random(seed))
    assert len({place.document for place in places}) == documents and len(set(places)) == count
    asked = Tally[int]()
    for place in places:  # a document's questions come in their order, and new documents by number
        assert place.question == asked[place.document] and place.document <= len(asked)
        asked[place.document] += 1
    assert max(asked.values()) - min(asked.values()) <= 1


@pytest.mark.parametrize("answers", [False, True])
def test_sessions_grow_by_prefix_and_are_openai_chats(answers: bool) -> None:
    made = build("agent", {"sessions": 3, "turns": 7, "answers": answers, "system_tokens": 300, "turn_tokens": 300})
    sessions: dict[str, list[Ask]] = {}
    for ask in made.asks:
        sessions.setdefault(str(ask.session), []).append(ask)
    assert [len(turns) for turns in sessions.values()] == [7, 7, 7]
    for turns in sessions.values():
        for before, after in pairwise(turns):
            assert before.messages is not None and after.messages is not None
            size = len(before.messages)
            assert after.messages[:size] == before.messages and len(after.messages) > size
        messages = turns[-1].messages or ()
        open_turns = [
            m for m in messages if m["role"] == "assistant" and m["content"] is None and "tool_calls" not in m
        ]
        assert len(open_turns) == (6 if answers else 0)
        calls = [call["id"] for message in messages for call in message.get("tool_calls", ())]
        assert calls == [message["tool_call_id"] for message in messages if message["role"] == "tool"]
        assert len(set(calls)) == len(calls) == (0 if answers else 4)
        assert bool(turns[0].extra.get("tools")) is not answers
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            assert json.loads(call["function"]["arguments"])["paths"]
        for turn in turns:  # where an answer is known, it stands in what the session has read last
            said = (turn.messages or ())[-1]
            assert (turn.expected is None) is (str(turn.key)[-1] not in "25")
            if turn.expected is not None and turn.expected.kind == "contains":
                assert turn.expected.text in said["content"]
    assert len({turns[0].messages[0]["content"] for turns in sessions.values() if turns[0].messages}) == 1


def test_mixed_has_its_shares() -> None:
    asks = list(build("mixed", {"num_prompts": 40, "long_share": 0.25, "isl_long": 4096, "questions": 2}).asks)
    kinds = Tally(ask.kind for ask in asks)
    assert kinds == {"short": 30, "long": 5, "long-again": 5}
    assert min(len(text(a)) for a in asks if a.kind != "short") > 8000


def test_shared_prefixes_are_shared() -> None:
    asks = list(build("shared-prefix", {"num_prompts": 9, "prefixes": 3, "prefix_len": 1024}).asks)
    systems = [ask.messages[0]["content"] for ask in asks if ask.messages]
    assert systems == systems[:3] * 3 and len(set(systems)) == 3
    assert len({text(ask) for ask in asks}) == 9


def test_random_ids_are_even_within_the_vocabulary_and_share_the_prefix() -> None:
    made = build("random", {"vocab_size": 50, "isl": 4000, "num_prompts": 5, "prefix_len": 64, "osl": 7})
    prompts: list[Sequence[int]] = [ask.prompt for ask in made.asks if isinstance(ask.prompt, tuple)]
    assert [len(prompt) for prompt in prompts] == [4064] * 5 and len({tuple(p[:64]) for p in prompts}) == 1
    counts = Tally(i for prompt in prompts for i in prompt[64:])
    assert set(counts) == set(range(50)) and sum((n - 400) ** 2 / 400 for n in counts.values()) < 95  # p = 1e-4
    assert made.asks[0].extra == {"ignore_eos": True} and made.asks[0].isl == 4064
    ranged = build("random", {"vocab_size": 50, "isl": 100, "osl": 40, "range_ratio": 0.5, "num_prompts": 200}).asks
    assert {len(ask.prompt or ()) for ask in ranged} <= set(range(50, 151)) and len({a.max_tokens for a in ranged}) > 20


def test_a_traces_equal_blocks_are_equal_text(tmp_path: Path) -> None:
    path = fake(tmp_path)["trace"]
    for form in ("ids", "text"):
        asks = list(build("trace", {**path, "form": form, "vocab_size": 500}).asks)
        said = [ask.prompt if form == "ids" else str(ask.prompt).split() for ask in asks]
        assert [len(each or ()) for each in said] == [700] * 3 and [ask.at for ask in asks] == [0.0, 0.01, 0.02]
        assert len({tuple(each[:512]) for each in said if each}) == 1
        assert len({tuple(each[512:]) for each in said if each}) == 3


@pytest.mark.parametrize("language", ["en", "zh"])
def test_findings_are_where_the_answers_say(language: str) -> None:
    asks = list(build("security", {"isl": 4096, "num_prompts": 60, "questions": 5, "language": language}).asks)
    absent = 0
    for ask in asks:
        material, question = text(ask), text(ask).splitlines()[-1]
        expected = ask.expected
        assert expected is not None
        absent += expected.kind == "absent"
        if "SQL" in question:
            joined = [body for body in material.split("def ") if "+ request.args" in body and "SELECT" in body]
            assert len(joined) == (expected.kind != "absent")
            assert all(body.startswith(f"{expected.text}(") for body in joined)
        if "wheel" in question:
            added = [line for line in material.splitlines() if "added to group wheel" in line]
            assert len(added) == (expected.kind != "absent") and all(expected.text in line for line in added)
        if "after many failed" in question or "多次登录失败" in question:
            failed = Tally(line.split(" from ")[1].split()[0] for line in material.splitlines() if "Failed" in line)
            entered = {line.split(" from ")[1].split()[0] for line in material.splitlines() if "Accepted" in line}
            both = [address for address, times in failed.items() if times > 2 and address in entered]
            assert both == ([expected.text] if expected.kind != "absent" else [])
    assert 10 < absent < 40
    log = next(text(ask) for ask in asks if "sshd" in text(ask)).splitlines()
    stamps = [line.split()[0] for line in log if line.startswith("2025")]
    assert stamps == sorted(stamps)


def test_documents_are_kept_up_to_a_size_and_one_at_least() -> None:
    made: list[int] = []

    def make(key: int) -> str:
        made.append(key)
        return "x" * key

    kept = Kept(make, len, 10)
    for key in (4, 5, 4, 6, 4, 20, 20, 4):
        assert len(kept.take(key)) == key
    assert made == [4, 5, 6, 20, 4]


def test_asks_are_a_sequence() -> None:
    asks = Asks(5, lambda index: Ask(f"k-{index}", None, "p", 1))
    assert [ask.key for ask in asks[1:4]] == ["k-1", "k-2", "k-3"] and asks[-1].key == "k-4" and len(asks[::2]) == 3
    with pytest.raises(IndexError):
        asks[5]
    with pytest.raises(ValueError, match="needs messages or a prompt"):
        Ask("k", None, None, 1)
