"""A run's figures by the names of vLLM's bench, each with what it means in words.

Knows outcomes. Must not know files, terminals or servers. A figure without samples is None.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longread.measure.load.estimates import Estimate, estimate
from longread.measure.load.goodput import Goodput, goodput
from longread.measure.load.outcome import Outcome, Run
from longread.spec.errors import ConfigError

PERCENTS = (50.0, 90.0, 95.0, 99.0)
DEFAULT = ("ttft", "tpot", "itl", "e2el")
DEFINITIONS: Mapping[str, str] = {
    "ttft": "from the instant before sending (connecting included) to the first event with reasoning or answer text; "
    "an empty role chunk does not count",
    "ttfc": "to the first event with a choice, an empty role chunk included (what vLLM's bench calls TTFT)",
    "ttfrt": "to the first reasoning text; requests without reasoning have none",
    "ttfat": "to the first text of the answer itself, after any reasoning",
    "tpot": "(e2el - ttft) / (output tokens - 1) of each request; answers of at most one token and of an unknown "
    "number are left out",
    "itl": "gaps between neighbouring events with text, pooled over requests: inter-chunk, not inter-token, where an "
    "event holds several tokens (see tokens_per_chunk); the name is vLLM's",
    "e2el": "to the last event with a choice (text or finish reason; not to usage after it), of requests answered to "
    "their end",
    "goodput": "requests per second that met every SLO; a failed request meets none, and a TPOT asks nothing of an "
    "answer of at most one token",
    "intervals": "95 %: Student's t over requests for means, order statistics for percentiles, Wilson for shares; "
    "requests are taken as independent, so under load they are lower bounds of what is unknown",
    "percentiles": "straight between neighbouring samples (numpy's default)",
    "throughput": "of requests answered to their end, over the time from the first due to the last end",
}


def _samples(name: str) -> Callable[[Outcome], list[float]]:
    if name == "itl":
        return lambda outcome: [gap * 1000 for gap in outcome.gaps]

    def one(outcome: Outcome) -> list[float]:
        value: float | None = getattr(outcome, name)
        return [] if value is None else [value * 1000]

    return one


SAMPLES: Mapping[str, Callable[[Outcome], list[float]]] = {
    name: _samples(name) for name in ("ttft", "ttfc", "ttfrt", "ttfat", "tpot", "itl", "e2el")
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be said: metrics by name, percents, SLOs in ms by name."""

    metrics: tuple[str, ...] = DEFAULT
    percents: tuple[float, ...] = PERCENTS
    slos: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """``estimates`` in milliseconds by metric, of the requests that were answered. ``missing``: what could not be said
    and why. ``kinds``: the same for each kind of request where there is more than one.
    """

    run: Run
    wanted: Wanted
    estimates: Mapping[str, Estimate]
    goodput: Goodput | None
    total_input_tokens: int | None
    total_output_tokens: int | None
    cached: tuple[int, int, int] | None
    tokens_per_chunk: float | None
    missing: tuple[str, ...]
    kinds: Mapping[str, "KindSummary"]

    @property
    def counts(self) -> Counter[str]:
        """Requests by status."""
        return Counter(each.status for each in self.run.outcomes)

    @property
    def completed(self) -> int:
        return self.counts["ok"]

    @property
    def failed(self) -> int:
        """Refused, failed and timed out; what the client cancelled is not the server's."""
        counts = self.counts
        return counts["refused"] + counts["failed"] + counts["timeout"]

    def per_second(self, amount: float | None) -> float | None:
        return None if amount is None or self.run.duration <= 0 else amount / self.run.duration


@dataclass(frozen=True, slots=True)
class KindSummary:
    requests: int
    completed: int
    estimates: Mapping[str, Estimate]


def parse_metrics(text: str) -> tuple[str, ...]:
    """vLLM's ``--percentile-metrics``. Raises ConfigError for a name that is none."""
    names = tuple(word.strip() for word in text.split(","))
    for name in names:
        if name not in SAMPLES:
            raise ConfigError(f"--percentile-metrics: no metric is called {name[:60]!r} (all: {', '.join(SAMPLES)})")
    return tuple(dict.fromkeys(names))


def parse_percents(text: str) -> tuple[float, ...]:
    """vLLM's ``--metric-percentiles``. Raises ConfigError for what is not within 0 and 100."""
    found = []
    for word in text.split(","):
        try:
            value = float(word)
        except ValueError:
            raise ConfigError(f"--metric-percentiles: {word.strip()[:60]!r} is not a number") from None
        if not 0 < value < 100:
            raise ConfigError(f"--metric-percentiles: {word.strip()[:60]}; it must lie between 0 and 100")
        found.append(value)
    return tuple(sorted(set(found)))


