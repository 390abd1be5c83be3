"""An engine that runs in another process, as the driver sees it: ``spec.engine.Engine`` over a channel.

Knows the messages, and how a process that has died or hangs is told from one that works. Must not know HTTP, nor what
the process loads.

``step`` waits for what comes: nothing is polled, and ``wake`` ends the wait. Limits, ids and sampling are checked here,
since that is pure; a grammar is compiled there, where one that breaks the compiler breaks no server. When the process
ends by itself, is killed, hangs or sends what is no message, the next call raises EngineLostError.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import TypeVar

from longread.server.worker import messages
from longread.server.worker.frames import Channel, ChannelError, Frame, StalledError, Waker, readable
from longread.server.worker.process import WorkerProcess
from longread.spec.engine import EngineInfo, EngineStats, Event, FinishEvent, GenerationRequest, Standing
from longread.spec.errors import EngineLostError, InvalidRequestError, OverloadedError, RequestError
from longread.spec.limits import check_request

logger = logging.getLogger("longread.server")

GRAMMAR_SECONDS = 60.0  # compiling one takes a second at most, when nothing else runs
EXPLAIN_SECONDS = 10.0  # the answer comes behind the step that runs
CLOSE_SECONDS = 45.0  # writes to the store that are due get 30 of them
SILENCE = 1.5  # times the step timeout: by then the process's own watchdog has failed, too
SILENCE_MARGIN = 5.0  # seconds

Answer = TypeVar("Answer")


class WorkerEngine:
    """The engine of a process that has loaded. ``told``: what it said of itself beside its info.

    ``validate``, ``wake`` and ``kill`` may be called from any thread, all else belongs to one. ``step_timeout``:
    seconds of a step, 0: no limit.
    """

    def __init__(
        self,
        process: WorkerProcess,
        channel: Channel,
        loaded: messages.Loaded,
        step_timeout: float,
    ):
        self._process = process
        self._channel = channel
        self._info, self._stats, self.told = loaded
        self._silence = SILENCE * step_timeout + SILENCE_MARGIN if step_timeout else None
        self._waker = Waker()
        self._count = itertools.count()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._computed: dict[str, int] = {}  # of the requests that somebody asked about
        self._last: GenerationRequest | None = None
        self._events: list[Event] = []
        self._heard = 0.0
        self._lost: str | None = None  # why
        self._closed = False
        self._asking = threading.Lock()
        self._checks: dict[int, Future[RequestError | None]] = {}
        self._standings: dict[int, Standing | None] = {}

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def validate(self, request: GenerationRequest) -> None:
        """As ``Engine.validate``. With a grammar it waits for the process: not for an event loop's thread. Raises
        OverloadedError where the process ends meanwhile.
        """
        check_request(request, self._info)
        grammar = request.sampling.grammar
        if grammar is None:
            return
        number, answer = next(self._count), Future[RequestError | None]()
        with self._asking:
            if self._lost is not None:
                raise _gone()
            self._checks[number] = answer
        try:
            self._send(messages.GRAMMAR, messages.encode([number, grammar.kind, grammar.value]))
            error = answer.result(GRAMMAR_SECONDS)
        except (ChannelError, WaitTimeoutError):
            raise OverloadedError("the grammar could not be checked now: try again later", code="busy") from None
        finally:
            with self._asking:
                self._checks.pop(number, None)
        if error is not None:
            raise error

    def submit(self, request: GenerationRequest) -> None:
        """As ``Engine.submit``; what only the process can refuse ends as "failed"."""
        self._require()
        check_request(request, self._info)
        if request.request_id in self._numbers:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use", param="request_id")
        number = next(self._count)
        text, blobs = messages.encode_submit(number, request, self._last)
        if not self._numbers:
            self._heard = time.monotonic()
        self._numbers[request.request_id], self._names[number] = number, request.request_id
        self._last = request
        self._tell(messages.SUBMIT, text, blobs)

    def cancel(self, request_id: str) -> None:
        number = self._numbers.get(request_id)
        if number is not None:
            self._tell(messages.CANCEL, messages.encode(number))

    def computed_tokens(self, request_id: str) -> int:
        """As of the last step that came; from the second call on, since the process must be asked to tell it."""
        number = self._numbers.get(request_id)
        if number is None:
            return 0
        if request_id not in self._computed:
            self._computed[request_id] = 0
            self._tell(messages.WATCH, messages.encode(number))
        return self._computed[request_id]

    def explain(self, request_id: str) -> Standing | None:
        """As ``Engine.explain``; it waits for the step that runs. None also where no answer comes."""
        number = self._numbers.get(request_id)
        if number is None:
            return None
        self._tell(messages.EXPLAIN, messages.encode(number))
        end = time.monotonic() + EXPLAIN_SECONDS
        while number in self._names and number not in self._standings and self._lost is None:
            if (left := end - time.monotonic()) <= 0:
                break
            self._read(left)
        return self._standings.pop(number, None)

    def has_work(self) -> bool:
        """Always: what the process sends, and its death, are found by ``step``, which waits."""
        return True

    def step(self) -> Sequence[Event]:
        """The events that came, in order; waits for some, or for anything else that is news. Raises EngineLostError."""
        if not self._events:
            self._require()
            self._wait()
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """As of the last step that came."""
        return self._stats

    def wake(self) -> None:
        """Let ``step`` return."""
        self._waker.wake()

    def kill(self) -> None:
        """End the process at once, without what it has not written."""
        self._process.kill()

    def close(self) -> None:
        """Have the process cancel its requests, keep what they computed, finish the store's writes and end; one that
        does not is killed. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        if self._lost is None:
            self._ask_to_end(time.monotonic() + CLOSE_SECONDS)
            self._lost = "it was closed"
            self._fail_checks()
        self._channel.close()
        self._waker.close()

    def _ask_to_end(self, end: float) -> None:
        try:
            self._send(messages.CLOSE, b"null")
            # Read on: a process that cannot send what it has left would not come to its end.
            while (left := end - time.monotonic()) > 0 and self._channel.receive(left) is not None:
                pass
        except ChannelError as error:
            logger.warning("the engine's process: %s", error)
        code = self._process.end(max(0.0, end - time.monotonic()) + 1.0)
        if code != 0:
            logger.warning("the engine's process did not end in order: %s", self._process.why())

    def _wait(self) -> None:
        """Read what is there, once something is, or until ``wake``."""
        waits = self._channel.fileno(), self._waker.fileno()
        ready = readable(waits, self._patience())
        if waits[1] in ready:
            self._waker.clear()
        if waits[0] in ready:
            self._read(0)
        elif not ready:
            self._process.abort()  # its stacks go to the log
            self._lose("it did not answer any more")
        if not self._events:
            self._require()

    def _patience(self) -> float | None:
        """Seconds until silence means that the process hangs; None: it may be silent."""
        if self._silence is None or not self._numbers:
            return None
        return max(0.0, self._heard + self._silence - time.monotonic())

    def _read(self, seconds: float) -> None:
        """Book what comes within that time. The end of the stream means that the process has ended or is ending."""
        try:
            frames = self._channel.receive(seconds)
            if frames is None:
                self._lose(None)
                return
            self.book(frames)
        except (ChannelError, ValueError) as error:
            logger.error("the engine's process sent what is no message: %s", str(error)[:500])
            self._lose("its messages are broken")

    def book(self, frames: Sequence[Frame]) -> None:
        """Take what has come. Raises ValueError for what is no message."""
        self._heard = time.monotonic()
        for frame in frames:
            self._book(frame)

    def _book(self, frame: Frame) -> None:
        if frame.kind == messages.STEP:
            step = messages.decode_step(frame.text, self._names)
            for number, event in step.events:
                self._events.append(event)
                if isinstance(event, FinishEvent):
                    self._forget(number)
            for number, tokens in step.computed:
                if number in self._names:
                    self._computed[self._names[number]] = tokens
            if step.stats is not None:
                self._stats = step.stats
        elif frame.kind == messages.CHECKED:
            number, error = messages.decode_checked(frame.text)
            with self._asking:
                answer = self._checks.pop(number, None)
            if answer is not None:
                answer.set_result(error)
        elif frame.kind == messages.EXPLAINED:
            number, standing = messages.decode_explained(frame.text)
            if number in self._names:
                self._standings[number] = standing
        else:
            raise ValueError(f"a message of kind {frame.kind!r} from a process that has loaded")

    def _forget(self, number: int) -> None:
        name = self._names.pop(number)
        del self._numbers[name]
        self._computed.pop(name, None)
        self._standings.pop(number, None)
        if not self._numbers:
            self._last = None  # a prompt may be large

    def _tell(self, kind: bytes, text: bytes, blobs: Sequence[bytes | memoryview] = ()) -> None:
        try:
            self._send(kind, text, blobs)
        except StalledError as error:
            self._process.abort()
            self._lose(f"it hangs: {error}")
        except ChannelError:
            pass  # it has ended; what it sent before is still there, and the next steps read it up to its end

    def _send(self, kind: bytes, text: bytes, blobs: Sequence[bytes | memoryview] = ()) -> None:
        self._channel.send(kind, text, blobs, seconds=self._silence)

    def _lose(self, why: str | None) -> None:
        """The process is of no more use: see that it ends, and remember why. ``why`` None: as its status says."""
        if self._lost is not None:
            return
        if why is not None:
            self._process.kill()
        self._process.end(2.0)
        with self._asking:
            self._lost = why if why is not None else self._process.why()
        self._fail_checks()

    def _fail_checks(self) -> None:
        with self._asking:
            checks, self._checks = list(self._checks.values()), {}
        for answer in checks:
            answer.set_result(_gone())

    def _require(self) -> None:
        if self._lost is not None:
            raise EngineLostError(f"the engine's process {self.pid} ended: {self._lost}")


def _gone() -> OverloadedError:
    return OverloadedError(
        "the engine has stopped and is being started again: send the request again", code="engine_restarting"
    )
