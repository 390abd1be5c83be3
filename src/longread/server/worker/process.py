"""The process that an engine runs in: how it is started, how it ends, and what its end means.

Knows processes. Must not know engines. It is a fresh interpreter, not a fork: the server has threads and open sockets.
It is in a session of its own, so that Ctrl-C at a terminal reaches the server only, which then ends it in order.
"""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Sequence

ABORT_SECONDS = 2.0  # for the stacks of all threads
WATCHDOG_STATUS = 1  # what faulthandler ends a process with
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "killed by SIGKILL: by hand, or by the system when it has no memory left",
    signal.SIGSEGV: "a segmentation fault; its stacks are in the log",
    signal.SIGABRT: "it aborted; its stacks are in the log",
}


class WorkerProcess:
    """``command`` started with the number of its end of the socket as the last argument. From any thread."""

    def __init__(self, command: Sequence[str], end: socket.socket):
        self._process = subprocess.Popen(
            [*command, str(end.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(end.fileno(),),
            start_new_session=True,
        )
        self._killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """At once; nothing happens to one that has ended."""
        self._killed = self._killed or self._process.poll() is None
        self._process.kill()

    def abort(self) -> None:
        """End one that hangs, with the stacks of its threads on stderr."""
        self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ABORT_SECONDS)

    def end(self, seconds: float) -> int:
        """Wait for its end, kill it after ``seconds``, and return its status."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def why(self) -> str:
        """What the status of one that has ended says, for a log."""
        status = self._process.returncode
        if status is None:
            return "it has not ended"
        if status < 0 and self._killed:
            return "the server killed it"
        if status < 0:
            return _SIGNALS.get(-status, f"killed by signal {-status}")
        if status == WATCHDOG_STATUS:
            return "a step took longer than --step-timeout allows; the stacks of its threads are in the log"
        return f"it ended with status {status}; the log above says why"
