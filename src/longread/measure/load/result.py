"""A run as files: one JSON with vLLM's flat keys and our own block, and a line of JSON for each request beside it.

Knows the schema. Must not know servers, terminals or how a run goes. Files appear whole or not at all; the lines are
written as requests end, into a file that gets its name when the run is over.

Schema 1 of the ``longread`` block; a field is None where it is not known:

- ``schema``, ``kind`` ("bench serve"), ``partial``, ``requests_file``
- ``requests``: ``planned``, by status, ``by_failure``, ``by_http_status``
- ``definitions``: the metrics in words
- ``metrics``: by name ``unit``, ``samples``, ``requests``, ``mean``, ``mean_interval`` and ``percentiles`` with
  ``value``, ``interval`` [low, high] (an open end is None) and ``needs_samples`` where it is open
- ``goodput``, ``cached_tokens``, ``tokens_per_chunk``, ``tokens_from``, ``kinds``
- ``missing``, ``warnings``: sentences
- ``quality``: what the quality gate said (measure/quality.py), None: none was run
- ``samples``: of the server and its machine while it ran (samples.py), where they were taken
- ``client``: its own cost; ``server``: what it told of itself; ``provenance``: how to do it again
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from longread.measure.load.calibrate import Calibration
from longread.measure.load.estimates import Estimate, Interval
from longread.measure.load.metrics import DEFINITIONS, KindSummary, Summary, percent_name
from longread.measure.load.outcome import Outcome, Spread
from longread.spec.errors import LongreadError

SCHEMA = 1
LINES = ".requests.jsonl"


def lines_path(path: Path) -> Path:
    """Where the requests of the result at ``path`` are."""
    return path.with_name(path.name.removesuffix(".json") + LINES)


class Lines:
    """Requests as they end, into ``path`` once the run is over. If the process dies, they are in ``path``.part."""

    def __init__(self, path: Path, detailed: bool):
        self._path, self._detailed = path, detailed
        self._part = path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._part.open("wb", buffering=0)

    def add(self, outcome: Outcome) -> None:
        """Raises LongreadError where the line cannot be written: a run whose requests are lost is not gone on with."""
        try:
            self._file.write(orjson.dumps(line(outcome, self._detailed)) + b"\n")
        except OSError as error:
            raise LongreadError(
                f"{self._part}: cannot be written: {error.strerror or error}; the run is stopped; what was measured "
                "until then is in that file"
            ) from error

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        elif not self._part.stat().st_size:
            self._part.unlink()


def line(outcome: Outcome, detailed: bool) -> dict[str, Any]:
    """One request. Instants are seconds on the run's clock. ``detailed``: with texts and the gaps between chunks."""
    row: dict[str, Any] = {
        name: getattr(outcome, name)
        for name in ("key", "index", "kind", "session", "status", "http_status", "failure", "error")
    }
    row |= {name: _round(getattr(outcome, name)) for name in ("due", "held", "sent", "first_byte", "last", "ended")}
    for name in ("ttft", "ttfc", "ttfrt", "ttfat", "tpot", "e2el"):
        row[f"{name}_ms"] = _ms(getattr(outcome, name))
    for name in ("prompt_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "tokens_from"):
        row[name] = getattr(outcome, name)
    row |= {
        "chunks": len(outcome.chunk_times),
        "finish_reason": outcome.finish_reason,
        "request_id": outcome.request_id,
        "new_connection": outcome.new_connection,
        "server_timing_ms": outcome.server_timing,
    }
    if detailed:
        row["gaps_ms"] = [_ms(gap) for gap in outcome.gaps]
        row["chunk_tokens"] = list(outcome.chunk_tokens) or None
        row |= {"text": outcome.text, "reasoning": outcome.reasoning}
    return row


def block(
    summary: Summary,
    *,
    provenance: Mapping[str, Any],
    server: Mapping[str, Any] | None,
    calibration: Calibration | None,
    warnings: list[str],
    requests_file: str | None,
) -> dict[str, Any]:
    """The ``longread`` block."""
    run = summary.run
    failed = [each for each in run.outcomes if each.status != "ok"]
    return {
        "schema": SCHEMA,
        "kind": "bench serve",
        "partial": run.partial,
        "requests_file": requests_file,
        "requests": {
            "planned": run.planned,
            **{name: summary.counts[name] for name in ("ok", "refused", "failed", "timeout", "cancelled")},
            "by_failure": dict(Counter(each.failure or "unknown" for each in failed)),
            "by_http_status": {str(k): n for k, n in Counter(each.http_status for each in run.outcomes).items()},
            "warmups": len(run.warmups),
        },
        "definitions": dict(DEFINITIONS),
        "metrics": {name: estimate_json(each) for name, each in summary.estimates.items()},
        "goodput": None if summary.goodput is None else asdict(summary.goodput),
        "cached_tokens": _cached(summary),
        "tokens_per_chunk": summary.tokens_per_chunk,
        "tokens_from": dict(Counter(str(each.tokens_from) for each in run.outcomes if each.status == "ok")),
        "kinds": {name: _kind(each) for name, each in summary.kinds.items()},
        "missing": list(summary.missing),
        "warnings": warnings,
        "client": _client(summary, calibration),
        "server": server,
        "provenance": dict(provenance),
    }


def _cached(summary: Summary) -> dict[str, Any] | None:
    if summary.cached is None:
        return None
    told, cached, prompt = summary.cached
    return {"requests": told, "cached": cached, "prompt": prompt, "share": cached / prompt if prompt else None}


def estimate_json(each: Estimate) -> dict[str, Any]:
    return {
        "unit": "ms",
        "samples": each.count,
        "requests": each.clusters,
        "mean": each.mean,
        "mean_interval": _interval(each.mean_interval)["interval"],
        "std": each.std,
        "median": each.median,
        "percentiles": {
            percent_name(p): {"value": value, **_interval(each.intervals[p])} for p, value in each.percentiles.items()
        },
    }


def _interval(interval: Interval | None) -> dict[str, Any]:
    """Without an interval: samples of one request are not independent of one another."""
    if interval is None:
        return {"interval": None, "needs_samples": None}
    return {"interval": [interval.low, interval.high], "needs_samples": interval.needs}


def _kind(each: KindSummary) -> dict[str, Any]:
    metrics = {name: estimate_json(estimate) for name, estimate in each.estimates.items()}
    return {"requests": each.requests, "completed": each.completed, "metrics": metrics}


def _client(summary: Summary, calibration: Calibration | None) -> dict[str, Any]:
    over = summary.run.overhead
    return {
        "loop_lag_ms": _spread(over.loop_lag),
        "lateness_ms": _spread(over.lateness),
        "cpu_share": over.cpu_share,
        "new_connections": over.new_connections,
        "added_ttft_ms": None if calibration is None else _spread(calibration.alone),
        "added_ttft_loaded_ms": None if calibration is None else _spread(calibration.loaded),
        "calibration": None
        if calibration is None
        else {"streams": calibration.streams, "gap_ms": calibration.gap * 1000, "server": "null, on loopback"},
    }


def _spread(each: Spread | None) -> dict[str, Any] | None:
    if each is None:
        return None
    return {"count": each.count, "p50": _ms(each.p50), "p99": _ms(each.p99), "max": _ms(each.largest)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 4)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
