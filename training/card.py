"""``python -m training.card results.json...``: the measured tables of a model card, as Markdown. Knows result files."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from training.cells import KEYS, SCHEMA, Cell, share

TITLES = {
    "length": "length",
    "kind": "kind of question",
    "decile": "depth of the answer, tenth of the document",
    "language": "language",
    "thinking": "thinking",
    "domain": "kind of document",
}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.card", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    for path in parser.parse_args(arguments).results:
        print(card(json.loads(path.read_text(encoding="utf-8"))))


def card(result: dict) -> str:
    """All tables of one result. Raises ValueError for another schema."""
    if result["schema"] != SCHEMA:
        raise ValueError(f"schema {result['schema']}, expected {SCHEMA}")
    parts = [_heading(result)]
    if "tables" in result:
        parts.append(_lengths(result))
        parts += [_grid(name, result["tables"][name]) for name in KEYS if _several(result["tables"][name], name)]
    for name in ("speed", "divergence", "index"):
        if name in result:
            parts.append(f"**{name}**\n\n{_plain(result[name])}")
    return "\n\n".join(parts) + "\n"


def _heading(result: dict) -> str:
    turns = "one question a conversation" if result["turns"] == 1 else f"up to {result['turns']} questions in turn"
    details = [result["method"], turns, str(result["device"])]
    if result["selection"]:
        details.append(f"selection {result['selection']}")
    details.append("quantised" if result["quantised"] else "not quantised")
    return f"### {result['model']}: {', '.join(details)}; seeds from 10^12 + {result['seed0']}"


def _lengths(result: dict) -> str:
    figures = {cell["length"]: cell for cell in result["documents"]}
    rows = []
    for cell in result["tables"]["length"]:
        figure = figures[cell["length"]]
        measured = [f"{cell['length']:,}", str(cell["count"]), share(cell), _interval(cell)]
        rows.append([*measured, *(f"{figure[key]:,}" for key in ("documents", "tokens_mean", "facts_fewest"))])
    head = ["length", "questions", "right", "95 % interval", "documents", "mean tokens", "facts, fewest"]
    return _table(head, rows)


def _several(cells: Sequence[Cell], name: str) -> bool:
    return len({str(cell[name]) for cell in cells}) > 1


def _grid(name: str, cells: Sequence[Cell]) -> str:
    """Lengths as rows, values as columns: share, interval and count."""
    values = sorted({str(cell[name]) for cell in cells})
    by_length: dict[str, dict[str, str]] = {}
    for cell in cells:
        text = f"{share(cell)} ({_interval(cell)}, n={cell['count']})"
        by_length.setdefault(f"{cell['length']:,}", {})[str(cell[name])] = text
    rows = [[length, *(found.get(value, "") for value in values)] for length, found in by_length.items()]
    return f"**By {TITLES[name]}**\n\n" + _table(["length", *values], rows)


def _interval(cell: Cell) -> str:
    return f"{100 * float(str(cell['low'])):.1f}-{100 * float(str(cell['high'])):.1f}"


def _plain(cells: Sequence[Cell]) -> str:
    head = list(cells[0])
    return _table(head, [[_number(cell[key]) for key in head] for cell in cells])


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


if __name__ == "__main__":
    main()
