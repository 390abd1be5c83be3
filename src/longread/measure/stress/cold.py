"""Cold start: how long until a started server answers, and what the first request of each shape pays.

Starts and stops the server several times; the last one is left for the next tests.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longread.measure.started import Readiness, StartError
from longread.measure.stress.host import Host
from longread.measure.stress.limits import COLD
from longread.measure.stress.subject import Subject, milliseconds
from longread.measure.stress.verdict import Finding, PressureResult, counted, observed_at_most, told
from longread.measure.workloads.ask import Ask

LATER = 3  # requests of a shape after its first
ANSWER = 16
LEAST = 512  # tokens of a document


@dataclass(frozen=True, slots=True)
class Plan:
    """``starts``, ``interval`` seconds apart; ``shapes``: tokens of documents, beside a short chat."""

    starts: int = 3
    interval: float = 2.0
    shapes: tuple[int, ...] = (1024, 8192)


async def run(host: Host, plan: Plan, limits: Mapping[str, float]) -> PressureResult:
    subject, result = host.subject, PressureResult(COLD)
    ready: list[Readiness] = []
    stalls: dict[str, list[float]] = {}
    books: list[dict[str, Any]] = []
    failed: str | None = None
    for number in range(plan.starts):
        if subject.control.over:
            break
        if number:
            await subject.control.sleep(plan.interval)
        host.end()
        subject.tell(f"cold start {number + 1} of {plan.starts}")
        try:
            found = await host.begin()
        except StartError as error:
            if not subject.control.over:  # a start that our own budget cut short is no failure
                failed = str(error)
            break
        if found is not None:
            ready.append(found)
            shapes = await _shapes(subject, plan.shapes, number)
            for name, each in shapes.items():
                if each["stall_ms"] is not None:
                    stalls.setdefault(name, []).append(each["stall_ms"] / 1000)
            books.append({"readiness_s": asdict(found), "shapes": shapes})
    result.books = {"starts": books, "left_in_page_cache": "weights may be in the system's page cache after the first"}
    result.findings = judge(ready, stalls, failed, limits)
    result.stopped = subject.control.why if len(ready) < plan.starts and failed is None else None
    return result


def judge(
    ready: Sequence[Readiness], stalls: Mapping[str, Sequence[float]], failed: str | None, limits: Mapping[str, float]
) -> list[Finding]:
    """``stalls``: seconds by shape, one a start."""
    answered = [each.answered for each in ready if each.answered is not None]
    found = [
        observed_at_most("cold_start_s", answered, limits["cold_start_s"], "s"),
        counted("failed_starts", int(failed is not None), len(ready) + int(failed is not None), 0, failed or ""),
    ]
    for name in ("listening", "health", "ready"):
        times = [value for value in (getattr(each, name) for each in ready) if value is not None]
        if times:
            found.append(told(f"{name}_s", statistics.fmean(times), "s", len(times), (min(times), max(times))))
    for shape, values in stalls.items():
        found.append(observed_at_most(f"first_request_stall_s {shape}", values, limits["first_request_stall_s"], "s"))
    return found


async def _shapes(subject: Subject, lengths: Sequence[int], start: int) -> dict[str, dict[str, Any]]:
    """Each shape's first request against the next ones, all with texts of their own."""
    found = {}
    wanted = sorted({subject.fitting(length, ANSWER) for length in lengths if length >= LEAST})
    for place, length in enumerate([0, *wanted]):
        use = 1000 + start * 16 + place
        asks: Sequence[Ask] = (
            subject.documents(1 + LATER, length, ANSWER, use) if length else subject.chats(1 + LATER, ANSWER, use)
        )
        done = await subject.one_by_one(asks, "cold")
        times = [each.e2el for each in done]
        known = [value for value in times[1:] if value is not None]
        first, steady = times[0] if times else None, statistics.median(known) if known else None
        found[f"{length:,} tokens" if length else "chat"] = {
            "first_ms": milliseconds(first),
            "steady_ms": milliseconds(steady),
            "stall_ms": milliseconds(max(first - steady, 0.0)) if first is not None and steady is not None else None,
            "prompt_tokens": done[0].prompt_tokens if done else None,
            "failures": [each.failure for each in done if each.status != "ok"],
        }
    return found
