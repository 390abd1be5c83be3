"""An engine in this process, driven request by request: what its steps took, and where each token's state came from.

For the benchmarks of one GPU (hopper_engine.py, hopper_tiers.py).
"""

import random
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from longread.engine.engine import LocalEngine
from longread.spec.engine import FirstToken, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import HashedTokens, hash_pages

VOCAB = 102400  # V2's, the smallest of the public models'


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, VOCAB), k=length))


class Driver:
    """An engine with its requests' events; every step's seconds and every token's moment are kept."""

    def __init__(self, engine: LocalEngine):
        self.engine = engine
        self.count = 0
        self.steps: list[float] = []
        self.cold: dict[int, float] = {}  # first tokens of prompts of which nothing was cached, by their length
        self.said: dict[str, list[int]] = {}

    def submit(self, ids: Sequence[int], tokens: int, **sampled: Any) -> str:
        """As the server does it: page identities are made beside the tokens, before the engine's clock starts."""
        self.count += 1
        prompt, root = tuple(ids), self.engine.info.cache_root
        start = time.perf_counter()
        data = array("i", prompt).tobytes()
        hashed = HashedTokens(root, data, hash_pages(root, data), min(prompt), max(prompt))
        self.hash_s = time.perf_counter() - start
        sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | sampled))
        self.engine.submit(GenerationRequest(f"r{self.count}", prompt, sampling, hashed))
        return f"r{self.count}"

    def run(self, until: Callable[[dict[str, list[float]]], bool] | None = None) -> dict[str, list[float]]:
        """Step until nothing is left (or ``until`` says so); the moments of each request's tokens."""
        moments: dict[str, list[float]] = {}
        self.firsts: dict[str, FirstToken] = {}
        self.said = {}
        while self.engine.has_work():
            start = time.perf_counter()
            events = self.engine.step()
            now = time.perf_counter()
            if events or now - start > 1e-3:
                self.steps.append(now - start)
            for event in events:
                if isinstance(event, TokenEvent):
                    moments.setdefault(event.request_id, []).append(now)
                    self.said.setdefault(event.request_id, []).append(event.token_id)
                    if event.first:
                        self.firsts[event.request_id] = event.first
            if until is not None and until(moments):
                break
        return moments

    def ttft(self, ids: Sequence[int], tokens: int = 1) -> dict[str, Any]:
        """One request: seconds to its first token, parts, reuse and the seconds of its steps."""
        self.steps = []
        name = self.submit(ids, tokens)
        self.run()
        first = self.firsts[name]
        times, reuse = first.times, first.reuse
        if times.prefill_tokens == len(ids):
            self.cold[len(ids)] = times.first_token - times.arrived
        return {
            "tokens": len(ids),
            "ttft_s": times.first_token - times.arrived,
            "hash_s": self.hash_s,
            "parts_s": times.parts(),
            "computed": times.prefill_tokens,
            "reused": None if reuse is None else [reuse.device_tokens, reuse.host_tokens, reuse.disk_tokens],
            "steps_s": [round(step, 5) for step in self.steps],
        }
