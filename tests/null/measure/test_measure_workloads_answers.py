"""Spellings that are one answer, and answers that differ in what matters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.workloads.answers import holds, normalise, score
from longread.measure.workloads.ask import Expected


@pytest.mark.parametrize(
    ("value", "answer", "right"),
    [
        ("12,393 EUR", "The value is 12393 EUR.", True),
        ("12,393 EUR", "It is **12,393 EUR** (row 4).", True),
        ("12,393 EUR", "It is €12,393.", False),  # the other order: alternatives are for that
        ("12,393 EUR", "12,394 EUR", False),
        ("12,393 EUR", "112,393 EUR", False),
        ("12,393 EUR", "12,393.5 EUR", False),
        ("15", "150", False),
        ("15", "1.15", False),
        ("15", "It is 15.", True),
        ("15", "15.0", True),
        ("15", "KX-15", False),
        ("8.9 percent", "8.9%", True),
        ("8.90 percent", "8.9 per cent", True),
        ("8.9 percent", "18.9%", False),
        ("449 mg", "449mg", True),
        ("449 mg", "449 micrograms", False),
        ("449 mg", "449 milligrams", True),
        ("31.8 mg/kg", "31.8 mg/kg daily", True),
        ("31.8 mg/kg", "31.8 mg", False),
        ("30 days", "30 day", True),
        ("Ms Aldana", "Ms. Aldana is.", True),
        ("Ms Aldana", "Mr Aldana", False),
        ("1695-XC", "The number is 1695-XC", True),
        ("1695-XC", "11695-XC", False),
        ("1695-XC", "1695-XCD", False),
        ("billing/api/a_store.py", "In `billing/api/a_store.py`.", True),
        ("203.0.113.21", "203.0.113.214", False),
        ("203.0.113.214", "From 203.0.113.214.", True),
        ("12,393元", "１２，３９３元", True),
        ("12,393元", "共12393元。", True),
        ("12,393元", "12,394元", False),
        ("百分之7.8", "7.8%", True),
        ("7.8%", "百分之7.8", True),
        ("7.8%", "百分之17.8", False),
        ("欧阳明远", "由欧阳明远负责", True),
        ("15天", "115天", False),
        ("EUR 1,200.0 million", "EUR 1200 million", True),
        ("60 °C", "60°C", True),
    ],
)
def test_a_value_is_found_whole_in_any_spelling(value: str, answer: str, right: bool) -> None:
    assert score(Expected("contains", value), answer).right is right
    assert score(Expected("critical", value, critical=(value,)), answer).right is right


@pytest.mark.parametrize(
    ("wanted", "answer", "right"),
    [
        ("yes", "Yes.", True),
        ("yes", "Yes, it may be cleaned, though not with water.", True),
        ("yes", "No.", False),
        ("no", "No, it must not.", True),
        ("no", "It must not be crushed.", True),
        ("no", "Driving isn't allowed.", True),
        ("yes", "It must not be crushed.", False),
        ("yes", "It may be crushed.", True),
        ("no", "None of it is clear", False),
        ("是", "是的，可以。", True),
        ("是", "可以", True),
        ("否", "不可以。", True),
        ("否", "否", True),
        ("否", "不得饮酒", True),
        ("是", "不得饮酒", False),
        ("yes", "Perhaps", False),
    ],
)
def test_yes_and_no(wanted: str, answer: str, right: bool) -> None:
    assert score(Expected("exact", wanted), answer).right is right


def test_absent_exact_reference_and_thoughts() -> None:
    absent = Expected("absent", "Not in the document.", ("not stated",))
    assert score(absent, "Not in the document.").right and score(absent, "This is not stated there").right
    assert not score(absent, "12 mg").right and not score(absent, "").right
    assert score(absent, "<think>12 mg?</think>not in the document").right
    assert not score(Expected("contains", "12 mg"), "<think>12 mg").right
    assert score(Expected("exact", "Port Alma"), " port alma. ").right
    assert not score(Expected("exact", "Port Alma"), "Port Alma and Port Hope").right
    assert score(Expected("contains", "a", ("Paris",)), "paris").right
    missing = score(Expected("critical", "x", critical=("5 mg", "Ms Quist")), "6 mg, Ms Quist")
    assert not missing.right and missing.missing == ("5 mg",)


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_numbers_are_equal_when_they_are(one: int, other: int) -> None:
    assert score(Expected("contains", f"{one:,}"), f"it is {other}, I think").right is (one == other)


@given(st.text(max_size=200), st.text(max_size=40))
def test_any_text_can_be_judged(answer: str, value: str) -> None:
    assert normalise(normalise(answer)).lower() is not None
    score(Expected("contains", value), answer)
    assert not holds(normalise(answer), "")
