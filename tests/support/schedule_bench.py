"""A schedule over a cache without contents: computing is committing. And prompts for it."""

import random
from collections.abc import Sequence

from longread.engine.scheduler import Schedule, Scheduler
from longread.engine.sequence import Timeline
from longread.kv.cache import KVCache
from longread.spec.config import Slo
from longread.spec.engine import Standing
from longread.spec.state import StateGroup

ROWS = StateGroup("latent", "rows", (0,), 1)
RING = StateGroup("window", "ring", (0,), 1, ring_rows=4)


class NoContent:
    """A StateStore for tests that look at bookkeeping only."""

    def reset_slot(self, slot: int) -> None: ...
    def copy_page(self, source: int, target: int) -> None: ...
    def save_snapshot(self, slot: int, snapshot: int) -> None: ...
    def load_snapshot(self, snapshot: int, slot: int) -> None: ...
    def copy_slot(self, source: int, target: int) -> None: ...
    def taken(self, pages: Sequence[int]) -> None: ...


class Bench:
    """A scheduler whose granted tokens are committed at once; finished prompts then decode ``output`` tokens."""

    def __init__(
        self,
        pages: int = 64,
        seqs: int = 8,
        budget: int = 64,
        rings: bool = False,
        caching: bool = True,
        slo: Slo | None = None,
    ):
        groups = (ROWS, RING) if rings else (ROWS,)
        self.now = 0.0  # counts steps
        self.cache = KVCache(groups, b"root", pages, seqs, 8, NoContent(), caching)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            snapshot_interval=4096,
            slo=slo,
            clock=lambda: self.now,
        )
        self.budget = budget
        self.outputs: dict[str, int] = {}
        self.done: list[str] = []
        self.failed: list[str] = []
        self.live: dict[str, Timeline] = {}

    def add(self, key: str, tokens: list[int], output: int = 4, priority: int = 0, owner: str = "") -> Timeline:
        timeline = Timeline(key, tokens)
        self.live[key] = timeline
        self.outputs[key] = output
        self.scheduler.add(timeline, priority, owner)
        return timeline

    def waiting(self, key: str) -> Standing:
        """Why it waits."""
        return self.scheduler.explain(self.live[key], waited=0.0)

    def step(self) -> Schedule:
        self.now += 1
        plan = self.scheduler.schedule()
        assert sum(g.length for g in plan.grants) <= self.budget
        assert len({g.timeline.key for g in plan.grants}) == len(plan.grants)
        for timeline, _ in plan.failed:
            self.failed.append(timeline.key)
            del self.live[timeline.key]
        for grant in plan.grants:
            timeline = grant.timeline
            assert grant.length > 0
            timeline.advance(self.cache, grant.length)
            if timeline.remaining == 0:
                timeline.tokens.append(len(timeline.tokens) % 50)
                if len(timeline.tokens) - timeline.prompt_length >= self.outputs[timeline.key]:
                    self.done.append(timeline.key)
                    self.scheduler.remove(timeline, keep_tail=True)
                    del self.live[timeline.key]
        self.cache.check()
        self.scheduler.check()
        return plan

    def run(self, limit: int = 10_000) -> int:
        steps = 0
        while self.live:
            self.step()
            steps += 1
            assert steps < limit, f"still alive after {limit} steps: {sorted(self.live)}"
        return steps


def numbers(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50) for _ in range(count)]
