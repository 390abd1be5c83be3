"""``longread stress``: files out, progress on stderr, the table on stdout, an exit code.

Knows files and the terminal.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from longread.measure.files import write_json
from longread.measure.gate.verdict import EXIT
from longread.measure.load.outcome import Outcome
from longread.measure.load.result import line
from longread.measure.stress import report
from longread.measure.stress.run import Settings, stress

INTERRUPTED = 130
EVERY = 10.0  # seconds between lines where nobody watches


def run(settings: Settings, output: Path | None) -> int:
    """0 PASS, 1 FAIL, 3 INCONCLUSIVE, 130 interrupted (what was measured is judged and written all the same)."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longread-stress-")))
        log = folder / "server.log" if output is None else output.with_suffix(".server.log")
        if output is not None:
            log.unlink(missing_ok=True)
        keep = stack.enter_context(_lines(None if output is None else output.with_suffix(".requests.jsonl")))
        with _progress() as tell:
            found = asyncio.run(stress(settings, log, tell, keep))
    if output is not None:
        write_json(output, found.document())
    console = Console(highlight=False)
    console.print(report.table(found.results))
    for text in report.notes(found):
        console.print(text)
    if output is not None:
        console.print(
            f"written: {output}, with its requests{' and the server log' if settings.launch else ''} beside it"
        )
    return INTERRUPTED if found.interrupted else EXIT[found.verdict]  # type: ignore[index]


def limits() -> int:
    console = Console(highlight=False)
    console.print(report.limits_table())
    for each in report.limits_reasons():
        console.print(each)
    return 0


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[Outcome, str], None]]:
    """A request a line, as they end."""
    if path is None:
        yield lambda outcome, phase: None
        return
    with path.open("w", encoding="utf-8") as file:

        def keep(outcome: Outcome, phase: str) -> None:
            row: dict[str, Any] = {"phase": phase, **line(outcome, True)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()

        yield keep


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done: one line that changes on a terminal, a line each ten seconds elsewhere."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("stress") as status:
            yield lambda words: status.update(words)
        return
    last = [-EVERY]

    def tell(words: str) -> None:
        now = time.monotonic()
        if now - last[0] >= EVERY:
            last[0] = now
            console.print(f"stress: {words}", markup=False)

    yield tell
