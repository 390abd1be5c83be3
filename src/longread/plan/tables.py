"""Tables that stay readable: whole in a pipe, in another shape where a terminal is too narrow for them.

Knows rich. No figure is ever cut or left out: what does not fit side by side is put below.
"""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from longread.spec.printing import printable

PIPED = 100_000  # columns: nothing is wrapped for a program, or for a pager that scrolls
_ANY = 1_000_000  # columns in which a table takes what it needs
_GAP = "   "  # between two fields of a record


class Screen(Console):
    """A console that shows no control character of a text: what a server or a file says cannot move the cursor, clear
    the screen or name the window. rich's own controls are no text and go through.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, newline="\n"), style, control)


def console() -> Console:
    """stdout: as wide as a terminal is, and without a width where there is none."""
    return Screen(highlight=False) if sys.stdout.isatty() else Screen(width=PIPED, highlight=False)


def print_records(
    console: Console, names: Sequence[str], rows: Sequence[Sequence[str | Text]], left: Sequence[str] = ()
) -> None:
    """A record a row, the first field its title; columns named in ``left`` are text, the others figures.

    Where the terminal is too narrow: a record a column, if so many fit, else the fields of each one after another.
    Cells of ``str`` are markup, as rich takes it.
    """
    cells = [[Text.from_markup(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    for table in (_table(names, cells, left), _across(names, cells)):
        if Measurement.get(console, console.options.update(width=_ANY), table).maximum <= console.width:
            console.print(table)
            return
    for row in cells:
        for line in _flow(names, row, console.width):
            console.print(line)


def _table(names: Sequence[str], rows: Sequence[Sequence[Text]], left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 or name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _across(names: Sequence[str], rows: Sequence[Sequence[Text]]) -> Table:
    """The same with a column a record."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(names[0], no_wrap=True)
    for row in rows:
        table.add_column(row[0], justify="right", no_wrap=True)
    for index, name in enumerate(names[1:], 1):
        table.add_row(name, *(row[index] for row in rows))
    return table


def _flow(names: Sequence[str], row: Sequence[Text], width: int) -> list[Text]:
    """A record's lines: broken between fields, inside one only where it alone is longer than a line."""
    title = row[0].copy()
    title.stylize("bold")
    lines, room = [Text.assemble((f"{names[0]} ", "dim"), title)], 0
    for name, cell in zip(names[1:], row[1:], strict=True):
        if not cell:
            continue
        field = Text.assemble((f"{name} ", "dim") if name else "", cell)
        if room < len(_GAP) + field.cell_len:
            lines.append(Text(_GAP))
            room = width - len(_GAP)
        else:
            lines[-1].append(_GAP)
            room -= len(_GAP)
        lines[-1].append_text(field)
        room -= field.cell_len
    return lines
