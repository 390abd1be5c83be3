"""A progress bar in tokens, for people at a terminal.

Knows: rich, stderr. Must not know: what is counted. stdout is never touched.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

PATIENCE = 2.0  # seconds without a terminal before it says how far it is


@contextmanager
def tokens_bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a callback that is told how many tokens are done, those that were there before included.

    On a terminal it draws a bar with tokens, tokens/s and what remains; elsewhere it stays silent for two seconds, then
    writes one line at each further tenth.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tenths(label, total)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.update(task, completed=done)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")


def _tenths(label: str, total: int) -> Callable[[int], None]:
    begun = time.monotonic()
    shown, since, base = 0, begun, -1

    def report(done: int) -> None:
        nonlocal shown, since, base
        now = time.monotonic()
        if base < 0 < done:  # what was there before was not read at any speed
            since, base = now, done
        tenth = 10 * done // max(total, 1)
        if tenth <= shown or now - begun < PATIENCE:
            return
        rate = (done - base) / (now - since) if now > since else 0.0
        left = f", {rate:,.0f} tokens/s, {(total - done) / rate:,.0f} s left" if rate else ""
        print(f"{label}: {done:,} of {total:,} tokens{left}", file=sys.stderr, flush=True)
        shown, since, base = tenth, now, done

    return report