def percent_name(percent: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{percent:g}"


def summarise(run: Run, wanted: Wanted | None = None) -> Summary:
    wanted = wanted or Wanted()
    answered = [each for each in run.outcomes if each.status == "ok"]
    names = list(wanted.metrics)
    if any(each.first_reasoning is not None for each in answered):
        names += [name for name in ("ttfrt", "ttfat") if name not in names]
    if "ttft" in names and "ttfc" not in names:
        names.append("ttfc")
    estimates = _estimates(answered, names, wanted.percents)
    missing: list[str] = []
    input_tokens = _total(answered, "prompt_tokens", "total_input_tokens", missing)
    output_tokens = _total(answered, "output_tokens", "total_output_tokens", missing)
    good = goodput(run.outcomes, wanted.slos, run.duration) if wanted.slos else None
    if good is not None and good.unknown:
        missing.append(f"request_goodput: of {good.unknown} requests it is not known whether they met it")
    missing += _left_out(answered, estimates)
    return Summary(
        run,
        wanted,
        estimates,
        good,
        input_tokens,
        output_tokens,
        _cached(answered, missing),
        _tokens_per_chunk(answered),
        tuple(missing),
        _kinds(run.outcomes, names, wanted.percents),
    )


def _estimates(answered: Sequence[Outcome], names: Sequence[str], percents: Sequence[float]) -> dict[str, Estimate]:
    return {name: estimate([SAMPLES[name](each) for each in answered], percents) for name in names}


def _kinds(outcomes: Sequence[Outcome], names: Sequence[str], percents: Sequence[float]) -> dict[str, KindSummary]:
    kinds = sorted({each.kind for each in outcomes})
    if len(kinds) < 2:
        return {}
    found = {}
    for kind in kinds:
        rows = [each for each in outcomes if each.kind == kind]
        answered = [each for each in rows if each.status == "ok"]
        found[kind] = KindSummary(len(rows), len(answered), _estimates(answered, names, percents))
    return found


def _total(answered: Sequence[Outcome], field: str, name: str, missing: list[str]) -> int | None:
    """The sum; None where it is not known of all."""
    values: list[int | None] = [getattr(each, field) for each in answered]
    unknown = values.count(None)
    if unknown:
        missing.append(f"{name}: {unknown} of {len(values)} answers came without usage; give --tokenizer to count them")
        return None
    return sum(value for value in values if value is not None)


def _left_out(answered: Sequence[Outcome], estimates: Mapping[str, Estimate]) -> list[str]:
    """What the latencies do not contain."""
    said = []
    silent = sum(not each.chunk_times for each in answered)
    if silent:
        said.append(f"ttft: {silent} answers had no text at all")
    if "tpot" in estimates:
        short = sum(each.output_tokens is not None and each.output_tokens <= 1 for each in answered)
        uncounted = sum(each.output_tokens is None for each in answered)
        said += [f"tpot: {short} answers of at most one token are left out"] if short else []
        said += [f"tpot: {uncounted} answers of an unknown number of tokens are left out"] if uncounted else []
    return said


def _cached(answered: Sequence[Outcome], missing: list[str]) -> tuple[int, int, int] | None:
    """(requests that told, their cached tokens, their prompt tokens)."""
    told = [each for each in answered if each.cached_tokens is not None and each.prompt_tokens is not None]
    if len(told) < len(answered):
        missing.append(f"cached_tokens: {len(answered) - len(told)} of {len(answered)} answers do not tell")
    if not told:
        return None
    return len(told), sum(each.cached_tokens or 0 for each in told), sum(each.prompt_tokens or 0 for each in told)


def _tokens_per_chunk(answered: Sequence[Outcome]) -> float | None:
    """Output tokens for each event with text, over all answers of a known number."""
    known = [each for each in answered if each.output_tokens is not None and each.chunk_times]
    chunks = sum(len(each.chunk_times) for each in known)
    return sum(each.output_tokens or 0 for each in known) / chunks if chunks else None


def flat(summary: Summary) -> dict[str, Any]:
    """vLLM's keys, and ours for metrics that it does not have."""
    run, good = summary.run, summary.goodput
    total = None
    if summary.total_input_tokens is not None and summary.total_output_tokens is not None:
        total = summary.total_input_tokens + summary.total_output_tokens
    found: dict[str, Any] = {
        "duration": run.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.per_second(summary.completed),
        "request_goodput": good.rate if good is not None else None,
        "output_throughput": summary.per_second(summary.total_output_tokens),
        "total_token_throughput": summary.per_second(total),
        "max_concurrent_requests": run.peak,
    }
    for name, each in summary.estimates.items():
        found[f"mean_{name}_ms"] = each.mean
        found[f"median_{name}_ms"] = each.median
        found[f"std_{name}_ms"] = each.std
        for percent, value in each.percentiles.items():
            found[f"{percent_name(percent)}_{name}_ms"] = value
    return found
