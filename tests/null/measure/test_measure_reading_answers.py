"""Every answer is in the document: a reader of its own, which knows the text only, must come to the same answers."""

import re
from collections import defaultdict

import pytest

from longread.measure.reading import DOMAINS, KINDS, LANGUAGES, Document, write

NAME, PLACE = r"(?P<e>[A-Z][a-z]+ [A-Z][a-z]+)", r"(?P<e>[一-龥]{4})"
CITE = {
    ("en", "contract"): r"clause (\d+\.\d+)",
    ("en", "statute"): r"§ (\d+)",
    ("en", "table"): r"row (\d+)",
    ("zh", "contract"): r"第([\d.]+)条",
    ("zh", "statute"): r"第(\d+)条",
}
CITE |= {("en", domain): r"line (\d+)" for domain in ("log", "code")}
CITE |= {("zh", domain): r"第(\d+)行" for domain in ("log", "code", "table")}
A, V = r"(?P<a>[a-z]+ [a-z]+)", r"(?P<v>.+?)(?: of each year)?\."
ZA, ZV = r"(?P<a>[一-龥]+?)", r"(?:每年)?(?P<v>[^每]+)。"
WORD, ZWORD = r"(?P<a>[a-z_]+)", r"(?P<a>[一-龥]+)"


def prose(mark: str, change: str, by: str, agreed: str, is_: str) -> list[str]:
    """The shapes of an English contract's or statute's fact lines."""
    start = rf"{mark}(?P<r>[\d.]+) (?:{change} No\. \d+: )?"
    return [
        rf"{start}[Tt]he {A} for {NAME} {is_} {V}",
        rf"{start}[Ff]or {NAME}, the {A} {agreed} is {V}",
        rf"{start}In respect of {NAME} the {A} (?:is|shall be) {V}",
        rf"{start}As {A} for {NAME}(?:, in addition to {mark or 'clause '}(?P<b>[\d.]+),)? the {by} names? {V}",
    ]


def chinese_prose(by: str) -> list[str]:
    start = r"第(?P<r>[\d.]+)条 (?:第\d+次修订：)?"
    return [
        rf"{start}{PLACE}的{ZA}为{ZV}",
        rf"{start}对于{PLACE}，{by}(?:约定|规定){ZA}为{ZV}",
        rf"{start}就{PLACE}而言，{ZA}应为{ZV}",
        rf"{start}{PLACE}的{ZA}，(?:除第(?P<b>[\d.]+)条外，)?{by}指定{ZV}",
    ]


HOST, TABLE = r"(?P<e>[a-z]+_[a-z]+)", r"(?:checked|open|closed)"
STAMP = r"(?P<r>\d+) \d\d:\d\d (?:INFO|WARN)"
SHAPES = {
    ("en", "contract"): prose("", "Amendment", "Parties", "agreed by the Parties", "shall be"),
    ("en", "statute"): prose("§ ", "Revision", "law", "under this law", "is"),
    ("en", "log"): [rf'{STAMP} {HOST} (?:reports )?{WORD}(?: first| after line (?P<b>\d+) also)?="?(?P<v>[^"]+)"?'],
    ("en", "code"): [
        rf'(?P<r>\d+) \| {HOST}\.{WORD}(?:\.first|\.after\[(?P<b>\d+)\])? = "?(?P<v>[^"]+?)"?(?:  # [a-z ]+)?'
    ],
    ("en", "table"): [
        rf"(?P<r>\d+) \| {NAME} \| {A} \|(?: first \|| after row (?P<b>\d+) \|)? (?P<v>[^|]+) \| {TABLE}"
    ],
    ("zh", "contract"): chinese_prose("双方"),
    ("zh", "statute"): chinese_prose("法律"),
    ("zh", "log"): [rf'{STAMP} {PLACE} (?:报告 )?{ZWORD}(?: 首个| 除第(?P<b>\d+)行外)?="?(?P<v>[^"]+)"?'],
    ("zh", "code"): [
        rf'(?P<r>\d+) \| {PLACE}\.{ZWORD}(?:\.首个|\.除\[(?P<b>\d+)\])? = "?(?P<v>[^"]+?)"?(?:  # [一-龥]+)?'
    ],
    ("zh", "table"): [
        rf"(?P<r>\d+) \| {PLACE} \| {ZWORD} \|(?: 首个 \|| 除第(?P<b>\d+)行外 \|)? (?P<v>[^|]+) \| [一-龥]+"
    ],
}
QUESTION_KEYS = {
    "contract": rf"(?:the|every|each) {A} (?:for|of) {NAME}",
    "log": rf"(?:the|every|each) {WORD} (?:of|at) {HOST}",
    "code": rf"{HOST}\.{WORD}",
}
CHINESE_QUESTIONS = re.compile(
    r"^(?:请说明|请列出|请合计|最新内容：)?(?P<keys>.*?)(?:是多少|是什么|是谁|共多少|的最新内容)*[？。]\n?$"
)

