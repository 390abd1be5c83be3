"""The progress bar of a loading checkpoint, for people at a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from longread.weights.reader import Progress as Callback

PATIENCE = 2.0  # seconds without a terminal before loading says how far it is


@contextmanager
def loading_bar(label: str) -> Iterator[Callback]:
    """Yields a ``progress`` callback for ``Checkpoint.load``.

    On a terminal it draws a bar on stderr. Elsewhere (logs) it stays silent for two seconds, then writes one line at
    each further tenth. stdout is never touched.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tenths(label)
        return
    # A label holds a folder's name: neither markup nor a format string.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _tenths(label: str) -> Callback:
    start, shown = time.monotonic(), 0

    def report(done: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * done // max(total, 1)
        if tenth > shown and time.monotonic() - start > PATIENCE:
            shown = tenth
            print(
                f"{label}: {10 * tenth} % of {total / 1e9:.1f} GB"
                if total >= 1e8
                else f"{label}: {10 * tenth} % of {total / 1e6:.0f} MB",
                file=sys.stderr,
            )

    return report
