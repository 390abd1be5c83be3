"""What shows nothing never passes: answers that are missing, empty, of no shape, or that nothing could be lost from."""

import asyncio
import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from toy_server import Toy

from longread.measure.gate import record
from longread.measure.gate.client import Allowance, Answer, Client
from longread.measure.gate.distribution import Position, difference, largest_gap
from longread.measure.gate.errors import GateError
from longread.measure.gate.exactness import Exactness, compare
from longread.measure.gate.judging import judge
from longread.measure.gate.profiles import built_in
from longread.measure.gate.record import Said, Sayings, packed
from longread.measure.gate.rounding import rule_of
from longread.measure.gate.run import Settings, Watch, compare_files, make_base
from longread.measure.gate.sampling import GREEDY, Sampler
from longread.measure.gate.verdict import LevelResult
from longread.spec.errors import ConfigError

LOSSLESS = built_in("lossless")
SHARP = rule_of(SimpleNamespace(dtype="float32", cache_dtype="float32"), LOSSLESS)  # type: ignore[arg-type]
ENTRY = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
OLDER = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]}
CHOICE = {
    "index": 0,
    "message": {"content": "a", "reasoning_content": "b"},
    "delta": {"content": "x"},
    "finish_reason": "stop",
    "token_ids": [1],
    "logprobs": {"content": [ENTRY], **OLDER},
}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
WHOLE = {"choices": [CHOICE], "usage": USAGE, "prompt_token_ids": [[1]]}
OLD = {**WHOLE, "choices": [{"text": "t", "finish_reason": "stop", "logprobs": OLDER}]}
JUNK = (None, 5, -1, "x", [], {}, ["x"], [None], {"a": 1}, True, math.nan, -math.inf, 10**400, -(10**400), "\ud800")


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*before, key)
        yield from places(inner, (*before, key))


def asked(raw: str, stream: bool) -> Answer:
    async def work() -> Answer:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {raw}\n\n" if stream else raw))
        async with Client("http://x", Allowance(10, 100), transport=transport) as client:
            return await client.chat(({"role": "user", "content": "x"},), **({"stream": True} if stream else {}))

    return asyncio.run(work())


@pytest.mark.parametrize("document", [WHOLE, OLD])
def test_an_answer_of_any_shape_is_an_answer_or_an_error_of_the_gates(document: dict[str, Any]) -> None:
    for place in places(document):
        for junk in JUNK:
            broken: Any = copy.deepcopy(document)
            inner = broken
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = junk
            for stream in (False, True):
                try:
                    answer = asked(json.dumps(broken), stream)
                except GateError:
                    continue
                texts = [answer.text, answer.reasoning, *(position.token for position in answer.positions)]
                json.dumps(texts, ensure_ascii=False).encode()  # what a file takes
                assert all(value <= 0 for position in answer.positions for _, value in position.top)


def test_an_answer_of_a_thousand_brackets_is_an_error() -> None:
    with pytest.raises(GateError, match="is not JSON"):
        asked("[" * 100_000 + "]" * 100_000, False)


def test_draws_that_were_not_told_are_no_greedy_draws() -> None:
    async def silent(prompt: str, **fields: object) -> Answer:
        return Answer("x", "length")

    client: Any = SimpleNamespace(complete=silent)
    abilities: Any = SimpleNamespace(seed=True, completion_top=5)
    found = asyncio.run(Sampler(client, abilities, 1, lambda _: None)._greedy("x", Position("a", -0.1, (("a", -0.1),))))
    assert (found.verdict, found.note) == ("INCONCLUSIVE", f"0 of {GREEDY} draws were told")


def test_tops_with_nothing_in_common_are_no_small_gap() -> None:
    one, other = Position("a", None, (("a", -0.1), ("b", -3.0))), Position("a", None, (("c", -0.1), ("d", -3.0)))
    assert largest_gap([one], [other]) == math.inf
    assert largest_gap([one], [replace(one, logprob=-0.1)]) == 0.0
    part = Position("\ufffd", -0.1, (("\ufffd", -0.1),))
    assert largest_gap([part], [part]) == 0.0  # part of a character names no token
    found = compare(
        "cold = warm", "d", Answer("x", "stop", positions=(one,)), Answer("x", "stop", positions=(other,)), SHARP
    )
    assert found.verdict == "different" and json.dumps(found.document_of(), allow_nan=False)


def exactness() -> Exactness:
    abilities: Any = SimpleNamespace(without={}, cached_told=False, salt=False, dtype=None, cache_dtype=None)
    return Exactness(None, abilities, LOSSLESS, "plain", 1, {}, 0, lambda _: None)  # type: ignore[arg-type]


def test_a_server_that_says_nothing_says_the_same_every_time_and_that_is_no_pass() -> None:
    level = exactness()
    level.found = [compare("cold = warm", f"d{i}", Answer("", "stop"), Answer("", "stop"), SHARP) for i in range(4)]
    assert level.judged(2)[0].verdict == "INCONCLUSIVE"
    level.found = [compare("cold = warm", f"d{i}", Answer("a", "stop"), Answer("a", "stop"), SHARP) for i in range(4)]
    assert level.judged(2)[0].verdict == "PASS"
    level.found.append(compare("cold = warm", "d9", Answer("", "stop"), Answer("a", "stop"), SHARP))
    assert level.judged(2)[0].verdict == "FAIL"


