"""Reasoning stability: how often answers hold reasoning, how they go wrong, and whether that changes over the run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longread.measure.gate.texts import repeats, truncated
from longread.measure.load.outcome import Outcome
from longread.measure.load.schedule import Schedule
from longread.measure.stress.limits import REASONING
from longread.measure.stress.subject import Subject
from longread.measure.stress.trend import MIN_SAMPLES, halves, share_change, slope
from longread.measure.stress.verdict import (
    Finding,
    PressureResult,
    counted,
    missing,
    share_at_least,
    share_at_most,
    told,
    within,
)
from longread.measure.workloads import score


@dataclass(frozen=True, slots=True)
class Plan:
    """``requests`` with ``concurrency`` in flight. ``temperature``: as DeepSeek advises for its reasoning models; each
    request has a seed of its own. ``answer``: tokens at most, reasoning included.
    """

    requests: int = 200
    concurrency: int = 4
    temperature: float = 0.6
    answer: int = 2048


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, looked at. ``length``: in tokens where all answers tell them, else in characters."""

    reasoned: bool
    empty: bool
    cut: bool
    looped: str | None
    length: float


async def run(subject: Subject, plan: Plan, limits: Mapping[str, float]) -> PressureResult:
    result = PressureResult(REASONING)
    subject.tell(f"reasoning: {plan.requests} requests")
    fields = {"temperature": plan.temperature}
    asks = [
        replace(ask, extra={**fields, "seed": subject.seed % 2**20 * 1000 + index, **ask.extra})
        for index, ask in enumerate(subject.chats(plan.requests, plan.answer, 4000))
    ]
    done = await subject.run(asks, Schedule(max_concurrency=plan.concurrency), "reasoning")
    rows = sorted(done.outcomes, key=lambda each: each.index)
    answered = [each for each in rows if each.status == "ok"]
    lost = [each for each in rows if each.status not in ("ok", "cancelled")]
    answers = looked_at(answered)
    result.findings = judge(answers, limits)
    why = f"{lost[0].failure}: {lost[0].error}" if lost else ""
    result.findings.append(counted("not_answered", len(lost), len(answered) + len(lost), 0, why))
    right = [
        score(expected, outcome.text).right
        for outcome in answered
        if (expected := asks[outcome.index].expected) is not None
    ]
    if right:
        result.findings.append(told("right_answers", sum(right) / len(right), "share", len(right)))
    result.books = _books(answers, answered)
    result.stopped = subject.control.why if len(rows) < plan.requests else None
    return result


def looked_at(outcomes: Sequence[Outcome]) -> list[Answer]:
    """In the order given."""
    counted_all = all(each.output_tokens is not None for each in outcomes)
    return [
        Answer(
            bool(each.reasoning.strip()),
            not each.text.strip(),
            truncated(each.text, each.finish_reason),
            repeats(each.reasoning) or repeats(each.text),
            float(each.output_tokens or 0) if counted_all else float(len(each.reasoning) + len(each.text)),
        )
        for each in outcomes
    ]


def judge(answers: Sequence[Answer], limits: Mapping[str, float]) -> list[Finding]:
    """``answers`` in the order of their asks."""
    n = len(answers)
    reasoned = sum(each.reasoned for each in answers)
    note = ""
    if n and not reasoned:
        note = (
            "no answer had any reasoning: the server has no reasoning parser, or thinking is off (--thinking asks for "
            "it); --limit reasoning_share_min=0 where none is meant"
        )
    loops = [each.looped for each in answers if each.looped is not None]
    return [
        share_at_least("reasoning_share_min", reasoned, n, limits["reasoning_share_min"], note),
        share_at_most("empty_share", sum(each.empty for each in answers), n, limits["empty_share"]),
        share_at_most("truncated_share", sum(each.cut for each in answers), n, limits["truncated_share"]),
        share_at_most("loop_share", len(loops), n, limits["loop_share"], f"as {loops[0][:80]!r}" if loops else ""),
        _share_drift([each.reasoned for each in answers], limits["share_drift"]),
        *_length_drift([each.length for each in answers], limits["length_drift"]),
    ]


def _share_drift(reasoned: Sequence[bool], limit: float) -> Finding:
    middle = len(reasoned) // 2
    change = share_change(reasoned[:middle], reasoned[middle:])
    if change is None or len(reasoned) < MIN_SAMPLES:
        return missing("share_drift", limit, "share", f"{len(reasoned)} answers", MIN_SAMPLES)
    return within("share_drift", change.value, (change.low, change.high), limit, "share", change.samples)


def _length_drift(lengths: Sequence[float], limit: float) -> list[Finding]:
    """By both halves, and by a robust trend over the run, each as a share of the length."""
    logs = [math.log(max(each, 1.0)) for each in lengths]
    change, line = halves(logs), slope(list(range(len(logs))), logs)
    if change is None or line is None:
        return [missing("length_drift", limit, "share", f"{len(lengths)} answers", MIN_SAMPLES)]
    run = len(logs) - 1
    by_halves = [_grown(each) for each in (change.value, change.low, change.high)]
    by_trend = [_grown(each * run) for each in (line.value, line.low, line.high)]
    note = f"no trend has p = {line.p:.2g}"
    return [
        within("length_drift", by_halves[0], (by_halves[1], by_halves[2]), limit, "share", change.samples, "halves"),
        within("length_drift by trend", by_trend[0], (by_trend[1], by_trend[2]), limit, "share", line.samples, note),
    ]


def _grown(logarithm: float) -> float:
    return math.expm1(max(min(logarithm, 700.0), -700.0))


def _books(answers: Sequence[Answer], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "answers": [
            {
                "key": outcome.key,
                "reasoned": each.reasoned,
                "empty": each.empty,
                "truncated": each.cut,
                "loop": None if each.looped is None else each.looped[:200],
                "length": each.length,
                "reasoning_characters": len(outcome.reasoning),
                "finish_reason": outcome.finish_reason,
            }
            for each, outcome in zip(answers, outcomes, strict=True)
        ]
    }
