"""Progress in tokens where there is no terminal: silent at first, then a line a tenth with speed and what remains."""

import pytest

from longread.cli import progress


def lines(reports: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch, capsys) -> list[str]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with progress.tokens_bar("a [b] {c}.txt", 1000) as report:
        for clock[0], done in reports:
            report(done)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_speed_is_of_what_was_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """400 tokens were there before; then 100 a second."""
    reports = [(0.5, 0), (1.0, 400), (2.0, 500), (3.0, 550), (3.5, 590), (4.0, 600), (8.0, 1000)]
    assert lines(reports, monkeypatch, capsys) == [
        "a [b] {c}.txt: 500 of 1,000 tokens, 100 tokens/s, 5 s left",
        "a [b] {c}.txt: 600 of 1,000 tokens, 50 tokens/s, 8 s left",
        "a [b] {c}.txt: 1,000 of 1,000 tokens, 100 tokens/s, 0 s left",
    ]


def test_what_is_over_at_once_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines([(0.1, 500), (1.9, 1000)], monkeypatch, capsys) == []


def test_a_first_report_that_comes_late_has_no_speed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert lines([(5.0, 300)], monkeypatch, capsys) == ["a [b] {c}.txt: 300 of 1,000 tokens"]
