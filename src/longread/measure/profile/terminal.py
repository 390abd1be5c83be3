"""The three levels at a terminal, on stdout.

Knows rich. Must not know how anything was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from longread.engine.profile_counts import BOOKS, SAMPLER
from longread.measure.profile.attribution import Attribution, Part
from longread.measure.profile.command import Profiled
from longread.plan.tables import console, print_records

OPS = 12  # of the longest, beside their groups


def show(done: Profiled) -> None:
    out = console()
    out.print("[bold]Where the time goes[/bold]")
    if done.attribution is None:
        out.print("  no answer had any text, so there is no TTFT to divide")
    else:
        _ttft(out, done.attribution, (done.kernels or {}).get("groups") or ())
    if done.kernels is not None:
        _kernels(out, done.kernels)
    else:
        out.print(f"kernels missing: {escape(done.why or 'not profiled')}", soft_wrap=True)


def _ttft(out: Console, told: Attribution, groups: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for part in told.parts:
        rows.append([part.level, escape(part.name), f"{part.ms:,.3f}", f"{part.share:.1%}"])
        if part.name == "prefill":
            rows += _inside(part, groups)
    total = sum(part.ms for part in told.parts)
    rows.append(["", "TTFT, mean", f"{told.ttft_ms:,.3f}", f"{total / told.ttft_ms if told.ttft_ms else 0:.1%}"])
    print_records(out, ["level", "part", "ms", "share"], rows, left=("part",))
    if any(row[0] == "kernels" for row in rows):
        out.print(
            "  kernels: the prefill divided as the profiled steps that read prompts, which are of a second run",
            soft_wrap=True,
        )
    notes = [f"{told.requests} requests; the server's parts by {told.source}"]
    if told.head_ms is not None:
        notes.append(f"response's head after {told.head_ms:,.3f} ms")
    notes.append(f"{told.connections_opened} connections opened")
    out.print("  " + "; ".join(notes), soft_wrap=True)
    for text in told.missing:
        out.print(f"missing: {escape(text)}", soft_wrap=True)


def _inside(prefill: Part, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What the server's prefill was spent on: a division of that row, no further part of the sum. The sampler and the
    books lie outside of what the server calls prefill.
    """
    shares = {each["name"]: each["prompt_share"] for each in groups if each["name"] not in (SAMPLER, BOOKS)}
    total = sum(share or 0.0 for share in shares.values())
    return [
        [
            "kernels",
            f"  of it: {escape(name)}",
            f"{prefill.ms * share / total:,.3f}",
            f"{prefill.share * share / total:.1%}",
        ]
        for name, share in sorted(shares.items(), key=lambda item: -(item[1] or 0.0))
        if share
    ]


def _kernels(out: Console, told: Mapping[str, Any]) -> None:
    steps, rates = told["steps"], told["rates"]
    out.print(
        f"[bold]Kernels[/bold]: {steps} steps, {told['step_ms'] / steps:,.3f} ms each ({told.get('device')}, "
        f"{told.get('dtype')}, {told.get('threads')} threads); the profiler's own time is in it",
        soft_wrap=True,
    )
    names = ["ops", "calls", "ms a step", "share", "GFLOP a step", "MB a step", "floor ms", "of roofline"]
    print_records(out, names, [_group(each, steps) for each in told["groups"]])
    total = sum(each["self_ms"] for each in told["groups"]) / steps
    out.print(f"  together {total:,.3f} ms a step", soft_wrap=True)
    if rates is None:
        out.print("roofline missing: give --hardware cpu, a card, or a file of `longread probe`", soft_wrap=True)
    else:
        speeds = ", ".join(
            f"{value / 1e9:,.1f} G{'B' if name.startswith('bytes') else 'FLOP'}/s {name.removesuffix('_per_s')}"
            for name, value in rates.items()
            if name != "hardware"
        )
        out.print(f"  roofline of {escape(rates['hardware'])}: {speeds}", soft_wrap=True)
    _ops(out, told["rows"], steps)


def _group(each: Mapping[str, Any], steps: int) -> list[str]:
    return [
        escape(each["name"]),
        f"{each['calls']:,}",
        f"{each['self_ms'] / steps:,.3f}",
        _percent(each["share"]),
        _amount(each["flops"], 1e9 * steps),
        _amount(each["bytes"], 1e6 * steps),
        "" if each["floor_ms"] is None else f"{each['floor_ms'] / steps:,.3f} ({each['bound']})",
        _percent(each["of_roofline"]),
    ]


def _ops(out: Console, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
    out.print(f"[bold]Ops[/bold]: the {min(OPS, len(rows))} with most time of {len(rows)}")
    print_records(
        out,
        ["op", "calls", "ms a step", "share"],
        [
            [escape(str(row["op"])), f"{row['calls']:,}", f"{row['self_ms'] / steps:,.3f}", _percent(row["share"])]
            for row in rows[:OPS]
        ],
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _amount(value: float | None, unit: float) -> str:
    return "" if not value else f"{value / unit:,.3g}"
