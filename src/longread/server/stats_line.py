"""What the engine does, in a line each ten seconds while there is traffic, as vLLM logs it.

Knows: EngineStats, a clock. Must not know: requests, HTTP.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from longread.spec.engine import EngineStats

logger = logging.getLogger("longread.server")

SECONDS = 10.0


class StatsLine:
    """Rates since the last ``line``. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._at = clock()
        self._last = EngineStats()

    def line(self, stats: EngineStats, queued_tokens: int) -> str | None:
        """None where nothing was done and nothing is to be done; ``queued_tokens``: of prompts, still to be read."""
        now, last = self._clock(), self._last
        if stats.generation_tokens < last.generation_tokens or stats.prompt_tokens < last.prompt_tokens:
            last = EngineStats()  # the engine was started again and counts from 0
        seconds = max(now - self._at, 1e-3)
        self._at, self._last = now, stats
        prompt, output = stats.prompt_tokens - last.prompt_tokens, stats.generation_tokens - last.generation_tokens
        busy = stats.num_requests_running or stats.num_requests_waiting
        if not (prompt or output or busy):
            return None
        parts = [
            f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {output / seconds:.1f} tokens/s",
            f"Running: {stats.num_requests_running} reqs",
            f"Waiting: {stats.num_requests_waiting} reqs",
            f"Prompt tokens to read: {queued_tokens}",
            f"KV cache usage: {100 * stats.kv_cache_usage_perc:.1f}%",
        ]
        looked_up = stats.prefix_cache_queries - last.prefix_cache_queries
        if looked_up > 0:
            hits = stats.prefix_cache_hits - last.prefix_cache_hits
            parts.append(f"Prefix cache hit rate: {100 * hits / looked_up:.1f}%")
        return ", ".join(parts)


async def log_stats(read: Callable[[], tuple[EngineStats, int] | None], seconds: float = SECONDS) -> None:
    """For ever. ``read``: the engine's stats and the prompt tokens that wait; None: there is no engine now."""
    lines = StatsLine()
    while True:
        await asyncio.sleep(seconds)
        found = read()
        told = None if found is None else lines.line(*found)
        if told is not None:
            logger.info("%s", told)
