"""A result of ``vllm bench serve`` as a run, by the definition sheet.

Knows its file. A word of vLLM's becomes the quantity that it is, not the one that it sounds like. vLLM writes 0
where it measured nothing: that is missing here.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from longread.measure.report.definitions import LATENCIES, RATES
from longread.measure.report.longread_result import of_samples, percent_of
from longread.measure.report.numbers import amount, items, whole, words
from longread.measure.report.run import Figure, Request, Run

_LISTS = "it was not run with --save-detailed, so it holds no single requests"


def is_result(document: Mapping[str, object]) -> bool:
    return "request_throughput" in document and ("mean_ttft_ms" in document or "completed" in document)


def run_of(document: Mapping[str, object], label: str, source: str) -> Run:
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
        found = _figure(document, theirs, completed)
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


def _figure(document: Mapping[str, object], name: str, completed: int | None) -> Figure | None:
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
        items(document.get(name))
        for name in ("itls", "input_lens", "output_lens", "errors", "start_times", "latencies")
    ]
    starts = [value for value in map(amount, columns[4]) if value is not None]
    zero = min(starts, default=0.0)
    found = []
    for number, (ttft, gaps, prompt, output, error, start, latency) in enumerate(zip_longest(ttfts, *columns)):
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
            one.values = _values(first, amount(latency), [amount(gap) for gap in items(gaps)], one.output_tokens)
            e2el = one.values.get("e2el")
            one.ended = None if one.sent is None or e2el is None else one.sent + e2el / 1000
        found.append(one)
    return found


def _values(first: float, latency: float | None, gaps: Sequence[float | None], tokens: int | None) -> dict[str, float]:
    """Of one request; seconds in, ms out. Older files have no latencies: there the gaps say where the answer ends."""
    found = {"ttfc": first * 1000}
    known = [gap for gap in gaps if gap is not None]
    last = latency or (first + sum(known) if known else None)
    if last is not None and last >= first:
        found["e2el"] = last * 1000
        if tokens is not None and tokens > 1:
            found["tpot_chunk"] = (last - first) * 1000 / (tokens - 1)
    return found
