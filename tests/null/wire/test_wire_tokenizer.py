"""Tokenizing and detokenizing with the real V4 tokenizer, and stop strings."""

import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wiretok import TOKENIZER_DIR, v4_tokenizer

from longread.spec.errors import CheckpointError
from longread.wire.detokenize import IncrementalDetokenizer, StopChecker
from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.conversation import conversation
from longread.wire.encoding.pieces import Piece
from longread.wire.tokenizer import Tokenizer
from longread.wire.types import ChatRequest, validate

SAMPLES = [
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # tab and spaces   \r\n\n\n",
    "深度求索的长文本：测试「引号」、全角，ひらがな カタカナ 한국어",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 n\u0303 \u202e rtl \u0000 nul \ufeff bom \ufffd",
    "Zalgo: Z\u0311\u0306a\u0324\u0300l\u0302g\u033co",
    "1234567890 3.14159 0xDEADBEEF 1_000_000",
    "",
    " ",
    "\n",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(text):
    tok = v4_tokenizer()
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    detok = IncrementalDetokenizer(tok)
    assert "".join(map(detok.push, ids)) + detok.flush() == text


@given(st.text(max_size=60))
def test_round_trip_of_any_text(text):
    tok = v4_tokenizer()
    assert tok.decode(tok.encode(text)) == text


@given(st.lists(st.integers(0, 129279), max_size=30), st.booleans())
def test_any_ids_stream_to_what_decode_gives(ids, skip):
    """Random ids are random bytes: broken characters, special tokens, holes."""
    tok = v4_tokenizer()
    detok = IncrementalDetokenizer(tok, skip_special=skip)
    assert "".join(map(detok.push, ids)) + detok.flush() == tok.decode(ids, skip_special=skip)


@given(st.lists(st.text("ab -\n中é😀<", max_size=60), max_size=3))
def test_no_text_has_fewer_tokens_than_its_length_says(texts):
    tok = v4_tokenizer()
    assert tok.least_tokens(texts) <= len(tok.encode("".join(texts), special=True))


def test_a_long_text_is_known_to_be_long_unless_tokens_may_swallow_text():
    tok = v4_tokenizer()
    assert tok.least_tokens(["a" * 10**6]) > 10**6 / 256
    longest = max((tok.token_bytes(i) for i in range(tok.vocab_size)), key=len)
    assert tok.least_tokens([longest.decode(), "x"]) == 2 == 1 + tok.least_tokens([longest.decode()])
    document = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
    document["added_tokens"][0]["rstrip"] = True
    stripping = Tokenizer(json.dumps(document).encode(), bos_id=0, eos_id=1)
    assert stripping.least_tokens(["a" * 10**6]) == 0


def test_an_unfinished_character_is_held_back():
    tok = v4_tokenizer()
    ids = tok.encode("🦤")
    assert len(ids) > 1
    detok = IncrementalDetokenizer(tok)
    assert [detok.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🦤"]
    detok = IncrementalDetokenizer(tok)
    assert detok.push(ids[0]) == "" and detok.flush() == "\ufffd"


def test_special_text_becomes_special_only_when_asked():
    tok = v4_tokenizer()
    assert tok.encode("</think>", special=True) == [128822] == [tok.id_of("</think>")]
    plain = tok.encode("</think>")
    assert 128822 not in plain and tok.decode(plain) == "</think>"
    ids = tok.encode_prompt([Piece("<｜User｜>", True), Piece("<｜User｜> a </think>", False), Piece("</think>", True)])
    assert ids[0] == 128803 and ids[-1] == 128822
    assert ids.count(128803) == 1 and ids.count(128822) == 1


def longest_stall_while_encoding(tok, text):
    """This thread's longest pause, as a share of the time that another thread encodes."""
    spans = []

    def encode():
        begin = time.perf_counter()
        tok.encode(text)
        spans.append(time.perf_counter() - begin)

    thread = threading.Thread(target=encode)
    stall, last = 0.0, time.perf_counter()
    thread.start()  # returns when the lock is free
    while not spans:
        now = time.perf_counter()
        stall, last = max(stall, now - last), now
    stall = max(stall, time.perf_counter() - last)
    thread.join()
    return stall / spans[0]


def test_other_threads_run_while_a_long_text_is_encoded():
    text = "def f(x: int) -> str: 深度求索 1234\n" * 4000
    shares = (longest_stall_while_encoding(v4_tokenizer(), text) for _ in range(3))  # a busy machine may cause one
    assert any(share < 0.5 for share in shares)


def test_markup_that_the_vocabulary_lacks_is_text():
    tok = v4_tokenizer()
    assert not tok.has("<｜System｜>")
    ids = tok.encode_prompt([Piece("a", False), Piece("<｜System｜>", True), Piece("b", False)])
    assert ids == tok.encode("a<｜System｜>b")


@pytest.mark.parametrize("name", ENCODINGS)
def test_piecewise_ids_equal_those_of_the_whole_string(name):
    """What makes prompts equal to the releases' own encoders, as long as nobody quotes markup."""
    tok = v4_tokenizer()
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "You are brief.\n"},
        {"role": "user", "content": "你好  world 123"},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": '{"x": [1]}'}}]},
        {"role": "tool", "tool_call_id": "a", "content": "\n ok"},
    ]
    request = validate(ChatRequest, {"messages": messages, "tools": [tool]})
    rendered = ENCODINGS[name].render(conversation(request, ENCODINGS[name].abilities))
    ids = tok.encode_prompt(rendered.pieces)
    assert ids == tok.encode(rendered.text, special=True)