def said(number: int, text: str, *levels: int, **more: Any) -> Said:
    fields: dict[str, Any] = {"turn": 0, "paper": f"p{number % 9}", "length": 512, "kind": "single", "fingerprint": "f"}
    fields |= {"expected": "17 days", "values": ("17 days",), "critical": True, "finish_reason": "stop"}
    return Said(**{**fields, "key": f"k{number}", "levels": levels, "text": text, **more})


def judged(level: int, before: str, after: str, count: int = 400) -> LevelResult:
    base = {f"k{i}": said(i, before, level) for i in range(count)}
    return judge(level, [said(i, after, level) for i in range(count)], base, LOSSLESS, 0.05)


@pytest.mark.parametrize("level", [2, 3, 4])
def test_two_servers_that_are_wrong_alike_show_nothing(level: int) -> None:
    assert judged(level, "17 days", "17 days").verdict == "PASS"
    assert judged(level, "I like trains", "I like trains").verdict == "INCONCLUSIVE"
    assert judged(level, "", "").verdict == "INCONCLUSIVE"


def test_a_base_that_answers_in_its_own_words_is_judged_by_the_overlap() -> None:
    words = "It is due within 17 days of the notice"
    assert judged(3, words, words).verdict == "PASS"
    assert "exact_drop" not in {f.name for f in judged(3, words, words).findings if f.verdict is not None}
    assert judged(3, words, "of no use at all").verdict == "FAIL"


def test_critical_values_of_answers_that_the_base_does_not_have_are_not_run() -> None:
    base = {f"k{i}": said(i, "", 4, error="500") for i in range(3)}
    assert judge(4, [said(i, "17 days", 4) for i in range(3)], base, LOSSLESS, 0.05).verdict == "INCONCLUSIVE"


def told(
    number: int, count: int, top: tuple[tuple[str, float], ...] = (("a", -0.01), ("b", -5.0)), **more: Any
) -> Said:
    """An answer of ``count`` tokens with log-probabilities."""
    positions = packed([Position("a", top[0][1], top)] * count)
    return said(number, "a" * count, 1, positions=positions, **more)


def test_an_answer_that_ends_early_counts_where_the_end_is_no_position() -> None:
    base = {f"k{i}": told(i, 40, finish_reason="length") for i in range(30)}
    same = [replace_said(one) for one in base.values()]
    assert judge(1, same, base, LOSSLESS, 0.05).verdict == "PASS"
    short = [told(i, 3) for i in range(30)]
    found = judge(1, short, base, LOSSLESS, 0.05)
    assert next(f for f in found.findings if f.name.startswith("flips")).verdict == "FAIL"
    assert any("30 answers end where the base's go on" in note for note in found.notes)


def replace_said(one: Said, **more: Any) -> Said:
    return one.model_copy(update=more)


def test_a_bound_of_the_kl_over_few_told_tokens_does_not_pass() -> None:
    open_ended = (("a", -3.0),)
    base = {f"k{i}": told(i, 40, open_ended) for i in range(30)}
    found = judge(1, [replace_said(one) for one in base.values()], base, LOSSLESS, 0.05)
    kl = next(f for f in found.findings if f.name.startswith("kl_mean"))
    assert (kl.value, kl.verdict) == (0.0, "INCONCLUSIVE") and "of the rest nothing is known" in kl.note
    assert difference(Position("a", -3.0, open_ended), Position("a", -3.0, open_ended), 0.1).shared < 0.06


def test_prompts_of_another_tokenizer_are_told() -> None:
    base = {f"k{i}": told(i, 2, prompt_ids="x") for i in range(3)}
    found = judge(1, [replace_said(one, prompt_ids="y") for one in base.values()], base, LOSSLESS, 0.05)
    assert any("3 prompts have other token ids" in note for note in found.notes)


@pytest.fixture(scope="module")
def small() -> Sayings:
    settings = Settings("http://toy", lengths=(512,), documents=4, levels=(1,), style="plain")
    return asyncio.run(make_base(settings, None, Watch(), Toy().transport()))


def test_a_file_that_leaves_asks_out_does_not_pass(small: Sayings) -> None:
    whole = compare_files(small, small, LOSSLESS)
    assert not any(f.name == "asks that are missing" for level in whole.levels for f in level.findings)
    half = replace(small, said=small.said[: len(small.said) // 2])
    found = compare_files(small, half, LOSSLESS)
    assert found.verdict == "INCONCLUSIVE"
    assert any(f.name == "asks that are missing" for level in found.levels for f in level.findings)


def test_a_file_that_holds_an_answer_twice_is_damaged(small: Sayings, tmp_path: Path) -> None:
    replace(small, said=[*small.said, small.said[0]]).write(tmp_path / "base.json")
    with pytest.raises(ConfigError, match="it holds 1 answers twice"):
        record.read(tmp_path / "base.json")
