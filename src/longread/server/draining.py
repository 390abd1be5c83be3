"""Waiting at the end of a server, and saying so: what is waited for, how long at most, how to stop it now.

Knows: an event loop, a log. Must not know: requests, engines.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("longread.server")

TELL_SECONDS = 2.0  # between two lines of progress
QUIET_SECONDS = 0.5  # in which an engine ends that has nothing to write
LEAST_WRITING, MOST_WRITING = 5.0, 45.0
NOW = "a second signal (Ctrl-C again) stops at once"


def writing_seconds(drain_seconds: float) -> float:
    """How long an engine may take to end, and to write what is due to its store, behind ``drain_seconds`` for open
    requests: as long again, within bounds.
    """
    return min(MOST_WRITING, max(LEAST_WRITING, drain_seconds))


async def drained(pending: Callable[[], int], idle: asyncio.Event, seconds: float) -> None:
    """Wait until ``idle``, at most ``seconds``, for what ``pending`` counts."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    logger.info("stopping: %s may go on for %g s; %s", _requests(pending()), seconds, NOW)
    while not idle.is_set() and (left := end - loop.time()) > 0:
        try:
            await asyncio.wait_for(idle.wait(), min(left, TELL_SECONDS))
        except TimeoutError:
            if (left := end - loop.time()) > 0:
                logger.info("stopping: %s left, for %.0f s at most", _requests(pending()), left)
    if pending():
        logger.warning("%s did not end in time and are cut off", _requests(pending()))


async def ended(ending: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait until the engine has ended; ``ending`` takes ``seconds`` at most by itself."""
    loop = asyncio.get_running_loop()
    end, task = loop.time() + seconds, asyncio.ensure_future(ending)
    pause, how = QUIET_SECONDS, f"; {NOW}, what is not written is computed again another time"
    while not (await asyncio.wait({task}, timeout=pause))[0]:
        left = max(0.0, end - loop.time())
        logger.info("stopping: the engine writes what is due to its store, for %.0f s at most%s", left, how)
        pause, how = TELL_SECONDS, ""
    await task


def _requests(count: int) -> str:
    return f"{count} request{'s' if count != 1 else ''}"
