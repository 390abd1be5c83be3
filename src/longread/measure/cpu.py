"""``longread bench cpu``: this engine against ``transformers`` generate, same checkpoints, in turn, on this CPU."""

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from longread.measure.result import Figure, Report, command_line, this_commit, this_machine
from longread.measure.worker import Task
from longread.spec.config_json import read_config
from longread.spec.errors import LongreadError

PACKAGES = ("longread", "torch", "transformers", "numpy", "numba")
# Fixtures with the head sizes of the real models (V3: all of MLA; V4: window and top-k), so that attention weighs what
# it weighs there; hidden sizes and experts stay tiny.
SHAPES: dict[str, dict[str, object]] = {
    "v3": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "q_lora_rank": 384,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "v4-flash": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "head_dim": 128,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "index_head_dim": 64,
        "index_topk": 512,
        "sliding_window": 128,
    },
}
NOTES = [
    "TTFT, cold: a fresh random prompt; decode: tokens/s once every request has its first token",
    "TTFT, warm: the same document with another 32-token question",
    "transformers runs generate() with its default attention and expert implementations, float32, greedy",
]


class BenchError(LongreadError):
    """A measured process failed; the message carries the end of its output."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Tokens of the prefill and of the decode prompts, decoded tokens, and how often the engines take turns."""

    context: int
    decode_context: int
    new_tokens: int
    rounds: int


def run(checkpoints: Sequence[Path], settings: Settings, output: Path | None) -> Report:
    """Measure every checkpoint, print a table, write ``output``. Raises BenchError when a measured process fails.

    Within a round each engine is measured in turn in a fresh process, so that a machine whose speed drifts shifts both.
    """
    console = Console()
    figures: list[Figure] = []
    for checkpoint in checkpoints:
        with console.status(checkpoint.name) as status:
            figures += _bench_checkpoint(checkpoint, settings, status.update)
    today = datetime.date.today().isoformat()
    models = {checkpoint.name: read_config(checkpoint) for checkpoint in checkpoints}
    report = Report("cpu", this_commit(), command_line(), today, this_machine(PACKAGES), figures, NOTES, models)
    console.print(table(report))
    if output:
        report.write(output)
        console.print(f"written to {output}")
    return report


def _bench_checkpoint(checkpoint: Path, settings: Settings, say: Callable[[str], None]) -> list[Figure]:
    name, context = checkpoint.name, settings.context
    ours, theirs = _take_turns(checkpoint, "prefill", context, 1, settings, say)
    samples, peer_samples = _samples(ours), _samples(theirs)
    figures = [Figure(name, "TTFT, cold", "s", context, 1, "lower", samples, "transformers", peer_samples, 2.0)]
    peaks, peer_peaks = _peaks(ours), _peaks(theirs)
    figures.append(Figure(name, "peak memory", "MiB", context, 1, "lower", peaks, "transformers", peer_peaks, 1.0))
    for batch, aim in ((1, 3.0), (8, 6.0)):
        tokens = settings.decode_context
        ours, theirs = _take_turns(checkpoint, "decode", tokens, batch, settings, say)
        samples, peer_samples = _samples(ours), _samples(theirs)
        figures.append(
            Figure(name, "decode", "tokens/s", tokens, batch, "higher", samples, "transformers", peer_samples, aim)
        )
    say(f"{name}: warm TTFT at {context} tokens")
    warm = measure(Task("longread", str(checkpoint), "warm", context, 1, 1, settings.rounds, seed=99))
    figures.append(
        Figure(name, "TTFT, warm", "s", context, 1, "lower", warm["samples"], "longread, cold", warm["cold"], 50.0)
    )
    return figures


def _take_turns(
    checkpoint: Path, quantity: str, context: int, batch: int, settings: Settings, say: Callable[[str], None]
) -> tuple[list[dict], list[dict]]:
    ours: list[dict] = []
    theirs: list[dict] = []
    for number in range(settings.rounds):
        for engine, answers in (("longread", ours), ("transformers", theirs)):
            turn = f"round {number + 1}/{settings.rounds}, {engine}"
            say(f"{checkpoint.name}: {quantity} at {context} tokens, batch {batch}, {turn}")
            answers.append(
                measure(Task(engine, str(checkpoint), quantity, context, batch, settings.new_tokens, 1, seed=number))
            )
    return ours, theirs


def _samples(answers: list[dict]) -> list[float]:
    return [sample for answer in answers for sample in answer["samples"]]


def _peaks(answers: list[dict]) -> list[float]:
    return [answer["peak_bytes"] / 2**20 for answer in answers]


def measure(task: Task) -> dict:
    """Run one task in a fresh process. Raises BenchError with the end of its standard error."""
    command = [sys.executable, "-m", "longread.measure.worker"]
    done = subprocess.run(command, input=json.dumps(asdict(task)), capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{task.engine} failed on {task.quantity}: {done.stderr.strip()[-2000:]}")
    answer: dict = json.loads(done.stdout.splitlines()[-1])
    return answer


def table(report: Report) -> Table:
    """The report as a terminal table: medians side by side, ratio and aim."""
    out = Table(title=f"{report.machine.cpu}, {report.machine.cores} cores, commit {report.commit}")
    for column in ("model", "quantity", "context", "batch", "longread", "against", "", "ratio", "aim"):
        out.add_column(column, justify="left" if column in ("model", "quantity", "against") else "right")
    for f in report.figures:
        ours, theirs = (f"{median(samples):,.4g} {f.unit}" for samples in (f.samples, f.peer_samples))
        aim = f"{f.aim:g}x" if f.aim else ""
        row = (f.model, f.quantity, f"{f.context:,}", str(f.batch), ours, f.peer, theirs, f"{f.ratio:.2f}x", aim)
        out.add_row(*row)
    return out
