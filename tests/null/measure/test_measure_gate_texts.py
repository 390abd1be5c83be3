"""Answers against references, and the values that must not change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.gate import clauses, critical, texts


def test_exact_match_forgives_case_spaces_width_and_a_full_stop_and_nothing_else() -> None:
    assert texts.exact(" 17 Days (clause 3.1). ", ["17 days (clause 3.1)"])
    assert texts.exact("文中没有", ["文中没有。"])
    assert texts.exact("１７天", ["17天"])
    assert not texts.exact("17 days", ["70 days"])
    assert not texts.exact("1.7 days", ["17 days"])


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat", "the cat sat down", 2 * 2 / 6),
        ("sat cat the", "the cat sat", 1 / 3),
        ("", "the cat", 0.0),
        ("", "", 1.0),
        ("罚金为五百元", "罚金为六百元", 5 / 6),
        ("1,000.50 EUR", "1,000.60 EUR", 0.5),  # a number is one word: half right is wrong
    ],
)
def test_rouge_l(answer: str, reference: str, f1: float) -> None:
    assert texts.rouge_l(answer, reference) == pytest.approx(f1)


@given(st.text(max_size=60), st.text(max_size=60))
def test_rouge_l_is_symmetric_and_a_share(one: str, other: str) -> None:
    assert 0 <= texts.rouge_l(one, other) == texts.rouge_l(other, one) <= 1


@pytest.mark.parametrize(
    "text",
    [
        "the same words again and " * 12,
        "Yes. " + "no " * 40,
        "答案是三天。" * 10,
        "A long beginning that says something new, and then " + "clause 4.2 says 17 days; " * 8,
    ],
)
def test_going_in_circles_is_found(text: str) -> None:
    assert texts.repeats(text) is not None


@pytest.mark.parametrize(
    "text",
    [
        "17 days (clause 3.1); 18 days (clause 3.2); 19 days (clause 3.3); 20 days (clause 3.4)",
        "a b a b a b",
        "| 1 | x |\n| 2 | y |\n| 3 | z |\n| 4 | w |",
        "",
        "".join(clauses.write(1, 40, "en")[0]),
    ],
)
def test_a_list_is_no_circle(text: str) -> None:
    assert texts.repeats(text) is None


def test_truncation() -> None:
    assert texts.truncated("and then", "length") and texts.truncated("", None) and texts.truncated("```py\nx", "stop")
    assert not texts.truncated("done.", "stop") and not texts.truncated("```x```", "stop")


@pytest.mark.parametrize(
    ("base", "candidate", "kind"),
    [
        ("Take 5 mg daily.", "Take 50 mg daily.", "number"),
        ("Take 5 mg daily.", "Take 5 mcg daily.", "number"),
        ("Take 0.5 mg.", "Take .5 mg.", "number"),
        ("0.6 MPa", "0.6 kPa", "number"),
        ("by 12 March", "by 13 March", "date"),
        ("2031-01-02", "2031-02-01", "date"),
        ("KX-1234", "KX-1243", "code"),
        ("Dr Keller", "Dr Kellner", "name"),
        ("The Supplier pays.", "The Customer pays.", "party"),
        ("He shall not enter.", "He shall enter.", "negation"),
        ("每次5毫克", "每次50毫克", "number"),
        ("由甲方承担", "由乙方承担", "party"),
        ("夜间不得运行", "夜间运行", "negation"),
        ("3月17日", "3月7日", "date"),
        ("-5 °C", "5 °C", "number"),
    ],
)
def test_a_changed_critical_value_is_found(base: str, candidate: str, kind: str) -> None:
    (found,) = critical.changes(base, candidate)
    assert found.startswith(kind) and critical.changes(candidate, base)
    assert not critical.changes(base, base)


@pytest.mark.parametrize(
    ("base", "candidate"),
    [
        ("12,000 EUR", "12000 EUR"),
        ("17 percent", "17%"),
        ("5 µg", "5 mcg"),
        ("The dose is 5 mg every 8 hours.", "Every 8 hours, 5 mg."),
        ("It may not run.", "It must never run."),
        ("Dr. Keller approves.", "Dr Keller"),
    ],
)
def test_another_wording_of_the_same_values_is_no_change(base: str, candidate: str) -> None:
    assert critical.changes(base, candidate) == []


def test_a_value_stands_only_as_itself() -> None:
    assert critical.stands("5 mg", "Take 5 mg.") and critical.stands("5 mg", "5  MG daily")
    for other in ("15 mg", "0.5 mg", "5 mg/kg", "25 mg", "5 mgs"):
        assert not critical.stands("5 mg", f"Take {other} daily")
    assert (
        critical.stands("17", "clause 17.") and not critical.stands("17", "17.5") and not critical.stands("17", "170")
    )
    assert critical.stands("3月17日", "在3月17日") and not critical.stands("no", "nothing")


def test_a_yes_does_not_stand_in_a_no() -> None:
    assert critical.stands("yes", "Yes.") and critical.stands("no", "No, it may not.")
    assert not critical.stands("可以", "不可以") and not critical.stands("yes", "Yes and no: it may not.")
    assert critical.stands("可以", "可以。") and critical.stands("不得", "不得")


def test_truth_is_missed_and_contradicted() -> None:
    assert critical.untrue(["5 mg"], "5 mg (clause 12)") == []
    assert critical.untrue(["5 mg"], "50 mg") == ["'5 mg' is missing", "'50 mg' is said instead or besides"]
    assert critical.untrue(["5 mg"], "5 mg or 50 mg") == ["'50 mg' is said instead or besides"]
    assert critical.untrue(["Supplier"], "the customer") == ["'Supplier' is missing"]


def test_values_of_a_reference_answer() -> None:
    assert critical.values_of("17 days (clause 3.1); Dr Berg (clause 4.2)") == ("17 days", "Dr Berg")
    assert critical.values_of("66天（第155条）；3月1日（第2条）。") == ("66天", "3月1日")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_clauses_hold_what_is_asked_of_them_and_a_seed_repeats(language: str) -> None:
    text, probes = clauses.write(5, 60, language)
    assert clauses.write(5, 60, language) == (text, probes) and clauses.write(6, 60, language)[0] != text
    lines = text.splitlines()
    assert len(lines) == 60 and {p.kind for p in probes} == {"party", "negation", "dose", "unit", "name"}
    for probe in probes:
        if probe.value not in ("yes", "no"):
            assert critical.stands(probe.value, lines[probe.line]), (probe, lines[probe.line])
        assert critical.untrue([probe.value], probe.value) == []
