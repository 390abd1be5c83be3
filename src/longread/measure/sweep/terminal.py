"""A sweep at a terminal: its points as a table, the knee and the search in words, on stdout.

Knows rich and the file's format. Must not know how anything was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from longread.measure.load.terminal import count, figure
from longread.plan.tables import console, print_records

LOADS: Mapping[str, str] = {
    "requests/s": "request_throughput",
    "output tok/s": "output_throughput",
    "TTFT mean": "mean_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT mean": "mean_tpot_ms",
    "E2E mean": "mean_e2el_ms",
}


def show(document: Mapping[str, Any]) -> None:
    out = console()
    points = document["points"]
    partial = " (partial)" if document["partial"] else ""
    out.print(f"[bold]Sweep of {document['axis']}[/bold]{partial}, milliseconds where not said otherwise")
    if not points:
        out.print("  nothing was measured")
    elif document["axis"] == "context":
        _frontier(out, points)
    else:
        _loads(out, document)
    if document.get("stopped"):
        out.print(f"stopped: {escape(document['stopped'])}", soft_wrap=True)


def _loads(out: Console, document: Mapping[str, Any]) -> None:
    searched = any("probe" in point for point in document["points"])
    names = [document["axis"], "answered", *LOADS, "cached", *(["verdict"] if searched else [])]
    print_records(out, names, [_load(point, searched) for point in document["points"]])
    found = document["knee"]
    if found is not None:
        low, high = found["interval"]
        out.print(f"knee: {found['value']:g}, between {low:g} and {high:g}: {found['method']}", soft_wrap=True)
    elif document["knee_note"]:
        out.print(document["knee_note"], soft_wrap=True)
    most = document["max_goodput"]
    if most is not None:
        _goodput(out, document["axis"], most)


def _load(point: Mapping[str, Any], searched: bool) -> list[str]:
    result = point["result"]
    done, bad = result.get("completed") or 0, result.get("failed") or 0
    told = ((result.get("longread") or {}).get("cached_tokens") or {}).get("share")
    row = [f"{point['value']:g}{' (stopped)' if point.get('stopped') else ''}", f"{done} of {done + bad}"]
    row += [figure(result.get(key)) for key in LOADS.values()]
    row.append("missing" if told is None else f"{told:.0%}")
    if searched:
        row.append(point["probe"]["said"] if "probe" in point else "")
    return row


def _goodput(out: Console, axis: str, most: Mapping[str, Any]) -> None:
    slos = " ".join(f"{name}:{value:g}" for name, value in most["slos"].items())
    low, high = most["interval"]
    wanted = f"{most['share']:.0%} of requests within {slos} ms"
    if low is None:
        told = "no load is known to meet it"
    elif high is None:
        told = f"met at {axis} {low:g}; no load is known to miss it"
    else:
        told = f"{axis} {low:g}; the limit lies between {low:g} (met) and {high:g} (missed), 95 % over all probes"
    out.print(f"max goodput, {wanted}: {told}", soft_wrap=True)
    if most["goodput"] is not None:
        out.print(f"  goodput there: {most['goodput']:.4g} requests/s", soft_wrap=True)
    out.print(f"  {most['ended']}, {most['probes']} loads tried" + (f"; {most['note']}" if most["note"] else ""))


def _frontier(out: Console, points: Sequence[Mapping[str, Any]]) -> None:
    names = ["context", "cached", "new", "TTFT newest", "TTFT warm", "TPOT", "TTFT cold (derived)", "cold measured"]
    rows, notes = [], []
    for point in points:
        step = point["frontier"]
        cold = step["cold_ttft_ms"]
        span = "missing"
        if cold["low"] is not None and cold["high"] is not None:
            span = f"{figure(cold['low'])} to {figure(cold['high'])}"
        rows.append(
            [
                f"{step['context_tokens']:,}{' (stopped)' if point.get('stopped') else ''}",
                count(step["cached_tokens"]),
                count(step["new_tokens"]),
                figure(step["newest_ttft_ms"]),
                figure(step["warm_ttft_ms"]),
                figure(step["tpot_ms"]),
                span,
                _measured(cold),
            ]
        )
        if step["note"]:
            notes.append(f"{step['context_tokens']:,}: {step['note']}")
    print_records(out, names, rows)
    out.print(
        "TTFT newest: only the newest interval is prefilled, the tokens before it come from the prefix cache. TTFT "
        "cold is derived from sums of it, not measured: --cold-at LENGTHS measures it and shows how far off it is.",
        soft_wrap=True,
    )
    for note in notes:
        out.print(escape(note), soft_wrap=True)


def _measured(cold: Mapping[str, Any]) -> str:
    """With how far the middle of the derived span is from it."""
    if cold["measured"] is None:
        return ""
    if cold["low"] is None or cold["high"] is None:
        return figure(cold["measured"])
    off = (cold["low"] + cold["high"]) / 2 / cold["measured"] - 1
    return f"{figure(cold['measured'])} (derived {off:+.0%})"
