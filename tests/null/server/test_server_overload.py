"""Five times more than the engine can read, for two minutes of a virtual clock, from clients that do as they are told.

The engine is its own policy over what steps cost; the server's admission and time decide what gets in.
"""

import heapq
import random
from dataclasses import dataclass, replace

import pytest

from longread.engine import policy
from longread.server.admission import Admission
from longread.server.commands import Watch
from longread.server.fake import FakeEngine
from longread.server.limits import Limits
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import FinishEvent, GenerationRequest, RequestTimes
from longread.spec.errors import AdmissionError

COST = StepCost(launch=5e-3, decode=1e-3, token=1e-3)
INFO = replace(FakeEngine(max_num_seqs=32).info, max_num_batched_tokens=256)
OVERLOAD, AFTER = 120.0, 60.0
OUTPUT = 20


@dataclass(slots=True)
class Running:
    request: GenerationRequest
    watch: Watch
    accepted: float
    first_token: float = 0.0
    produced: int = 0


@dataclass(slots=True)
class Seen:
    asked: int = 0
    refused: int = 0
    most_in_flight: int = 0
    most_queued: int = 0
    busy: float = 0.0  # seconds of the overload in which the engine worked
    read: int = 0  # prompt tokens of requests that ended in it


class Clock:
    """The engine and its clients. ``prompts``: lengths to draw from."""

    def __init__(self, limits: Limits, slo: Slo, rate: float, prompts: list[int], seed: int = 0):
        self.admission, self.rng, self.prompts = (
            Admission(limits, slo, clock=lambda: self.now),
            random.Random(seed),
            prompts,
        )
        self.now, self.turn, self.names = 0.0, 0, 0
        self.events: list[tuple[float, int, int]] = []  # (when, tie, prompt tokens): a client asks, or asks again
        self.running: list[Running] = []
        self.ended: list[Running] = []
        self.seen = Seen()
        at = 0.0
        while (at := at + self.rng.expovariate(rate)) < OVERLOAD:
            self._at(at, self.rng.choice(prompts))

    def _at(self, when: float, tokens: int) -> None:
        self.names += 1
        heapq.heappush(self.events, (when, self.names, tokens))

    def run(self) -> None:
        while self.events or self.running:
            while self.events and self.events[0][0] <= self.now:
                _, name, tokens = heapq.heappop(self.events)
                self._ask(str(name), tokens)
            if self.running:
                self._step()
            else:
                self.now = max(self.now, self.events[0][0])
            assert self.now < 100 * (OVERLOAD + AFTER), "it does not recover"

    def _ask(self, name: str, tokens: int) -> None:
        request, seen = GenerationRequest(name, (0,) * tokens), self.seen
        seen.asked += 1
        try:
            self.admission.admit([request], INFO, COST)
        except AdmissionError as error:
            seen.refused += 1
            assert error.retry_after is not None
            self._at(self.now + error.retry_after * self.rng.uniform(1.0, 1.2), tokens)
            return
        watch = Watch(name)
        self.admission.follow(name, watch)
        self.running.append(Running(request, watch, self.now))
        seen.most_in_flight = max(seen.most_in_flight, self.admission.in_flight)
        seen.most_queued = max(seen.most_queued, self.admission.queued_tokens)

    def _step(self) -> None:
        """The first in line have slots; decodes first, then prompts as the policy shares them."""
        active = self.running[: INFO.max_num_seqs]
        decodes = [each for each in active if each.first_token]
        prompts = [each for each in active if not each.first_token]
        lefts = [len(each.request.prompt) - each.watch.tokens for each in prompts]
        demands = [policy.Demand(left, left, each.watch.tokens) for left, each in zip(lefts, prompts, strict=True)]
        lengths = policy.split(INFO.max_num_batched_tokens - len(decodes), demands, self.turn)
        seconds = COST.seconds((len(decodes), 0), policy.chunks(demands, lengths))
        self.turn, self.now = self.turn + 1, self.now + seconds
        if self.now < OVERLOAD:
            self.seen.busy += seconds
        for each, length in zip(prompts, lengths, strict=True):
            each.watch.tokens += length
            if each.watch.tokens == len(each.request.prompt):
                each.first_token = self.now
                self.admission.first_token(each.request.request_id)
        for each in decodes:
            each.produced += 1
            if each.produced == OUTPUT:
                self._end(each)

    def _end(self, each: Running) -> None:
        times = RequestTimes(each.accepted, each.accepted, each.first_token, self.now)
        self.admission.ended(FinishEvent(each.request.request_id, "length", 1, OUTPUT, 0, times=times))
        self.running.remove(each)
        self.ended.append(each)
        if self.now < OVERLOAD:
            self.seen.read += len(each.request.prompt)


@pytest.mark.parametrize("prompts", [[1000], [200, 1000, 8000], [100] * 40 + [30_000]], ids=["same", "mixed", "books"])
def test_an_overload_of_five_keeps_its_targets_and_wastes_nothing(prompts: list[int]) -> None:
    ttft = 4.0
    capacity = 1 / (sum(prompts) / len(prompts) * COST.token + OUTPUT * COST.decode)
    clock = Clock(Limits(), Slo(ttft=ttft), 5 * capacity, prompts)
    clients = len(clock.events)
    clock.run()
    seen = clock.seen
    assert len(clock.ended) == clients, "somebody was never served"
    assert seen.refused > clients / 2, "this was no overload"
    assert (clock.admission.in_flight, clock.admission.queued_tokens) == (0, 0)
    assert seen.most_in_flight <= INFO.max_num_seqs + 1024
    assert seen.most_queued <= 3 * max(prompts) + ttft / COST.token
    assert seen.busy >= 0.9 * OVERLOAD, f"the engine worked for {seen.busy:.0f} of {OVERLOAD:.0f} s"
    short = []
    for each in clock.ended:
        own = len(each.request.prompt) * COST.token
        waited = each.first_token - each.accepted - own
        if len(each.request.prompt) == min(prompts):
            short.append(waited)
        # Whoever is shorter passes a long prompt, if with half of the steps, and a book waits for the one before it.
        assert waited <= 4 * (ttft + own), f"{len(each.request.prompt)} tokens waited {waited:.1f} s for others"
    assert sorted(short)[len(short) * 99 // 100] <= 1.3 * ttft  # what decodes meanwhile takes its part of the steps


def test_without_a_target_the_count_alone_keeps_the_queue_bounded() -> None:
    clock = Clock(Limits(max_num_queued_reqs=50), Slo(), 5 / (1000 * COST.token), [1000])
    clients = len(clock.events)
    clock.run()
    assert len(clock.ended) == clients
    assert clock.seen.most_in_flight == INFO.max_num_seqs + 50
    assert clock.seen.busy >= 0.9 * OVERLOAD
