"""A result of ``longread bench serve`` as a run. Knows its schema (measure/load/result.py), trusts no value of it."""

import math
from collections.abc import Iterable, Mapping, Sequence

from longread.measure.load.estimates import estimate
from longread.measure.report.numbers import amount, items, mapping, plain, real, whole, words
from longread.measure.report.run import ENDS, Figure, Request, Run

SCHEMA = 1
AGREE = 0.001  # of a mean: requests are rounded to 0.1 us
_TIMES = ("ttft", "ttfc", "ttfrt", "ttfat", "tpot", "e2el")
_OWN_RATES = ("output_throughput", "request_throughput", "request_goodput", "total_token_throughput")


def run_of(
    document: Mapping[str, object], label: str, source: str, requests: list[Request] | None, why: str | None
) -> Run:
    own = mapping(document.get("longread"))
    provenance = mapping(own.get("provenance"))
    told = mapping(own.get("requests"))
    ends = {name: whole(told.get(name)) or 0 for name in ENDS}
    figures = {name: figure_of(mapping(each)) for name, each in mapping(own.get("metrics")).items()}
    odd = _disagree(figures, requests or [])
    figures |= derived(requests or [])
    return Run(
        label=label,
        tool="longread",
        source=source,
        model=words(document.get("model_id")),
        date=words(provenance.get("date")),
        figures={name: each for name, each in figures.items() if each.count},
        rates={name: amount(document.get(name)) for name in _OWN_RATES},
        load=_load(document, requests),
        ends=ends,
        planned=whole(told.get("planned")),
        duration=amount(document.get("duration")),
        partial=own.get("partial") is True,
        requests=requests,
        no_requests=why,
        own=own,
        missing=texts(own.get("missing")),
        warnings=(*odd, *texts(own.get("warnings"))),
    )


def _disagree(figures: Mapping[str, Figure], requests: Sequence[Request]) -> list[str]:
    """Where a result says something else than its requests: one of the two was edited, or is of another run."""
    answered = [each for each in requests if each.status == "ok"]
    said = []
    for name in ("ttft", "e2el"):
        samples, figure = [each.values[name] for each in answered if name in each.values], figures.get(name)
        if not samples or figure is None or figure.mean is None:
            continue
        mean = math.fsum(samples) / len(samples)
        if abs(mean - figure.mean) > AGREE * max(mean, figure.mean) or figure.count != len(samples):
            said.append(
                f"the result and its requests disagree about {name.upper()}: mean {plain(figure.mean)} ms of "
                f"{figure.count} in the one, {plain(mean)} ms of {len(samples)} in the other; one of them was edited"
            )
    return said


def texts(value: object) -> tuple[str, ...]:
    return tuple(text for text in (words(each, 400) for each in items(value)) if text is not None)


def figure_of(told: Mapping[str, object]) -> Figure:
    """One metric of the block, or of a kind's."""
    percentiles: dict[float, float | None] = {}
    bounds: dict[float, tuple[float | None, float | None]] = {}
    needs: dict[float, int] = {}
    for name, each in mapping(told.get("percentiles")).items():
        one, at = mapping(each), percent_of(name)
        if at is None:
            continue
        percentiles[at] = amount(one.get("value"))
        interval = _pair(one.get("interval"))
        if interval is not None:
            bounds[at] = interval
        more = whole(one.get("needs_samples"))
        if more:
            needs[at] = more
    return Figure(
        whole(told.get("samples")),
        amount(told.get("mean")),
        amount(told.get("std")),
        _pair(told.get("mean_interval")),
        percentiles,
        bounds,
        needs,
    )


def percent_of(name: str) -> float | None:
    """99.0 of "p99"."""
    try:
        value = float(name.removeprefix("p"))
    except ValueError:
        return None
    return value if 0 < value < 100 else None


def _pair(value: object) -> tuple[float | None, float | None] | None:
    found = items(value)
    if len(found) != 2:
        return None
    low, high = real(found[0]), real(found[1])
    return None if low is None and high is None else (low, high)


def _load(document: Mapping[str, object], requests: Sequence[Request] | None) -> dict[str, float | None]:
    completed, prompt = whole(document.get("completed")), amount(document.get("total_input_tokens"))
    return {
        "concurrency": amount(document.get("max_concurrency")),
        "rate": amount(document.get("request_rate")),
        "context": prompt / completed if completed and prompt else None,
        "peak": amount(document.get("max_concurrent_requests")),
    }


def request_of(row: Mapping[str, object]) -> Request:
    """One line of the requests' file."""
    values = {name: amount(row.get(f"{name}_ms")) for name in _TIMES}
    gaps = tuple(gap for gap in (amount(each) for each in items(row.get("gaps_ms"))) if gap is not None)
    status = row.get("status")
    found = Request(
        key=words(row.get("key")),
        kind=words(row.get("kind"), 60) or "unnamed",
        status=status if isinstance(status, str) and status in ENDS else "failed",
        sent=amount(row.get("sent")),
        ended=amount(row.get("ended")),
        failure=words(row.get("failure"), 80),
        gaps=gaps,
        prompt_tokens=whole(row.get("prompt_tokens")),
        output_tokens=whole(row.get("output_tokens")),
        cached_tokens=whole(row.get("cached_tokens")),
        timing={
            name: value
            for name, value in ((str(k)[:60], amount(v)) for k, v in mapping(row.get("server_timing_ms")).items())
            if value is not None
        },
    )
    known = {name: value for name, value in values.items() if value is not None}
    found.values = known | _more(known, found, "gaps_ms" in row)
    return found


def _more(known: Mapping[str, float], row: Request, detailed: bool) -> dict[str, float]:
    """The other tools' quantities, as far as this request tells them."""
    found = {}
    ttft, last_text = known.get("ttft"), None
    if detailed and ttft is not None and row.status == "ok":
        last_text = found["e2el_text"] = ttft + sum(row.gaps)
    if row.output_tokens is not None and row.output_tokens > 1:
        if "e2el" in known and "ttfc" in known:
            found["tpot_chunk"] = max(known["e2el"] - known["ttfc"], 0.0) / (row.output_tokens - 1)
        if last_text is not None and ttft is not None:
            found["tpot_text"] = (last_text - ttft) / (row.output_tokens - 1)
    return found


def derived(requests: Iterable[Request]) -> dict[str, Figure]:
    """Figures of the quantities that only the requests tell."""
    answered = [each for each in requests if each.status == "ok"]
    found = {}
    for name in ("tpot_chunk", "tpot_text", "e2el_text"):
        samples = [each.values[name] for each in answered if name in each.values]
        if samples:
            found[name] = of_samples(samples)
    return found


def of_samples(samples: Sequence[float]) -> Figure:
    """With the intervals that the bench gives."""
    percents = (50.0, 90.0, 95.0, 99.0)
    found = estimate([[value] for value in samples], percents)
    bounds = {p: (i.low, i.high) for p, i in found.intervals.items() if i is not None}
    needs = {p: i.needs for p, i in found.intervals.items() if i is not None and i.needs is not None}
    mean = found.mean_interval
    return Figure(found.count, found.mean, found.std, (mean.low, mean.high), found.percentiles, bounds, needs)
