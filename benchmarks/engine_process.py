"""What it costs that the engine runs in a process of its own: one-way latency of a token and tokens a second.

The engine is the fake one, driven by the server's driver: on a thread of this process, and in a process of its own. For
each number of streams, paced (a step takes ``--step-ms``; latency) and unpaced (throughput): the seconds from a
request's end in the engine to its arrival on the event loop, and the tokens that the loop was given in a second. And
the way of a prompt of ``--prompt`` tokens there and of its first token back. Prints one JSON object.
Run on a quiet machine: python benchmarks/engine_process.py
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from longread.server.driver import EngineDriver
from longread.server.fake import FakeEngine
from longread.server.worker.child import attend
from longread.server.worker.engine import WorkerEngine
from longread.server.worker.supervise import Workers
from longread.spec.engine import Engine, Event, FinishEvent, GenerationRequest, SamplingParams
from longread.spec.state import HashedTokens, hash_pages

TOKENS = 20  # of an answer; the next one of the same stream follows at once


class PacedEngine(FakeEngine):
    """Each step takes ``seconds``."""

    def __init__(self, seconds: float, max_num_seqs: int, max_model_len: int):
        super().__init__(max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self._seconds = seconds

    def step(self) -> Sequence[Event]:
        time.sleep(self._seconds)
        return super().step()


def load(task: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    return PacedEngine(**task), {}


async def streams(driver: EngineDriver, count: int, seconds: float) -> tuple[list[float], float]:
    """Latencies of the ends, and tokens a second."""
    end, late, tokens = time.monotonic() + seconds, [], 0
    names = map(str, itertools.count())

    async def one(number: int) -> None:
        nonlocal tokens
        while time.monotonic() < end:
            sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
            subscription = driver.submit([GenerationRequest(next(names), (7, number + 3), sampling)])
            while events := await subscription.take():
                for event in events:
                    if isinstance(event, FinishEvent):
                        late.append(time.monotonic() - event.times.finished)
                        tokens += event.completion_tokens

    begun = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(count)))
    return late, tokens / (time.monotonic() - begun)


async def there_and_back(driver: EngineDriver, prompt: int, rounds: int) -> list[float]:
    """Seconds from submitting a long prompt to its end behind one token."""
    ids = tuple(range(3, 3 + prompt))
    data = array("i", ids).tobytes()
    hashed = HashedTokens(b"", data, hash_pages(b"", data), ids[0], ids[-1])
    seconds = []
    for number in range(rounds):
        begun = time.monotonic()
        subscription = driver.submit([GenerationRequest(f"p{number}", ids, SamplingParams(max_tokens=1), hashed)])
        while await subscription.take():
            pass
        seconds.append(time.monotonic() - begun)
    return seconds


def figures(late: Sequence[float]) -> dict[str, float]:
    ordered = sorted(late)
    return {
        "p50_ms": round(1000 * statistics.median(ordered), 4),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 4),
    }


async def measure(make: Callable[[dict[str, Any]], Engine | WorkerEngine], args: argparse.Namespace) -> dict[str, Any]:
    """All of one kind of engine."""
    found: dict[str, Any] = {}
    for count in args.streams:
        for name, pace in (("paced", args.step_ms / 1000), ("unpaced", 0.0)):
            task = {"seconds": pace, "max_num_seqs": count, "max_model_len": 4096}
            driver = EngineDriver(lambda task=task: make(task))
            driver.start()
            await driver.loaded()
            late, rate = await streams(driver, count, args.seconds)
            await driver.close()
            found[f"{count} streams, {name}"] = {**figures(late), "tokens_per_second": round(rate)}
    driver = EngineDriver(lambda: make({"seconds": 0.0, "max_num_seqs": 1, "max_model_len": args.prompt + 8}))
    driver.start()
    await driver.loaded()
    found[f"a prompt of {args.prompt} tokens, there and back"] = figures(
        await there_and_back(driver, min(args.prompt, driver.engine_info.vocab - 3), 5)
    )
    await driver.close()
    return found


def in_process(task: dict[str, Any]) -> WorkerEngine:
    return Workers((sys.executable, "-P", os.path.abspath(__file__)), task).make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--prompt", type=int, default=128 * 1024)
    args = parser.parse_args()
    made: dict[str, Callable[[dict[str, Any]], Engine | WorkerEngine]] = {
        "on a thread": lambda task: PacedEngine(**task),
        "in a process": in_process,
    }
    result = {name: asyncio.run(measure(make, args)) for name, make in made.items()}
    print(json.dumps({"machine": platform.machine(), "cores": os.cpu_count(), **result}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[-1].isdigit() and len(sys.argv) == 2:
        attend(int(sys.argv[1]), load)
    main()
