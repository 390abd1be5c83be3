"""Runs an engine and hands its events to the calls that wait for them.

Knows: the engine protocols, threads, one event loop. Must not know: HTTP, text, models.

    loop thread                         engine thread
                                        loads the engine, closes it, sees how it ended, waits for its turn
    an engine in a process of its own:
    submit, cancel, read, deliver       sleeps meanwhile
    an engine beside us:
    submit, cancel   --commands-->      drain commands, step, stats
    deliver          <--one call a step--

Every request that ``submit`` accepts ends exactly once: with the engine's FinishEvent, or with one made here when the
engine refused it late, broke, or was closed.

An engine that is lost (EngineLostError: its process died) is made again, if ``Restarts`` says so: requests in flight
end with an error that invites to send them again, new ones are refused until the next engine is there.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from longread.server.admission import Admission
from longread.server.attached import Attached
from longread.server.commands import (
    Cancel,
    Close,
    Command,
    Explain,
    Gone,
    Live,
    Refresh,
    Settled,
    Watch,
)
from longread.server.deadlines import Deadlines
from longread.server.draining import MOST_WRITING, drained, ended, writing_seconds
from longread.server.ends import (
    broken_error,
    failed_event,
    left_until,
    overflow_error,
    restarting_error,
    shutting_down_error,
)
from longread.server.poison import Poison
from longread.server.restarts import Restarts
from longread.server.roles import Observer, ProcessEngine
from longread.server.subscription import Subscription
from longread.spec.engine import (
    Engine,
    EngineInfo,
    EngineStats,
    Event,
    FinishEvent,
    GenerationRequest,
    Standing,
    TokenEvent,
)
from longread.spec.errors import (
    CrashLoopError,
    DeadlineError,
    EngineLostError,
    LongreadError,
    OverloadedError,
    PoisonedPromptError,
    RequestError,
)

logger = logging.getLogger("longread.server")

EXPLAIN_SECONDS = 20.0  # for the step that runs to end
JOIN_MARGIN = 3.0  # seconds, for a process that has to be killed; a step that never ends must not hold the server

AnyEngine = Engine | ProcessEngine
State = Literal["loading", "ready", "restarting", "closing", "failed", "closed"]


class EngineDriver:
    """Owns the engine thread. ``make`` loads the engine on that thread; until it returns, requests are refused (503).

    ``admission`` decides what is accepted. ``restarts``: when an engine that is lost is made again; None: never.
    All methods but ``stats`` belong to the loop thread that called ``start``.
    """

    def __init__(
        self,
        make: Callable[[], AnyEngine],
        *,
        admission: Admission | None = None,
        observer: Observer | None = None,
        restarts: Restarts | None = None,
    ):
        self._make = make
        self.admission = admission or Admission()
        self._deadlines = Deadlines(self._give_up)
        self._poison = Poison()
        self._observer = observer
        self._restarts = restarts
        self._load_seconds = 0.0  # of the last engine
        self._next_engine = 0.0  # when the next one will be there, as far as one can tell
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._live: dict[str, Live] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded = asyncio.Event()
        self._over = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine: AnyEngine | None = None
        self._attached: Attached | None = None  # the engine, where it is a process's and there
        self._closing = False
        self._hurried = False
        self._end_seconds = MOST_WRITING
        self._watches: tuple[Watch, ...] = ()  # replaced whole by the loop thread, read by the engine's
        self.state: State = "loading"
        self.error: BaseException | None = None
        self.stats = EngineStats()

    @property
    def pending(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def engine_info(self) -> EngineInfo:
        """Raises OverloadedError while the model loads and EngineFailedError when there is no engine any more."""
        self._check_serving()
        assert self._engine is not None
        return self._engine.info

    @property
    def current(self) -> tuple[EngineInfo, EngineStats] | None:
        """For metrics, from any thread: None while there is no engine that takes requests."""
        engine = self._engine
        return (engine.info, self.stats) if engine is not None and self.state == "ready" else None

    @property
    def process(self) -> ProcessEngine | None:
        """The engine, where it is a process's and there; for the loop thread."""
        return self._attached.engine if self._attached is not None else None

    def start(self) -> None:
        """Start loading, from within the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="longread-engine", daemon=True)
        self._thread.start()

    async def loaded(self) -> None:
        """Wait until the engine is there; raises what loading raised."""
        await self._loaded.wait()
        if self.state == "failed" and self.error is not None:
            raise self.error

    async def failed(self) -> None:
        """Wait until the engine has failed for good: nobody makes another."""
        await self._over.wait()

    def validate(self, request: GenerationRequest) -> None:
        """The engine's own check; from any thread. Raises RequestError."""
        self._check_serving()
        assert self._engine is not None
        self._engine.validate(request)

    def submit(self, requests: Sequence[GenerationRequest], deadline: float | None = None) -> Subscription:
        """Queue validated requests, all or none. ``deadline``: the monotonic time by which their client wants them.

        Raises what ``Admission.admit`` and ``Poison.check`` raise, DeadlineError where the deadline has passed,
        OverloadedError while there is no engine, and EngineFailedError.
        """
        info = self.engine_info
        client = None if deadline is None else left_until(deadline)
        with self._refusals_counted(len(requests)):
            self._poison.check(requests)
            self.admission.admit(requests, info, self.stats.known_cost, client)
        if self._observer is not None:
            self._observer.accepted(len(requests))
        subscription = Subscription(requests)
        for request in requests:
            self._live[request.request_id] = Live(request, subscription)
            self._poison.began(request)
            self._put(request)
            self._follow(request, client)
        self._idle.clear()
        return subscription

    def check_room(self, owner: str) -> None:
        """Raises AdmissionError where no request of an owner would be accepted now, before anything is done for one."""
        if self.current is not None:
            info, stats = self.current
            with self._refusals_counted(1):
                self.admission.check_room(owner, info, stats.known_cost)

    @contextmanager
    def _refusals_counted(self, count: int) -> Iterator[None]:
        try:
            yield
        except (OverloadedError, PoisonedPromptError) as error:
            if self._observer is not None:
                self._observer.rejected(count, error.code or "")
            raise

    def _follow(self, request: GenerationRequest, client: float | None) -> None:
        """Start its time limits, and watch its progress where that matters."""
        limits, progress = self.admission.limits, None
        if limits.queue_timeout is not None or self.admission.wants_progress(request):
            progress = self.watch(request.request_id)
            self.admission.follow(request.request_id, progress)
        self._deadlines.start(request, limits, progress, client)

    def watch(self, request_id: str) -> "Watch":
        """Follow how far a submitted request's prompt is, step by step until it ends."""
        watch = Watch(request_id)
        self._watches = (*self._watches, watch)
        return watch

    async def explain(self, request_id: str) -> Standing | None:
        """Where a request stands and why, once the step that runs has ended. None: it has ended, or no engine is there
        that could tell.
        """
        going = isinstance(self._engine, ProcessEngine) and self._attached is None
        if request_id not in self._live or self.state not in ("ready", "closing") or going:
            return None
        answer: asyncio.Future[Standing | None] = asyncio.get_running_loop().create_future()
        self._put(Explain(request_id, answer))
        try:
            return await asyncio.wait_for(answer, EXPLAIN_SECONDS)
        except TimeoutError:
            return None

    def stop(self, request_id: str) -> None:
        """The caller has what it wants (a stop string): no more tokens, then the request's FinishEvent."""
        self._drop(request_id, "stop")

    def cancel(self, subscription: Subscription) -> None:
        """Cancel whatever of it has not ended."""
        for request_id in subscription.choice:
            self._drop(request_id, "cancelled")

    def cut_off(self, reason: str) -> None:
        """Count a client that was cut off because it did not read."""
        if self._observer is not None:
            self._observer.slow_reader(reason)

    def refresh(self) -> None:
        """Have ``stats`` read soon: an idle engine takes no steps, and its store's writes end behind the last one."""
        self._put(Refresh())

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, give the others ``drain_seconds``, fail the rest, end the engine, which may then write
        for ``writing_seconds(drain_seconds)``. Again: nothing.
        """
        if self._closing:
            return
        self._closing = True
        if self.state == "ready":
            self.state = "closing"
            if self._live and drain_seconds > 0:
                await drained(lambda: len(self._live), self._idle, drain_seconds)
        loading = self.state in ("loading", "restarting")
        self.state = "closed" if self.state != "failed" else "failed"
        await asyncio.sleep(0)  # what has ended in time is delivered first
        self._detach()
        self._end_all(shutting_down_error)  # before the store's last writes, which may take long
        self._end_seconds = writing_seconds(drain_seconds)
        self._put(Close())
        # A load cannot be interrupted from here: the thread finds the command when it ends.
        if not loading:
            await ended(asyncio.to_thread(self.join, self._end_seconds + JOIN_MARGIN), self._end_seconds)
        self._loaded.set()

    def join(self, seconds: float) -> None:
        """Wait for the engine thread; from any thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def hurry(self) -> None:
        """End the draining of a ``close`` now, and an engine's process with it; no other one is made."""
        self._hurried = True  # before the thread sees what becomes of the process
        self._idle.set()
        if isinstance(self._engine, ProcessEngine):
            self._engine.kill()

    def _put(self, command: Command) -> None:
        if self._attached is None:
            self._commands.put(command)
        elif isinstance(command, GenerationRequest):
            self._submit(self._attached.engine, command)
            self._attached.expect()
        elif isinstance(command, Cancel):
            self._attached.engine.cancel(command.request_id)
        elif isinstance(command, Explain):
            self._attached.engine.explain(command.request_id, partial(self._tell, command.answer))

    def _check_serving(self) -> None:
        if self.state == "restarting":
            raise restarting_error(self._next_engine)
        if self.state == "loading":
            raise OverloadedError("the model is still loading: wait until /ready answers 200", code="model_loading")
        if self.state in ("closing", "closed"):
            raise shutting_down_error()
        if self.state == "failed":
            raise broken_error(self.error)

    def _drop(self, request_id: str, why: str) -> None:
        live = self._live.get(request_id)
        if live is not None and live.dropped is None:
            live.dropped = why
            self._put(Cancel(request_id))

    def _give_up(self, request_id: str, error: RequestError, why: str) -> None:
        """End a request for its caller now. Its slot is free when the engine has ended it, too."""
        live = self._live.get(request_id)
        if live is None or live.told:
            return
        self._drop(request_id, why)
        if isinstance(error, DeadlineError) and self.current is not None:
            info, stats = self.current
            error.retry_after = self.admission.predicted_wait(info, stats.known_cost)
        live.dropped, live.told = why, True
        live.subscription.refusals[request_id] = error
        live.subscription.give([failed_event(live.request, error)])

    def _overflowing(self, subscription: Subscription) -> None:
        error = overflow_error(subscription.unread, self.admission.limits.max_stream_buffer)
        self.cut_off("buffer")
        for request_id in subscription.choice:
            self._give_up(request_id, error, "slow_reader")

    # Loop side: called by the engine thread through call_soon_threadsafe, in order.

    def _deliver(self, events: Sequence[Event], at: float) -> None:
        """Give each call what came for it, in one go; what is only counted waits until all has been written."""
        given: dict[Subscription, list[Event]] = {}
        gaps: list[float] = []
        for event in events:
            live = self._live.get(event.request_id)
            if live is None:
                continue
            if isinstance(event, TokenEvent):
                if live.dropped is not None:
                    continue
                if live.last_token is None:
                    self.admission.first_token(event.request_id)
                    self._deadlines.first_token(event.request_id)
                else:
                    gaps.append(at - live.last_token)
                live.last_token = at
            else:
                self._ended(event, live)
                if live.told:
                    continue
            given.setdefault(live.subscription, []).append(event)
        for subscription, mine in given.items():
            subscription.give(mine)
            if subscription.unread > self.admission.limits.max_stream_buffer:
                self._overflowing(subscription)
        if gaps and self._observer is not None:
            self._observer.gaps(gaps)

    def _ended(self, event: FinishEvent, live: Live) -> None:
        del self._live[event.request_id]
        self.admission.ended(event)
        self._poison.ended(live.request, event.reason in ("stop", "length"))
        self._deadlines.end(event.request_id)
        if self._watches:
            self._watches = tuple(watch for watch in self._watches if watch.request_id != event.request_id)
        if not self._live:
            self._idle.set()
        if self._observer is not None:
            known = live.told or event.reason == "cancelled"
            self._observer.finish(event, live.dropped if known and live.dropped is not None else event.reason)

    def _refuse(self, request_id: str, error: RequestError) -> None:
        """End a request that the engine does not know."""
        live = self._live.get(request_id)
        if live is None:
            return
        if not live.told:
            live.subscription.refusals[request_id] = error
        self._deliver([failed_event(live.request, error)], time.monotonic())

    def _end_all(self, make_error: Callable[[], RequestError]) -> None:
        for request_id in list(self._live):
            self._refuse(request_id, make_error())

    def _became_ready(self, engine: AnyEngine) -> None:
        self._engine = engine
        if isinstance(engine, ProcessEngine) and not self._closing:
            self._attached = Attached(engine, self._came, self._went)
        if self.state in ("loading", "restarting"):
            self.state = "ready"
        self._loaded.set()

    def _came(self, events: Sequence[Event]) -> None:
        """An engine's process told something."""
        if self._attached is None:
            return
        self._follow_up(self._attached.engine)
        if events:
            self._deliver(events, time.monotonic())

    def _went(self, hangs: bool) -> None:
        """It will tell no more: the thread sees how it ended."""
        self._attached = None
        self._commands.put(Gone(hangs))

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    def _broke(self, error: BaseException) -> None:
        self.state, self.error = "failed", error
        self._end_all(lambda: broken_error(error))
        self._loaded.set()
        self._over.set()

    def _lost(self, next_engine: float | None) -> None:
        """The engine is gone. ``next_engine``: monotonic time at which another may be there; None: none will."""
        if next_engine is None:
            self._end_all(shutting_down_error)
            return
        if self.state == "ready":
            self.state = "restarting"
        self._next_engine = next_engine
        self._poison.died(live.request for live in self._live.values())
        self.admission.lost()
        if self._observer is not None:
            self._observer.lost()
        self._end_all(lambda: restarting_error(next_engine))
        self._commands.put(Settled())

    # Engine side.

    def _post(self, call: Callable[..., None], *arguments: object) -> bool:
        """False: nobody is there any more."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            logger.debug("the event loop is closed; an event of the engine was dropped")
            return False
        return True

    def _run(self) -> None:
        # A process edge: whatever happens on this thread becomes the state of the server and the end of every request.
        try:
            engine = self._timed_make()
        except BaseException as error:
            logger.debug("loading the model failed", exc_info=error)  # whoever waits for ``loaded`` gets it raised
            self._post(self._broke, error)
            return
        try:
            serving: AnyEngine | None = engine
            while serving is not None:
                serving = self._live_through(serving)
        except CrashLoopError as error:
            logger.debug("a crash loop", exc_info=error)  # raised to whoever waits for ``failed``
            self._post(self._broke, error)
        except BaseException as error:
            logger.error("the engine failed; all its requests are ended", exc_info=error)
            self._post(self._broke, error)

    def _timed_make(self) -> AnyEngine:
        begun = time.monotonic()
        engine = self._make()
        self._load_seconds = time.monotonic() - begun
        if self._next_engine:
            logger.warning("the engine is there again, it took %.1f s to load", self._load_seconds)
        return engine

    def _live_through(self, engine: AnyEngine) -> AnyEngine | None:
        """Serve with an engine until it is closed, or lost: then the next one is returned. Raises CrashLoopError."""
        self.stats = engine.stats()  # before anyone may read it: a pool that is free must not look full
        self._post(self._became_ready, engine)
        begun = time.monotonic()
        try:
            if isinstance(engine, ProcessEngine):
                self._await_end(engine)
            else:
                self._serve(engine)
            return None
        except EngineLostError as error:
            if self._restarts is None:
                raise
            lost: LongreadError = error
        finally:
            if isinstance(engine, ProcessEngine):
                engine.close(self._end_seconds)
            else:
                engine.close()
        life, next_engine = time.monotonic() - begun, None
        while next_engine is None and self._await_turn(lost, life):
            try:
                next_engine = self._timed_make()
            except LongreadError as error:  # also a checkpoint that cannot be read now: it may be there again soon
                lost, life = error, 0.0
        return next_engine

    def _await_turn(self, lost: LongreadError, life: float) -> bool:
        """End what was in flight and wait until it is time for the next engine. False: the server closes meanwhile."""
        assert self._restarts is not None
        if self._closing or self._hurried:
            self._post(self._lost, None)
            return False
        delay = self._restarts.died(life)
        if delay is None:
            self._post(self._lost, None)
            raise CrashLoopError(f"{lost}; that was {self._restarts.told()}, so it is not started again") from lost
        logger.error("%s; it is started again in %g s", lost, delay)
        end = time.monotonic() + delay
        if not self._post(self._lost, end + self._load_seconds):
            return False
        settled = False
        while not settled or (left := end - time.monotonic()) > 0:
            try:
                command = self._commands.get(timeout=left if settled else None)
            except queue.Empty:
                break
            if isinstance(command, Close):
                return False
            settled = settled or isinstance(command, Settled)
        return not (self._closing or self._hurried)

    def _await_end(self, engine: ProcessEngine) -> None:
        """The loop serves. Raises EngineLostError where the process ended."""
        while not isinstance(command := self._commands.get(), Close):
            if isinstance(command, Gone):
                raise engine.lost(command.hangs)

    def _serve(self, engine: Engine) -> None:
        while True:
            # Without work this blocks on the queue: an idle server uses no processor time.
            for command in self._next_commands(wait=not engine.has_work()):
                if isinstance(command, Close):
                    return
                if isinstance(command, Cancel):
                    engine.cancel(command.request_id)
                elif isinstance(command, GenerationRequest):
                    self._submit(engine, command)
                elif isinstance(command, Refresh):
                    self.stats = engine.stats()
                elif isinstance(command, Explain):
                    self._tell(command.answer, engine.explain(command.request_id))
            if engine.has_work():
                events = engine.step()
                self._follow_up(engine)
                if events:
                    self._post(self._deliver, events, time.monotonic())

    # On either thread, whichever the engine's is.

    def _follow_up(self, engine: AnyEngine) -> None:
        self.stats = engine.stats()
        for watch in self._watches:
            watch.tokens = max(watch.tokens, engine.computed_tokens(watch.request_id))

    def _tell(self, answer: "asyncio.Future[Standing | None]", standing: Standing | None) -> None:
        self._post(_answer, answer, standing)

    def _submit(self, engine: AnyEngine, request: GenerationRequest) -> None:
        try:
            engine.submit(request)
        except RequestError as error:
            self._post(self._refuse, request.request_id, error)

    def _next_commands(self, wait: bool) -> Iterable[Command]:
        commands = [self._commands.get()] if wait else []
        while True:
            try:
                commands.append(self._commands.get_nowait())
            except queue.Empty:
                return commands


def _answer(future: "asyncio.Future[Standing | None]", standing: Standing | None) -> None:
    if not future.done():
        future.set_result(standing)
