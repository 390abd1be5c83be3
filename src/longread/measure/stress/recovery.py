"""Failure recovery: a process of the server is killed in the middle of requests; what became of them, how long until it
answers again, whether it says what it said, and what of its cache is left.

Kills only what was started here, or what the user named.
"""

import asyncio
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longread.measure.load.outcome import Outcome, Run
from longread.measure.started import StartError
from longread.measure.stress.host import Host
from longread.measure.stress.limits import RECOVERY
from longread.measure.stress.subject import Subject, row
from longread.measure.stress.verdict import (
    Finding,
    PressureResult,
    counted,
    missing,
    observed_at_most,
    told,
)
from longread.measure.workloads.ask import Ask

ANSWER = 48
GREEDY: Mapping[str, object] = {"temperature": 0.0}
ENDS = ("answered", "told", "broken", "hung")


@dataclass(frozen=True, slots=True)
class Plan:
    """``kills``: of what, one after the other: "worker", "server" or "pid". ``in_flight``: requests meanwhile.
    ``tokens`` of their documents; ``known``: short chats whose greedy answers are compared, beside two documents.
    """

    kills: tuple[str, ...] = ("server",)
    in_flight: int = 8
    tokens: int = 4096
    known: int = 6


@dataclass(slots=True)
class Kill:
    """The books of one kill. ``ends``: of the requests in flight, by ENDS. ``back``: seconds, None: it did not come
    back (``why``). ``restarted``: it had to be started anew. ``comparable``: greedy answers that were the same twice
    before; ``cached``: (cached, prompt) tokens of documents that were read before.
    """

    what: str
    ends: Counter[str] = field(default_factory=Counter)
    tokens_lost: int = 0
    back: float | None = None
    why: str = ""
    restarted: bool = False
    left: int | None = None
    comparable: int = 0
    changed: list[str] = field(default_factory=list)
    cached_before: tuple[int, int] | None = None
    cached: tuple[int, int] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)


async def run(host: Host, plan: Plan, limits: Mapping[str, float]) -> PressureResult:
    subject, result, kills = host.subject, PressureResult(RECOVERY), []
    asks = [*subject.documents(2, plan.tokens, ANSWER, 5000), *subject.chats(plan.known, ANSWER, 5001)]
    for number, what in enumerate(plan.kills):
        if subject.control.over:
            break
        subject.tell(f"recovery: kill of the {what}")
        first = await subject.one_by_one(asks, "recovery: before")
        second = await subject.one_by_one(asks, "recovery: before, again")
        flight = subject.documents(plan.in_flight, plan.tokens, ANSWER, 5100 + number)
        kill = await _kill(host, what, flight, _seconds(first), limits)
        if kill is None:
            result.findings.append(_no_such(what, limits))
            continue
        kill.cached_before = cached(second)
        if kill.back is not None and not subject.control.interrupted.is_set():
            after = await subject.one_by_one(asks, "recovery: after")
            kill.comparable, kill.changed = changed(first, second, after)
            kill.cached = cached(after)
        kills.append(kill)
        result.findings += judge(kill, limits)
        if kill.back is None:
            break
    result.books = {"kills": [_book(each) for each in kills]}
    result.stopped = subject.control.why if len(kills) < len(plan.kills) else None
    return result


def _no_such(what: str, limits: Mapping[str, float]) -> Finding:
    why = (
        "the server has its engine in no process of its own: only the server can be killed" if what == "worker" else ""
    )
    return missing(f"recovery_s ({what})", limits["recovery_s"], "s", why or "it does not run")


def _seconds(outcomes: Sequence[Outcome]) -> float:
    """Of one document, cold."""
    known = [each.e2el for each in outcomes[:2] if each.e2el is not None]
    return statistics.median(known) if known else 1.0


async def _kill(
    host: Host, what: str, flight: Sequence[Ask], seconds: float, limits: Mapping[str, float]
) -> Kill | None:
    """Requests in flight, a kill in the middle of the first one's time, and their ends. None: there is no such process;
    the requests are given up then.
    """
    subject, kill = host.subject, Kill(what)
    sending = asyncio.create_task(subject.run(flight, phase="recovery: in flight"))
    await subject.control.sleep(seconds / 2)
    at = host.kill(what)
    if at is None:
        subject.control.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return None
    loop = asyncio.get_running_loop()
    killed = loop.time()
    if what == "server" and host.process is not None:
        kill.left = await asyncio.to_thread(host.process.orphans)
    back = asyncio.create_task(host.back(at, limits["recovery_s"] * 2))
    done = await _ends(subject, sending, limits["hang_s"], killed)
    _count(kill, done, flight)
    try:
        kill.back, kill.restarted = await back
    except StartError as error:
        kill.why = "" if subject.control.interrupted.is_set() else str(error)
    return kill


async def _ends(subject: Subject, sending: "asyncio.Task[Run]", hang: float, killed: float) -> Run:
    """Their ends, or after ``hang`` seconds from the kill no end: then they are given up."""
    left = max(killed + hang - asyncio.get_running_loop().time(), 0.0)
    await asyncio.wait([sending], timeout=left)
    if not sending.done():
        subject.control.cancel()
    return await sending


