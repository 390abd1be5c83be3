"""The engine's process: takes requests from a channel, steps the engine, sends what each step brought.

Knows the engine protocol and signals. Must not know checkpoints: whoever calls ``attend`` says how to load.

    reader thread                      main thread
    frames from the server --queue-->  drain commands, step, send one message a step
    two more threads: grammars are compiled there

The process lives as long as its server: it is killed with it where the system can do that (Linux), and ends when the
channel closes. It ignores the signals that an operator sends to a whole group: the server decides when it ends.
A step that does not end is found by faulthandler's own thread, which needs no interpreter lock.
"""

import ctypes
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import JsonValue

from longread.server.worker import messages
from longread.server.worker.collecting import Collections
from longread.server.worker.frames import Channel, ChannelError
from longread.spec.engine import (
    Engine,
    Event,
    FinishEvent,
    GenerationRequest,
    GrammarSpec,
    SamplingParams,
)
from longread.spec.errors import CheckpointError, ConfigError, EngineFailedError, RequestError
from longread.spec.profiler import ProfileError, Profiling

logger = logging.getLogger("longread.server")

Load = Callable[[Any], tuple[Engine, Mapping[str, JsonValue]]]
Commands = queue.SimpleQueue[tuple[bytes, Any]]  # a message's kind and content

BROKEN_STATUS = 3
ORPHAN_STATUS = 4
GRAMMAR_THREADS = 2
CANCEL_SECONDS = 10.0  # for the step that runs when the process is told to end
STATS_SECONDS = 0.02
BEAT_SECONDS = 1.0  # a process that works says so at least that often
_PR_SET_PDEATHSIG = 1


class Watchdog:
    """Ends the process with the stacks of all its threads when ``beat`` is not called for ``seconds`` (up to a quarter
    more). 0: never. Arming it makes a thread, so that most calls do nothing.
    """

    def __init__(self, seconds: float):
        self.idle_seconds = seconds / 4 if seconds else None  # ``beat`` is due so often, also without work
        self._armed = 0.0
        self._seconds = seconds

    def beat(self) -> None:
        now = time.monotonic()
        if self._seconds and (not self._armed or now - self._armed >= self._seconds / 4):
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds * 1.25, exit=True)

    def rest(self) -> None:
        """Nothing is due until the next ``beat``."""
        self._armed = 0.0
        faulthandler.cancel_dump_traceback_later()


def attend(descriptor: int, load: Load) -> None:
    """Serve the socket ``descriptor`` with the engine that ``load`` makes of the task. Does not return."""
    _live_and_die_with_the_server()
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=descriptor), messages.TO_PROCESS, messages.MAX_PROMPT_BYTES)
    commands: Commands = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, commands), name="worker-reader", daemon=True).start()
    status = BROKEN_STATUS
    # The process's edge: what breaks in here is logged here, and the server finds the process gone.
    try:
        status = _serve(channel, commands, load)
    except ChannelError:
        status = ORPHAN_STATUS
    except BaseException:
        logger.exception("the engine failed; its process ends")
    # No clean-up: a thread that compiles a grammar without end must not hold it, and the store is closed already.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _live_and_die_with_the_server() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(ORPHAN_STATUS)


def _read(channel: Channel, commands: Commands) -> None:
    """The reader thread, which also makes the numbers of a long prompt: the main thread has a step to run meanwhile.
    The server's end of the channel closes with the server: nothing is left to be done then.
    """
    last: GenerationRequest | None = None
    try:
        while (frames := channel.receive()) is not None:
            for frame in frames:
                if frame.kind == messages.SUBMIT:
                    number, last = messages.decode_submit(frame.text, frame.blob, last)
                    commands.put((frame.kind, (number, last)))
                else:
                    commands.put((frame.kind, messages.decode(frame.text)))
    except BaseException:
        logger.exception("what the server sends cannot be read; the engine's process ends")
        os._exit(BROKEN_STATUS)
    os._exit(ORPHAN_STATUS)


def _serve(channel: Channel, commands: Commands, load: Load) -> int:
    _, setup = commands.get()
    try:
        engine, told = load(setup["task"])
    except ConfigError as error:
        return _refuse(channel, "config", error)
    except CheckpointError as error:
        return _refuse(channel, "checkpoint", error)
    collections = Collections()
    collections.begin()
    channel.send(messages.LOADED, messages.encode_loaded(engine.info, engine.stats(), told))
    return _Served(channel, engine, Watchdog(setup["step_timeout"]), collections).run(commands)


def _refuse(channel: Channel, kind: messages.FailedAs, error: Exception) -> int:
    channel.send(messages.FAILED, messages.encode_failed(kind, str(error)))
    return BROKEN_STATUS


