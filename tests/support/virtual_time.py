"""An event loop whose time passes only while there is nothing to do: waits take no time, and what a program measures is
exact on a machine of any speed.

Both sides of a connection must run on it. Threads are not waited for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
QUIET = 0.001  # real seconds without an event before time passes: what was written to a local socket has come by then


class _Selector(selectors.DefaultSelector):
    """Instead of waiting for ``timeout``, says that it has passed."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(0) or super().select(QUIET)
        if not found:
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """As ``asyncio.run``."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
