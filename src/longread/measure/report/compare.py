"""A against B: each metric better, worse, the same, or not decided, and how many more requests would decide it.

Knows runs and ratios. Must not know files or terminals. All judged rows hold together: the error of 5 % is divided by
their number (Bonferroni), so that of twenty comparisons of a thing with itself about one says anything at all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from longread.measure.gate.statistics import paired_drop, samples_to_decide
from longread.measure.intervals import normal_quantile, percentile, wilson
from longread.measure.report import ratios
from longread.measure.report.conditions import Difference, differences, only_grave, repeats_differ, same_asks
from longread.measure.report.definitions import LATENCIES, RATES, TOOLS, Quantity, Tool, called
from longread.measure.report.numbers import percent as share_words
from longread.measure.report.ratios import Ratio
from longread.measure.report.run import Request, Run
from longread.spec.errors import ConfigError

SCHEMA = 1
ERROR = 0.05
MARGIN = 0.02
DEFAULT = ("ttft", "ttfc", "ttfat", "tpot", "tpot_chunk", "tpot_text", "e2el", "e2el_text")
STATISTICS: Mapping[str, float | None] = {"mean": None, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}
DEFAULT_STATISTICS = ("mean", "p99")
LEAST_PAIRED = 0.8  # of the smaller side's answers; below, it is other requests that are compared

Verdict = Literal["better", "worse", "same", "inconclusive", "not judged"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """``margin``: a change of less than this is no change. ``anyway``: grave differences are told, not refused."""

    metrics: tuple[str, ...] = DEFAULT
    statistics: tuple[str, ...] = DEFAULT_STATISTICS
    margin: float = MARGIN
    anyway: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. ``a``, ``b``: the values; ``ratio``, ``low``, ``high``: B / A. For shares ``ratio`` is None and
    ``low`` and ``high`` are of the difference B - A. ``needed``: about so many requests more (a side).
    """

    metric: str
    title: str
    statistic: str
    unit: str
    a: float | None
    b: float | None
    verdict: Verdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    paired: bool = False
    needed: int | None = None
    needed_of: str = "requests"
    note: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    a: tuple[Run, ...]
    b: tuple[Run, ...]
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    left_out: tuple[str, ...]
    margin: float
    judged: int
    pairs: int
    method: str = field(default="")

    @property
    def verdict(self) -> Verdict:
        """One worse row makes it worse; better where a row is and none is worse; the same where all are."""
        found = {row.verdict for row in self.rows} - {"not judged"}
        for verdict in ("worse", "better"):
            if verdict in found:
                return verdict
        return "same" if found == {"same"} else "inconclusive"

    def document(self) -> dict[str, object]:
        return {
            "kind": "longread-compare",
            "schema": SCHEMA,
            "verdict": self.verdict,
            "a": [_side(run) for run in self.a],
            "b": [_side(run) for run in self.b],
            "confidence": 1 - ERROR,
            "rows_judged_together": self.judged,
            "margin": self.margin,
            "pairs": self.pairs,
            "method": self.method,
            "rows": [asdict(row) for row in self.rows],
            "differences": [asdict(each) for each in self.differences],
            "not_compared": list(self.left_out),
        }


def _side(run: Run) -> dict[str, object]:
    gate = None if run.gate is None else {"verdict": run.gate.verdict, "profile": run.gate.profile}
    return {
        "file": run.source,
        "tool": TOOLS[run.tool],
        "model": run.model,
        "date": run.date,
        "commit": run.part("provenance", "commit"),
        "answered": run.answered,
        "gate": gate,
    }


