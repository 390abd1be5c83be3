"""A run: every ask of a workload sent when it is due, and what became of each.

Knows sessions, the cap, warming up and how a run is stopped. Must not know where asks come from, nor what is made of
their outcomes. Nothing is sent twice.
"""

import asyncio
import math
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from longread.measure.load.bodies import Bodies
from longread.measure.load.client import CANCELLED, Client
from longread.measure.load.outcome import Outcome, Run
from longread.measure.load.overhead import Watch
from longread.measure.load.schedule import Schedule, Turn, sessions
from longread.measure.load.target import Target, warmed
from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError, LongreadError

REQUEST_SECONDS = 6 * 3600.0  # as vLLM's bench: a limit for what hangs, not for what is slow
WARM_TOGETHER = 8  # warm-ups in flight where nothing caps them
SPARE_FILES = 64


class LoadError(LongreadError):
    """The server could not be measured at all; the message says what it answered."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``request_timeout``: seconds of one request. ``seconds``: after this long nothing new is sent, and what is in
    flight is waited for. ``warmups``: requests before the run that are not counted.
    """

    request_timeout: float = REQUEST_SECONDS
    seconds: float = math.inf
    warmups: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.request_timeout < math.inf:
            raise ConfigError(f"request timeout {self.request_timeout:g} s: it must be above 0 and have an end")
        if not self.seconds > 0:
            raise ConfigError(f"duration {self.seconds:g} s: it must be above 0")
        if self.warmups < 0:
            raise ConfigError(f"{self.warmups} warm-ups: there cannot be fewer than 0")


class Progress:
    """Told what happens, as it happens, on the loop's thread; does nothing by itself."""

    def preparing(self, done: int, total: int) -> None:
        """Bodies made."""

    def warming(self, done: int, total: int) -> None:
        """Warm-ups ended."""

    def started(self, total: int) -> None:
        """Warm-ups are over; the run's clock starts when this returns."""

    def sent(self, in_flight: int) -> None:
        """One more was sent."""

    def finished(self, outcome: Outcome, in_flight: int) -> None:
        """One ended, in whatever way."""


class Stop:
    """Ends a run early. ``ask`` once: nothing new is sent, what is in flight is waited for; twice: that is cancelled
    too. Call it on the loop's thread.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._events = (asyncio.Event(), asyncio.Event())

    def ask(self) -> None:
        for event in self._events[: self.asked + 1]:
            event.set()
        self.asked += 1

    async def wait(self, times: int) -> None:
        await self._events[times - 1].wait()


async def run(
    asks: Sequence[Ask],
    target: Target,
    schedule: Schedule,
    limits: Limits | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Send all ``asks`` and wait for their ends. ``stop`` and ``limits.seconds`` end it early; what was never sent then
    has no outcome, and the run is partial. ``clock``: seconds, of every instant but the run's start, which is a date.

    Raises ConfigError: no asks, or ones that do not fit the schedule or the backend. LoadError: no warm-up was
    answered.
    """
    limits, progress, stop = limits or Limits(), progress or Progress(), stop or Stop()
    if not asks:
        raise ConfigError("the workload is empty: there is nothing to send")
    plan = sessions(asks, schedule)
    _allow_files(min(len(plan), schedule.max_concurrency or len(plan)) + SPARE_FILES)
    with Bodies(asks, target, lambda done: progress.preparing(done, len(asks))) as bodies:
        async with Client(target, limits.request_timeout, clock) as client:
            warming = asyncio.create_task(_warm_up(client, asks, schedule, limits.warmups, progress))
            warmups = await _unless(stop, warming) or []
            return await _Running(client, bodies, schedule, limits, progress, stop).all(plan, warmups)