def _count(kill: Kill, done: Run, flight: Sequence[Ask]) -> None:
    for outcome in done.outcomes:
        end = end_of(outcome)
        kill.ends[end] += 1
        kill.requests.append({**row(outcome), "end": end})
        if end != "answered":
            kill.tokens_lost += len(outcome.chunk_times)
    kill.ends["hung"] += len(flight) - len(done.outcomes)  # never even sent: the server did not take the connection


def end_of(outcome: Outcome) -> str:
    """answered: whole. told: the server said that it failed (an HTTP status, or an error in the stream). broken: the
    connection went with the process. hung: none of these came in time.
    """
    if outcome.status == "ok":
        return "answered"
    if outcome.status in ("cancelled", "timeout"):
        return "hung"
    said = outcome.failure or ""
    return "told" if said.startswith("http ") or said == "error in the stream" else "broken"


def changed(first: Sequence[Outcome], second: Sequence[Outcome], after: Sequence[Outcome]) -> tuple[int, list[str]]:
    """(answers that were the same twice before, keys of those that are not afterwards). An answer that does not come
    any more is a changed one.
    """
    again, now = ({each.key: each for each in rows if each.status == "ok"} for rows in (second, after))
    same = [
        each
        for each in first
        if each.status == "ok" and each.key in again and _said(each) == _said(again[each.key]) and any(_said(each))
    ]
    return len(same), [each.key for each in same if each.key not in now or _said(now[each.key]) != _said(each)]


def _said(outcome: Outcome) -> tuple[str, str]:
    return outcome.reasoning, outcome.text


def cached(outcomes: Sequence[Outcome]) -> tuple[int, int] | None:
    """(cached, prompt) tokens of documents; None where the server does not tell."""
    told_ones = [
        (each.cached_tokens, each.prompt_tokens)
        for each in outcomes
        if each.kind.startswith("document") and each.cached_tokens is not None and each.prompt_tokens is not None
    ]
    return (sum(c for c, _ in told_ones), sum(p for _, p in told_ones)) if told_ones else None


def judge(kill: Kill, limits: Mapping[str, float]) -> list[Finding]:
    name = f"({kill.what})"
    flight = sum(kill.ends.values())
    lost = flight - kill.ends["answered"]
    found = [
        _back(kill, f"recovery_s {name}", limits["recovery_s"]),
        _hung(kill, name, lost, limits["hung"]),
        told(f"lost {name}", float(lost), "requests", flight, note=", ".join(f"{kill.ends[e]} {e}" for e in ENDS)),
    ]
    if kill.left is not None:
        found.append(counted(f"left_processes {name}", kill.left, 1, limits["left_processes"]))
    if kill.back is not None:
        found.append(_answers(kill, name, limits["changed_answers"]))
        found.append(_kept(kill, name, limits["cached_share_after_min"]))
    return found


def _back(kill: Kill, name: str, limit: float) -> Finding:
    if kill.back is None:
        if not kill.why:
            return missing(name, limit, "s", "interrupted before it was back")
        return Finding(name, "FAIL", None, None, None, limit, "s", 1, None, kill.why)
    note = ""
    if kill.restarted and kill.what == "worker":
        note = "the server ended with its engine and was started anew here: in service somebody must"
    return observed_at_most(name, [kill.back], limit, "s", note)


def _hung(kill: Kill, name: str, lost: int, limit: float) -> Finding:
    if not lost:
        return missing(
            f"hung {name}", limit, "requests", "all were answered before the kill: longer documents are needed"
        )
    return counted(f"hung {name}", kill.ends["hung"], lost, limit)


def _answers(kill: Kill, name: str, limit: float) -> Finding:
    if not kill.comparable:
        why = "no greedy answer was the same twice before the kill, so none can be compared"
        return missing(f"changed_answers {name}", limit, "answers", why)
    note = f"of {kill.comparable}: {', '.join(kill.changed[:5])}" if kill.changed else ""
    return counted(f"changed_answers {name}", len(kill.changed), kill.comparable, limit, note)


def _kept(kill: Kill, name: str, limit: float) -> Finding:
    named = f"cached_share_after_min {name}"
    if kill.cached is None or not kill.cached[1]:
        why = "the server does not tell cached tokens"
        return missing(named, limit, "share", why) if limit else told(named, None, "share", 0, note=why)
    share = kill.cached[0] / kill.cached[1]
    before = "" if not kill.cached_before else f"{kill.cached_before[0]:,} of {kill.cached_before[1]:,} before the kill"
    if not limit:
        return told(named, share, "share", kill.cached[1], note=before)
    verdict: Any = "PASS" if share >= limit else "FAIL"
    return Finding(named, verdict, share, None, None, limit, "share", kill.cached[1], None, before)


def _book(kill: Kill) -> dict[str, Any]:
    return {
        "what": kill.what,
        "in_flight": dict(kill.ends),
        "chunks_lost": kill.tokens_lost,
        "back_s": kill.back,
        "why": kill.why,
        "started_anew": kill.restarted,
        "left_processes": kill.left,
        "comparable_answers": kill.comparable,
        "changed_answers": kill.changed,
        "cached_before": kill.cached_before,
        "cached_after": kill.cached,
        "requests": kill.requests,
    }
