"""What the demo asks, in which order, and how an answer is judged and shown."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from longread.measure import demo
from longread.measure.demo import Inquiry, Pair, Row, own_text, remind, rounds, shown, told
from longread.measure.served import Asked


def asked(answer: str, thought: str = "", ttft: float = 2.0) -> Asked:
    return Asked(answer, thought, ttft, 0.5, 11, 4096, 3840)


def lines(pair: Pair, text: str = "") -> str:
    return "\n".join(line.plain for line in told(pair, text))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_each_question_is_asked_once_cold_and_once_warm_behind_another(count: int) -> None:
    inquiries = [Inquiry(str(i), None, False) for i in range(count)]
    order = list(rounds(inquiries))
    assert {first for first, _ in order} >= set(inquiries)
    assert sorted(second.question for _, second in order if second is not None) == [str(i) for i in range(count)]
    assert all(first != second for first, second in order)


def test_an_answer_is_right_only_when_it_is_exactly_that_both_times() -> None:
    inquiry = Inquiry("How much?", "48,213 EUR (clause 7.3)", False, ("7.3 It shall be 48,213 EUR.  (line 9)",))
    right = Pair(inquiry, asked("48,213 EUR (clause 7.3)"), asked("48,213 EUR (clause 7.3)\n", ttft=0.05))
    said = lines(right)
    assert right.right and said.count("  right") == 2 and "the text  7.3 It shall be 48,213 EUR.  (line 9)" in said
    assert "first token after 2.00 s" in said and "first token after 50 ms: 256 tokens read, 3,840 from" in said
    wrong = Pair(inquiry, asked("48,213 EUR (clause 7.3)"), asked("48,213 EUR"))
    assert not wrong.right and "7.3)  right when cold" in lines(wrong) and "EUR  WRONG when warm" in lines(wrong)
    row = Row("x", (right, wrong), None, 2**20)
    assert next(iter(demo.table([row]).columns[1].cells)) == "1 of 2"
    assert demo.verdict([row]).plain == "1 of 2 questions were answered WRONG."
    assert demo.verdict([Row("x", (right,), None, None)] * 2).plain.startswith("All 2 questions were answered right")


@pytest.mark.parametrize(
    ("answer", "mark"),
    [
        ("48,213 EUR (clause 7.3)", "  (these words stand in the text)"),
        ("48,213 EUR (clause 7.3); Port Mara (clause 9.1)", "  (NOT in the text: made up)"),
        ("赵芳（第30.10条）", "  (NOT in the text: made up)"),
        ("Not in the document.", ""),
        ("It depends (see 7.3) on much.", ""),
    ],
)
def test_what_an_answer_quotes_is_looked_up_in_a_text_of_the_users(answer: str, mark: str) -> None:
    said = lines(Pair(Inquiry("How much?", None, False), asked(answer), asked(answer)), "It is 48,213 EUR, say.")
    assert f"   answer    {answer}{mark}\n" in said


def test_noise_is_shown_on_one_line_and_without_an_expectation_nothing_is_judged() -> None:
    pair = Pair(Inquiry("Who?", None, True), asked("a\nb\x1b[31m" * 300), asked("a\nb\x1b[31m" * 300, "It is\n"))
    said = lines(pair)
    assert demo.verdict([Row("x", (pair,), None, None)]).plain.startswith("What would be right is not known")
    assert "\x1b" not in said and "WRONG" not in said and "expected" not in said and r"thought   'It is\n'" in said
    assert max(map(len, said.splitlines())) < 500


def test_questions_about_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Some text. " * 300, encoding="utf-8")
    exam = own_text([file, file], [], "zh")
    assert exam.title == "a.txt, a.txt" and [q.question for q in exam.inquiries] == list(demo.QUESTIONS["zh"])
    assert [q.thinking for q in exam.inquiries] == [False, False, True]
    assert exam.turn(exam.inquiries[0]).endswith("Some text. \n应付金额是多少？")
    exam = own_text([file], ["Why?", "Why?"], "en")
    assert [(q.question, q.thinking) for q in exam.inquiries] == [("Why?", False)]


def test_without_a_terminal_what_takes_long_says_so_in_plain_lines() -> None:
    console = Console(file=io.StringIO(), width=80)
    waits = iter([False, False, True])

    def over(seconds: float) -> bool:
        assert seconds == 10.0
        return next(waits)

    remind(console, over)
    assert written(console) == "   ... 10 s\n   ... 20 s\n"
    assert next(waits, None) is None


def test_what_is_done_is_said_at_once_without_a_terminal_and_moves_on_one() -> None:
    console = Console(file=io.StringIO(), width=80)
    with shown(console, "round 1 of 3"):
        assert written(console) == "round 1 of 3\n"
    assert written(console) == "round 1 of 3\n"
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with shown(console, "round 1 of 3"):
        pass
    assert "\r" in written(console)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