def compare(a: Sequence[Run], b: Sequence[Run], wanted: Wanted | None = None) -> Comparison:
    """``a`` and ``b``: one run each, or repeats. Raises ConfigError where they must not be compared."""
    wanted = wanted or Wanted()
    told = differences(a[0], b[0])
    for side, runs in (("A", a), ("B", b)):
        told += [Difference(f"the repeats of {side} differ: {text}", True) for text in repeats_differ(list(runs))]
        told += [
            Difference(f"{run.label} of {side} failed the quality gate {run.gate.profile}", True)
            for run in runs[1:]
            if run.gate is not None and run.red
        ]
    grave = only_grave(told)
    if grave and not wanted.anyway:
        raise ConfigError(
            "A and B must not be compared:\n  " + "\n  ".join(grave) + "\nGive --anyway to do it all the same"
        )
    tools = a[0].tool, b[0].tool
    metrics, left_out = _common(a, b, wanted.metrics)
    judged = _judged(a, b, metrics, wanted.statistics)
    error = ERROR / judged
    several = len(a) > 1 or len(b) > 1
    pairs = _pairs(a[0], b[0]) if not several and same_asks(a[0], b[0]) else []
    rows = [
        _latency(a, b, quantity, statistic, error, wanted.margin, pairs, tools)
        for quantity in metrics
        for statistic in wanted.statistics
    ]
    rows += _throughput(a, b, error, wanted.margin, pairs)
    if not several:
        rows.append(_answered(a[0], b[0], error, pairs))
        rows += _goodput(a[0], b[0], error)
    return Comparison(
        tuple(a),
        tuple(b),
        tuple(rows),
        tuple(told),
        tuple(left_out),
        wanted.margin,
        judged,
        len(pairs),
        _method(several, bool(pairs), judged),
    )


def _judged(a: Sequence[Run], b: Sequence[Run], metrics: Sequence[Quantity], statistics: Sequence[str]) -> int:
    """How many rows can get a verdict: those that have too few samples for an interval cost the others nothing."""
    several = len(a) > 1 or len(b) > 1
    count = 0
    for quantity in metrics:
        fewest = min(len(_samples(side[0], quantity.name)) for side in (a, b))
        for statistic in statistics:
            percent = STATISTICS[statistic]
            count += several or fewest >= ratios.least_samples(percent) or (not fewest and percent is None)
    paced = closed(a[0]) and closed(b[0])
    count += len(_rates(a[0], b[0])) if paced else 0
    return max(count + (0 if several else 1 + _with_slos(a[0], b[0])), 1)


def _method(several: bool, paired: bool, judged: int) -> str:
    if several:
        how = "each run is one sample (Welch's t of the logarithm)"
    else:
        what = "the same asks in pairs" if paired else "requests of both runs apart"
        how = f"{what}, block bootstrap in the order of sending, t of the logarithm; one run a side: what differs from "
        how += "run to run is not in the interval, repeat runs and give folders to have it there"
    return f"{how}; {judged} rows hold together with {1 - ERROR:.0%} (Bonferroni)"


def _common(a: Sequence[Run], b: Sequence[Run], names: Sequence[str]) -> tuple[list[Quantity], list[str]]:
    """Quantities that both sides have, and why the others are not compared."""
    found, said = [], []
    for name in names:
        quantity = LATENCIES[name]
        sides = [all(name in run.figures for run in runs) for runs in (a, b)]
        if all(sides):
            found.append(quantity)
        elif any(sides):
            which, lacking = ("A", b[0].tool) if sides[0] else ("B", a[0].tool)
            what = called(quantity, lacking)
            why = (
                f"{TOOLS[lacking]} does not measure it" if what == "not measured" else "the other file does not hold it"
            )
            if what != "not measured" and lacking == "longread" and quantity.from_rows:
                why = f"the other run needs {quantity.from_rows}"
            said.append(f"{quantity.title} ({quantity.meaning}): only {which} has it; {why}")
    if found and a[0].tool == b[0].tool == "longread":  # other tools' words say nothing new between two of our own
        found = [
            each
            for each in found
            if "longread" in each.names and each.name not in ("tpot_chunk", "tpot_text", "e2el_text", "ttfc")
        ] or found
    if not found:
        raise ConfigError(
            f"{a[0].source} and {b[0].source} share no quantity of {', '.join(names)}: "
            + ("; ".join(said) or "none is in both")
        )
    return found, said


