"""When the engine's process looks for garbage in cycles: among old objects only at rest, or else very rarely.

Knows Python's collector and a clock; nothing of requests. Reference counts free nearly all that a step makes; the
collector is for cycles (tracebacks, closures). Its full pass visits every container that lives, the modules of torch
and the books of 10,000 requests among them: 50 to 200 ms in which no token comes. So what loading made is taken out of
its sight, young objects are looked at as ever (a pass of well under a millisecond), and full passes come when nobody
waits.
"""

import gc
import time
from collections.abc import Callable

YOUNG, MIDDLE = 5_000, 10  # objects made until a young pass; young passes until one of both young generations
NEVER = 2**30
REST_SECONDS = 10.0  # between full passes at rest: a client that asks at once after each answer meets few
BUSY_SECONDS = 900.0  # without any rest: cycles that grew old may not pile up for ever


class Collections:
    """``begin`` is called once when the engine is loaded, ``rest`` when nothing is to do, ``busy`` between steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, collect: Callable[[], int] = gc.collect):
        self._clock = clock
        self._collect = collect
        self._last = clock()

    def begin(self) -> None:
        """What lives now lives as long as the process: no pass looks at it again."""
        self._collect()
        gc.freeze()
        gc.set_threshold(YOUNG, MIDDLE, NEVER)
        self._last = self._clock()

    def rest(self) -> None:
        self._after(REST_SECONDS)

    def busy(self) -> None:
        self._after(BUSY_SECONDS)

    def _after(self, seconds: float) -> None:
        if self._clock() - self._last >= seconds:
            self._collect()
            self._last = self._clock()
