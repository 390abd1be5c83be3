"""An engine in a process of its own, on the event loop: read as soon as something comes, told at once.

Knows: an event loop, the engine's file. Must not know: requests, what the events mean. No thread stands between the
process and the loop: waking one, and its fight for the interpreter's lock, costs more than reading what came.
"""

import asyncio
from collections.abc import Callable, Sequence

from longread.server.roles import ProcessEngine
from longread.spec.engine import Event

LEAST_TIMER = 0.01  # seconds: a timer may ring a little early


class Attached:
    """From now until ``detach``, ``engine`` belongs to the running loop. ``on_events`` gets what comes, also nothing
    but new stats; ``on_gone`` is called once, when nothing more will come: ``hangs`` where the process is silent for
    too long.
    """

    def __init__(
        self,
        engine: ProcessEngine,
        on_events: Callable[[Sequence[Event]], None],
        on_gone: Callable[[bool], None],
    ):
        self.engine = engine
        self._on_events = on_events
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._file = engine.fileno()
        self._timer: asyncio.TimerHandle | None = None
        self._detached = False
        self._loop.add_reader(self._file, self._read)
        engine.keep_unsent(self._write_later)

    def expect(self) -> None:
        """Something was submitted: from now on the process may not be silent for ever."""
        if self._timer is None and not self._detached:
            seconds = self.engine.patience()
            if seconds is not None:
                self._timer = self._loop.call_later(max(seconds, LEAST_TIMER), self._look)

    def detach(self) -> None:
        """The loop has nothing to do with it any more. Again: nothing."""
        if self._detached:
            return
        self._detached = True
        self._loop.remove_reader(self._file)
        self._loop.remove_writer(self._file)
        if self._timer is not None:
            self._timer.cancel()

    def _read(self) -> None:
        self._on_events(self.engine.read())
        if self.engine.gone:
            self._end(hangs=False)

    def _look(self) -> None:
        """What came meanwhile has been read: a loop looks at files before it looks at timers."""
        self._timer = None
        if self.engine.patience() == 0:
            self._end(hangs=True)
        else:
            self.expect()

    def _end(self, hangs: bool) -> None:
        self.detach()
        self._on_gone(hangs)

    def _write_later(self) -> None:
        """On whatever thread."""
        self._loop.call_soon_threadsafe(self._watch_writing)

    def _watch_writing(self) -> None:
        if not self._detached:
            self._loop.add_writer(self._file, self._write)

    def _write(self) -> None:
        if self.engine.flush():
            self._loop.remove_writer(self._file)
