"""What the driver expects of others: of an engine in a process of its own, and of whoever counts.

Protocols only.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from longread.spec.engine import FinishEvent


@runtime_checkable
class ProcessEngine(Protocol):
    """What an engine in a process of its own offers besides ``Engine``; from any thread."""

    def wake(self) -> None:
        """Let ``step``, which waits for events, return: there are commands."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Observer(Protocol):
    """Told on the loop thread, for metrics."""

    def gaps(self, seconds: Sequence[float]) -> None:
        """Output tokens came, so many seconds after the ones before them; first tokens are not among them."""
        ...

    def finish(self, event: FinishEvent, reason: str) -> None:
        """A request ended; ``reason`` is the event's, or "stop" where a stop string ended it, or the name of the limit
        for which the server gave it up.
        """
        ...

    def accepted(self, count: int) -> None:
        """So many requests were accepted; each ends once."""
        ...

    def rejected(self, count: int, reason: str) -> None:
        """So many requests were refused, since there was no room."""
        ...

    def slow_reader(self, reason: str) -> None:
        """An answer was cut off because its client did not read: for too much "time", or too much in the "buffer"."""
        ...

    def lost(self) -> None:
        """The engine died; it will be made again."""
        ...
