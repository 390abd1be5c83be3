"""A sweep: points measured one after the other, each in the file before the next begins.

Knows the order of points and when to stop. Must not know HTTP, the command line, or how a figure is made. What measures
a point and the clock are given.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from longread.measure.load.bench import Job, Measured
from longread.measure.load.bench import measure as over_http
from longread.measure.sweep import frontier, knee, predict
from longread.measure.sweep.axis import MAX_POINTS, Axis, Name
from longread.measure.sweep.judging import Seen, Verdict, judge, quantile, seen
from longread.measure.sweep.search import Search
from longread.measure.sweep.store import Book
from longread.measure.workloads.ask import Workload

LATENCY, THROUGHPUT = "mean_e2el_ms", "request_throughput"
LOAD: Final = ((THROUGHPUT, "requests/s"), ("mean_ttft_ms", "ms TTFT"), ("mean_tpot_ms", "ms TPOT"))
NEWEST: Final = (
    ("new_tokens", "new tokens"),
    ("newest_ttft_ms", "ms to the first token"),
    ("warm_ttft_ms", "ms warm"),
    ("tpot_ms", "ms TPOT"),
)
SHARES: Final = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the capacity: the rates of rate=auto
SATURATED = 256  # requests in flight that show the capacity
FLAT, FLAT_POINTS = 0.05, 2  # concurrency=auto ends where so many doublings brought less throughput than that
REFUSED = 0.1  # and where more requests than that were not answered
ROUNDS = 3  # of a probe: N, N and 2 N requests
FIRST_CONCURRENCY = 4.0


@dataclass(frozen=True, slots=True)
class At:
    """One run of a point. ``key``: no other run has it, so it gives the run prompts of its own, which are in no
    server's cache. ``file``: the name of its result.
    """

    axis: Name
    value: float
    key: str
    requests: int
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """``share`` of requests must meet ``slos`` (milliseconds by name); ``probes``: loads tried at most."""

    slos: Mapping[str, float]
    share: float
    precision: float
    probes: int

    @property
    def z(self) -> float:
        return quantile(self.probes, ROUNDS)


@dataclass(frozen=True, slots=True)
class Frontier:
    """``document``: of which prompts are cut. ``other``: the n-th other one, of so many tokens: for prompts of which
    nothing is cached. ``job``: with a workload of ours, written to a file of that name.
    """

    document: frontier.Source
    other: Callable[[int, int], frontier.Source]
    job: Callable[[Callable[[], Workload], str | None], Job]
    osl: int
    repeats: int
    cold_at: tuple[int, ...]
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """What to sweep. ``job``: one run as a job. ``max_seconds``: no point begins after that, and none that is predicted
    to end after it. ``requests``: of a point at least; ``waves``, ``min_seconds``: see predict.requests.
    """

    axis: Axis
    job: Callable[[At], Job]
    requests: int
    waves: int
    min_seconds: float
    max_seconds: float = math.inf
    goal: Goal | None = None
    frontier: Frontier | None = None


class _OverError(Exception):
    """No further point; says why."""


class Sweep:
    """One sweep. ``book``: where points go; those that it has already are not measured again."""

    def __init__(
        self,
        task: Task,
        book: Book,
        measure: Callable[[Job], Measured] = over_http,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ):
        self._task, self._book, self._measure, self._clock, self._say = task, book, measure, clock, say
        self._begun = clock()
        self._alone = 0.0
        self.interrupted = False
        self.why: str | None = None  # it ended before its end

    def run(self) -> None:
        """All of it. Ctrl-C, the end of its time and an error of the server keep what was measured."""
        try:
            if self._task.frontier is not None:
                self._frontier(self._task.frontier)
            elif self._task.goal is not None:
                self._search(self._task.goal)
            else:
                self._values()
            self._book.document["partial"] = False
        except KeyboardInterrupt:
            self.interrupted, self.why = True, "interrupted"
        except _OverError as over:
            self.why = str(over)
        finally:
            self._conclude()

    def _conclude(self) -> None:
        document = self._book.document
        if self._task.frontier is None:
            found, document["knee_note"] = knee.knee(_curve(self._task.axis, self._book.points))
            document["knee"] = None if found is None else _knee_json(found, document["knee_note"])
        document["stopped"] = self.why
        self._book.write()

    def _one(self, job: Job) -> Measured:
        """One run. Raises KeyboardInterrupt behind a run that was interrupted and has nothing."""
        done = self._measure(job)
        if done.interrupted and not done.summary.completed:
            raise KeyboardInterrupt
        return done

    def _at(self, axis: Name, value: float, requests: int, file: str | None) -> At:
        again = len(self._book.document["provenance"].get("resumed_from", []))
        key = f"{file or f'{axis}={value:g}, {requests} requests'}, {again}"
        return At(axis, value, key, requests, file)

    def _count(self, value: float) -> int:
        task = self._task
        return predict.requests(task.axis.name, value, task.requests, task.waves, task.min_seconds)

    def _left(self) -> float:
        return self._task.max_seconds - (self._clock() - self._begun)

    def _time(self, seconds: float, what: str) -> None:
        """Raises _OverError where a point of ``seconds`` does not fit any more."""
        if seconds > self._left():
            raise _OverError(
                f"{what} is predicted to take {predict.duration(seconds)}, and of --max-time "
                f"{self._task.max_seconds:g} s {predict.duration(max(self._left(), 0))} are left"
            )

    # Loads.

    def _values(self) -> None:
        axis = self._task.axis
        self._try_one(axis.values or ())
        values: Sequence[float] | Iterator[float]
        if axis.values is not None:
            values = axis.values
        else:
            values = self._doubling() if axis.name == "concurrency" else self._rates()
        for value in values:
            if self._book.point(value) is None:
                self._point(value)

    def _try_one(self, values: Sequence[float]) -> None:
        """One request alone, and with it how long the rest will take."""
        done = self._one(self._task.job(self._at("concurrency", 1, 1, None)))
        ended = [each.e2el for each in done.summary.run.outcomes if each.e2el is not None]
        if not ended:
            return  # the points will say what is wrong
        self._alone = ended[0]
        loads = [(value, self._count(value)) for value in values if self._book.point(value) is None]
        said = f"one request alone takes {self._alone:.3g} s"
        if loads:
            least, most = predict.span(self._task.axis.name, loads, self._alone)
            said += f"; {len(loads)} points: {predict.duration(least)} to {predict.duration(most)}"
        else:
            said += "; the loads are chosen while measuring"
        if self._task.max_seconds < math.inf:
            said += f", at most {predict.duration(self._task.max_seconds)} by --max-time"
        self._say(f"longread: {said}")

    def _point(self, value: float) -> None:
        name, count = self._task.axis.name, self._count(value)
        best = max((p["result"].get(THROUGHPUT) or 0.0 for p in self._book.points), default=0.0)
        if best > 0:
            self._time(predict.left(name, [(value, count)], best, self._alone), f"{name} {value:g}")
        else:
            self._time(predict.span(name, [(value, count)], self._alone)[0], f"{name} {value:g}")
        done = self._one(self._task.job(self._at(name, value, count, f"{name}-{self._task.axis.label(value)}")))
        self._put({"value": value, "result": done.document}, done)

    def _put(self, point: dict[str, Any], done: Measured) -> None:
        if done.interrupted:
            point["stopped"] = True
        self._book.put(point)
        self._say(f"longread: {self._said(point)}")
        if done.interrupted:
            raise KeyboardInterrupt

    def _said(self, point: Mapping[str, Any]) -> str:
        axis, result = self._task.axis, point["result"]
        known = axis.values if self._task.goal is None else None
        place = f"{len(self._book.points)} of {len(known)}" if known else f"{len(self._book.points)}"
        parts = [f"point {place}: {axis.name} {axis.label(point['value'])}"]
        told, names = (point["frontier"], NEWEST) if "frontier" in point else (result, LOAD)
        parts += [f"{told[key]:.4g} {unit}" for key, unit in names if told.get(key) is not None]
        if known and self._task.frontier is None:
            rest = [(v, self._count(v)) for v in known if self._book.point(v) is None]
            best = max((p["result"].get(THROUGHPUT) or 0.0 for p in self._book.points), default=0.0)
            if rest and best > 0:
                parts.append(f"about {predict.duration(predict.left(axis.name, rest, best, self._alone))} to go")
        return ", ".join(parts)

    def _doubling(self) -> Iterator[float]:
        """1, 2, 4, … until throughput stands still or the server refuses."""
        value, flat, before = self._task.axis.low, 0, 0.0
        for _ in range(MAX_POINTS):
            yield value
            point = self._book.point(value)
            result = point["result"] if point is not None else {}
            now = result.get(THROUGHPUT) or 0.0
            flat = flat + 1 if now < before * (1 + FLAT) else 0
            before = max(before, now)
            bad = (result.get("failed") or 0) / max((result.get("failed") or 0) + (result.get("completed") or 0), 1)
            if flat >= FLAT_POINTS or bad > REFUSED or value >= self._task.axis.high:
                return
            value = min(value * 2, self._task.axis.high)

    def _rates(self) -> Iterator[float]:
        """Shares of the capacity, which a closed loop of many requests shows."""
        anchors = self._book.document["anchors"]
        for name, load in (("alone", 1), ("saturated", SATURATED)):
            if name not in anchors:
                count = max(self._task.requests, 2 * SATURATED)
                if load == 1:
                    fitting = int(self._task.min_seconds / self._alone) if self._alone else self._task.requests
                    count = min(self._task.requests, max(fitting, 8))
                done = self._one(self._task.job(self._at("concurrency", load, count, None)))
                if done.interrupted:
                    raise KeyboardInterrupt
                anchors[name] = done.document
                self._book.write()
        capacity = anchors["saturated"].get(THROUGHPUT) or 0.0
        if capacity <= 0:
            raise _OverError("no request of the closed loop that shows the capacity was answered")
        for share in SHARES:
            yield min(max(float(f"{capacity * share:.3g}"), self._task.axis.low), self._task.axis.high)

    # Max goodput.

    def _search(self, goal: Goal) -> None:
        axis = self._task.axis
        self._try_one(())
        start = FIRST_CONCURRENCY if axis.name == "concurrency" else 1 / self._alone if self._alone else axis.low
        search = Search(axis.low, axis.high, axis.low if axis.bounds else start, axis.integer, goal.precision)
        for point in self._book.points:
            if "probe" in point:
                search.add(point["value"], point["probe"]["said"])
        try:
            while len(search.verdicts) < goal.probes and (value := search.next()) is not None:
                search.add(value, self._probe(value, goal).said)
        finally:
            self._book.document["max_goodput"] = _found(search, goal, self._book.points)

    def _probe(self, value: float, goal: Goal) -> Verdict:
        """Rounds of new requests, each from an idle server on, until it is decided."""
        name, base = self._task.axis.name, self._count(value)
        rounds: list[list[Seen]] = []
        for count in (base, base, 2 * base):
            seconds = predict.span(name, [(value, count)], self._alone)[0]
            if rounds and seconds > self._left():
                break
            self._time(seconds, f"a probe of {name} {value:g}")
            file = f"{name}-{self._task.axis.label(value)}-round{len(rounds) + 1}"
            done = self._one(self._task.job(self._at(name, value, count, file)))
            rounds.append(seen(done.summary.run.outcomes, goal.slos))
            verdict = judge(rounds, goal.share, goal.z)
            if verdict.said != "undecided" or done.interrupted:
                break
        self._say(
            f"longread: {name} {self._task.axis.label(value)}: {verdict.said} ({verdict.good} of {verdict.judged} "
            f"good, {verdict.interval[0]:.1%} to {verdict.interval[1]:.1%}, wanted {goal.share:.0%}: {verdict.reason})"
        )
        told = {**asdict(verdict), "rounds": len(rounds), "share_interval": list(verdict.interval)}
        del told["interval"]
        self._put({"value": value, "result": done.document, "probe": told}, done)
        return verdict

    # The context frontier.

    def _frontier(self, wanted: Frontier) -> None:
        lengths = [int(value) for value in self._task.axis.values or ()]
        measured = 0  # the prompt that this run has put into the server's cache last
        self._warm_up(wanted, lengths[0])
        for place, length in enumerate(lengths):
            if self._book.point(length) is not None:
                continue
            before = [each["frontier"] for each in self._book.points if each["value"] < length]
            self._frontier_time(before, lengths[place:], lengths[place])
            if place and measured != lengths[place - 1]:
                self._again(wanted, lengths[place - 1])
            done = self._one(wanted.job(lambda n=length: self._asks(wanted, n), f"context-{length}"))  # type: ignore[misc]
            step = frontier.step(length, done.summary.run.outcomes, before)
            self._put({"value": length, "result": done.document, "frontier": step.as_json()}, done)
            measured = length
        for place, length in enumerate(wanted.cold_at):
            self._cold(wanted, length, place)

    def _asks(self, wanted: Frontier, length: int) -> Workload:
        return frontier.workload(wanted.document, length, wanted.osl, wanted.repeats, wanted.extra)

    def _warm_up(self, wanted: Frontier, length: int) -> None:
        """Another document's beginning, so that the first point pays for no first use of anything."""
        other = wanted.other(0, length)
        self._one(wanted.job(lambda: frontier.single(other, length, wanted.osl, "warm-up", wanted.extra), None))

    def _again(self, wanted: Frontier, length: int) -> None:
        """Points that are kept from an earlier run may have left the server's cache."""
        self._say(f"longread: reading the first {length:,} tokens again, which is not measured")
        self._one(wanted.job(lambda: frontier.single(wanted.document, length, 1, "read again", wanted.extra), None))

    def _frontier_time(self, before: Sequence[dict[str, Any]], rest: Sequence[int], length: int) -> None:
        total = frontier.seconds_left(before, rest)
        if total is None:
            return
        about = "at least" if len(before) < 2 else "about"
        self._say(f"longread: {len(rest)} points to go, {about} {predict.duration(total)}")
        self._time(frontier.seconds_left(before, [length]) or 0.0, f"context {length:,}")

    def _cold(self, wanted: Frontier, length: int, place: int) -> None:
        point = self._book.point(length)
        if point is None or point["frontier"]["cold_ttft_ms"]["measured"] is not None:
            return
        self._time((point["frontier"]["cold_ttft_ms"]["high"] or 0.0) / 1000, f"a cold prompt of {length:,}")
        other = wanted.other(1 + place, length)
        job = wanted.job(
            lambda: frontier.single(other, length, 1, frontier.COLD, wanted.extra), f"context-{length}-cold"
        )
        rows = self._one(job).summary.run.outcomes
        ttft = next((each.ttft for each in rows if each.status == "ok" and not each.cached_tokens), None)
        cached = next((each.cached_tokens for each in rows), None)
        if ttft is None:
            self._say(f"longread: the cold prompt of {length:,} says nothing: {cached} tokens of it were cached")
            return
        point["frontier"]["cold_ttft_ms"]["measured"] = ttft * 1000
        self._book.put(point)


