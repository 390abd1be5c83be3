"""Long context: requests of growing and then of constant length, and what stays behind of each in memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longread.measure.load.outcome import Outcome
from longread.measure.stress.limits import CONTEXT
from longread.measure.stress.memory import Sample
from longread.measure.stress.subject import Subject, milliseconds
from longread.measure.stress.trend import MIN_SAMPLES, slope
from longread.measure.stress.verdict import (
    Finding,
    PressureResult,
    at_most,
    counted,
    missing,
    slope_needed,
    told,
)

GROWING = (8, 4, 2)  # parts of the length that come before it
WARM_SHARE = 0.2  # of the constant requests, which allocators and caches need to reach their size
SETTLE = 0.1  # seconds after an answer until memory is read
LENGTH_LEAST = 512  # tokens; a shorter document may state nothing that can be asked about


@dataclass(frozen=True, slots=True)
class Plan:
    """``requests`` of ``tokens``, each with a document of its own, one after the other. ``answer``: tokens at most."""

    tokens: int = 16_384
    requests: int = 60
    answer: int = 32


@dataclass(frozen=True, slots=True)
class Point:
    """One long request that was answered, and memory after it."""

    index: int
    ttft: float | None
    memory: Sample


async def run(subject: Subject, plan: Plan, limits: Mapping[str, float]) -> PressureResult:
    result = PressureResult(CONTEXT)
    failed: list[Outcome] = []
    grown: list[dict[str, Any]] = []
    for place, part in enumerate(GROWING):
        if subject.control.over:
            break
        length = max(plan.tokens // part, LENGTH_LEAST)
        subject.tell(f"long context: {length:,} tokens")
        one, memory = await _ask(subject, subject.documents(1, length, plan.answer, 2000 + place))
        failed += [each for each in one if each.status != "ok"]
        grown += [_row(each, memory) for each in one]
    asks = subject.documents(plan.requests, plan.tokens, plan.answer, 2100)
    points: list[Point] = []
    rows: list[dict[str, Any]] = []
    sent = 0
    for number in range(plan.requests):
        if subject.control.over:
            break
        subject.tell(f"long context: request {number + 1} of {plan.requests}")
        one, memory = await _ask(subject, asks[number : number + 1])
        for outcome in one:
            sent += 1
            rows.append(_row(outcome, memory))
            if outcome.status == "ok":
                points.append(Point(number, outcome.ttft, memory))
            elif outcome.status != "cancelled":
                failed.append(outcome)
        if len(failed) >= MIN_SAMPLES and not points:
            break  # a server that refuses all of them is not asked on
    result.findings = judge(points, failed, sent, limits)
    result.books = {"growing": grown, "requests": rows}
    result.stopped = subject.control.why if sent < plan.requests else None
    return result


async def _ask(subject: Subject, asks: Sequence[Any]) -> tuple[list[Outcome], Sample]:
    done = await subject.one_by_one(asks, "context")
    await subject.control.sleep(SETTLE)
    return done, await subject.sample()


def _row(outcome: Outcome, memory: Sample) -> dict[str, Any]:
    return {
        "status": outcome.status,
        "failure": outcome.failure,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "ttft_ms": milliseconds(outcome.ttft),
        "own_bytes": memory.own,
        "resident_bytes": memory.resident,
        "gpu_bytes": memory.gpu,
    }


def judge(points: Sequence[Point], failed: Sequence[Outcome], sent: int, limits: Mapping[str, float]) -> list[Finding]:
    """``points``: of the constant part, the warming ones included."""
    warm = math.ceil(len(points) * WARM_SHARE)
    kept = points[warm:]
    reason = f"{failed[0].failure}: {failed[0].error}" if failed else ""
    found = [
        leak("leak_bytes_per_request", [(p.index, p.memory.own) for p in kept], limits["leak_bytes_per_request"]),
        leak(
            "gpu_leak_bytes_per_request", [(p.index, p.memory.gpu) for p in kept], limits["gpu_leak_bytes_per_request"]
        )
        if any(p.memory.gpu is not None for p in kept)
        else told("gpu_memory", None, "bytes", 0, note="not known: NVML tells nothing of these processes"),
        _growth([(p.index, p.ttft) for p in kept], limits["ttft_growth"]),
        counted("context_failures", len(failed), sent, limits["context_failures"], reason),
    ]
    known = [p.memory.own for p in points if p.memory.own is not None]
    if known:
        found.append(told("memory_now", float(known[-1]), "bytes", len(known), (float(min(known)), float(max(known)))))
    return found


def leak(name: str, series: Sequence[tuple[int, int | None]], limit: float) -> Finding:
    """Bytes a request by a robust slope: PASS: no leak above the limit, FAIL: a leak, INCONCLUSIVE: with the number of
    requests after warming up that would decide.
    """
    known = [(x, y) for x, y in series if y is not None]
    if not known:
        why = "memory is not known: start the server here, or name its process with --pid (on this machine)"
        return missing(name, limit, "bytes", why if not series else f"{why}; its /metrics do not tell it either")
    line = slope([x for x, _ in known], [y for _, y in known])
    if line is None:
        return missing(name, limit, "bytes", f"{len(known)} requests after warming up", MIN_SAMPLES)
    needed = slope_needed(line.samples, line.value, line.low, line.high, limit)
    note = f"no leak at all has p = {line.p:.2g}; neighbours correlate by {line.hanging:.2f}"
    return at_most(name, line.value, (line.low, line.high), limit, "bytes", line.samples, needed=needed, note=note)


def _growth(series: Sequence[tuple[int, float | None]], limit: float) -> Finding:
    """Rise of TTFT over the run, as a share of its level."""
    known = [(x, y) for x, y in series if y is not None]
    line = slope([x for x, _ in known], [math.log(max(y, 1e-6)) for _, y in known])
    if line is None:
        return missing("ttft_growth", limit, "share", f"{len(known)} answers after warming up", MIN_SAMPLES)
    run = known[-1][0] - known[0][0]
    value, low, high = (_grown(each * run) for each in (line.value, line.low, line.high))
    needed = slope_needed(line.samples, value, low, high, limit)
    return at_most("ttft_growth", value, (low, high), limit, "share", line.samples, needed=needed)


def _grown(logarithm: float) -> float:
    return math.expm1(min(logarithm, 700.0))
