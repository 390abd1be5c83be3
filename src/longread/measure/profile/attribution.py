"""The TTFT as the client saw it, divided into parts that add up to it.

Knows outcomes and what a server tells of itself. Must not know HTTP or terminals. Each division is exact by
construction: what no part explains is a part of its own, shown also where it is negative.

By request, where each answer brings its own times (Longread's parts): the server's parts end with the first byte
behind its first token; from there to the client's first event is network, HTTP and the client. By histogram, where only
/metrics tells (vLLM, SGLang): means over what ended in between; what the server's TTFT has beside queue and prefill is
its front end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from longread.measure.load.outcome import SERVER_PARTS, Outcome

WAY, TEXT = "network, HTTP, client", "first event to first text"
FRONT = "front end (TTFT less queue and prefill)"
HEAD, REST = "to the response's head", "head to first text"

Level = Literal["client", "server"]
Source = Literal["each answer", "the server's histograms", "the client alone"]


@dataclass(frozen=True, slots=True)
class Part:
    """``ms``: mean over requests. ``share``: of the TTFT."""

    level: Level
    name: str
    ms: float
    share: float


@dataclass(frozen=True, slots=True)
class Attribution:
    """``parts`` add up to ``ttft_ms``, the mean over ``requests``. ``head_ms``: the response's head, mean, a moment
    and no part. ``missing``: what could not be told, and why.
    """

    requests: int
    ttft_ms: float
    source: Source
    parts: tuple[Part, ...]
    head_ms: float | None
    connections_opened: int
    missing: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def attribute(outcomes: Sequence[Outcome], server: Mapping[str, Any] | None) -> Attribution | None:
    """``server``: the result's block of that name. None: no answer had any text."""
    rows = [each for each in outcomes if each.status == "ok" and each.ttft is not None]
    if not rows:
        return None
    told = [each for each in rows if _parts(each)]
    missing = []
    if told:
        if len(told) < len(rows):
            missing.append(f"{len(rows) - len(told)} of {len(rows)} answers told no times of the server's; left out")
        return _made(told, "each answer", _by_request(told), missing)
    latencies = (server or {}).get("latencies_s") or {}
    if "TTFT" in latencies:
        return _made(rows, "the server's histograms", _by_histogram(rows, latencies, missing), missing)
    missing.append("server: it tells no times, in its answers or at /metrics")
    return _made(rows, "the client alone", _alone(rows, missing), missing)


def _made(
    rows: Sequence[Outcome], source: Source, parts: Sequence[tuple[Level, str, float]], missing: Sequence[str]
) -> Attribution:
    ttft = _mean(rows, lambda each: each.ttft or 0.0)
    heads = [each.first_byte - each.sent for each in rows if each.first_byte is not None]
    return Attribution(
        len(rows),
        ttft,
        source,
        tuple(Part(level, name, ms, ms / ttft if ttft else 0.0) for level, name, ms in parts),
        fmean(heads) * 1000 if heads else None,
        sum(bool(each.new_connection) for each in rows),
        tuple(missing),
    )


def _parts(outcome: Outcome) -> dict[str, float]:
    """Milliseconds by part; none where the last one is not told: then they do not end with the first byte."""
    told = outcome.server_timing or {}
    return {name: told[name] for name in SERVER_PARTS if name in told} if SERVER_PARTS[-1] in told else {}


def _mean(rows: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
    """In milliseconds, of seconds."""
    return fmean(value(each) for each in rows) * 1000


def _by_request(rows: Sequence[Outcome]) -> list[tuple[Level, str, float]]:
    found: list[tuple[Level, str, float]] = []
    for name in SERVER_PARTS:
        values = [_parts(each).get(name) for each in rows]
        if any(value is not None for value in values):
            found.append(("server", name, fmean(value or 0.0 for value in values)))
    server = sum(ms for _, _, ms in found)
    first = _mean(rows, lambda each: each.ttfc if each.ttfc is not None else each.ttft or 0.0)
    ttft = _mean(rows, lambda each: each.ttft or 0.0)
    return [*found, ("client", WAY, first - server), ("client", TEXT, ttft - first)]


def _by_histogram(
    rows: Sequence[Outcome], latencies: Mapping[str, Mapping[str, Any]], missing: list[str]
) -> list[tuple[Level, str, float]]:
    total, seen = latencies["TTFT"]["mean"] * 1000, latencies["TTFT"]["count"]
    if seen != len(rows):
        missing.append(
            f"the server's histograms hold {seen} first tokens, this client saw {len(rows)}: others asked too"
        )
    found: list[tuple[Level, str, float]] = []
    for name in ("queue", "prefill"):
        if name in latencies:
            found.append(("server", name, latencies[name]["mean"] * 1000))
        else:
            missing.append(f"server: it has no histogram of its {name} time")
    found.append(("server", FRONT, total - sum(ms for _, _, ms in found)))
    return [
        *found,
        ("client", f"{WAY}, and what the server does not count", _mean(rows, lambda e: e.ttft or 0) - total),
    ]


def _alone(rows: Sequence[Outcome], missing: list[str]) -> list[tuple[Level, str, float]]:
    ttft = _mean(rows, lambda each: each.ttft or 0.0)
    if any(each.first_byte is None for each in rows):
        missing.append("client: the response's head was not timed")
        return [("client", "to the first text", ttft)]
    head = _mean(rows, lambda each: (each.first_byte or 0.0) - each.sent)
    return [("client", HEAD, head), ("client", REST, ttft - head)]