def _curve(axis: Axis, points: Sequence[Mapping[str, Any]]) -> list[knee.Point]:
    found = []
    for point in points:
        result = point["result"]
        latency, throughput = result.get(LATENCY), result.get(THROUGHPUT)
        if point.get("stopped") or not latency or not throughput:
            continue
        told = (((result.get("longread") or {}).get("metrics") or {}).get("e2el") or {}).get("mean_interval")
        low, high = told if told else (None, None)
        found.append(knee.Point(point["value"], throughput, latency, low, high, axis.name == "concurrency"))
    return found


def _knee_json(found: knee.Knee, method: str) -> dict[str, Any]:
    return {
        "value": found.value,
        "interval": list(found.interval),
        "method": method,
        "latency": LATENCY,
        "throughput": THROUGHPUT,
    }


def _found(search: Search, goal: Goal, points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    at = next((point for point in points if search.met is not None and point["value"] == search.met), None)
    note = (
        "some load was met above one that was missed: noise, so the interval holds both" if search.contradicts else None
    )
    return {
        "value": search.met,
        "interval": [search.met, search.missed],
        "slos": dict(goal.slos),
        "share": goal.share,
        "confidence": 0.95,
        "goodput": None if at is None else at["result"].get("request_goodput"),
        "ended": search.ended(),
        "probes": len(search.verdicts),
        "note": note,
    }
