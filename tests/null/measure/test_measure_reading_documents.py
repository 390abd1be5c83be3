"""What every synthetic document keeps to, whatever its seed, length, language and domain."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.measure.reading import DOMAINS, KINDS, LANGUAGES, Document, ask, write
from longread.measure.reading.grammar import MARK, VALUE_KINDS
from longread.measure.reading.lexicon_en import ENGLISH
from longread.measure.reading.lexicon_zh import CHINESE

REFERENCE = re.compile(r"(?:§ |第)?(\d+)(?:\.(\d+))?(?:条)? ")
DOCUMENTS = st.builds(
    write,
    seed=st.integers(0, 2**63),
    lines=st.integers(4, 400),
    language=st.sampled_from(LANGUAGES),
    domain=st.sampled_from(DOMAINS),
)


def references(document: Document) -> list[tuple[int, int]]:
    """Of the lines that have one; titles and headings begin otherwise."""
    found = [REFERENCE.match(line.text) for line in document.lines]
    return [(int(hit[1]), int(hit[2] or 0)) for hit in found if hit is not None]


@settings(max_examples=150, deadline=None)
@given(DOCUMENTS, st.integers(0, 60), st.integers(0, 2**40))
def test_any_document(document: Document, count: int, seed: int) -> None:
    for line in document.lines:
        assert line.text.endswith("\n") and line.text.count("\n") == 1 and not line.text[0].isspace()
        assert MARK not in line.text and "{" not in line.text
    # References grow from line to line, hence are unique.
    assert all(before < after for before, after in pairwise(references(document)))
    assert all(number <= 9999 for number, _ in references(document))
    assert sum(len(record.lines) for record in document.stated.records) == document.facts
    keys = [(record.entity, record.attribute) for record in document.stated.records]
    assert len(set(keys)) == len(keys)

    questions = document.questions(count, seed)
    assert questions == document.questions(count, seed) and len(questions) <= count
    assert len({question.text for question in questions}) == len(questions)
    lines = [line for question in questions for line in question.lines]
    assert len(set(lines)) == len(lines)  # no two questions about one key
    for question in questions:
        assert MARK not in question.text + question.answer + question.thought
        assert ask(question) == question.text == question.text.strip()
        assert (question.kind == "absent") == (question.lines == ())
        assert 0 <= document.depth(question) < 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 200), st.sampled_from(DOMAINS))
def test_one_seed_says_the_same_in_both_languages_and_spacings(seed: int, lines: int, domain: str) -> None:
    english, chinese = (write(seed, lines, language, domain) for language in LANGUAGES)
    spaced = write(seed, lines, "zh", domain, spaced=True)
    assert spaced.text.replace(MARK, "") == chinese.text
    for marked, plain in zip(spaced.questions(9), chinese.questions(9), strict=True):
        assert marked.text.replace(MARK, "") == plain.text and marked.answer.replace(MARK, "") == plain.answer
    assert write(seed, lines, "en", domain, spaced=True) == english
    assert references(english) == references(chinese)
    for one, other in zip(english.stated.records, chinese.stated.records, strict=True):
        assert (one.kind, one.lines, one.references) == (other.kind, other.lines, other.references)
        assert one.attribute.kind == other.attribute.kind


def test_length_language_and_domain_follow_the_call() -> None:
    drawn = Counter()
    for seed in range(200):
        document = write(seed, 10)
        drawn[document.language, document.domain] += 1
        assert len(document.lines) == 10
        assert document == write(seed, 10, document.language, document.domain)
    assert set(drawn) == {(language, domain) for language in LANGUAGES for domain in DOMAINS}
    assert min(drawn.values()) >= 8


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_many_similar_facts(language: str, domain: str) -> None:
    for lines in (200, 1000, 6000):
        document = write(lines, lines, language, domain)
        assert document.facts >= 100 and 0.78 <= document.facts / lines <= 0.9
        kinds = Counter(record.kind for record in document.stated.records)
        keys = len(document.stated.records)
        assert 0.04 <= kinds["last"] / keys <= 0.12 and 0.015 <= kinds["list"] / keys <= 0.07
        entities = Counter(record.entity for record in document.stated.records)
        attributes = Counter(record.attribute for record in document.stated.records if record.kind != "list")
        assert keys / len(entities) >= 5 and keys / len(attributes) >= 8  # keys share their halves


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "absent"])
def test_depth_is_uniform(kind: str) -> None:
    tenths: Counter[int] = Counter()
    for seed in range(260):
        document = write(seed, 150)
        for question in document.questions(6, seed=seed, kinds=[kind]):
            if kind != "multi-key":
                tenths[int(10 * document.depth(question))] += 1
                continue
            starts = [document.depth(question.__class__("single", "", "", "", (line,))) for line in question.lines]
            tenths.update(int(10 * start) for start in starts)
    mean = sum(tenths.values()) / 10
    # Five standard deviations; the lists' edge, where no room is left for their other lines, is inside them.
    assert mean > 70 and all(abs(tenths[tenth] - mean) < 5 * mean**0.5 for tenth in range(10)), tenths


def test_half_of_the_questions_are_single() -> None:
    for seed in range(20):
        asked = Counter(question.kind for question in write(seed, 1200).questions(48, seed=seed))
        assert asked["single"] == 24 and all(4 <= asked[kind] <= 5 for kind in KINDS if kind != "single")
    only = write(1, 1200).questions(20, kinds=["last", "absent"])
    assert Counter(question.kind for question in only) == {"last": 10, "absent": 10}


def test_different_seeds_ask_different_questions() -> None:
    document = write(1, 500, "en", "contract")
    assert document.questions(10, 1) != document.questions(10, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: write(1, 3), "at least 4 lines"),
        (lambda: write(1, 9, "fr"), "no documents in 'fr'"),
        (lambda: write(1, 9, "en", "poem"), "'poem'"),
        (lambda: write(1, 9).questions(3, kinds=["double"]), "double"),
        (lambda: write(1, 9).questions(3, kinds=[]), "single"),
    ],
)
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


PINNED = {
    ("en", "contract"): "656d243c8f3dc17c",
    ("zh", "contract"): "45ad2ae2a71a544c",
    ("en", "statute"): "af2c056ed2556fd5",
    ("zh", "statute"): "c59a5647bf7f1d90",
    ("en", "log"): "30ad527940223066",
    ("zh", "log"): "89655f9b4d8374b3",
    ("en", "code"): "0d3756b41fc279a2",
    ("zh", "code"): "1d02a900fd88fa52",
    ("en", "table"): "4cb01ccc3acd0806",
    ("zh", "table"): "abec2e01b2f553b2",
}


@pytest.mark.parametrize(("language", "domain"), PINNED)
def test_seeds_give_the_pinned_text(language: str, domain: str) -> None:
    """Training, model card and gates name documents by seed. A changed text needs retraining and a new pin."""
    document = write(20260, 300, language, domain)
    asked = "".join(f"{question.text}\n{question.thought}\n{question.answer}\n" for question in document.questions(40))
    found = hashlib.sha256((document.text + asked).encode()).hexdigest()[:16]
    assert found == PINNED[language, domain]


def test_text_does_not_depend_on_hash_seeds() -> None:
    program = (
        "import hashlib; from longread.measure.reading import write; d = write(7, 400);"
        "print(hashlib.sha256((d.text + str(d.questions(40))).encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(found) == 1 and len(found.pop().strip()) == 64


def test_needs_the_standard_library_only() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'psutil', 'orjson', 'rich', 'tokenizers'): sys.modules[name] = None\n"
        "import longread.measure.reading"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_lexicons_are_parallel() -> None:
    assert len(ENGLISH.firsts) >= 120 and len(ENGLISH.seconds) >= 40
    for tongue in (ENGLISH, CHINESE):
        for group in (tongue.firsts, tongue.seconds, tongue.persons, tongue.places, tongue.months):
            assert len(set(group)) == len(group)
    for name in ("firsts", "seconds", "persons", "places", "months", "last", "several", "listing", "count"):
        assert len(getattr(ENGLISH, name)) == len(getattr(CHINESE, name)), name
    for domain in DOMAINS:
        one, other = ENGLISH.domains[domain], CHINESE.domains[domain]
        assert len(one.attributes) == 24 and len(set(one.attributes) | set(one.lists)) == 28
        assert len(set(other.attributes) | set(other.lists)) == 28
        assert [item.kind for item in one.attributes] == [item.kind for item in other.attributes]
        assert [item.kind for item in one.lists] == [item.kind for item in other.lists]
        for name in ("facts", "amended", "first", "further", "fillers", "headings", "titles", "keys", "every"):
            assert len(getattr(one, name)) == len(getattr(other, name)), name
    assert set(ENGLISH.values) == set(CHINESE.values) == set(VALUE_KINDS)
    assert set(ENGLISH.single) == set(CHINESE.single) == set(VALUE_KINDS)


def test_chinese_words_cannot_merge_over_their_boundaries() -> None:
    """No two characters that meet at a boundary are neighbours inside any word."""
    inside: dict[str, str] = {}
    meeting: dict[str, str] = {}
    for seed in range(60):
        document = write(seed, 300, "zh", DOMAINS[seed % 5], spaced=True)
        parts = [document.text]
        for question in document.questions(60):
            parts += [question.text, question.answer, question.thought]
        for run in re.findall(f"[一-龥{MARK}]+", "\n".join(parts)):
            words = [word for word in run.split(MARK) if word]
            for word in words:
                inside.update({one + two: word for one, two in pairwise(word)})
            meeting.update({one[-1] + two[0]: f"{one}|{two}" for one, two in pairwise(words)})
    assert {pair: (inside[pair], meeting[pair]) for pair in inside if pair in meeting} == {}
