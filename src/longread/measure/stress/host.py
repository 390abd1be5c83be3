"""Where the server under test comes from: started here, or there already; and how it is found again after a kill.

Knows processes. Must not know what is measured. Kills what it started, or the process that the user named.
"""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from longread.measure.load.server import Look, look, only_model
from longread.measure.load.target import Target
from longread.measure.started import Launch, Readiness, Started, StartError, heaviest_child, wait_ready
from longread.measure.stress.subject import Subject
from longread.spec.errors import ConfigError


@dataclass(slots=True)
class Host:
    """``launch`` None: the server is there already, at the subject's address. ``pid``: of its process on this machine,
    where the user named it. ``model`` None: the one that it serves. ``log``: what started servers say.
    """

    subject: Subject
    launch: Launch | None
    pid: int | None
    model: str | None
    log: Path
    ready_seconds: float = 1800.0
    process: Started | None = None
    seen: Look | None = None

    async def begin(self, seconds: float | None = None) -> Readiness | None:
        """Make sure that a server is there; None where it was before. ``seconds``: at most, default: what is left.

        Raises StartError, and NoServerError where the server does not say what it serves.
        """
        if self.launch is None or (self.process is not None and self.process.alive()):
            if self.seen is None:
                self._meet(self.subject.target.base_url)
            return None
        self.process = Started(self.launch, self.log)
        self.subject.tell(f"starting: {self.launch.shown()}")
        control = self.subject.control
        found = None
        try:
            found = await self.process.wait_ready(
                seconds or min(self.ready_seconds, max(control.left, 1.0)),
                self.subject.target.headers,
                control.interrupted,
            )
        finally:
            if found is None:
                self.end()
        self.subject.memory.pid = self.process.pid
        self._meet(self.process.base_url)
        return found

    def _meet(self, base_url: str) -> None:
        """Read who serves there."""
        target: Target = replace(self.subject.target, base_url=base_url)
        self.seen = look(target)
        self.subject.target = replace(target, model=self.model or only_model(base_url, self.seen))
        length = self.seen.model_facts.get("max_model_len")
        self.subject.max_model_len = length if isinstance(length, int) and length > 0 else None

    def end(self) -> None:
        """Stop what was started here."""
        if self.process is not None:
            self.process.stop()
            self.process = None

    def kill(self, what: str) -> float | None:
        """SIGKILL to the server ("server"), to the process of its engine ("worker") or to the named one ("pid").
        Returns when, by ``time.monotonic``; None where there is no such process.
        """
        if what == "pid":
            os.kill(named(self.pid).pid, signal.SIGKILL)
            return time.monotonic()
        if self.process is None:
            return None
        if what == "server":
            now = time.monotonic()
            self.process.kill()
            return now
        worker = heaviest_child(self.process.pid)
        if worker is None:
            return None
        worker.send_signal(signal.SIGKILL)
        return time.monotonic()

    async def back(self, since: float, seconds: float) -> tuple[float, bool]:
        """(seconds from ``since`` until it answers again, whether it had to be started anew). A server that ended is
        started anew if it was started here. Raises StartError.
        """
        process, control = self.process, self.subject.control
        base_url = self.subject.target.base_url

        def gone() -> str | None:
            return None if process is None or process.alive() else "the server ended"

        try:
            found = await wait_ready(base_url, since, seconds, self.subject.target.headers, gone, control.interrupted)
        except StartError:
            if process is None or process.alive():
                raise
            process.orphans()
            self.process = None
            await self.begin(seconds)
            return time.monotonic() - since, True
        return found.answered or 0.0, False


def named(pid: int | None) -> psutil.Process:
    """The user's process. Raises ConfigError where there is none, or where it is this program or an ancestor of it."""
    if pid is None or not psutil.pid_exists(pid):
        raise ConfigError(f"--pid {pid}: there is no such process")
    own = psutil.Process()
    if pid in {1, own.pid, *(each.pid for each in own.parents())}:
        raise ConfigError(f"--pid {pid}: that is this program, or a process that it runs under; it is not killed")
    return psutil.Process(pid)
