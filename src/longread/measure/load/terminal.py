"""A run at a terminal: how far it is, on stderr, and its figures at the end, on stdout.

Knows rich and summaries. Must not know HTTP or files.
"""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from longread.measure.load.calibrate import Calibration
from longread.measure.load.estimates import Estimate, Interval
from longread.measure.load.metrics import Summary, percent_name
from longread.measure.load.outcome import Outcome, Spread
from longread.measure.load.run import Progress as Told
from longread.plan.tables import Screen, console, print_records

EVERY, QUIET = 10.0, 30.0  # seconds between lines where nobody watches a bar; between those that tell nothing new
NAMES = {
    "ttft": "TTFT",
    "ttfc": "first chunk",
    "ttfrt": "1st reasoning",
    "ttfat": "1st answer",
    "tpot": "TPOT",
    "itl": "chunk gap",
    "e2el": "E2E",
}


class _Counts(Told):
    """What both kinds of display count."""

    def __init__(self) -> None:
        self.total = self.done = self.bad = 0

    def started(self, total: int) -> None:
        self.total = total

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        self.done += 1
        self.bad += outcome.status != "ok"

    def said(self, in_flight: int) -> str:
        return f"{in_flight} in flight" + (f", {self.bad} not answered" if self.bad else "")


class _Bar(_Counts):
    def __init__(self, bar: Progress):
        super().__init__()
        self._bar, self._task = bar, bar.add_task("preparing", total=None, said="")

    def preparing(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def warming(self, done: int, total: int) -> None:
        self._bar.update(self._task, description="warming up", completed=done, total=total)

    def started(self, total: int) -> None:
        super().started(total)
        self._bar.reset(self._task, description="measuring", completed=0, total=total)

    def sent(self, in_flight: int) -> None:
        self._bar.update(self._task, said=self.said(in_flight))

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        super().finished(outcome, in_flight)
        self._bar.update(self._task, completed=self.done, said=self.said(in_flight))


class _Lines(_Counts):
    """Words for whoever reads a log: soon after something moved, and now and then while nothing does."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self._begun = self._told = now
        self._moved, self._in_flight = False, 0
        self._phase = "preparing"

    def preparing(self, done: int, total: int) -> None:
        self._phase, self._moved = f"preparing: {done:,} of {total:,} prompts", True

    def warming(self, done: int, total: int) -> None:
        self._phase, self._moved = f"warming up: {done:,} of {total:,} requests answered", True

    def started(self, total: int) -> None:
        super().started(total)
        self._phase, self._moved, self._begun = "", True, time.monotonic()

    def sent(self, in_flight: int) -> None:
        self._in_flight = in_flight

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        super().finished(outcome, in_flight)
        self._in_flight, self._moved = in_flight, True

    def due(self, now: float) -> str | None:
        """A line, where it is time for one. Asked every EVERY seconds."""
        if not self._moved and now - self._told < QUIET:
            return None
        self._told, self._moved = now, False
        did = self._phase or f"{self.done:,} of {self.total:,} requests, {self.said(self._in_flight)}"
        return f"{did}; {now - self._begun:.0f} s"


@contextmanager
def display() -> Iterator[Told]:
    """A bar on a terminal, lines elsewhere."""
    screen = Screen(stderr=True)
    if not screen.is_terminal:
        with _spoken(_Lines(time.monotonic())) as lines:
            yield lines
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[said]}"),
    )
    with Progress(*columns, console=screen, transient=True, refresh_per_second=4) as bar:
        yield _Bar(bar)


@contextmanager
def _spoken(lines: _Lines) -> Iterator[_Lines]:
    """Tells from a thread: a request may take minutes, in which nothing else would."""
    ended = threading.Event()

    def speak() -> None:
        while not ended.wait(EVERY):
            said = lines.due(time.monotonic())
            if said is not None:
                print(said, file=sys.stderr, flush=True)

    speaker = threading.Thread(target=speak, name="progress", daemon=True)
    speaker.start()
    try:
        yield lines
    finally:
        ended.set()
        speaker.join()


def show(summary: Summary, calibration: Calibration | None, warnings: Sequence[str]) -> None:
    """The figures, as a table that a pipe gets whole."""
    out = console()
    out.print(f"[bold]Benchmark result[/bold]{' (partial: it was stopped)' if summary.run.partial else ''}")
    for name, value in _totals(summary):
        out.print(f"  {name:<34} {escape(value)}", soft_wrap=True)
    percents = summary.wanted.percents
    names = ["milliseconds", "mean", "95 % interval", *map(percent_name, percents), "n"]
    print_records(out, names, [_row(name, each, percents) for name, each in summary.estimates.items()])
    for kind, told in summary.kinds.items():
        out.print(f"[bold]{escape(kind)}[/bold]: {told.completed:,} of {told.requests:,} answered")
        print_records(out, names, [_row(name, each, percents) for name, each in told.estimates.items()])
    _footnotes(out, summary)
    if "ttfc" in summary.estimates:
        out.print("  TTFT is to the first text; the first chunk may be an empty one with the role")
    out.print(_hanging(f"client: {_client(summary, calibration)}"))
    for text in summary.missing:
        out.print(f"missing: {escape(text)}")
    for text in warnings:
        out.print(f"[yellow]warning:[/yellow] {escape(text)}")


def _hanging(text: str) -> Padding:
    """Indented on every line that a terminal breaks it into; a pipe gets one line."""
    return Padding(Text(text), (0, 0, 0, 2), expand=False)


def _totals(summary: Summary) -> list[tuple[str, str]]:
    run, counts = summary.run, summary.counts
    ends = ", ".join(f"{counts[n]:,} {n}" for n in ("refused", "failed", "timeout", "cancelled") if counts[n])
    rows = [
        ("requests answered", f"{summary.completed:,} of {run.planned:,}" + (f" ({ends})" if ends else "")),
        ("duration", f"{run.duration:.2f} s, at most {run.peak:,} in flight"),
        ("input / output tokens", f"{count(summary.total_input_tokens)} / {count(summary.total_output_tokens)}"),
        ("requests/s", figure(summary.per_second(summary.completed))),
        ("output tokens/s", figure(summary.per_second(summary.total_output_tokens))),
    ]
    if summary.cached is not None and summary.cached[2]:
        _, cached, prompt = summary.cached
        rows.append(("cached prompt tokens", f"{cached:,} of {prompt:,} ({cached / prompt:.1%})"))
    if summary.tokens_per_chunk is not None:
        rows.append(("output tokens a chunk", f"{summary.tokens_per_chunk:.2f}"))
    good = summary.goodput
    if good is not None:
        slos = " ".join(f"{name}:{value:g}" for name, value in good.slos.items())
        told = "not known" if good.rate is None or good.fraction is None else f"{good.rate:.3g}/s, {good.fraction:.1%}"
        if good.interval is not None:
            told += f" [{good.interval[0]:.1%}, {good.interval[1]:.1%}]"
        rows.append((f"goodput ({slos} ms)", told))
    failures: dict[str, int] = {}
    for each in run.outcomes:
        if each.failure is not None:
            failures[each.failure] = failures.get(each.failure, 0) + 1
    return rows + [(f"not answered: {name}", f"{n:,}") for name, n in sorted(failures.items())]


def _row(name: str, each: Estimate, percents: Sequence[float]) -> list[str]:
    cells = [NAMES[name], figure(each.mean), _span(each.mean_interval)]
    for percent in percents:
        interval = each.intervals[percent]
        mark = "*" if each.count and interval is not None and interval.needs is not None else ""
        cells.append(figure(each.percentiles[percent]) + mark)
    return [*cells, f"{each.count:,}"]


def _footnotes(out: Console, summary: Summary) -> None:
    needs = {
        percent: interval.needs
        for each in summary.estimates.values()
        for percent, interval in each.intervals.items()
        if each.count and interval is not None and interval.needs is not None
    }
    if needs:
        told = ", ".join(f"{percent_name(percent)} needs {count:,}" for percent, count in sorted(needs.items()))
        out.print(_hanging(f"* too few samples to bound it with 95 %: {told}"))


def _client(summary: Summary, calibration: Calibration | None) -> str:
    over = summary.run.overhead
    parts = [f"loop lag {_pair(over.loop_lag)}", f"sent late {_pair(over.lateness)}"]
    parts.append("CPU not known" if over.cpu_share is None else f"CPU {over.cpu_share:.0%} of a core")
    if calibration is not None:
        parts.append(f"adds to TTFT {_pair(calibration.alone)}")
        if calibration.loaded is not None:
            parts.append(f"{_pair(calibration.loaded)} with {calibration.streams} streams")
    return "; ".join(parts)


def _pair(each: Spread | None) -> str:
    return "not known" if each is None else f"{each.p50 * 1000:.1f}/{each.p99 * 1000:.1f} ms (p50/p99)"


def _span(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return "-"
    return f"{figure(interval.low)} to {figure(interval.high)}"


def figure(value: float | None) -> str:
    return "missing" if value is None else f"{value:,.2f}"


def count(value: int | None) -> str:
    return "missing" if value is None else f"{value:,}"
