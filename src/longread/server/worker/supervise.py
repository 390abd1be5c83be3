"""Starts engine processes, one after another: the ``make`` of a driver whose engine may die.

Knows the handshake: what to load goes there, an engine's info or the reason why there is none comes back. Must not know
what is loaded.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from longread.server.worker import messages
from longread.server.worker.engine import WorkerEngine
from longread.server.worker.frames import Channel, ChannelError, pair
from longread.server.worker.process import WorkerProcess
from longread.spec.engine import EngineInfo
from longread.spec.errors import CheckpointError, ConfigError, EngineFailedError, EngineLostError

DEFAULT_STEP_TIMEOUT = 120.0  # seconds; the steps that are planned take a hundredth of it
END_SECONDS = 5.0


class LoadInterruptedError(ConfigError):
    """The server was stopped while the model loaded."""


class Workers:
    """``command``: the program of the process, which calls ``child.attend`` with its last argument. ``task`` is what it
    is told to load, as JSON. ``step_timeout``: seconds after which a step means that the process hangs; 0: never.
    """

    def __init__(
        self, command: Sequence[str], task: Mapping[str, object], *, step_timeout: float = DEFAULT_STEP_TIMEOUT
    ):
        self._command = tuple(command)
        self._setup = messages.encode({"step_timeout": step_timeout, "task": task})
        self._step_timeout = step_timeout
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._stopped = False
        self._first: EngineInfo | None = None

    def make(self) -> WorkerEngine:
        """Start a process and wait until its engine is there, however long it loads. Raises what loading raised
        (ConfigError, CheckpointError), EngineLostError where the process ended instead, LoadInterruptedError after
        ``stop``, and ConfigError where the engine is another than the first one was.
        """
        here, there = pair()
        with there, self._lock:
            if self._stopped:
                here.close()
                raise LoadInterruptedError("stopped before the model was loaded")
            self._process = process = WorkerProcess(self._command, there)
        channel = Channel(here, messages.FROM_PROCESS, 0)
        with ExitStack() as undo:
            undo.callback(channel.close)
            undo.callback(process.end, END_SECONDS)
            undo.callback(process.kill)
            engine = self._loaded(process, channel)
            undo.pop_all()
            return engine

    def stop(self) -> None:
        """End a load, and load nothing any more; an engine that is there is not touched. From any thread."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()

    def _loaded(self, process: WorkerProcess, channel: Channel) -> WorkerEngine:
        try:
            channel.send(messages.SETUP, self._setup)
            frames = channel.receive()
            while frames == []:
                frames = channel.receive()
            if frames and frames[0].kind == messages.FAILED:
                kind, message = messages.decode_failed(frames[0].text)
                raise {"config": ConfigError, "checkpoint": CheckpointError, "other": EngineFailedError}[kind](message)
            if frames and frames[0].kind == messages.LOADED:
                loaded = messages.decode_loaded(frames[0].text)
                self._check_same(loaded[0])
                with self._lock:
                    self._process = None  # from here on the engine's
                engine = WorkerEngine(process, channel, loaded, self._step_timeout)
                engine.book(frames[1:])
                return engine
        except (ChannelError, ValueError) as error:
            raise EngineLostError(f"the engine's process sent what is no message while it loaded: {error}") from error
        process.end(END_SECONDS)
        if self._stopped:
            raise LoadInterruptedError("stopped while the model was loading")
        raise EngineLostError(f"the engine's process ended while it loaded the model: {process.why()}")

    def _check_same(self, info: EngineInfo) -> None:
        """What was promised to clients and what their prompts were hashed for must hold for each engine."""
        first = self._first = self._first or info
        measured = replace(
            info,
            allocated_bytes=first.allocated_bytes,
            step_target=first.step_target,
            step_reason=first.step_reason,
        )
        if measured != first:
            raise ConfigError("the checkpoint or the machine has changed since the server was started: start it again")
