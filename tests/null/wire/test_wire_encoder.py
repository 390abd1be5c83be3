"""The fast ways to ids against ``tokenizers`` for the whole text: more than ten thousand texts, in both views."""

import random
import threading
from functools import cache
from pathlib import Path

import orjson
import pytest
from tokenizers import Tokenizer as RawTokenizer
from wiretok import TOKENIZER_DIR

import longread.wire.encoder as encoder_module
from longread.wire.cuts import PART_CHARACTERS
from longread.wire.encoder import TextEncoder
from longread.wire.fast import FastEncoder, hard_texts
from longread.wire.seen import SeenParts
from longread.wire.tokenizer import ids_of

PARSED = orjson.loads((TOKENIZER_DIR / "tokenizer.json").read_bytes())
MARKUP = [token["content"] for token in PARSED["added_tokens"]]
SHOWN = ["<｜User｜>", "<｜Assistant｜>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "｜DSML｜"]


@cache
def views():
    document = (TOKENIZER_DIR / "tokenizer.json").read_text()
    plain = orjson.dumps(PARSED | {"added_tokens": []}).decode()
    return document, RawTokenizer.from_str(document), RawTokenizer.from_str(plain)


@cache
def fast():
    """Loaded once: a large vocabulary takes a second."""
    made = TextEncoder(views()[0], PARSED, *views()[1:])
    assert made.hasten().startswith("fastokens")
    return made._fast


def new_encoder(hastened=True, parsed=PARSED):
    made = TextEncoder(views()[0], parsed, *views()[1:])
    made._fast = fast() if hastened else None
    return made


def expected(texts, special):
    encodings = views()[1 if special else 2].encode_batch_fast(texts, add_special_tokens=False)
    return [list(encoding.ids) for encoding in encodings]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a few characters, so that short texts have many."""
    for module in ("encoder", "cuts"):
        monkeypatch.setattr(f"longread.wire.{module}.PART_CHARACTERS", 12)
    monkeypatch.setattr("longread.wire.cuts._WINDOW", 8)


def _run(draw):
    return draw.choice(" \n\t0.a一é😀\u0301-=\0\u3000") * draw.randrange(1, 60)


def _code(draw):
    lines = Path(encoder_module.__file__).read_text().splitlines(keepends=True)
    start = draw.randrange(len(lines))
    return "".join(lines[start : start + draw.randrange(1, 5)]).replace("    ", draw.choice(["    ", "\t", "  "]))


def _cjk(draw):
    sources = ("深度求索长文本模型推理服务", "。，、；：「」（）　", "ひらがなカタカナー・゠", "한국어", "abc 12", "\n")
    return "".join(draw.choice(draw.choice(sources)) for _ in range(draw.randrange(1, 60)))


def _emoji(draw):
    return "".join(
        draw.choice(["👩‍👩‍👧", "🏳️‍🌈", "😀", "❤️", "🇩🇪", " ", "ok", "\u200d"]) for _ in range(draw.randrange(1, 20))
    )


def _marks(draw):
    return "".join(draw.choice("aé \u0301\u0308\u0e31กिकﷺ\u20e3" + "1.") for _ in range(draw.randrange(1, 40)))


def _markup(draw):
    token = draw.choice([*SHOWN, draw.choice(MARKUP)])
    return draw.choice(["a ", "\n", "", "12"]) + token[: draw.choice([len(token), len(token), -1])]


def _any(draw):
    return "".join(chr(draw.choice([draw.randrange(1, 0xD7FF), draw.randrange(0xE000, 0x10FFFF)])) for _ in range(9))


def _words(draw):
    return "".join(draw.choice(["the ", "of\n", "I'll ", "x_y ", "3.14,", "A", "--", "\r\n"]) for _ in range(20))


KINDS = (_run, _code, _cjk, _emoji, _marks, _markup, _any, _words)


def texts_for(seed, count):
    draw = random.Random(seed)
    return ["".join(draw.choice(KINDS)(draw) for _ in range(draw.randrange(1, 5))) for _ in range(count)]


@pytest.mark.parametrize("special", [False, True])
def test_six_thousand_texts_in_one_piece(special, monkeypatch):
    """The faster library alone, without parts."""
    texts = texts_for(special, 6_000)
    found = [ids_of(fast().encode(text, special)) for text in texts]
    assert found == expected(texts, special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("hastened", [False, True])
def test_two_thousand_texts_that_begin_like_others(special, hastened, small_parts):
    """Random cuts and endings of texts that were encoded before, so that most parts are looked up."""
    draw, encoder = random.Random(special), new_encoder(hastened)
    texts = []
    for text in texts_for(10 + special, 300 if not hastened else 700):
        k = draw.randrange(len(text) + 1)
        texts += [text, text[:k] + draw.choice(KINDS)(draw), text[:k]]
    assert [ids_of(encoder.encode(text, special)) for text in texts] == expected(texts, special)
    assert encoder._seen.held > 0


@pytest.mark.parametrize("special", [False, True])
def test_long_texts_are_looked_up(special, monkeypatch):
    text = "".join(texts_for(5, 2_000))
    encoder = new_encoder()
    (want,) = expected([text], special)
    assert ids_of(encoder.encode(text, special)) == want
    asked = []
    monkeypatch.setattr(encoder, "_new", lambda texts, special: asked.extend(texts) or new(texts, special))
    new = TextEncoder._new.__get__(encoder)
    for end in ("", " And then?", "\n\n", "一", " ", "\u0301"):
        asked.clear()
        assert ids_of(encoder.encode(text + end, special)) == expected([text + end], special)[0]
        assert len(asked) <= 1 and sum(map(len, asked)) < 4 * PART_CHARACTERS
    asked.clear()
    encoder.encode(text, not special)  # another view is another text
    assert len(asked) > 3


def test_a_tokenizer_that_cannot_be_divided_is_looked_up_whole(monkeypatch):
    encoder = new_encoder(parsed=PARSED | {"pre_tokenizer": None})
    text = "word " * PART_CHARACTERS
    first = encoder.encode(text, False)
    monkeypatch.setattr(encoder, "_new", lambda texts, special: [b"\1\0\0\0" for _ in texts])
    assert encoder.encode(text, False) == first
    assert encoder.encode(text + "!", False) == b"\1\0\0\0"


class Wrong:
    def encode(self, text, special):
        return b"\7\0\0\0"


class Tired:
    """Gives up on texts with an x."""

    def encode(self, text, special):
        return None if "x" in text else fast().encode(text, special)


def test_a_difference_ends_the_use_of_the_faster_library(caplog):
    encoder = new_encoder()
    encoder._fast = Wrong()
    text = "secret words " * 2000
    assert ids_of(encoder.encode(text, False)) == expected([text], False)[0]
    assert not encoder.fast
    assert "otherwise than tokenizers" in caplog.text and "secret" not in caplog.text
    assert ids_of(encoder.encode(text + "more", False)) == expected([text + "more"], False)[0]


def test_what_is_compared_is_a_sample(monkeypatch):
    encoder, compared = new_encoder(), []
    exact = encoder._exact_one
    monkeypatch.setattr(encoder, "_exact_one", lambda text, special: compared.append(text) or exact(text, special))
    encoder.encode("a" * 100_000, False)  # too long to be a sample
    for i in range(20):
        encoder.encode(f"text {i}", False)
    assert compared == ["text 0"]
    encoder._sampled -= 10.0
    encoder.encode("text 20", False)
    assert compared == ["text 0", "text 20"]


def test_a_text_that_the_library_gives_up_on_goes_to_the_other(small_parts):
    encoder = new_encoder()
    encoder._fast = Tired()
    text = "one two three four x five six seven eight nine x ten eleven twelve"
    assert ids_of(encoder.encode(text, False)) == expected([text], False)[0]
    assert encoder.fast


def test_hasten_says_what_is_used(monkeypatch):
    _, marked, plain = views()
    encoder = TextEncoder("{}", PARSED, marked, plain)
    assert "cannot read" in encoder.hasten() and not encoder.fast
    encoder = TextEncoder(views()[0], PARSED | {"truncation": {"max_length": 9}}, marked, plain)
    assert "truncation" in encoder.hasten() and not encoder.fast
    monkeypatch.setattr(encoder_module, "FastEncoder", lambda document: Wrong())
    encoder = new_encoder(hastened=False)
    assert "differently" in encoder.hasten() and not encoder.fast


def test_the_start_up_texts_hold_what_tokenizers_differ_on():
    texts = list(hard_texts(SHOWN))
    assert len(texts) > 150
    assert any(token in text for token in SHOWN for text in texts)
    assert list(hard_texts(SHOWN)) == texts


def test_what_the_library_gives_up_on_is_none():
    assert fast().encode("\ud800", False) is None
    with pytest.raises(ValueError):
        FastEncoder("no json")


def test_seen_parts_are_bounded_and_the_oldest_go():
    seen = SeenParts(10_000)
    for i in range(100):
        seen.add((False, f"{i:04}" * 100), b"ids!" * 10)
        seen.take([(False, "0000" * 100)])
    assert 9_000 < seen.held <= 10_000
    assert seen.take([(False, "0000" * 100), (False, "0001" * 100), (False, "0099" * 100)]) == [
        b"ids!" * 10,
        None,
        b"ids!" * 10,
    ]
    held = seen.held
    seen.add((False, "0099" * 100), b"")
    seen.add((True, "x" * 20_000), b"")
    assert seen.held == held


def test_threads_share_what_was_seen(small_parts):
    encoder, texts = new_encoder(), texts_for(3, 60)
    want, wrong = expected(texts, False), []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(100):
            i = draw.randrange(len(texts))
            if ids_of(encoder.encode(texts[i], False)) != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
