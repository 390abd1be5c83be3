"""Says where a call stands that has not ended, from the server's record of it.

Knows the records and a terminal.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from longread.measure.calls import head_line
from longread.spec.printing import printable

# What it waits for, and what can be done about it.
ADVICE = {
    "turn": "Others came first, or their class does. A lower priority number is served first.",
    "slots": "As many requests run as may: --max-num-seqs, at a page of cache and a row of each step for each.",
    "pages": "Its prompt does not fit beside those that run: --kv-cache-memory-bytes gives the cache more.",
    "prefix": "It starts when that has been computed, and saves computing it again.",
    "load": "It starts when they are there.",
    "step": "Prompts share each step, short ones first; --step-target, --slo and --max-num-batched-tokens bound it.",
}


def draw(record: Mapping[str, Any], console: Console) -> None:
    """The standing in one record, from ``calls.Source.one``."""
    console.print(Text(head_line(record)))
    found = record.get("standing")
    if found is None:
        console.print(Text("This server does not tell where a request stands: it is an older one."))
    elif not found and record["state"] == "running":
        console.print(
            Text("It is with the server, and not with its engine: it is coming, or its last words are going.")
        )
    elif not found:
        console.print(Text("It has ended: `longread trace` shows where its time went."))
    for standing in found or ():
        for line in lines(standing, named=record["choices"] > 1):
            console.print(Text(line))


def lines(standing: Mapping[str, Any], named: bool = False) -> list[str]:
    """One choice's standing in words; ``named``: which choice it is, too."""
    of = f"choice {standing['choice']}: " if named else ""
    told = [f"{of}{standing['phase']} for {_seconds(standing['waited_ms'])}: {printable(standing['detail'])}"]
    if standing["reason"] in ADVICE:
        told.append(f"  {ADVICE[standing['reason']]}")
    told.append(
        f"  class {standing['class']}, {standing['computed_tokens']:,} of {standing['prompt_tokens']:,} prompt tokens "
        f"done, preempted {standing['preemptions']} times; {standing['num_running']} run and "
        f"{standing['num_waiting']} wait, {standing['position']} of them before it"
    )
    expected = [("it starts", standing["starts_in_ms"]), ("the first token comes", standing["first_token_in_ms"])]
    if known := [f"{what} in about {_seconds(ms)}" for what, ms in expected if ms is not None]:
        told.append(f"  {' and '.join(known)}")
    elif not standing.get("cost_known", True):
        told.append("  when is not known yet: too few steps have been measured since the server was started")
    if standing["reason"] == "step" and standing.get("step_target_ms") is not None:
        told.append(
            f"  a step should take {_seconds(standing['step_target_ms'])}: {printable(standing['step_reason'])}"
        )
    return told


def _seconds(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
