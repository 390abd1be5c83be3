"""``longread bench cpu``: this engine against ``transformers`` generate on the same checkpoints, in turn, on this CPU."""

import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longread.measure.result import Figure, Report, command_line, this_commit, this_machine
from longread.measure.worker import Task
from longread.spec.errors import LongreadError

PACKAGES = ("longread", "torch", "transformers", "numpy", "numba")


class BenchError(LongreadError):
    """A measured process failed; the message carries the end of its output."""


def run(
    checkpoints: Sequence[Path], context: int, decode_context: int, new_tokens: int, rounds: int, output: Path | None
) -> Report:
    """Measure every checkpoint, print a table, write ``output``. Raises BenchError when a measured process fails.

    Within a round each engine is measured in turn in a fresh process, so that a machine whose speed drifts shifts both.
    """
    console = Console()
    figures: list[Figure] = []
    for checkpoint in checkpoints:
        with console.status(f"{checkpoint.name}") as status:
            figures += _bench_checkpoint(checkpoint, context, decode_context, new_tokens, rounds, status.update)
    notes = [
        "prefill: time to the first token of a fresh random prompt; decode: tokens/s after the first token of every request",
        "transformers runs generate() with its default attention and expert implementations, float32, greedy",
    ]
    report = Report(
        "cpu", this_commit(), command_line(), datetime.date.today().isoformat(), this_machine(PACKAGES), figures, notes
    )
    console.print(table(report))
    if output:
        report.write(output)
        console.print(f"written to {output}")
    return report


def _bench_checkpoint(
    checkpoint: Path, context: int, decode_context: int, new_tokens: int, rounds: int, say
) -> list[Figure]:  # type: ignore[no-untyped-def]
    name = checkpoint.name
    pairs = [("prefill", context, 1, 2.0), ("decode", decode_context, 1, 3.0), ("decode", decode_context, 8, 6.0)]
    figures = []
    for quantity, tokens, batch, aim in pairs:
        ours: list[dict] = []
        theirs: list[dict] = []
        for number in range(rounds):
            for engine, answers in (("longread", ours), ("transformers", theirs)):
                say(f"{name}: {quantity} at {tokens} tokens, batch {batch}, round {number + 1}/{rounds}, {engine}")
                answers.append(measure(Task(engine, str(checkpoint), quantity, tokens, batch, new_tokens, 1, number)))
        unit, better = ("s", "lower") if quantity == "prefill" else ("tokens/s", "higher")
        label = "TTFT, cold" if quantity == "prefill" else "decode"
        figures.append(
            Figure(name, label, unit, tokens, batch, better, _samples(ours), "transformers", _samples(theirs), aim)
        )
        if quantity == "prefill":
            peaks = [[answer["peak_bytes"] / 2**20 for answer in answers] for answers in (ours, theirs)]
            figures.append(
                Figure(name, "peak memory", "MiB", tokens, batch, "lower", peaks[0], "transformers", peaks[1], 1.0)
            )
    say(f"{name}: warm TTFT at {context} tokens")
    warm = measure(Task("longread", str(checkpoint), "warm", context, 1, 1, rounds, 99))
    figures.append(
        Figure(name, "TTFT, warm", "s", context, 1, "lower", warm["samples"], "longread, cold", warm["cold"], 50.0)
    )
    return figures


def _samples(answers: list[dict]) -> list[float]:
    return [sample for answer in answers for sample in answer["samples"]]


def measure(task: Task) -> dict:
    """Run one task in a fresh process. Raises BenchError with the end of its standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "longread.measure.worker"],
        input=json.dumps(asdict(task)),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BenchError(f"{task.engine} failed on {task.quantity}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(report: Report) -> Table:
    """The report as a terminal table: medians side by side, ratio and aim."""
    out = Table(title=f"{report.machine.cpu}, {report.machine.cores} cores, commit {report.commit}")
    for column in ("model", "quantity", "context", "batch", "longread", "against", "", "ratio", "aim"):
        out.add_column(column, justify="left" if column in ("model", "quantity", "against") else "right")
    for f in report.figures:
        ours, theirs = sorted(f.samples)[len(f.samples) // 2], sorted(f.peer_samples)[len(f.peer_samples) // 2]
        aim = f"{f.aim:g}x" if f.aim else ""
        out.add_row(
            f.model, f.quantity, f"{f.context:,}", str(f.batch), f"{ours:,.4g} {f.unit}", f.peer, f"{theirs:,.4g} {f.unit}",
            f"{f.ratio:.2f}x", aim,
        )  # fmt: skip
    return out
