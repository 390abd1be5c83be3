"""Mixed load: short requests alone and beside long documents, in the order A B B A, so that drift hits both alike.

Short requests come at fixed times whatever the server does: a client that waits for answers would ask less just when
the server stalls.
"""

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longread.measure.load.outcome import Outcome
from longread.measure.load.schedule import Schedule
from longread.measure.stress.limits import MIXED
from longread.measure.stress.subject import Subject, milliseconds, ttft_or_never
from longread.measure.stress.trend import difference
from longread.measure.stress.verdict import (
    Finding,
    PressureResult,
    at_most,
    counted,
    missing,
    percentile_at_most,
    told,
)
from longread.measure.workloads.ask import Ask

SHARE = 0.99
ALONE = 3  # long documents, and PROBED short requests, before everything, one at a time
PROBED = 5
PROBING = 0.1  # of the time, for each kind alone; at least one request
MOST_LONGS = 4096  # of a window; their texts are made beforehand
RATES = (0.2, 20.0)  # short requests a second that are chosen by themselves
ORDER = ("alone", "beside", "beside", "alone")


@dataclass(frozen=True, slots=True)
class Plan:
    """``shorts`` in each of both conditions, at ``rate`` a second (None: one in flight on average); ``longs`` documents
    of ``tokens`` always under way beside them.
    """

    shorts: int = 400
    rate: float | None = None
    longs: int = 1
    tokens: int = 16_384
    short_answer: int = 64
    long_answer: int = 32


@dataclass(slots=True)
class Seen:
    """Outcomes by condition. Instants are on the clock of their own window, so windows are kept apart."""

    windows: list[tuple[str, list[Outcome]]]
    longs_alone: list[Outcome]

    def shorts(self, condition: str) -> list[Outcome]:
        return [each for name, rows in self.windows if name == condition for each in rows if _short(each)]

    def longs(self) -> list[Outcome]:
        return [each for name, rows in self.windows if name == "beside" for each in rows if not _short(each)]


def _short(outcome: Outcome) -> bool:
    return outcome.kind == "chat"