def _pairs(a: Run, b: Run) -> list[tuple[Request, Request]]:
    """Requests of the same ask that both answered, in A's order of sending."""
    if a.requests is None or b.requests is None:
        return []
    keyed: list[dict[str, Request]] = []
    for run in (a, b):
        rows = [each for each in run.requests or () if each.key is not None]
        by_key = {each.key: each for each in rows if each.key is not None}
        if len(by_key) != len(rows):
            return []
        keyed.append(by_key)
    both = [(one, keyed[1][key]) for key, one in keyed[0].items() if key in keyed[1]]
    answered = [(one, other) for one, other in both if one.status == other.status == "ok"]
    if len(answered) < LEAST_PAIRED * max(min(a.answered, b.answered), 1):
        return []
    return sorted(answered, key=lambda pair: pair[0].sent or 0.0)


def _latency(
    a: Sequence[Run],
    b: Sequence[Run],
    quantity: Quantity,
    statistic: str,
    error: float,
    margin: float,
    pairs: Sequence[tuple[Request, Request]],
    tools: tuple[Tool, Tool],
) -> Row:
    percent = STATISTICS[statistic]
    values = [_value(runs[0], quantity.name, percent) for runs in (a, b)]
    needed_of, paired = "requests", False
    if len(a) > 1 or len(b) > 1:
        sides = [[_value(run, quantity.name, percent) or 0.0 for run in runs] for runs in (a, b)]
        ratio, needed_of = ratios.of_runs(sides[0], sides[1], error), "runs"
        values = [_geometric(side) for side in sides]
    else:
        matched = [
            (one.values[quantity.name], other.values[quantity.name])
            for one, other in pairs
            if quantity.name in one.values and quantity.name in other.values
        ]
        lists = [_samples(runs[0], quantity.name) for runs in (a, b)]
        if matched and len(matched) >= LEAST_PAIRED * min(len(lists[0]), len(lists[1])):
            paired = True
            ratio = ratios.of_samples([x for x, _ in matched], [y for _, y in matched], percent, error, paired=True)
        elif lists[0] and lists[1]:
            ratio = ratios.of_samples(lists[0], lists[1], percent, error, paired=False)
        else:
            ratio = _of_figures(a[0], b[0], quantity.name, percent, error, values)
    verdict, needed = judge(ratio, margin, higher=False)
    words = {called(quantity, tool) for tool in tools}
    note = ratio.why or (f"called {' and '.join(sorted(words))}" if len(words) > 1 else "")
    return _row(quantity, statistic, values, ratio, paired, (verdict, needed, needed_of), note)


def _row(
    quantity: Quantity,
    statistic: str,
    values: Sequence[float | None],
    ratio: Ratio,
    paired: bool,
    judged: tuple[Verdict, int | None, str],
    note: str,
) -> Row:
    """``judged``: the verdict, and how many more of what would tell."""
    verdict, needed, needed_of = judged
    return Row(
        quantity.name,
        quantity.title,
        statistic,
        quantity.unit,
        values[0],
        values[1],
        verdict,
        ratio.value,
        ratio.low,
        ratio.high,
        ratio.samples,
        paired,
        needed,
        needed_of,
        note,
    )


def _value(run: Run, name: str, percent: float | None) -> float | None:
    figure = run.figures.get(name)
    if figure is None:
        return None
    if percent is None:
        return figure.mean
    told = figure.percentiles.get(percent)
    if told is None:
        samples = _samples(run, name)
        return percentile(sorted(samples), percent / 100) if samples else None
    return told