def test_hidden_and_visible_special_tokens():
    tok = v4_tokenizer()
    assert tok.decode([0, 128822, 1]) == "</think>"
    assert tok.decode([0], skip_special=False) == "<｜begin▁of▁sentence｜>"
    assert tok.token_bytes(10**9) == b"" and tok.token_text(128822) == "</think>"
    assert tok.vocab_size == 129280


def test_a_missing_or_wrong_tokenizer_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="not found"):
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not a tokenizer\.json"):
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    tiny = {"version": "1.0", "model": model, "added_tokens": [{"id": 2, "content": "<e>", **flags}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny))
    assert Tokenizer.open(tmp_path, bos_id=0, eos_id=1).encode("ba<e>", special=True) == [1, 0, 2]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    with pytest.raises(CheckpointError, match="has id 2, but config"):
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny | {"model": {"type": "Unigram", "vocab": []}}))
    with pytest.raises(CheckpointError, match="'Unigram' is not supported"):
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
ADDED = {"id": 2, "content": "<e>", **FLAGS}
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
TINY = {"version": "1.0", "model": MODEL, "added_tokens": [ADDED]}


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "no object 'model'"),
        ({"model": 5}, "no object 'model'"),
        ({"model": MODEL | {"type": ["x"] * 1000}}, "is not supported"),
        ({"model": MODEL | {"merges": [["a", "zz"]]}}, "refuses it"),
        ({"model": MODEL | {"merges": 5}}, "refuses it"),
        ({"model": MODEL | {"vocab": ["a"]}}, "model.vocab must map"),
        ({"model": MODEL | {"vocab": {}}}, "model.vocab must map"),
        ({"model": MODEL | {"vocab": {"a": -1}}}, "model.vocab must map"),
        ({"model": MODEL | {"vocab": {"a": True}}}, "model.vocab must map"),
        ({"model": MODEL | {"vocab": {"a": 2**31}}}, "model.vocab must map"),
        ({"normalizer": 5}, "normalizer must be"),
        ({"normalizer": {"type": "Nope"}}, "refuses it"),
        ({"pre_tokenizer": {"type": "Nope"}}, "refuses it"),
        ({"added_tokens": None}, "added_tokens must be a list"),
        ({"added_tokens": [5]}, r"added_tokens\[0\] must have"),
        ({"added_tokens": [ADDED, {"content": "x", **FLAGS}]}, r"added_tokens\[1\] must have"),
        ({"added_tokens": [ADDED | {"id": -1}]}, r"added_tokens\[0\] must have"),
        ({"added_tokens": [ADDED | {"content": ""}]}, r"added_tokens\[0\] must have"),
    ],
)
def test_a_bad_tokenizer_json_is_a_checkpoint_error(tmp_path, document, says):
    data = document if isinstance(document, bytes) else json.dumps(TINY | document).encode()
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=says) as caught:
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"bos_token":{}}', "bos_token must be"),
        (b'{"bos_token":5}', "bos_token must be"),
        (b'{"eos_token":{"content":["a"]}}', "eos_token must be"),
        (b'{"eos_token":"nope"}', "has id None, but"),
    ],
)
def test_a_bad_tokenizer_config_is_a_checkpoint_error(tmp_path, config, says):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY))
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.open(tmp_path, bos_id=0, eos_id=1)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_is_no_file_is_a_checkpoint_error(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(json.dumps(TINY))
    for make in (os.mkdir, os.mkfifo):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        with pytest.raises(CheckpointError, match="not a regular file"):
            Tokenizer.open(tmp_path, bos_id=0, eos_id=1)
        (tmp_path / name).rmdir() if make is os.mkdir else None


def test_a_vocabulary_that_the_model_has_no_rows_for_is_refused():
    tok = Tokenizer(json.dumps(TINY).encode(), bos_id=0, eos_id=1)
    tok.check_vocabulary(3)
    with pytest.raises(CheckpointError, match="largest id is 2, but"):
        tok.check_vocabulary(2)
    wide = TINY | {"model": MODEL | {"vocab": {"a": 0, "b": 9}}}
    with pytest.raises(CheckpointError, match="largest id is 9"):
        Tokenizer(json.dumps(wide).encode(), bos_id=0, eos_id=1).check_vocabulary(9)


def naive_stop(text, stops, include, free=0):
    for end in range(free + 1, len(text) + 1):
        hits = [(end - len(s), s) for s in stops if text[:end].endswith(s)]
        if hits:
            at, stop = min(hits)
            return text[: end if include else at], stop
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=10),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_strings_over_any_chunks(chunks, stops, include, free):
    """``free``: so many chunks come first that no stop string may end in."""
    checker = StopChecker(stops, include=include)
    out = ""
    for i, chunk in enumerate(chunks):
        out += checker.push(chunk, stoppable=i >= free)
    out += checker.flush()
    assert (out, checker.matched) == naive_stop("".join(chunks), stops, include, len("".join(chunks[:free])))


def test_stop_checker_holds_back_only_what_may_become_a_stop():
    checker = StopChecker(["<end>"])
    assert checker.push("abc<e") == "abc" and checker.push("x") == "<ex"
    assert checker.push("<end") == "" and checker.push(">tail") == "" and checker.matched == "<end>"
    assert checker.push("more") == "" == checker.flush()
