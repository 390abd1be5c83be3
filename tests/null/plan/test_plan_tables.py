"""Tables on narrow terminals and in pipes: no figure is cut, no line is wider than the terminal."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from longread.plan.tables import PIPED, print_records

NAMES = ("class", "TTFT p50/p99", "E2E p50/p99", "reused", "note")
ROWS = [
    ("short", "1,234.5 ms / 23,456.7 ms", "140 s / 300 s", "0%", ""),
    ("long [i]", "442 s / 562 s", "491 s / 575 s", "12%", "a sentence of some words that goes on"),
]


def drawn(width: int, rows: list[tuple[str, ...]]) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_records(console, NAMES, [[Text(cell) for cell in row] for row in rows], left=("note",))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [50, 60, 80, 120, PIPED])
def test_every_figure_is_whole_at_any_width(width: int) -> None:
    lines = drawn(width, ROWS)
    for cell in (cell for row in ROWS for cell in row):
        assert any(cell in line for line in lines), cell
    assert not any("…" in line for line in lines)
    assert max(len(line) for line in lines) <= width


def test_a_row_a_record_where_there_is_room_and_a_column_a_record_before_fields_below_one_another() -> None:
    short = [(*row[:4], row[4][:10]) for row in ROWS]
    assert [line.split()[0] for line in drawn(PIPED, short)] == ["class", "short", "long"]
    across = drawn(66, short)
    assert across[0].split() == ["class", "short", "long", "[i]"]
    assert [line.split()[0] for line in across] == ["class", "TTFT", "E2E", "reused", "note"]
    below = drawn(46, short)
    assert [line for line in below if not line.startswith(" ")] == ["class short", "class long [i]"]
    assert "   TTFT p50/p99 442 s / 562 s" in below


def test_a_field_longer_than_the_terminal_is_wrapped_and_not_cut() -> None:
    (*_, first, second) = drawn(30, [("x", "1 s", "2 s", "3%", "words that do not fit on a line of thirty")])
    assert " ".join(f"{first} {second}".split()) == "note words that do not fit on a line of thirty"


def test_an_empty_field_is_not_named() -> None:
    assert "note" not in "".join(drawn(40, [("x", "1,234.5 ms / 23,456.7 ms", "140 s / 300 s", "0%", "")] * 2))
