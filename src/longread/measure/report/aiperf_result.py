"""A result of ``aiperf profile`` (profile_export_aiperf.json, and profile_export.jsonl beside it) as a run.

Knows its files, as 0.13 writes them. Warm-up requests stand among the others there and are left out. Source: aiperf's
metrics reference and its files.
"""

from collections.abc import Mapping, Sequence

from longread.measure.report.definitions import LATENCIES, RATES
from longread.measure.report.longread_result import of_samples, percent_of
from longread.measure.report.numbers import amount, items, mapping, whole, words
from longread.measure.report.run import Figure, Request, Run

SUFFIX, ROWS = "_aiperf.json", ".jsonl"
_IN_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "milliseconds": 1.0, "s": 1000.0, "sec": 1000.0, "seconds": 1000.0}
_OF_REQUESTS = ("ttft", "ttfat", "tpot_text", "e2el_text")  # one value a request; gaps are many


def is_result(document: Mapping[str, object]) -> bool:
    return isinstance(document.get("request_latency"), dict) and "avg" in mapping(document["request_latency"])


def rows_name(name: str) -> str | None:
    """The file of the requests beside the result of that name; None where the name does not tell."""
    return name.removesuffix(SUFFIX) + ROWS if name.endswith(SUFFIX) else None


def run_of(
    document: Mapping[str, object], label: str, source: str, requests: list[Request] | None, why: str | None
) -> Run:
    requests = None if requests is None else _from_zero(requests)
    ok, bad = (_average(document, name) for name in ("request_count", "error_request_count"))
    figures: dict[str, Figure] = {}
    for quantity in LATENCIES.values():
        theirs = quantity.names.get("aiperf")
        found = None if theirs is None else _figure(mapping(document.get(theirs)), ok)
        if found is None:
            continue
        samples = [each.values[quantity.name] for each in requests or () if quantity.name in each.values]
        figures[quantity.name] = of_samples(samples) if samples else found
    model, load = _asked(mapping(document.get("input_config")))
    return Run(
        label=label,
        tool="aiperf",
        source=source,
        model=model,
        date=words(document.get("start_time")),
        figures=figures,
        rates={each.name: _average(document, each.names["aiperf"]) for each in RATES.values()},
        load={**load, "context": _average(document, "input_sequence_length")},
        ends={"ok": int(ok or 0), "failed": int(bad or 0)},
        planned=None,
        duration=_average(document, "benchmark_duration"),
        partial=document.get("was_cancelled") is True,
        requests=requests,
        no_requests=None if requests is not None else why,
        own={},
        missing=tuple(
            f"{each.title}: aiperf's {each.names['aiperf']} is not in the file"
            for each in LATENCIES.values()
            if "aiperf" in each.names and each.name not in figures
        ),
    )


def _asked(asked: Mapping[str, object]) -> tuple[str | None, dict[str, float | None]]:
    """Model and load: of the last profiling phase, or where releases before the phases had them."""
    models, endpoint = items(mapping(asked.get("models")).get("items")), mapping(asked.get("endpoint"))
    names = [mapping(each).get("name") for each in models] or items(endpoint.get("model_names"))
    phases = [mapping(each) for each in items(asked.get("phases"))]
    profiling = [each for each in phases if each.get("kind") == "profiling"]
    load = profiling[-1] if profiling else mapping(asked.get("loadgen"))
    rate = amount(load.get("rate", load.get("request_rate")))
    return (words(names[0]) if names else None), {"concurrency": amount(load.get("concurrency")), "rate": rate}


def _average(document: Mapping[str, object], name: str) -> float | None:
    return amount(mapping(document.get(name)).get("avg"))


def _figure(told: Mapping[str, object], count: float | None) -> Figure | None:
    factor = _IN_MS.get(str(told.get("unit", "ms")))
    mean = amount(told.get("avg"))
    if mean is None or factor is None:
        return None
    percentiles: dict[float, float | None] = {}
    for name, value in told.items():
        at, found = percent_of(name) if name.startswith("p") else None, amount(value)
        if at is not None:
            percentiles[at] = None if found is None else found * factor
    std = amount(told.get("std"))
    number = whole(told.get("count"))
    return Figure(
        number if number is not None else whole(count),
        mean * factor,
        None if std is None else std * factor,
        None,
        percentiles,
    )


def request_of(row: Mapping[str, object]) -> Request | None:
    """A line of profile_export.jsonl, its times still those of the day; None: a warm-up."""
    meta, metrics, error = (mapping(row.get(name)) for name in ("metadata", "metrics", "error"))
    if meta.get("benchmark_phase", "profiling") != "profiling":
        return None
    status = "failed" if error else "cancelled" if meta.get("was_cancelled") is True else "ok"
    one = Request(
        key=words(meta.get("x_request_id")),
        kind="unnamed",
        status=status,
        sent=_seconds(meta.get("request_start_ns")),
        ended=_seconds(meta.get("request_end_ns")),
        failure=(words(error.get("type"), 80) or "failed") if error else None,
        prompt_tokens=whole(_value(metrics, "input_sequence_length")),
        output_tokens=whole(_value(metrics, "output_sequence_length")),
        cached_tokens=whole(_value(metrics, "usage_prompt_cache_read_tokens")),
    )
    if status == "ok":
        told = {name: _ms(mapping(metrics.get(LATENCIES[name].names["aiperf"]))) for name in _OF_REQUESTS}
        one.values = {name: each[0] for name, each in told.items() if each}
        one.gaps = tuple(_ms(mapping(metrics.get(LATENCIES["itl"].names["aiperf"]))))
    return one


def _seconds(value: object) -> float | None:
    """From nanoseconds, which are more than any other number of a file may be."""
    return amount(value / 1e9) if type(value) is int and abs(value) < 2**63 else None


def _from_zero(requests: Sequence[Request]) -> list[Request]:
    """In the order of sending, on the run's own clock."""
    zero = min((each.sent for each in requests if each.sent is not None), default=0.0)
    for each in requests:
        each.sent = None if each.sent is None else each.sent - zero
        each.ended = None if each.ended is None else max(each.ended - zero, 0.0)
    return sorted(requests, key=lambda each: each.sent or 0.0)


def _value(metrics: Mapping[str, object], name: str) -> object:
    return mapping(metrics.get(name)).get("value")


def _ms(told: Mapping[str, object]) -> Sequence[float]:
    """One value, or a list of them; nothing where the unit is not known."""
    factor, value = _IN_MS.get(str(told.get("unit", "ms"))), told.get("value")
    if factor is None:
        return ()
    known = (amount(each) for each in (items(value) or (value,)))
    return [each * factor for each in known if each is not None]