class _Served:
    """An engine at work."""

    def __init__(self, channel: Channel, engine: Engine, watchdog: Watchdog, collections: Collections):
        self._channel = channel
        self._engine = engine
        self._watchdog = watchdog
        self._collections = collections
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._watched: dict[int, int] = {}  # tokens as they were told
        self._stats = engine.stats()
        self._told = self._sent = 0.0
        self._compiling = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="worker-grammar")

    def run(self, commands: Commands) -> int:
        while True:
            self._watchdog.beat()
            if not self._engine.has_work():
                self._collections.rest()
            try:
                kind, told = commands.get(not self._engine.has_work(), self._watchdog.idle_seconds)
                while kind != messages.CLOSE:
                    self._obey(kind, told)
                    kind, told = commands.get_nowait()
                self._close(told)
                return 0
            except queue.Empty:
                pass
            if self._engine.has_work():
                self._report(self._engine.step())
                self._collections.busy()

    def _obey(self, kind: bytes, told: Any) -> None:
        if kind == messages.SUBMIT:
            self._submit(*told)
        elif kind == messages.GRAMMAR:
            self._check(*told)
        elif kind == messages.EXPLAIN:
            name = self._names.get(told)
            standing = self._engine.explain(name) if name is not None else None
            self._send(messages.EXPLAINED, messages.encode_explained(told, standing))
        elif kind == messages.PROFILE:
            self._profile(*told)
        elif told in self._names:  # else it has ended, and the server will hear of it
            if kind == messages.CANCEL:
                self._engine.cancel(self._names[told])
            elif kind == messages.WATCH:
                self._watched[told] = 0

    def _profile(self, number: int, num_steps: int) -> None:
        """Begin to record so many steps; 0: end it and tell it, which may take long: no step hangs meanwhile. A
        profile that fails is no reason to end what else runs.
        """
        told: Mapping[str, JsonValue] | None = None
        error: RequestError | None = None
        try:
            if not isinstance(self._engine, Profiling):
                raise ProfileError("this engine was not loaded to be profiled", code="profiler_off")
            if num_steps:
                self._engine.start_profile(num_steps)
            else:
                self._watchdog.rest()
                told = self._engine.stop_profile()
        except RequestError as refused:
            error = refused
        except Exception as failed:
            logger.exception("a profile failed")
            error = ProfileError(
                f"the profile failed ({type(failed).__name__}); the server's log says why", code="profile_failed"
            )
        self._send(messages.PROFILED, messages.encode_profiled(number, told, error))

    def _submit(self, number: int, request: GenerationRequest) -> None:
        self._numbers[request.request_id], self._names[number] = number, request.request_id
        try:
            self._engine.submit(request)
        except RequestError as error:
            # The server has checked all but what only the engine knows: a grammar that fails the second time.
            self._report([messages.refused(request, error)])

    def _report(self, events: Sequence[Event]) -> None:
        """Send what happened, if anything did, or if it has been silent for long."""
        computed = []
        for number, before in self._watched.items():
            tokens = self._engine.computed_tokens(self._names[number])
            if tokens > before:
                self._watched[number] = tokens
                computed.append((number, tokens))
        ended = [event.request_id for event in events if isinstance(event, FinishEvent)]
        now = time.monotonic()
        stats = None
        # With each end, so that no client knows more than the metrics do, and before the engine rests.
        if ended or now - self._told >= STATS_SECONDS or not self._engine.has_work():
            stats = self._engine.stats()
            self._told = now
            if stats == self._stats:
                stats = None
            else:
                self._stats = stats
        if not (events or computed or stats is not None or now - self._sent > BEAT_SECONDS):
            return
        self._send(messages.STEP, messages.encode_step(events, self._numbers, stats, computed))
        for name in ended:
            number = self._numbers.pop(name)
            del self._names[number]
            self._watched.pop(number, None)

    def _send(self, kind: bytes, text: bytes) -> None:
        # A server that is stopped for a while (Ctrl-Z) is no reason to die of the watchdog.
        self._channel.send(kind, text, waiting=self._watchdog.beat)
        self._sent = time.monotonic()

    def _check(self, number: int, kind: Any, value: str) -> None:
        """Have a grammar compiled on another thread, so that ``submit`` finds it compiled."""
        sampling = SamplingParams(max_tokens=1, grammar=GrammarSpec(kind, value))
        checking = self._compiling.submit(self._engine.validate, GenerationRequest("grammar", (0,), sampling))
        checking.add_done_callback(lambda done: self._checked(number, done.exception()))

    def _checked(self, number: int, error: BaseException | None) -> None:
        """On that thread."""
        if error is not None and not isinstance(error, RequestError):
            logger.error("checking a grammar failed", exc_info=error)
            error = EngineFailedError(f"the grammar could not be checked ({type(error).__name__})", code="internal")
        try:
            self._channel.send(messages.CHECKED, messages.encode_checked(number, error))
        except ChannelError:
            logger.debug("the server is gone; a grammar's check was dropped")

    def _close(self, seconds: float) -> None:
        """End what runs as if it had been cancelled, so that what it computed stays in the cache, and write that. After
        ``seconds`` the server ends this process, wherever it is.
        """
        end = time.monotonic() + min(CANCEL_SECONDS, seconds / 2)
        for name in list(self._numbers):
            self._engine.cancel(name)
        while self._numbers and time.monotonic() < end:
            self._watchdog.beat()
            self._report(self._engine.step())
        self._watchdog.rest()  # writing to a slow disk has a limit of its own
        self._engine.close()
