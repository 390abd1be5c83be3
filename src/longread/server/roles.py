"""What the driver expects of others: of an engine in a process of its own, and of whoever counts.

Protocols only.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from longread.spec.engine import EngineInfo, EngineStats, Event, FinishEvent, GenerationRequest, Standing
from longread.spec.errors import EngineLostError


@runtime_checkable
class ProcessEngine(Protocol):
    """An engine in a process of its own. Nothing waits, but ``lost`` and ``close``; from any thread: ``validate`` and
    ``kill``.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def gone(self) -> bool:
        """Nothing more will come."""
        ...

    def validate(self, request: GenerationRequest) -> None:
        """As ``Engine.validate``; with a grammar it waits for the process."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """As ``Engine.submit``."""
        ...

    def cancel(self, request_id: str) -> None:
        """As ``Engine.cancel``."""
        ...

    def computed_tokens(self, request_id: str) -> int:
        """As ``Engine.computed_tokens``, as of the last step that came; from the second call on."""
        ...

    def explain(self, request_id: str, answer: Callable[[Standing | None], None]) -> None:
        """Have ``answer`` told, on any thread, where a request stands; None once it has ended."""
        ...

    def stats(self) -> EngineStats:
        """As of the last step that came."""
        ...

    def fileno(self) -> int:
        """Readable when something has come."""
        ...

    def keep_unsent(self, later: Callable[[], None] | None) -> None:
        """Keep what the process has no room for, and call ``later``, on any thread, to have ``flush`` called."""
        ...

    def flush(self) -> bool:
        """Send of what was kept what there is room for; True: nothing is left."""
        ...

    def read(self) -> Sequence[Event]:
        """The events that came, maybe none."""
        ...

    def patience(self) -> float | None:
        """Seconds until more silence means that it hangs; None: it may be silent."""
        ...

    def lost(self, hangs: bool = False) -> EngineLostError:
        """See that the process of an engine that is gone, or hangs, ends; and why it did. It waits."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def close(self, seconds: float) -> None:
        """End it in order within that time, or at all. It waits."""
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
