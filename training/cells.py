"""Answers counted into the cells of a result table, and the result file. Knows no models and no tokens."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from longread.measure.intervals import wilson

SCHEMA = 1
KEYS = ("kind", "decile", "language", "thinking", "domain")
Cell = dict[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question was. ``decile``: 0..9 of the answer's place in the document, None where it is in none."""

    length: int
    kind: str
    decile: int | None
    language: str
    domain: str
    thinking: bool


def tables(answers: Iterable[tuple[Asked, bool]]) -> dict[str, list[Cell]]:
    """Cells of "length" and of length x each of ``KEYS``: count, right, and Wilson's 95 % interval (low, high)."""
    counts: dict[str, dict[tuple[int, object], list[int]]] = {name: {} for name in ("length", *KEYS)}
    for asked, right in answers:
        for name, cells in counts.items():
            value = asked.length if name == "length" else getattr(asked, name)
            if value is None:
                continue
            cell = cells.setdefault((asked.length, value), [0, 0])
            cell[0] += 1
            cell[1] += right
    return {name: [_cell(name, key, *cell) for key, cell in _sorted(cells)] for name, cells in counts.items()}


def _sorted(cells: dict[tuple[int, object], list[int]]) -> list[tuple[tuple[int, object], list[int]]]:
    return sorted(cells.items(), key=lambda item: (item[0][0], str(item[0][1])))


def _cell(name: str, key: tuple[int, object], count: int, right: int) -> Cell:
    low, high = wilson(right, count)
    where: Cell = {"length": key[0]} if name == "length" else {"length": key[0], name: key[1]}
    return where | {"count": count, "right": right, "low": round(low, 4), "high": round(high, 4)}


def summary(answers: Iterable[tuple[Asked, bool]]) -> str:
    """One line a length for a terminal: the share of right answers by kind, and the worst decile."""
    made = tables(answers)
    lines = []
    for cell in made["length"]:
        length = cell["length"]
        kinds = "  ".join(f"{c['kind']} {share(c)}" for c in made["kind"] if c["length"] == length)
        deciles = [c for c in made["decile"] if c["length"] == length]
        worst = min(deciles, key=lambda c: int(str(c["right"])) / int(str(c["count"])), default=None)
        tail = f"  worst decile {worst['decile']}: {share(worst)}" if worst else ""
        lines.append(f"{length:>6}: {share(cell)} of {cell['count']}  {kinds}{tail}")
    return "\n".join(lines)


def share(cell: Cell) -> str:
    """ "97.3 %" of a cell."""
    return f"{100 * int(str(cell['right'])) / int(str(cell['count'])):.1f} %"


def document_figures(lengths: Iterable[tuple[int, int, int]]) -> list[Cell]:
    """Per length: how many documents, their mean tokens and fewest facts; from (length, tokens, facts) of each."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for length, tokens, facts in lengths:
        groups[length].append((tokens, facts))
    return [
        {
            "length": length,
            "documents": len(group),
            "tokens_mean": round(sum(tokens for tokens, _ in group) / len(group)),
            "facts_fewest": min(facts for _, facts in group),
        }
        for length, group in sorted(groups.items())
    ]


def write_result(path: Path, result: dict[str, object]) -> None:
    """Write a result as JSON, with the schema's number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": SCHEMA, **result}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