Fact = tuple[str, str, str | None]  # reference, value, reference of the line before


def read(document: Document) -> dict[tuple[str, str], list[Fact]]:
    """(entity, attribute) -> its facts in the order of the lines, from the text alone."""
    shapes = [re.compile(shape) for shape in SHAPES[document.language, document.domain]]
    found: dict[tuple[str, str], list[Fact]] = defaultdict(list)
    for line in document.text.split("\n"):
        for shape in shapes:
            if hit := shape.fullmatch(line):
                groups = hit.groupdict()
                found[hit["e"], hit["a"]].append((hit["r"], hit["v"], groups.get("b")))
                break
    return dict(found)


def asked(document: Document, text: str) -> list[tuple[str, str]]:
    """The keys that a question names, in its order."""
    if document.language == "zh":
        text = CHINESE_QUESTIONS.match(text)["keys"]  # type: ignore[index]
        text = text.replace("的数值", "").replace("的全部数值", "").replace("全部", "").replace("的最新内容", "")
        keys = []
        for part in re.split("[、和]", text):
            hit = re.fullmatch(rf"{PLACE}[的.]?{ZWORD}", part)
            assert hit is not None, part
            keys.append((hit["e"], hit["a"]))
        return keys
    pattern = QUESTION_KEYS.get(document.domain, QUESTION_KEYS["contract"])
    return [(hit["e"], hit["a"]) for hit in re.finditer(pattern, text)]


def answer(document: Document, kind: str, facts: list[Fact]) -> str:
    english = document.language == "en"
    cite = re.sub(r"\(.*\)", "{}", CITE[document.language, document.domain])
    if not facts:
        return "Not in the document." if english else "文中没有。"
    cites = [cite.format(reference) for reference, _, _ in facts]
    if kind == "count":
        return f"{', '.join(cites)}: {len(facts)}" if english else f"{'、'.join(cites)}：{len(facts)}"
    if english:
        return "; ".join(f"{value} ({name})" for (_, value, _), name in zip(facts, cites, strict=True))
    return "；".join(f"{value}（{name}）" for (_, value, _), name in zip(facts, cites, strict=True))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("lines", [12, 60, 700])
def test_reader_finds_every_answer(language: str, domain: str, lines: int) -> None:
    kinds = set()
    for seed in range(30 if lines < 100 else 4):
        document = write(seed, lines, language, domain)
        found = read(document)
        assert sum(len(facts) for facts in found.values()) == document.facts
        for question in document.questions(60, seed=seed):
            kinds.add(question.kind)
            keys = asked(document, question.text)
            facts = [fact for key in keys for fact in found.get(key, [])]
            if question.kind in ("single", "multi-key"):
                assert all(len(found[key]) == 1 for key in keys), question
                assert len(keys) == 1 if question.kind == "single" else len(keys) in (2, 3)
            elif question.kind == "last":
                assert len(keys) == 1 and len(facts) in (2, 3)
                facts = facts[-1:]
            elif question.kind == "absent":
                assert len(keys) == 1 and not facts
            else:
                assert len(keys) == 1 and len(facts) in (2, 3, 4)
                # Each later line names the one before, so that the list can be followed.
                assert [fact[2] for fact in facts] == [None, *(fact[0] for fact in facts[:-1])]
            assert question.answer == answer(document, question.kind, facts), question
            cites = re.findall(CITE[language, domain], question.thought)
            assert cites == [fact[0] for fact in facts]
            for index, (reference, value, _) in zip(question.lines, facts, strict=True):
                text = document.lines[index].text
                assert value in text and re.search(rf"(?<![\d.]){re.escape(reference)}(?![\d.])", text)
    assert kinds == set(KINDS) or lines == 12


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_absent_keys_are_near_misses(language: str, domain: str) -> None:
    """Two of three name an entity and an attribute that the document has, but apart; the others a strange entity."""
    known = strange = 0
    for seed in range(12):
        document = write(seed, 250, language, domain)
        found = read(document)
        entities, attributes = {key[0] for key in found}, {key[1] for key in found}
        for question in document.questions(20, seed=seed, kinds=["absent"]):
            ((entity, attribute),) = asked(document, question.text)
            assert attribute in attributes and (entity, attribute) not in found and question.lines == ()
            if entity in entities:
                known += 1
            else:
                strange += 1
                assert entity not in document.text
    assert known + strange == 240 and 130 <= known <= 190
