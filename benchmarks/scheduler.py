"""What one decision of the schedule costs: 1,000 running and 10,000 waiting requests, no model. Aim: at most 2 ms.

    python benchmarks/scheduler.py --output results/scheduler.json

Cases: everybody decodes while the slots are full; a server in motion, where four requests end in each step and others
take their places and read their prompts, in one class and in three; every running one reads a prompt, of 40 owners and
of an owner each; slots are free and pages are not.
With and without a latency target, since a target makes the schedule size its step. Only ``schedule()`` is timed; adding
and removing requests is timed apart. Python's garbage collector is set as it is in the engine's process; a full pass,
which should not come, is counted apart.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longread.engine.scheduler import Schedule, Scheduler
from longread.engine.sequence import Timeline
from longread.engine.virtual import ROOT, NoContent, groups, hashed
from longread.kv.cache import KVCache
from longread.measure.result import this_commit, this_machine
from longread.server.worker.collecting import Collections
from longread.spec.config import Slo
from longread.spec.cost import StepCost

AIM_MS = 2.0
TARGETS = {"no target": None, "tpot=50ms": Slo(tpot=0.05)}
COST = StepCost(launch=0.012, decode=1e-5, context=1e-9, chunk=1e-4, token=2e-5, pair=5e-11)
PROMPT, PAGES_EACH = 1000, 8
OWNERS = 40


@dataclass
class Bench:
    """A schedule over books without content; ``spent``: seconds by what was called."""

    running: int
    waiting: int
    slo: Slo | None
    pages: int
    budget: int = 8192
    priorities: tuple[int, ...] = (0,)
    owners: int = OWNERS
    spent: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = KVCache(groups(True), ROOT, self.pages, self.running, 256, NoContent())
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=self.running,
            max_num_batched_tokens=max(self.budget, self.running),
            snapshot_interval=32768,
            slo=self.slo,
        )
        self.scheduler.cost = COST
        self.made = 0
        self.live: dict[str, Timeline] = {}

    def timed(self, what: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.spent.setdefault(what, []).append(time.perf_counter() - started)

    def add(self, tokens: int = PROMPT) -> None:
        self.made += 1
        prompt, known = hashed([(self.made, tokens)])
        timeline = Timeline(f"r{self.made}", prompt, known)
        self.live[timeline.key] = timeline
        priority = self.priorities[self.made % len(self.priorities)]
        self.timed("add", lambda: self.scheduler.add(timeline, priority, f"owner {self.made % self.owners}"))

    def end(self, timeline: Timeline) -> None:
        self.timed("remove", lambda: self.scheduler.remove(timeline, False))
        del self.live[timeline.key]

    def decide(self, what: str = "schedule") -> Schedule:
        started, worked = time.perf_counter(), time.thread_time()
        plan = self.scheduler.schedule()
        ended = time.thread_time()
        self.spent.setdefault(what, []).append(time.perf_counter() - started)
        self.spent.setdefault(f"{what}, processor", []).append(ended - worked)
        for grant in plan.grants:
            grant.timeline.advance(self.cache, grant.length)
            if not grant.timeline.remaining:
                grant.timeline.tokens.append(2**30)
        return plan

    def fill(self) -> None:
        """Until as many run as may."""
        while self.scheduler.num_running < self.running:
            before = self.scheduler.num_running
            self.decide("filling")
            if self.scheduler.num_running == before and not self.scheduler.num_waiting:
                sys.exit(f"only {before} of {self.running} run")

    def settle(self) -> None:
        """Until nobody reads a prompt."""
        while any(each.lease is not None and each.remaining > 1 for each in self.live.values()):
            self.decide("filling")


def decoding(bench: Bench, steps: int) -> None:
    for _ in range(bench.running):
        bench.add()
    bench.fill()
    bench.settle()
    for _ in range(bench.waiting):
        bench.add()
    for _ in range(steps):
        bench.decide()


def moving(bench: Bench, steps: int, ends: int = 4) -> None:
    for _ in range(bench.running + bench.waiting):
        bench.add()
    bench.fill()
    bench.settle()
    for _ in range(steps):
        running = [each for each in bench.live.values() if each.lease is not None]
        for timeline in running[:ends]:
            bench.end(timeline)
            bench.add()
        bench.decide()


def classes(bench: Bench, steps: int) -> None:
    """As ``moving``, of all classes: the higher ones push the lower ones out until each class has what it can have."""
    bench.priorities = (0, 0, 0, 10, 100)
    moving(bench, steps)


def reading(bench: Bench, steps: int) -> None:
    for _ in range(bench.running):
        bench.add(10 * PROMPT)
    for _ in range(bench.waiting):
        bench.add()
    bench.fill()
    for _ in range(steps):
        bench.decide()


def apart(bench: Bench, steps: int) -> None:
    """As ``reading``, with as many owners as requests: the schedule shares a step among owners first."""
    bench.owners = bench.running + bench.waiting
    reading(bench, steps)


def lacking(bench: Bench, steps: int) -> None:
    """Half of the slots are taken, and the pages that are free are kept for those who run."""
    half = bench.running // 2
    for _ in range(half):
        bench.add()
    while bench.scheduler.num_running < half:
        bench.decide("filling")
    bench.settle()
    for _ in range(bench.waiting):
        bench.add()
    for _ in range(steps):
        bench.decide()


CASES: dict[str, tuple[Callable[[Bench, int], None], Callable[[int, int], int]]] = {
    "all decode, slots full": (decoding, lambda running, waiting: running * PAGES_EACH),
    "in motion": (moving, lambda running, waiting: running * PAGES_EACH),
    "in motion, three classes": (classes, lambda running, waiting: running * PAGES_EACH),
    "all read, slots full": (reading, lambda running, waiting: running * 50),
    "all read, an owner each": (apart, lambda running, waiting: running * 50),
    "slots free, pages lacking": (lacking, lambda running, waiting: running // 2 * 5),
}


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{p}": ordered[min(len(ordered) * p // 100, len(ordered) - 1)] for p in (50, 90, 99)}
    found = {"mean": sum(ordered) / len(ordered), **at, "max": ordered[-1]}
    return {"count": len(ordered), **{name: round(1e3 * value, 4) for name, value in found.items()}}


@contextmanager
def full_collections() -> Iterator[list[float]]:
    """Seconds of each full pass of the garbage collector meanwhile."""
    pauses: list[float] = []
    begun = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        elif info["generation"] == 2:
            pauses.append(time.perf_counter() - begun)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def measure(name: str, target: str, running: int, waiting: int, steps: int) -> dict[str, object]:
    case, pages = CASES[name]
    bench = Bench(running, waiting, TARGETS[target], pages(running, waiting))
    Collections().begin()
    with full_collections() as pauses:
        case(bench, steps)
    bench.cache.check()
    bench.scheduler.check()
    figures = {what: spread(values) for what, values in bench.spent.items() if not what.startswith("filling")}
    figures |= {"full collection": spread(pauses)} if pauses else {}
    return {
        "case": name,
        "target": target,
        "running": bench.scheduler.num_running,
        "waiting": bench.scheduler.num_waiting,
        "preemptions": bench.scheduler.preemptions,
        "ms": figures,
        "within_aim": figures["schedule"]["p50"] <= AIM_MS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=1000)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=200, help="decisions timed in each case (%(default)s)")
    parser.add_argument("--case", choices=tuple(CASES), help="only this one")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for name in [args.case] if args.case else CASES:
        for target in TARGETS:
            row = measure(name, target, args.running, args.waiting, args.steps)
            rows.append(row)
            told = ", ".join(
                f"{what} p50 {ms['p50']:.3f} p99 {ms['p99']:.3f} max {ms['max']:.3f} ms"
                for what, ms in row["ms"].items()  # type: ignore[attr-defined]
            )
            beside = f"{row['running']} running, {row['waiting']} waiting"
            print(f"{name}, {target} ({beside}): {told}", flush=True)
    if args.output:
        report = {
            "benchmark": "one decision of the schedule",
            "commit": this_commit(),
            "command": " ".join(["python", *sys.argv]),
            "machine": asdict(this_machine(("longread",))),
            "load_average": os.getloadavg(),
            "aim_ms": AIM_MS,
            "rows": rows,
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
