"""An engine that runs in another process, as the driver sees it.

Knows the messages, and how a process that has died or hangs is told from one that works. Must not know HTTP, event
loops, nor what the process loads.

Nothing here waits but what says so: whoever watches ``fileno`` calls ``read`` when something has come. Limits, ids and
sampling are checked here, since that is pure; a grammar is compiled there, where one that breaks the compiler breaks no
server. When the process ends by itself, is killed, hangs or sends what is no message, the engine is lost.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import suppress

from pydantic import JsonValue

from longread.server.worker import messages
from longread.server.worker.frames import Channel, ChannelError, Frame
from longread.server.worker.process import WorkerProcess
from longread.spec.engine import EngineInfo, EngineStats, Event, FinishEvent, GenerationRequest, Standing
from longread.spec.errors import EngineLostError, InvalidRequestError, OverloadedError, RequestError
from longread.spec.limits import check_request

logger = logging.getLogger("longread.server")

GRAMMAR_SECONDS = 60.0  # compiling one takes a second at most, when nothing else runs
CLOSE_SECONDS = 45.0  # writes to the store that are due get 30 of them
END_SECONDS = 2.0  # for a process whose channel is closed already
SILENCE = 1.5  # times the step timeout: by then the process's own watchdog has failed, too
SILENCE_MARGIN = 5.0  # seconds

Explained = Callable[[Standing | None], None]
Profiled = Callable[[dict[str, JsonValue] | None, RequestError | None], None]


class WorkerEngine:
    """The engine of a process that has loaded. ``told``: what it said of itself beside its info.

    ``validate`` and ``kill`` may be called from any thread, all else belongs to one at a time. ``step_timeout``:
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
        self._count = itertools.count()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._computed: dict[str, int] = {}  # of the requests that somebody asked about
        self._last: GenerationRequest | None = None
        self._events: list[Event] = []
        self._heard = 0.0
        self.gone = False  # nothing more will come
        self._why: str | None = None  # None: its status says it
        self._closed = False
        self._asking = threading.Lock()
        self._checks: dict[int, Future[RequestError | None]] = {}
        self._explained: dict[int, list[Explained]] = {}
        self._profiled: dict[int, Profiled] = {}

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
            if self.gone:
                raise _restarting()
            self._checks[number] = answer
        try:
            self._channel.send(messages.GRAMMAR, messages.encode([number, grammar.kind, grammar.value]))
            error = answer.result(GRAMMAR_SECONDS)
        except (ChannelError, WaitTimeoutError):
            raise OverloadedError("the grammar could not be checked now: try again later", code="busy") from None
        finally:
            with self._asking:
                self._checks.pop(number, None)
        if error is not None:
            raise error

    def submit(self, request: GenerationRequest) -> None:
        """As ``Engine.submit``; what only the process can refuse ends as "failed", and what comes when the engine is
        gone never ends.
        """
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

    def explain(self, request_id: str, answer: Explained) -> None:
        """Have ``answer`` told where a request stands, behind the step that runs: None once it has ended, or, on the
        thread that finds it out, once the process has.
        """
        number = self._numbers.get(request_id)
        if number is None or self.gone:
            answer(None)
            return
        self._explained.setdefault(number, []).append(answer)
        self._tell(messages.EXPLAIN, messages.encode(number))

    def profile(self, num_steps: int, answer: Profiled) -> None:
        """Have the process record its next ``num_steps`` steps, or with 0 tell what it recorded; ``answer`` gets that,
        or why not.
        """
        if self.gone:
            answer(None, _restarting())
            return
        number = next(self._count)
        self._profiled[number] = answer
        self._tell(messages.PROFILE, messages.encode([number, num_steps]))

    def fileno(self) -> int:
        """Readable when something has come."""
        return self._channel.fileno()

    def keep_unsent(self, later: Callable[[], None] | None) -> None:
        """As ``Channel.keep_unsent``."""
        self._channel.keep_unsent(later)

    def flush(self) -> bool:
        """As ``Channel.flush``; True also where the process is gone."""
        try:
            return self._channel.flush()
        except ChannelError:
            return True  # what it sent before is still there to be read

    def read(self, seconds: float = 0.0) -> Sequence[Event]:
        """The events that came, in order, maybe none; waits at most ``seconds``. Look at ``gone`` behind it."""
        if not self.gone:
            self._receive(seconds)
        events, self._events = self._events, []
        return events

    def patience(self) -> float | None:
        """Seconds until more silence means that the process hangs; None: it may be silent."""
        if self._silence is None or not self._numbers or self.gone:
            return None
        return max(0.0, self._heard + self._silence - time.monotonic())

    def lost(self, hangs: bool = False) -> EngineLostError:
        """See that the process ends, and say why it did. It may take seconds. ``hangs``: its time was over."""
        if hangs and not self.gone:
            self._process.abort()  # its stacks go to the log
            self._go("it did not answer any more")
        if self._why is not None:
            self._process.kill()
        self._process.end(END_SECONDS)
        return EngineLostError(f"the engine's process {self.pid} ended: {self._why or self._process.why()}")

    def stats(self) -> EngineStats:
        """As of the last step that came."""
        return self._stats

    def kill(self) -> None:
        """End the process at once, without what it has not written."""
        self._process.kill()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Have the process cancel its requests, keep what they computed, finish the store's writes and end; one that
        has not ended after ``seconds`` is killed. Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        self._channel.keep_unsent(None)
        if not self.gone:
            self._ask_to_end(seconds)
            self._go("it was closed")
        self._channel.close()

    def _ask_to_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        def waiting() -> None:
            if time.monotonic() > end:
                raise ChannelError("it does not read")

        try:
            self._channel.send(messages.CLOSE, messages.encode(seconds), waiting=waiting)
            # Read on: a process that cannot send what it has left would not come to its end.
            while (left := end - time.monotonic()) > 0 and self._channel.receive(left) is not None:
                pass
        except ChannelError as error:
            logger.warning("the engine's process: %s", error)
        code = self._process.end(max(0.0, end - time.monotonic()) + 1.0)
        if code != 0:
            why = self._process.why()
            logger.warning("the engine's process did not end in order within %g s: %s", seconds, why)

    def _receive(self, seconds: float) -> None:
        """Book what comes within that time. The end of the stream means that the process has ended or is ending."""
        try:
            frames = self._channel.receive(seconds)
            if frames is None:
                self._go(None)
                return
            if frames:
                self.book(frames)
        except (ChannelError, ValueError) as error:
            logger.error("the engine's process sent what is no message: %s", str(error)[:500])
            self._go("its messages are broken")

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
            for each in self._explained.pop(number, []):
                each(standing)
        elif frame.kind == messages.PROFILED:
            number, told, refusal = messages.decode_profiled(frame.text)
            tell = self._profiled.pop(number, None)
            if tell is not None:
                tell(told, refusal)
        else:
            raise ValueError(f"a message of kind {frame.kind!r} from a process that has loaded")

    def _forget(self, number: int) -> None:
        name = self._names.pop(number)
        del self._numbers[name]
        self._computed.pop(name, None)
        for each in self._explained.pop(number, []):
            each(None)
        if not self._numbers:
            self._last = None  # a prompt may be large

    def _tell(self, kind: bytes, text: bytes, blobs: Sequence[bytes | memoryview] = ()) -> None:
        with suppress(ChannelError):  # it has ended; what it sent before is still there to be read, up to its end
            self._channel.send(kind, text, blobs)

    def _go(self, why: str | None) -> None:
        """The process is of no more use; whoever waits for an answer of it has one now."""
        with self._asking:
            self.gone, self._why = True, why
            checks, self._checks = list(self._checks.values()), {}
        for answer in checks:
            answer.set_result(_restarting())
        profiled, self._profiled = self._profiled, {}
        for tell in profiled.values():
            tell(None, _restarting())
        explained, self._explained = self._explained, {}
        for answers in explained.values():
            for each in answers:
                each(None)


def _restarting() -> OverloadedError:
    return OverloadedError(
        "the engine has stopped and is being started again: send the request again", code="engine_restarting"
    )
