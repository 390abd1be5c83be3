"""Where a text may be cut: a hunt for counterexamples to the rule, over every short text and many longer ones."""

import itertools
import json
import random

import pytest
from tokenizers import Tokenizer as RawTokenizer
from wiretok import TOKENIZER_DIR

from longread.wire import cuts as rule
from longread.wire.cuts import PART_CHARACTERS, cuts, divisible, parts

DOCUMENT = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text())
# One or two of each kind of character that the patterns tell apart, and some that others call white space or numbers.
KINDS = "\n\r \ta1.一é\u0301。\0"
MORE = KINDS + "\u3000\x85\x1c\u2028あ゠・゛〇½٣Z,:$'_-😀𠮷\u200b\ufeff\u0e01"


@pytest.fixture(scope="module")
def pre_tokens():
    pre_tokenizer = RawTokenizer.from_str(json.dumps(DOCUMENT)).pre_tokenizer
    return lambda text: [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def differing(texts, pre_tokens):
    for text in texts:
        whole = None
        for k in cuts(text):
            whole = whole if whole is not None else pre_tokens(text)
            if pre_tokens(text[:k]) + pre_tokens(text[k:]) != whole:
                yield text, k


def test_every_text_of_four_characters(pre_tokens):
    assert not list(differing(map("".join, itertools.product(KINDS, repeat=4)), pre_tokens))


def test_longer_texts(pre_tokens):
    draw = random.Random(1)
    texts = ["".join(draw.choices(MORE if i % 2 else KINDS, k=draw.randrange(5, 24))) for i in range(10_000)]
    assert sum(len(cuts(text)) for text in texts) > 20_000
    assert not list(differing(texts, pre_tokens))


@pytest.mark.parametrize(
    "text", ["a\nb", "a b", "一 b", "a一", "一a", "。一", "12,", ",12", "一\n", " 一", "\n7", "\r<"]
)
def test_the_rule_cuts_where_it_says(text):
    assert cuts(text)


@pytest.mark.parametrize(
    "text", ["ab", "\n\n", "\n ", "  ", "a\n", "é ", "\u3000 ", "12", "一二", "\u2028a", "(a", "\n\x1c"]
)
def test_and_nowhere_else(text):
    assert not cuts(text)


def test_a_wrong_rule_would_be_found(pre_tokens, monkeypatch):
    """The hunt itself works: without the condition on the other side of a line end or a space it finds texts."""
    for wrong in ("(?<=\n)", "(?= )", "(?<=[,.])(?=[a-z])"):
        monkeypatch.setattr(rule, "_CUT", rule.re.compile(wrong))
        texts = map("".join, itertools.product("\n a.", repeat=4))
        assert next(differing(texts, pre_tokens), None) is not None


def test_parts_join_to_the_text_and_begin_alike_where_the_texts_do():
    draw = random.Random(2)
    words = [f"word{i}{draw.choice([' ', chr(10), '. ', '，', ''])}" for i in range(6000)]
    text = "".join(words)
    whole = parts(text)
    assert "".join(whole) == text and len(whole) > 5
    assert all(len(part) >= PART_CHARACTERS for part in whole[:-1])
    assert parts("") == [] and parts("x") == ["x"]
    for _ in range(50):
        k = draw.randrange(len(text))
        other = text[:k] + draw.choice(["", "?", "\n", " 12", "一" * 9000, text])
        found = parts(other)
        assert "".join(found) == other
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(whole, found, strict=False))))
        assert sum(map(len, whole[: same + 1])) >= k - PART_CHARACTERS  # the first difference is near


def test_a_text_without_cuts_stays_whole():
    assert parts("é" * 20_000) == ["é" * 20_000]


def changed(**fields):
    return DOCUMENT | fields


def test_only_the_known_pre_tokenizer_is_divided():
    assert divisible(DOCUMENT)
    assert divisible(changed(normalizer=None))
    splits = DOCUMENT["pre_tokenizer"]["pretokenizers"]
    for i in range(len(splits)):
        without = {"type": "Sequence", "pretokenizers": splits[:i] + splits[i + 1 :]}
        assert not divisible(changed(pre_tokenizer=without))
    digits = [{**splits[0], "pattern": {"Regex": r"\p{N}"}}, *splits[1:]]
    assert not divisible(changed(pre_tokenizer={"type": "Sequence", "pretokenizers": digits}))
    prefixed = [*splits[:3], {**splits[3], "add_prefix_space": True}]
    assert not divisible(changed(pre_tokenizer={"type": "Sequence", "pretokenizers": prefixed}))
    assert not divisible(changed(pre_tokenizer=None))
    assert not divisible(changed(normalizer={"type": "NFC"}))
    assert not divisible(changed(truncation={"max_length": 5}))
    assert not divisible(changed(model=DOCUMENT["model"] | {"dropout": 0.1}))
    token = DOCUMENT["added_tokens"][0]
    for odd in ({"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"content": "<a b>"}, {"content": "\nx"}):
        assert not divisible(changed(added_tokens=[{**token, **odd}]))
