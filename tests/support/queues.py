"""Queues as servers for the load searches: M/D/1, whose waiting times are known exactly, without any waiting.

Knows Outcome. Nothing here sleeps: arrivals and ends are computed (Lindley's recursion).
"""

import math
import random
from collections.abc import Iterator

from longread.measure.load.outcome import Outcome


def md1_within(rate: float, service: float, wait: float) -> float:
    """P(waiting time <= ``wait``) of M/D/1 (A. K. Erlang 1909), seconds; 0 at and above capacity."""
    load = rate * service
    if load >= 1:
        return 0.0
    total = 0.0
    for k in range(int(wait / service) + 1):
        x = rate * (k * service - wait)
        total += (x**k) / math.factorial(k) * math.exp(-x)
    return (1 - load) * total


def limit(service: float, wait: float, share: float) -> float:
    """The rate at which exactly ``share`` of requests wait at most ``wait`` seconds."""
    low, high = 0.0, 1 / service
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if md1_within(middle, service, wait) >= share else (low, middle)
    return low


def waits(rate: float, count: int, service: float, seed: int) -> Iterator[tuple[float, float]]:
    """(time of arrival, seconds waited) of ``count`` requests at Poisson times to an idle server that takes
    ``service`` seconds for each.
    """
    rng, at, free = random.Random(seed), 0.0, 0.0
    for _ in range(count):
        begin = max(at, free)
        free = begin + service
        yield at, begin - at
        at += rng.expovariate(rate)


def md1(rate: float, count: int, service: float, seed: int) -> list[Outcome]:
    """The same as outcomes."""
    return [answered(i, at, wait, service) for i, (at, wait) in enumerate(waits(rate, count, service, seed))]


def answered(index: int, sent: float, wait: float, service: float, tokens: int = 2) -> Outcome:
    """One that waits, then has its first token at once and its last at the end of its service."""
    outcome = Outcome(f"q-{index}", "queue", index, status="ok", sent=sent, due=sent)
    outcome.chunk_times.extend([sent + wait, sent + wait + service])
    outcome.last = outcome.ended = sent + wait + service
    outcome.output_tokens, outcome.prompt_tokens, outcome.cached_tokens = tokens, 8, 0
    return outcome
