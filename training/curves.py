"""``python -m training.curves``: draw the answer loss of training/logs/*.jsonl over trained time as curves.svg.

With ``--thin NAME LOG`` it first makes logs/NAME.jsonl of a whole log.jsonl: the records of some steps become one, and
folders go. Knows the log's records; needs the standard library only.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from html import escape
from math import log10
from pathlib import Path

HERE = Path(__file__).parent
LOGS = HERE / "logs"
PICTURE = HERE / "curves.svg"
READERS = ("reader-v3", "reader-v4")
STEPS = 60  # of one row length that a thinned record stands for
KEPT = ("step", "seconds", "tokens", "stage", "lr")  # of the last record that went into one
MEANS = ("answer_loss", "document_loss", "index_loss", "tokens_s", "waited")
FOLDERS = ("state", "stages")

WIDTH, HEIGHT, LEFT, TOP, GAP = 440, 300, 56, 44, 70
LEAST, MOST = 1e-5, 10.0
COLOURS = {256: "#8c564b", 512: "#e377c2", 1024: "#7f7f7f", 2048: "#2ca02c"} | {
    4096: "#17becf", 8192: "#1f77b4", 16384: "#ff7f0e", 32768: "#d62728"
}  # fmt: skip

Record = dict[str, object]


def number(value: object) -> float:
    return float(str(value))


def read(path: Path) -> list[Record]:
    """The records of a log; a loss is in those with a ``length``, the others are events."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def thinned(records: Sequence[Record]) -> Iterator[Record]:
    """Events without folders, and of each row length one record for at least STEPS steps within a stage."""
    waiting: dict[object, list[Record]] = {}
    for record in records:
        if "event" in record:
            yield from (joined(group) for group in waiting.values())
            waiting = {}
            options = record.get("options")
            kept = {k: v for k, v in options.items() if k not in FOLDERS} if isinstance(options, dict) else None
            yield record if kept is None else record | {"options": kept}
            continue
        group = waiting.setdefault(record["length"], [])
        group.append(record)
        if sum(number(part["steps"]) for part in group) >= STEPS:
            yield joined(waiting.pop(record["length"]))
    yield from (joined(group) for group in waiting.values())


def joined(group: Sequence[Record]) -> Record:
    """One record of several: means by steps, exact answers by answers; ``lr`` is missing where a save wrote it."""
    last: Record = {}
    for record in group:
        last |= record
    steps, answers = (sum(int(number(part[name])) for part in group) for name in ("steps", "answers"))
    right = sum(number(part["exact"]) * number(part["answers"]) for part in group)
    means = {name: sum(number(part[name]) * number(part["steps"]) for part in group) / steps for name in MEANS}
    return (
        {name: last[name] for name in KEPT if name in last}
        | {"length": last["length"], "steps": steps}
        | {name: round(mean) if name == "tokens_s" else round(mean, 5) for name, mean in means.items()}
        | {"exact": round(right / max(answers, 1), 4), "answers": answers}
    )


def write_thinned(log: Path, path: Path) -> None:
    """Write the thinned form of a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in thinned(read(log))), encoding="utf-8")


def picture(logs: Sequence[tuple[str, list[Record]]]) -> str:
    """SVG text: one panel a reader, one curve a row length, logarithmic losses."""
    width, height = LEFT + len(logs) * (WIDTH + GAP), TOP + HEIGHT + 84
    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {font}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, (name, records) in enumerate(logs):
        parts += panel(name, records, LEFT + place * (WIDTH + GAP))
    lengths = sorted({int(number(r["length"])) for _, records in logs for r in records if "length" in r})
    parts += key(lengths, TOP + HEIGHT + 62)
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(name: str, records: Sequence[Record], left: float) -> Iterator[str]:
    """Frame, scales, where stages (dotted) and runs (dashed) begin, and the curves."""
    measured = [record for record in records if "length" in record]
    end = max(number(record["seconds"]) for record in measured)

    def x(seconds: float) -> float:
        return left + WIDTH * seconds / end

    yield text(left, TOP - 14, f"{name}: answer loss (nats a token) over trained minutes", weight="bold")
    for power in range(round(log10(LEAST)), round(log10(MOST)) + 1):
        yield line(left, y(10.0**power), left + WIDTH, y(10.0**power), "#dddddd")
        yield text(left - 6, y(10.0**power) + 4, f"1e{power}", anchor="end")
    for minute in range(0, int(end / 60) + 1, 2):
        yield text(x(minute * 60), TOP + HEIGHT + 18, str(minute), anchor="middle")
    yield from (
        line(at, TOP, at, TOP + HEIGHT, "#999999", dash) for at, dash in ((x(s), d) for s, d in begins(records))
    )
    for length in sorted({int(number(record["length"])) for record in measured}):
        # What was left over at a stage's end may be a few steps: noise.
        own = [r for r in measured if r["length"] == length and number(r["steps"]) >= STEPS / 3]
        points = " ".join(f"{x(number(r['seconds'])):.1f},{y(number(r['answer_loss'])):.1f}" for r in own)
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[length]}" stroke-width="1.5"/>'


def begins(records: Sequence[Record]) -> Iterator[tuple[float, str]]:
    """Trained seconds at which a stage or a later run began, with the line's dashes."""
    seconds = 0.0
    for record in records:
        seconds = number(record.get("seconds", seconds))
        if seconds and record.get("event") in ("stage", "start"):
            yield seconds, "2 3" if record["event"] == "stage" else "6 3"


def y(loss: float) -> float:
    share = (log10(MOST) - log10(min(MOST, max(LEAST, loss)))) / (log10(MOST) - log10(LEAST))
    return TOP + HEIGHT * share


def key(lengths: Sequence[int], top: float) -> Iterator[str]:
    """Which colour is which row length."""
    for place, length in enumerate(lengths):
        left = LEFT + 116 * place
        yield line(left, top - 4, left + 22, top - 4, COLOURS[length], width=3)
        yield text(left + 28, top, f"{length:,} tokens")


def line(x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", width: float = 1) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"{dashes}/>'


def text(x: float, y: float, words: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m training.curves", description=__doc__.splitlines()[0])
    parser.add_argument("--thin", nargs=2, action="append", default=[], metavar=("NAME", "LOG"))
    for name, log in parser.parse_args(arguments).thin:
        write_thinned(Path(log), LOGS / f"{name}.jsonl")
    PICTURE.write_text(picture([(name, read(LOGS / f"{name}.jsonl")) for name in READERS]), encoding="utf-8")


if __name__ == "__main__":
    main()