def _geometric(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else None


def _samples(run: Run, name: str) -> list[float]:
    """Of the answered requests, in the order of sending. A request's gaps hang together, so they are not samples."""
    return [each.values[name] for each in _answers(run) if name in each.values]


def _of_figures(
    a: Run, b: Run, name: str, percent: float | None, error: float, values: Sequence[float | None]
) -> Ratio:
    one, other = values
    if one is None or other is None or one <= 0 or other <= 0:
        return Ratio(None, why="a file does not hold it")
    if percent is not None:
        reasons = "; ".join(dict.fromkeys(run.no_requests for run in (a, b) if run.no_requests))
        return Ratio(other / one, why=f"no interval: {reasons or 'a file holds no single requests'}")
    left, right = a.figures[name], b.figures[name]
    return ratios.of_summaries((one, left.std, left.count), (other, right.std, right.count), error)


def judge(ratio: Ratio, margin: float, *, higher: bool) -> tuple[Verdict, int | None]:
    """The verdict, and how many more samples it needs where it is open."""
    if ratio.value is None or (ratio.low is None and ratio.least is None):
        return "not judged", None
    if ratio.low is None or ratio.high is None:
        return "inconclusive", ratios.more_needed(ratio, margin)
    if ratio.low >= 1 / (1 + margin) and ratio.high <= 1 + margin:
        return "same", None
    if ratio.high < 1:
        return ("worse" if higher else "better"), None
    if ratio.low > 1:
        return ("better" if higher else "worse"), None
    return "inconclusive", ratios.more_needed(ratio, margin)


def _rates(a: Run, b: Run) -> list[Quantity]:
    names = ("output_throughput", "request_throughput")
    return [RATES[name] for name in names if a.rates.get(name) and b.rates.get(name)]


def closed(run: Run) -> bool:
    """Whether the answers set the pace. In an open loop the client does, and a throughput is its own rate."""
    told = run.part("provenance", "schedule", "open_loop")
    return told is False if told is not None else run.load.get("rate") is None


def _throughput(
    a: Sequence[Run], b: Sequence[Run], error: float, margin: float, pairs: Sequence[tuple[Request, Request]]
) -> list[Row]:
    rows = []
    for quantity in _rates(a[0], b[0]):
        sides = [[run.rates.get(quantity.name) or 0.0 for run in runs] for runs in (a, b)]
        several, paced = len(a) > 1 or len(b) > 1, closed(a[0]) and closed(b[0])
        if several:
            ratio = ratios.of_runs(sides[0], sides[1], error)
        else:
            ratio = _busy((a[0], b[0]), quantity.name, error, sides[1][0] / sides[0][0], pairs)
        verdict, needed = judge(ratio, margin, higher=True)
        note = ratio.why or ""
        if not paced:
            verdict, needed, note = "not judged", None, "open loop: the client sets the rate, so it says nothing"
        values = [_geometric(side) for side in sides] if several else [sides[0][0], sides[1][0]]
        unit = "runs" if several else "requests"
        paired = bool(pairs) and ratio.low is not None
        rows.append(_row(quantity, "rate", values, ratio, paired, (verdict, needed, unit), note))
    return rows


def _busy(
    runs: tuple[Run, Run], name: str, error: float, value: float, pairs: Sequence[tuple[Request, Request]]
) -> Ratio:
    """A rate is one figure a run. In a closed loop it moves as what is answered per second in flight does, so its
    interval is that ratio's.
    """
    found = []
    until = next((each for each in ("e2el", "e2el_text") if all(each in run.figures for run in runs)), "e2el")
    for place, run in enumerate(runs):
        rows = [pair[place] for pair in pairs] or [each for each in _answers(run) if until in each.values]
        tokens = [float(each.output_tokens or 0) if name == "output_throughput" else 1.0 for each in rows]
        times = [each.values.get(until, 0.0) for each in rows]
        if not sum(tokens) or not sum(times):
            return Ratio(
                value, why="no interval: " + (run.no_requests or "a file holds no tokens or no ends of its answers")
            )
        # What each request adds to tokens / time, around 1: the mean is 1, and its spread is the rate's.
        per_token, per_time = len(rows) / sum(tokens), len(rows) / sum(times)
        found.append([1 + t * per_token - e * per_time for t, e in zip(tokens, times, strict=True)])
    around = ratios.of_samples(found[0], found[1], None, error, paired=bool(pairs))
    if around.half is None:
        return Ratio(value, samples=around.samples, why=around.why, least=around.least)
    half = around.half
    return Ratio(value, value * math.exp(-half), value * math.exp(half), around.samples, half)


def _answers(run: Run) -> list[Request]:
    """In the order of sending."""
    return sorted((each for each in run.requests or () if each.status == "ok"), key=lambda each: each.sent or 0.0)


def _answered(a: Run, b: Run, error: float, pairs: Sequence[object]) -> Row:
    """Shares of requests that were answered, as a difference."""
    counts = [(run.answered, run.answered + run.bad) for run in (a, b)]
    if same_asks(a, b) and pairs and a.requests is not None and b.requests is not None:
        status = [{each.key: each.status == "ok" for each in run.requests or ()} for run in (a, b)]
        both = status[0].keys() & status[1].keys()
        lost = sum(status[0][key] and not status[1][key] for key in both)
        won = sum(status[1][key] and not status[0][key] for key in both)
        low, high = (-x for x in reversed(paired_drop(lost, won, len(both), error)))
        return _share_row("answered", "requests answered", counts, low, high, len(both), True)
    low, high = _difference(counts[0], counts[1], error)
    return _share_row("answered", "requests answered", counts, low, high, min(n for _, n in counts), False)


def _with_slos(a: Run, b: Run) -> int:
    slos = [run.part("goodput", "slos") for run in (a, b)]
    return int(isinstance(slos[0], dict) and slos[0] == slos[1])


def _goodput(a: Run, b: Run, error: float) -> list[Row]:
    """The share of requests within all SLOs, where both were held to the same."""
    if not _with_slos(a, b):
        return []
    counts = []
    for run in (a, b):
        good, of, unknown = (run.part("goodput", name) for name in ("good", "counted", "unknown"))
        if not isinstance(good, int) or not isinstance(of, int) or unknown or not 0 <= good <= of:
            return []
        counts.append((good, of))
    low, high = _difference(counts[0], counts[1], error)
    return [_share_row("goodput", "requests within all SLOs", counts, low, high, min(n for _, n in counts), False)]


def _difference(a: tuple[int, int], b: tuple[int, int], error: float) -> tuple[float, float]:
    """Interval of b's share less a's, from Wilson's of each (R. G. Newcombe, Statistics in Medicine 17 (1998), 873)."""
    if not a[1] or not b[1]:
        return -1.0, 1.0
    z = normal_quantile(error)
    shares = a[0] / a[1], b[0] / b[1]
    (a_low, a_high), (b_low, b_high) = wilson(*a, z), wilson(*b, z)
    middle = shares[1] - shares[0]
    return (
        middle - math.hypot(shares[1] - b_low, a_high - shares[0]),
        middle + math.hypot(b_high - shares[1], shares[0] - a_low),
    )


SHARE_MARGIN = 0.01


def _share_row(
    metric: str, title: str, counts: Sequence[tuple[int, int]], low: float, high: float, samples: int, paired: bool
) -> Row:
    """``low``, ``high``: of the difference of the shares. Within one point it is the same."""
    shares = [good / of if of else None for good, of in counts]
    verdict: Verdict = "inconclusive"
    needed = None
    if shares[0] is None or shares[1] is None:
        verdict = "not judged"
    elif low >= -SHARE_MARGIN and high <= SHARE_MARGIN:
        verdict = "same"
    elif low > 0:
        verdict = "better"
    elif high < 0:
        verdict = "worse"
    else:
        middle = shares[1] - shares[0]
        edges = (0.0, math.copysign(SHARE_MARGIN, middle or 1.0))
        wanted = [samples_to_decide(samples, middle, low, high, edge) for edge in edges]
        known = [each for each in wanted if each is not None]
        needed = max(min(known) - samples, 1) if known else None
    note = f"difference {share_words(low)} to {share_words(high)}, same within {share_words(SHARE_MARGIN)}"
    return Row(
        metric, title, "share", "", shares[0], shares[1], verdict, None, low, high, samples, paired, needed, note=note
    )