class _Running:
    """One run's state."""

    def __init__(
        self, client: Client, bodies: Bodies, schedule: Schedule, limits: Limits, progress: Progress, stop: Stop
    ):
        self._client, self._bodies, self._limits, self._progress, self._stop = client, bodies, limits, progress, stop
        self._cap = asyncio.Semaphore(schedule.max_concurrency) if schedule.max_concurrency else None
        self._open = schedule.open_loop
        self._outcomes: list[Outcome] = []
        self._flying = self._peak = 0
        self._closed = asyncio.Event()
        self._broken: BaseException | None = None
        self._zero = 0.0

    async def all(self, plan: Sequence[Sequence[Turn]], warmups: list[Outcome]) -> Run:
        total = sum(map(len, plan))
        self._progress.started(total)
        watch, started, self._zero = Watch(), time.time(), self._client.clock()
        tasks: set[asyncio.Task] = set()
        feeder = asyncio.create_task(self._feed(plan, tasks))
        watchers = [asyncio.create_task(work) for work in (self._close(feeder), self._abort(feeder, tasks))]
        try:
            await asyncio.wait([feeder])
            self._look_at(feeder)
            while tasks:
                await asyncio.wait(tasks)
        finally:
            for task in (feeder, *watchers, *tasks):
                task.cancel()
            await asyncio.gather(*watchers, *tasks, return_exceptions=True)
        overhead = await watch.stop(self._outcomes)
        if self._broken is not None:
            raise self._broken
        duration = max((each.ended or 0.0 for each in self._outcomes), default=0.0)
        partial = len(self._outcomes) < total or any(each.failure == CANCELLED for each in self._outcomes)
        return Run(self._outcomes, warmups, started, duration, total, partial, overhead, self._peak)

    def _now(self) -> float:
        return self._client.clock() - self._zero

    async def _feed(self, plan: Sequence[Sequence[Turn]], tasks: set[asyncio.Task]) -> None:
        """Starts each session at its time. The cap is taken here, in order, so that no session overtakes another."""
        for turns in plan:
            due = turns[0].at or 0.0
            await self._until(due)
            if self._cap is not None:
                await self._cap.acquire()
            if self._closed.is_set():
                return
            # Without times a request is due when there is room for it: waiting for that is the load's own shape.
            now = self._now()
            held = max(now - due, 0.0) if self._cap is not None and self._open else 0.0
            task = asyncio.create_task(self._session(turns, due if self._open else now, held))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(self._look_at)
            await asyncio.sleep(0)  # it sends before the next one is looked at

    def _look_at(self, task: asyncio.Task) -> None:
        """A task that broke (its ask could not be built) ends the run: nothing new is sent."""
        if not task.cancelled() and task.exception() is not None and self._broken is None:
            self._broken = task.exception()
            self._stop.ask()

    async def _until(self, due: float) -> None:
        """Returns at ``due``, or when the run is closed."""
        wait = due - self._now()
        if wait > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._closed.wait()

    async def _session(self, turns: Sequence[Turn], due: float, held: float) -> None:
        answers: list[str] = []
        try:
            for place, turn in enumerate(turns):
                if place:
                    ready = self._now() + turn.think
                    due = ready if turn.at is None else turn.at
                    held = max(ready - due, 0.0)
                    await self._until(max(due, ready))
                if self._closed.is_set():
                    return
                outcome = await self._turn(turn, due, held, answers)
                answers.append(outcome.text)
                if outcome.status != "ok" and any(self._bodies.stubs[t.index].open_turns for t in turns[place + 1 :]):
                    self._skip(turns[place + 1 :])
                    return
        finally:
            if self._cap is not None:
                self._cap.release()

    async def _turn(self, turn: Turn, due: float, held: float, answers: Sequence[str]) -> Outcome:
        outcome = self._outcome(turn, due, held)
        body = self._bodies.body(turn.index, answers)
        self._flying += 1
        self._peak = max(self._peak, self._flying)
        self._progress.sent(self._flying)
        try:
            await self._client.send(body, outcome, self._zero)
        finally:
            self._flying -= 1
            self._ended(outcome)
        return outcome

    def _outcome(self, turn: Turn, due: float, held: float) -> Outcome:
        stub = self._bodies.stubs[turn.index]
        return Outcome(stub.key, stub.kind, turn.index, stub.session, due=due, held=held)

    def _skip(self, turns: Sequence[Turn]) -> None:
        """Turns that need an answer which never came."""
        for turn in turns:
            outcome = self._outcome(turn, self._now(), 0.0)
            outcome.sent = outcome.ended = self._now()
            outcome.status, outcome.failure = "cancelled", "an earlier turn failed"
            outcome.error = "its session has no answer to go on from"
            self._ended(outcome)

    def _ended(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._progress.finished(outcome, self._flying)

    async def _close(self, feeder: asyncio.Task) -> None:
        """Nothing new after the first request to stop, or after the time that the run has."""
        seconds = self._limits.seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await self._stop.wait(1)
        self._closed.set()
        feeder.cancel()

    async def _abort(self, feeder: asyncio.Task, tasks: set[asyncio.Task]) -> None:
        await self._stop.wait(2)
        self._closed.set()
        for task in (feeder, *tasks):
            task.cancel()


async def _unless(stop: Stop, task: asyncio.Task[list[Outcome]]) -> list[Outcome] | None:
    """The task's result; None where ``stop`` was asked first: it is cancelled then."""
    asked = asyncio.create_task(stop.wait(1))
    try:
        await asyncio.wait([asked, task], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (asked, task):
            each.cancel()
        await asyncio.gather(asked, task, return_exceptions=True)


async def _warm_up(
    client: Client, asks: Sequence[Ask], schedule: Schedule, count: int, progress: Progress
) -> list[Outcome]:
    """``count`` requests like the workload's first ones, with beginnings of their own."""
    first = [ask for ask in (asks[i] for i in range(min(count, len(asks)))) if not ask.answers] or [asks[0]]
    room = asyncio.Semaphore(schedule.max_concurrency or WARM_TOGETHER)
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        ask = warmed(first[number % len(first)], number)
        outcome = Outcome(ask.key, ask.kind, number)
        async with room:
            await client.send(client.target.body(ask), outcome, client.clock())
        outcomes.append(outcome)
        progress.warming(len(outcomes), count)

    await asyncio.gather(*(one(number) for number in range(count)))
    if count and all(each.status != "ok" for each in outcomes):
        raise LoadError(
            f"no warm-up request was answered by {client.target.url}: {outcomes[0].failure} ({outcomes[0].error})"
        )
    return outcomes


def _allow_files(wanted: int) -> None:
    """Raise this process's soft limit of open files to what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ConfigError(
                f"up to {wanted:,} connections at once, and this process may open {hard:,} files: give a smaller "
                "--max-concurrency, or raise the limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
