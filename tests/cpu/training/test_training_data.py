"""The readers' tokenizer and training stream: the server's chat layout, words and numbers, fixed batches."""

import json
import random
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from training import data, tokenizer
from training.data import ANSWER, DOCUMENT, IGNORED, Batches, conversation, encode, render, sample
from training.encoder import Encoder

from longread.measure.reading import DOMAINS, LANGUAGES, Document, Question, write
from longread.wire.encoding import ENCODINGS
from longread.wire.encoding.conversation import Conversation, Turn
from longread.wire.tokenizer import Tokenizer as ServerTokenizer

PAIRS = [(language, domain) for language in LANGUAGES for domain in DOMAINS]


@pytest.fixture(scope="module")
def server() -> ServerTokenizer:
    return ServerTokenizer(tokenizer.PATH.read_bytes(), bos_id=0, eos_id=1)


def turns(document: Document, questions: list[Question]) -> tuple[Turn, ...]:
    """User turns and answers as a client would send them."""
    found: list[Turn] = []
    for i, question in enumerate(questions):
        text = f"{document.text}\n{question.text}" if i == 0 else question.text
        found += [Turn("user", (text,)), Turn("assistant", (question.answer,), question.thought)]
    return tuple(found)


@pytest.mark.parametrize(("language", "domain"), PAIRS)
@pytest.mark.parametrize("encoding", ["v3.1", "v4"])
def test_answers_without_thinking_equal_the_servers_rendering(
    server: ServerTokenizer, encoding: str, language: str, domain: str
) -> None:
    document = write(5, 60, language, domain)
    questions = document.questions(4)
    rendered = ENCODINGS[encoding].render(Conversation(turns(document, questions), add_generation_prompt=False))
    assert conversation(document, questions, False, tokenizer.load())[0] == server.encode_prompt(rendered.pieces)


@pytest.mark.parametrize("keep", [False, True])
def test_thinking_equals_v4s_rendering(server: ServerTokenizer, keep: bool) -> None:
    document = write(6, 60, "zh", "contract")
    questions = document.questions(3)
    conv = Conversation(
        turns(document, questions), thinking=True, effort="high", drop_reasoning=not keep, add_generation_prompt=False
    )
    expected = server.encode_prompt(ENCODINGS["v4"].render(conv).pieces)
    assert conversation(document, questions, True, tokenizer.load(), keep)[0] == expected


@pytest.mark.parametrize("encoding", ["v3.1", "v4"])
@pytest.mark.parametrize("thinking", [False, True])
def test_what_stands_before_the_last_answer_is_the_servers_prompt(
    server: ServerTokenizer, encoding: str, thinking: bool
) -> None:
    document = write(7, 60, "en", "statute")
    questions = document.questions(3)
    effort = "high" if thinking else None
    conv = Conversation(turns(document, questions)[:-1], thinking=thinking, effort=effort)
    prompt = server.encode_prompt(ENCODINGS[encoding].render(conv).pieces)
    ids, weights = conversation(document, questions, thinking, tokenizer.load())
    generated = server.encode(questions[-1].answer)
    if thinking:
        generated = [*server.encode(questions[-1].thought), server.id_of("</think>") or -1, *generated]
    assert ids == [*prompt, *generated, 1]
    assert weights[len(prompt) - 1 :] == [IGNORED] + [ANSWER] * (len(generated) + 1)


@pytest.mark.parametrize(("language", "domain"), PAIRS)
def test_the_fast_encoder_equals_the_tokenizer(language: str, domain: str) -> None:
    reader, fast = tokenizer.load(), Encoder(tokenizer.load())
    document = write(9, 200, language, domain)
    by_line = [fast(line.text) for line in document.lines]
    assert by_line == [found.ids for found in reader.encode_batch_fast([line.text for line in document.lines])]
    assert [i for ids in by_line for i in ids] == fast(document.text) == reader.encode(document.text).ids
    for question in document.questions(40):
        for text in (question.text, question.thought, question.answer):
            assert fast(text) == reader.encode(text).ids


@given(st.text(st.sampled_from("a Zé7四的。（_.|#\n\t—½\r\"'"), max_size=12))
def test_the_fast_encoder_equals_the_tokenizer_on_any_text(text: str) -> None:
    assert Encoder(tokenizer.load())(text) == tokenizer.load().encode(text).ids


def test_weights_name_document_and_answers(server: ServerTokenizer) -> None:
    document = write(8, 40, "en", "code")
    questions = document.questions(4)
    row = render(encode(document, questions, tokenizer.load()), 4, False, tokenizer.load())
    documents = [i for i, weight in enumerate(row.weights) if weight == DOCUMENT]
    assert documents == list(range(2, 2 + len(documents)))
    assert server.decode([row.ids[i] for i in documents]) == document.text + "\n"
    answers = [i for start, end, _ in row.answers for i in range(start, end)]
    assert answers == [i for i, weight in enumerate(row.weights) if weight == ANSWER]
    for start, end, question in row.answers:
        assert server.decode(row.ids[start:end]) == question.answer


