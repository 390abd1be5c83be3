"""The line of throughput in the log: rates since the last one, and nothing where nothing happens."""

import asyncio

import pytest

from longread.server.stats_line import StatsLine, log_stats
from longread.spec.engine import EngineStats


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_of_the_time_since_the_last_line() -> None:
    clock = Clock()
    lines = StatsLine(clock)
    clock.now += 10
    assert lines.line(EngineStats(), 0) is None
    clock.now += 10
    stats = EngineStats(
        num_requests_running=2,
        num_requests_waiting=1,
        kv_cache_usage_perc=0.125,
        prefix_cache_queries=2000,
        prefix_cache_hits=500,
        prompt_tokens=2000,
        generation_tokens=55,
    )
    assert lines.line(stats, 1300) == (
        "Avg prompt throughput: 200.0 tokens/s, Avg generation throughput: 5.5 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, Prompt tokens to read: 1300, KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    clock.now += 5
    told = lines.line(stats, 0)  # it runs, but nothing came
    assert told is not None and "generation throughput: 0.0" in told and "hit rate" not in told
    rest = EngineStats(prompt_tokens=2000, generation_tokens=65, prefix_cache_queries=2000, prefix_cache_hits=500)
    told = lines.line(rest, 0)
    assert told is not None and "Running: 0" in told
    assert lines.line(rest, 0) is None


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    clock = Clock()
    lines = StatsLine(clock)
    clock.now += 10
    lines.line(EngineStats(prompt_tokens=5000, generation_tokens=900), 0)
    clock.now += 10
    told = lines.line(EngineStats(prompt_tokens=100, generation_tokens=20), 0)
    assert told is not None and "prompt throughput: 10.0" in told and "generation throughput: 2.0" in told


@pytest.mark.anyio
async def test_it_goes_to_the_log_while_there_is_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reads = [None, (EngineStats(), 0), (EngineStats(generation_tokens=3), 0)]
    read = asyncio.Event()

    def next_one() -> tuple[EngineStats, int] | None:
        if not reads:
            read.set()
            return None
        return reads.pop(0)

    task = asyncio.create_task(log_stats(next_one, 0.001))
    await asyncio.wait_for(read.wait(), 5)
    task.cancel()
    assert len(caplog.messages) == 1 and "generation throughput" in caplog.messages[0]
