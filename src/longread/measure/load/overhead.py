"""What the client itself costs: how late its event loop wakes, how late it sends, its share of the CPU.

Knows the process's own clocks. Must not know servers or requests.
"""

import asyncio
import time
from collections.abc import Iterable

from longread.measure.intervals import percentile
from longread.measure.load.outcome import Outcome, Overhead, Spread

TICK = 0.01  # seconds between looks at the loop


def spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return Spread(len(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1])


class Watch:
    """Looks at the running loop every 10 ms until it is stopped. A timer is rounded up to the next millisecond by the
    system's poll, so a lag of up to 1 ms is no load.
    """

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._begun, self._cpu = time.perf_counter(), time.process_time()
        self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            self._lags.append(max(time.perf_counter() - before - TICK, 0.0))

    async def stop(self, outcomes: Iterable[Outcome]) -> Overhead:
        """The figures since it began; ``outcomes``: of the requests that were sent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        wall, cpu = time.perf_counter() - self._begun, time.process_time() - self._cpu
        sent = [each for each in outcomes if each.new_connection is not None or each.first_byte is not None]
        return Overhead(
            loop_lag=spread(self._lags),
            lateness=spread(each.lateness for each in sent),
            cpu_share=cpu / wall if wall > 0 else None,
            new_connections=sum(each.new_connection is True for each in sent),
        )