def test_numbers_of_up_to_three_digits_are_one_token() -> None:
    reader = tokenizer.load()
    for text in [str(n) for n in range(1000)] + [f"{n:03}" for n in range(1000)] + [f"{n:02}" for n in range(100)]:
        assert reader.encode(text).tokens == [text]
    assert reader.encode("1482").tokens == ["148", "2"]


@pytest.mark.parametrize(("language", "domain"), PAIRS)
def test_every_word_of_a_document_is_one_token(language: str, domain: str) -> None:
    reader = tokenizer.load()
    spaced = write(10**9 + 7, 120, language, domain, spaced=True).text
    assert spaced.replace(tokenizer.MARK, "") == write(10**9 + 7, 120, language, domain).text
    ends, expected = 0, set()
    for part in spaced.split(tokenizer.MARK):
        for _, (_, end) in tokenizer.pre_tokenizer().pre_tokenize_str(part):
            expected.add(ends + end)
        ends += len(part)
    found = {end for _, end in reader.encode(spaced.replace(tokenizer.MARK, "")).offsets}
    assert found == expected


def test_special_tokens_are_deepseeks() -> None:
    reader = json.loads(tokenizer.PATH.read_text(encoding="utf-8"))
    fixture = json.loads(
        (tokenizer.PATH.parents[1] / "src/longread/weights/fixture_tokenizer.json").read_text(encoding="utf-8")
    )
    assert {key: value for key, value in reader.items() if key not in ("model", "added_tokens")} == {
        key: value for key, value in fixture.items() if key not in ("model", "added_tokens")
    }
    assert [token | {"id": 0} for token in reader["added_tokens"]] == [
        token | {"id": 0} for token in fixture["added_tokens"]
    ]
    assert [reader["model"]["vocab"][name] for name in tokenizer.FIRST] == [0, 1, 2]
    assert tokenizer.load().get_vocab_size() == tokenizer.SIZE


def test_learn_takes_the_most_frequent_pair_first() -> None:
    words = {("a", "b", "c"): 3, ("b", "c"): 2, ("x", "a", "b"): 3}
    assert tokenizer.learn(words) == [("a", "b"), ("ab", "c"), ("x", "ab"), ("b", "c")]
    assert tokenizer.learn(words, limit=1) == [("a", "b")]
    assert tokenizer.learn({("x", "a", "b"): 1}, known=[("x", "ab"), ("a", "b")]) == []
    assert tokenizer.merged(("a", "a", "a"), ("a", "a")) == ("aa", "a")


@pytest.mark.parametrize("length", [512, 2048])
def test_rows_are_nearly_full_and_whole(server: ServerTokenizer, length: int) -> None:
    rng = random.Random(3)
    rows = [sample(length, rng, tokenizer.load()) for _ in range(40)]
    assert all(len(row.ids) == len(row.weights) <= length and row.ids[-1] == 1 for row in rows)
    assert all(len(row.answers) >= data.MIN_QUESTIONS for row in rows)
    assert sum(len(row.ids) for row in rows) > 0.85 * length * len(rows)
    thinking = [row for row in rows if server.id_of("<think>") in row.ids]
    assert 0 < len(thinking) < 20


def test_the_shortest_rows_hold_a_question_and_shorter_ones_are_refused() -> None:
    ids, weights = Batches(data.LEAST_LENGTH, 30, seed=1).batch(0)
    assert (weights == ANSWER).any(1).all() and (ids[:, 0] == tokenizer.BOS).all()
    with pytest.raises(ValueError, match=f"at least {data.LEAST_LENGTH} tokens"):
        Batches(data.LEAST_LENGTH - 1, 1, seed=1)


def test_the_stream_is_the_same_whatever_the_number_of_workers() -> None:
    def first(workers: int, start: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stream = Batches(512, 2, seed=11, first=start)
        context = "fork" if workers else None
        loader = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
        return list(islice(loader, 4))

    alone, shared, later = first(0), first(2), first(1, 2)
    assert alone[0][0].dtype == torch.int32 and alone[0][1].dtype == torch.uint8
    assert alone[0][0].shape == alone[0][1].shape == (2, 512)
    for (ids, weights), (other_ids, other_weights) in zip(alone + alone[2:], shared + later[:2], strict=True):
        assert torch.equal(ids, other_ids) and torch.equal(weights, other_weights)
    assert not torch.equal(alone[0][0], alone[1][0])
    assert not alone[0][1][alone[0][0] == tokenizer.PAD].any()
