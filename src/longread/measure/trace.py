"""Draws one call's time as a waterfall, and the last calls as a table.

Knows the records and a terminal. Each part begins where the one before it ends, since they are the sum of the time to
the first byte; ``queue`` gathers all waiting, so its bar is a sum too and not one moment.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from longread.measure.calls import head_line, reuse_line
from longread.measure.standing import lines
from longread.spec.printing import printable

BAR = 48  # cells, where the terminal is wide enough
BESIDE_BAR = 64  # what the other columns take
NAMES = {
    "receive": "receive the body",
    "thread": "wait for a thread",
    "parse": "parse",
    "render": "render the chat",
    "tokenise": "tokenise",
    "hash": "hash",
    "check": "check the limits",
    "lookup": "look up",
    "queue": "queue",
    "load_host": "load from host",
    "load_disk": "load from disk",
    "prefill": "prefill",
    "sample": "sample",
    "first_byte": "first byte out",
}


def draw(record: Mapping[str, Any], console: Console) -> None:
    """The waterfall of one record, from ``calls.Source.one``."""
    told, timing = record["longread"], record["longread"]["timing"]
    console.print(Text(head_line(record)))
    console.print(Text(reuse_line(told["reuse"], record["prompt_tokens"] if record["state"] == "running" else None)))
    if record.get("error"):
        console.print(Text(f"error: {printable(record['error'])}"))
    runs = record["state"] == "running"
    width = max(8, min(BAR, console.width - BESIDE_BAR))
    console.print(_waterfall(timing, told["reuse"], width, "not yet" if runs else "not measured"))
    for standing in record.get("standing") or ():
        for line in lines(standing, named=record["choices"] > 1):
            console.print(Text(line))
    console.print(Text(_ends(record, timing)))


def _ends(record: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    """The last line: the times of the whole, as far as they are known."""
    ttft, total, elapsed = timing["ttft_ms"], timing["total_ms"], record.get("elapsed_ms")
    since = "" if elapsed is None else f" {elapsed:,.1f} ms after the first byte in"
    if ttft is None:
        return f"no first token yet,{since}" if since else "no first token came"
    what = "first byte" if timing["parts_ms"].get("first_byte") is not None else "first token"
    ends = ""
    if total is not None:
        ends = f"; {record['completion_tokens']} tokens, all {total:,.1f} ms after the first byte in"
    elif since:
        ends = f"; it runs, {record['completion_tokens']} tokens so far,{since}"
    return f"{what} after {ttft:,.1f} ms{ends}"


def _waterfall(timing: Mapping[str, Any], reuse: Mapping[str, Any] | None, width: int, missing: str) -> Table:
    parts = timing["parts_ms"]
    whole = sum(value for value in parts.values() if value is not None) or 1.0
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("part", no_wrap=True)
    table.add_column("", width=width, no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    done = 0.0
    for part, value in parts.items():
        name = Text(NAMES.get(part, part))
        if value is None:
            table.add_row(name, "", Text("–", style="dim"), "", Text(missing, style="dim"))
            continue
        share = f"{100 * value / whole:.1f} %"
        table.add_row(
            name, bar(done / whole, value / whole, width), f"{value:,.2f}", share, Text(_note(part, timing, reuse))
        )
        done += max(0.0, value)
    return table


def bar(start: float, length: float, width: int) -> Text:
    """A bar inside ``width`` cells, in eighths of a cell; what took time at all is seen."""
    eighths = width * 8
    begin = min(eighths - 1, max(0, round(start * eighths)))
    size = min(eighths - begin, round(max(0.0, length) * eighths))
    if size < 8:
        # Left-aligned eighths cannot begin inside a cell: what is thinner than one stands at the cell's edge.
        return Text(" " * (begin // 8) + ("▏▎▍▌▋▊▉"[max(0, size - 1)] if length > 0 else ""))
    return Text(" " * (begin // 8) + "█" * (size // 8) + ("", *"▏▎▍▌▋▊▉")[size % 8])


def _note(part: str, timing: Mapping[str, Any], reuse: Mapping[str, Any] | None) -> str:
    if part == "prefill" and timing["prefill_tokens"] is not None:
        seconds = timing["parts_ms"]["prefill"] / 1000
        rate = f", {timing['prefill_tokens'] / seconds:,.0f} tokens/s" if seconds > 0 else ""
        return f"{timing['prefill_tokens']:,} tokens in {timing['prefill_chunks']} chunks{rate}"
    tier = {"load_host": "host_tokens", "load_disk": "disk_tokens"}.get(part)
    return f"{reuse[tier]:,} tokens" if tier is not None and reuse is not None and reuse[tier] else ""


def table(calls: Sequence[Mapping[str, Any]]) -> Table:
    """Summaries, from ``calls.Source.newest``."""
    out = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("at", "id", "state", "prompt", "reused", "why not more", "first", "all"):
        right = name in ("prompt", "reused", "first", "all")
        out.add_column(name, justify="right" if right else "left", no_wrap=name != "why not more")
    for call in calls:
        at = datetime.fromtimestamp(call["created"]).strftime("%H:%M:%S")
        counts = [_count(call[name]) for name in ("prompt_tokens", "reused_tokens")]
        elapsed = call.get("elapsed_ms")
        times = [_ms(call["ttft_ms"]), _ms(call["total_ms"]) if elapsed is None else f"{_ms(elapsed)} so far"]
        names = [Text(printable(str(call[name]))) for name in ("id", "state")]
        out.add_row(at, *names, *counts, Text(printable(call["reason"] or "–")), *times)
    return out


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f} ms"