async def run(subject: Subject, plan: Plan, limits: Mapping[str, float]) -> PressureResult:
    result = PressureResult(MIXED)
    subject.tell("mixed load: each kind alone")
    probed = await subject.one_by_one(subject.chats(PROBED, plan.short_answer, 3000), "mixed: probe", PROBING)
    longs = subject.documents(ALONE, plan.tokens, plan.long_answer, 3001)
    seen = Seen([], await subject.one_by_one(longs, "mixed: long", PROBING))
    rate, each_long = plan.rate or _rate(probed), _seconds(seen.longs_alone)
    for place, condition in enumerate(ORDER):
        if subject.control.over:
            break
        subject.tell(f"mixed load: {plan.shorts // 2} short requests {condition}, {rate:.3g} a second")
        asks = _window(subject, plan, condition, rate, place, each_long)
        done = await _until_shorts(subject, asks, f"mixed: {condition}", 1 / (len(ORDER) - place))
        seen.windows.append((condition, done))
    result.findings = judge(seen, limits)
    result.books = _books(seen, rate)
    whole = sum(len(seen.shorts(name)) for name in ("alone", "beside")) >= 2 * (plan.shorts // 2 * 2)
    result.stopped = None if whole else subject.control.why
    return result


def _rate(probed: Iterable[Outcome]) -> float:
    known = [each.e2el for each in probed if each.e2el is not None]
    return min(max(1 / max(statistics.median(known), 1e-3), RATES[0]), RATES[1]) if known else 1.0


def _seconds(longs: Iterable[Outcome]) -> float:
    return min((each.e2el for each in longs if each.e2el is not None), default=1.0)


def _window(subject: Subject, plan: Plan, condition: str, rate: float, place: int, each_long: float) -> list[Ask]:
    """Short asks at Poisson times; beside them sessions of long ones, each begun when the last has its answer, as many
    as there is time for if they took ``each_long`` seconds, as alone.
    """
    draw, at, asks = random.Random(subject.seed * 4 + place), 0.0, []
    for ask in subject.chats(plan.shorts // 2, plan.short_answer, 3100 + place):
        asks.append(replace(ask, at=at))
        at += draw.expovariate(rate)
    if condition == "beside":
        count = min(math.ceil(at / max(each_long, 0.01)) + 4, MOST_LONGS)
        for lane in range(plan.longs):
            longs = subject.documents(count, plan.tokens, plan.long_answer, 3200 + place * 16 + lane)
            asks += [replace(longs[i], at=0.0, session=f"long-{lane}") for i in range(len(longs))]
    return asks


async def _until_shorts(subject: Subject, asks: Sequence[Ask], phase: str, share: float) -> list[Outcome]:
    """Ends when the last short request has, or with its ``share`` of the time: what is left is not sent."""
    left = sum(ask.session is None for ask in asks)

    def seen(outcome: Outcome) -> None:
        nonlocal left
        left -= _short(outcome)
        if not left:
            subject.control.close()

    done = await subject.run(asks, Schedule(trace=True), phase, seen, share)
    return [each for each in done.outcomes if each.status != "cancelled"]


def judge(seen: Seen, limits: Mapping[str, float]) -> list[Finding]:
    alone, beside, longs = seen.shorts("alone"), seen.shorts("beside"), seen.longs()
    before = [ttft_or_never(each) for each in alone]
    during = [ttft_or_never(each) for each in beside]
    found = [
        percentile_at_most("short_ttft_p99_ms", during, SHARE, limits["short_ttft_p99_ms"], "ms"),
        _told_percentile("short_ttft_p99_ms alone", before),
        percentile_at_most(
            "decode_stall_p99_ms",
            [pause * 1000 for pause in stalls(seen.windows)],
            SHARE,
            limits["decode_stall_p99_ms"],
            "ms",
            "" if longs else "no long prompt was read while a short answer came",
        ),
        _told_percentile("decode_stall_p99_ms alone", [max(each.gaps) * 1000 for each in alone if each.gaps]),
        _slowdown(seen.longs_alone, longs, limits["long_slowdown"]),
        starved(beside, longs, limits),
    ]
    bad = [each for each in (*alone, *seen.longs_alone) if each.status != "ok"]
    if bad:
        why = f"{len(bad)} not answered without any long document beside: {bad[0].failure} ({bad[0].error})"
        found.append(counted("failures_alone", len(bad), len(alone) + len(seen.longs_alone), 0, why))
    return found


def stalls(windows: Iterable[tuple[str, Sequence[Outcome]]]) -> list[float]:
    """Of each short answer that was coming while a long prompt was read: its longest pause, in seconds, that overlaps
    with that reading.
    """
    found = []
    for condition, rows in windows:
        if condition != "beside":
            continue
        readings = [(o.sent, o.chunk_times[0] if o.chunk_times else o.ended or o.sent) for o in rows if not _short(o)]
        for each in rows:
            if not _short(each):
                continue
            times = each.chunk_times
            pauses = [
                times[i] - times[i - 1]
                for i in range(1, len(times))
                if any(begin < times[i] and times[i - 1] < end for begin, end in readings)
            ]
            if pauses:
                found.append(max(pauses))
    return found


def _told_percentile(name: str, values: Sequence[float]) -> Finding:
    judged = percentile_at_most(name, values, SHARE, math.inf, "ms")
    interval = None if judged.low is None or judged.high is None else (judged.low, judged.high)
    return told(name, judged.value, "ms", judged.samples, interval)


def _slowdown(alone: Iterable[Outcome], beside: Iterable[Outcome], limit: float) -> Finding:
    """Ratio of geometric means of TTFT, with Welch's interval of their logarithms."""
    before = [math.log(max(each.ttft, 1e-6)) for each in alone if each.ttft is not None]
    after = [math.log(max(each.ttft, 1e-6)) for each in beside if each.ttft is not None]
    change = difference(before, after)
    if change is None:
        return missing("long_slowdown", limit, "times", f"{len(before)} long answers alone, {len(after)} beside", 4)
    low, high = (math.exp(min(each, 700.0)) for each in (change.low, change.high))
    return at_most("long_slowdown", math.exp(change.value), (low, high), limit, "times", change.samples)


def starved(shorts: Sequence[Outcome], longs: Sequence[Outcome], limits: Mapping[str, float]) -> Finding:
    """Short requests without a first token in time, and requests of either kind that were not answered at all."""
    late = [each for each in shorts if each.ttft is None or each.ttft > limits["starve_s"]]
    lost = [each for each in (*shorts, *longs) if each.status != "ok" and each not in late]
    notes = [f"{len(late)} short ones had no first token within {limits['starve_s']:g} s"] if late else []
    bad = [each for each in (*late, *lost) if each.status != "ok"]
    notes += [f"{bad[0].failure}: {bad[0].error}"] if bad else []
    return counted("starved", len(late) + len(lost), len(shorts) + len(longs), limits["starved"], "; ".join(notes))


def _books(seen: Seen, rate: float) -> dict[str, Any]:
    return {
        "short_rate": rate,
        "long_alone_ttft_ms": [milliseconds(each.ttft) for each in seen.longs_alone],
        "windows": [
            {
                "condition": condition,
                "shorts": sum(map(_short, rows)),
                "longs": sum(not _short(each) for each in rows),
                "short_ttft_ms": [milliseconds(each.ttft) for each in rows if _short(each)],
                "long_ttft_ms": [milliseconds(each.ttft) for each in rows if not _short(each)],
            }
            for condition, rows in seen.windows
        ],
    }
