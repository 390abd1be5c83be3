"""Results of ``vllm bench serve`` and of aiperf as runs, by the definition sheet.

Knows their files. A word of theirs becomes the quantity that it is, not the one that it sounds like. vLLM writes 0
where it measured nothing: that is missing here.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from longread.measure.report.definitions import LATENCIES, RATES
from longread.measure.report.longread_result import of_samples, percent_of
from longread.measure.report.numbers import amount, items, mapping, whole, words
from longread.measure.report.run import Figure, Request, Run

_LISTS = "it was not run with --save-detailed, so it holds no single requests"
_AIPERF_ROWS = "aiperf's requests are in profile_export.jsonl, which is not read"


def is_vllm(document: Mapping[str, object]) -> bool:
    return "request_throughput" in document and ("mean_ttft_ms" in document or "completed" in document)


def is_aiperf(document: Mapping[str, object]) -> bool:
    return isinstance(document.get("request_latency"), dict) and "avg" in mapping(document["request_latency"])


def vllm(document: Mapping[str, object], label: str, source: str) -> Run:
    completed, planned = whole(document.get("completed")), whole(document.get("num_prompts"))
    failed = whole(document.get("failed"))
    if failed is None and completed is not None and planned is not None:
        failed = max(planned - completed, 0)
    requests = _requests(document)
    figures: dict[str, Figure] = {}
    missing: list[str] = []
    for quantity in LATENCIES.values():
        theirs = quantity.names.get("vllm")
        if theirs is None:
            continue
        found = _vllm_figure(document, theirs, completed)
        samples = [each.values[quantity.name] for each in requests or () if quantity.name in each.values]
        if found is not None:
            figures[quantity.name] = of_samples(samples) if samples else found
        else:
            missing.append(f"{quantity.title}: vLLM's {theirs} is not in the file or 0, which it writes for nothing")
    rates = {each.name: amount(document.get(each.names["vllm"])) for each in RATES.values()}
    prompt = amount(document.get("total_input_tokens"))
    return Run(
        label=label,
        tool="vllm",
        source=source,
        model=words(document.get("model_id")),
        date=words(document.get("date")),
        figures=figures,
        rates=rates,
        load={
            "concurrency": amount(document.get("max_concurrency")),
            "rate": amount(document.get("request_rate")),
            "context": prompt / completed if completed and prompt else None,
        },
        ends={"ok": completed or 0, "failed": failed or 0},
        planned=planned,
        duration=amount(document.get("duration")),
        partial=False,
        requests=requests,
        no_requests=None if requests is not None else _LISTS,
        own={},
        missing=tuple(missing),
    )


def _vllm_figure(document: Mapping[str, object], name: str, completed: int | None) -> Figure | None:
    mean = amount(document.get(f"mean_{name}_ms"))
    if not mean or not completed:
        return None
    percentiles: dict[float, float | None] = {50.0: amount(document.get(f"median_{name}_ms"))}
    for key, value in document.items():
        at = (
            percent_of(key.removesuffix(f"_{name}_ms")) if key.startswith("p") and key.endswith(f"_{name}_ms") else None
        )
        if at is not None:
            percentiles[at] = amount(value)
    count = completed if name != "itl" else None  # gaps are more than requests, and their number is not told
    return Figure(count, mean, amount(document.get(f"std_{name}_ms")), None, percentiles)


def _requests(document: Mapping[str, object]) -> list[Request] | None:
    """From the lists of ``--save-detailed``, seconds there. A failed request has a text in ``errors``."""
    ttfts = items(document.get("ttfts"))
    if not ttfts:
        return None
    columns: list[Sequence[object]] = [
        items(document.get(name)) for name in ("itls", "input_lens", "output_lens", "errors", "start_times")
    ]
    starts = [value for value in map(amount, columns[4]) if value is not None]
    zero = min(starts, default=0.0)
    found = []
    for number, (ttft, gaps, prompt, output, error, start) in enumerate(zip_longest(ttfts, *columns)):
        failed = bool(error)
        first = amount(ttft)
        sent = amount(start)
        one = Request(
            key=str(number),
            kind="unnamed",
            status="failed" if failed else "ok",
            sent=None if sent is None else sent - zero,
            failure=(words(error, 80) or "failed") if failed else None,
            prompt_tokens=whole(prompt),
            output_tokens=whole(output),
        )
        if first and not failed:
            one.values = _vllm_values(first, [amount(gap) for gap in items(gaps)], one.output_tokens)
        found.append(one)
    return found


def _vllm_values(first: float, gaps: Sequence[float | None], tokens: int | None) -> dict[str, float]:
    found = {"ttfc": first * 1000}
    known = [gap for gap in gaps if gap is not None]
    if known and tokens is not None and tokens > 1:
        found["tpot_chunk"] = sum(known) * 1000 / (tokens - 1)
    return found


def aiperf(document: Mapping[str, object], label: str, source: str) -> Run:
    asked = mapping(document.get("input_config"))
    endpoint, load = mapping(asked.get("endpoint")), mapping(asked.get("loadgen"))
    names = items(endpoint.get("model_names"))
    ok = _average(document, "request_count")
    bad = _average(document, "error_request_count")
    figures: dict[str, Figure] = {}
    for quantity in LATENCIES.values():
        theirs = quantity.names.get("aiperf")
        found = None if theirs is None else _aiperf_figure(mapping(document.get(theirs)), ok)
        if found is not None:
            figures[quantity.name] = found
    rates = {each.name: _average(document, each.names["aiperf"]) for each in RATES.values()}
    return Run(
        label=label,
        tool="aiperf",
        source=source,
        model=words(names[0]) if names else None,
        date=words(document.get("start_time")),
        figures=figures,
        rates=rates,
        load={
            "concurrency": amount(load.get("concurrency")),
            "rate": amount(load.get("request_rate")),
            "context": _average(document, "input_sequence_length"),
        },
        ends={"ok": int(ok or 0), "failed": int(bad or 0)},
        planned=None,
        duration=_average(document, "benchmark_duration"),
        partial=document.get("was_cancelled") is True,
        requests=None,
        no_requests=_AIPERF_ROWS,
        own={},
        missing=tuple(
            f"{each.title}: aiperf's {each.names['aiperf']} is not in the file"
            for each in LATENCIES.values()
            if "aiperf" in each.names and each.name not in figures
        ),
    )


def _average(document: Mapping[str, object], name: str) -> float | None:
    return amount(mapping(document.get(name)).get("avg"))


def _aiperf_figure(told: Mapping[str, object], count: float | None) -> Figure | None:
    factor = {"ms": 1.0, "milliseconds": 1.0, "s": 1000.0, "sec": 1000.0, "seconds": 1000.0}.get(
        str(told.get("unit", "ms"))
    )
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
