"""The bundled readers in the real engine: they answer, and they answer the same however the text was read."""

from collections.abc import Iterator

import pytest
from readers import Reader, each_kind, examination

from longread.cli.checkpoint import BUNDLED
from longread.measure.reading import KINDS, LANGUAGES

PAPERS = (("en", "contract", 80), ("zh", "statute", 92), ("en", "log", 100), ("zh", "table", 90))  # 1,500 tokens each
EACH = 8


@pytest.fixture(scope="module", params=BUNDLED)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    return Reader.open(request.param)


def test_every_kind_of_question_is_answered_in_both_languages(reader: Reader) -> None:
    wrong: list[str] = []
    asked: list[tuple[str, str]] = []
    for number, (language, domain, lines) in enumerate(PAPERS):
        document = examination(number, lines, language, domain)
        questions = each_kind(document, EACH)
        assert 1350 <= len(reader.prompt(document.text)) <= 1750 and document.facts >= 60
        wrong += reader.wrong(document, questions)
        asked += [(language, question.kind) for question in questions]
    assert len(asked) == 32 and set(asked) == {(language, kind) for language in LANGUAGES for kind in KINDS}
    assert len(asked) - len(wrong) >= 30, "\n".join(wrong)


def test_a_conversation_goes_on_about_the_same_document(reader: Reader) -> None:
    document = examination(50, 80, "zh", "contract")
    said: list[str] = []
    for question in each_kind(document, 4):
        turn = question.text if said else f"{document.text}\n{question.text}"
        before = len(reader.prompt(*said)) if said else 0
        (answer,) = reader.answers([reader.prompt(*said, turn)])
        assert answer.text == question.answer
        assert answer.end.cached_tokens >= before - 8, "what was said is not read again"
        said += [turn, answer.text]


@pytest.mark.parametrize(("name", "language"), [("reader-v4", "en"), ("reader-v3", "zh")])
def test_cold_warm_and_chunked_answers_are_the_same_tokens(name: str, language: str) -> None:
    document = examination(9, 80, language, "contract")
    question, other = each_kind(document, 2)
    reader = Reader.open(name)
    prompt, before = (reader.prompt(f"{document.text}\n{one.text}") for one in (question, other))
    (cold,) = reader.answers([prompt])
    (again,) = reader.answers([prompt])
    # Chunks that end within a page, within a compressor's window; warm behind another question.
    chunked = Reader.open(name, max_num_batched_tokens=201)
    chunked.answers([before])
    (warm,) = chunked.answers([prompt])
    uncached = Reader.open(name, max_num_batched_tokens=201, enable_prefix_caching=False)
    (pieces,) = uncached.answers([prompt])
    assert cold.text == question.answer
    assert cold.end.cached_tokens == pieces.end.cached_tokens == 0
    assert warm.end.cached_tokens >= 1024 and again.end.cached_tokens >= 1024
    assert cold.ids == again.ids == warm.ids == pieces.ids
