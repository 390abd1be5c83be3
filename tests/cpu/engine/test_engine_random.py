"""1,000 random requests against a small pool: batching, preemption, prefix hits and eviction never change an output."""

import gc
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from toy_model import MLA_GROUPS, RING_GROUPS, VOCAB, toy_engine

from longread.engine.engine import LocalEngine
from longread.spec.config import Slo
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import StateGroup


@dataclass
class Seen:
    tokens: list[int] = field(default_factory=list)
    ends: list[FinishEvent] = field(default_factory=list)


def make_requests(count: int, seed: int) -> list[GenerationRequest]:
    """Prompts that share documents, end anywhere around page ends, and are sampled in every way."""
    draw = random.Random(seed)
    documents = [[draw.randrange(2, VOCAB) for _ in range(900)] for _ in range(5)]
    requests = []
    for number in range(count):
        cut = draw.choice([0, 1, 3, 200, 250, 255, 256, 257, 300, 505, 511, 512, 513, 600, 766, 840])
        prompt = draw.choice(documents)[:cut] + [draw.randrange(2, VOCAB) for _ in range(draw.choice([0, 0, 1, 5, 40]))]
        sampling = SamplingParams(
            temperature=draw.choice([0.0, 0.0, 1.0, 3.0]),
            top_k=draw.choice([0, 0, 5]),
            top_p=draw.choice([1.0, 1.0, 0.9]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.0, 1.0, 1.3]),
            frequency_penalty=draw.choice([0.0, 0.0, 0.0, 0.5]),
            seed=draw.randrange(1000),
            max_tokens=draw.choice([1, 2, 8, 8, 20, 40]) if draw.random() < 0.97 else 300,
            stop_token_ids=tuple(draw.sample(range(2, VOCAB), 2)) if draw.random() < 0.3 else (),
            ignore_eos=draw.random() < 0.5,
            min_tokens=draw.choice([0, 0, 1]),
        )
        priority, owner = draw.choice([0, 0, 0, 1, 100]), draw.choice(["", "a", "b"])
        requests.append(GenerationRequest(f"r{number}", tuple(prompt or [7]), sampling, priority=priority, owner=owner))
    return requests


def drain(engine: LocalEngine, seen: dict[str, Seen], audit: bool = True) -> None:
    for event in engine.step():
        if isinstance(event, TokenEvent):
            assert not seen[event.request_id].ends, "a token behind the end"
            seen[event.request_id].tokens.append(event.token_id)
        else:
            seen[event.request_id].ends.append(event)
    if audit:
        engine._core.cache.check()


def alone(groups: tuple[StateGroup, ...], request: GenerationRequest) -> Seen:
    """The same request in a fresh engine that has room for everything and does it in one piece."""
    engine = toy_engine(groups, num_pages=8, max_num_seqs=1, max_num_batched_tokens=2048, max_model_len=2048)
    seen: dict[str, Seen] = defaultdict(Seen)
    engine.submit(request)
    while engine.has_work():
        drain(engine, seen, audit=False)
    return seen[request.request_id]


def live_objects(seen: dict[str, Seen]) -> int:
    """Objects that Python tracks, without the test's own record of events."""
    gc.collect()
    return len(gc.get_objects()) - sum(4 + 2 * len(s.ends) for s in seen.values())


@pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "ring"])
def test_thousand_requests_each_end_once_as_if_alone(groups: tuple[StateGroup, ...]) -> None:
    draw = random.Random(3)
    requests = make_requests(500, seed=len(groups))
    # The target makes chunks as long as the machine happens to be fast.
    slo = Slo(tpot=0.004)
    engine = toy_engine(groups, num_pages=9, max_num_seqs=5, max_num_batched_tokens=160, max_model_len=1300, slo=slo)
    seen: dict[str, Seen] = defaultdict(Seen)
    cancelled: set[str] = set()
    waiting = list(requests)
    objects: list[int] = []
    while waiting or engine.has_work():
        for _ in range(draw.choice([0, 1, 1, 4])):
            if waiting:
                engine.submit(waiting.pop(0))
        if draw.random() < 0.06 and engine._requests:
            victim = draw.choice(list(engine._requests))
            engine.cancel(victim)
            cancelled.add(victim)
        if draw.random() < 0.03:
            engine._core.scheduler.preempt_latest()  # as a session that needs room does; the pool's own need is rarer
        drain(engine, seen)
        if len(waiting) == 300 and not objects:
            objects.append(live_objects(seen))
    objects.append(live_objects(seen))
    for request in requests:
        mine = seen[request.request_id]
        assert len(mine.ends) == 1
        expected = alone(groups, request)
        if request.request_id in cancelled:
            assert mine.ends[0].reason == "cancelled"
            assert mine.tokens == expected.tokens[: len(mine.tokens)]
        else:
            assert mine.tokens == expected.tokens
            assert (mine.ends[0].reason, mine.ends[0].stop_token) == (
                expected.ends[0].reason,
                expected.ends[0].stop_token,
            )
            assert mine.ends[0].completion_tokens == expected.ends[0].completion_tokens
    stats = engine.stats()
    assert stats.num_preemptions > 5, "the pool was never short: the test proves nothing"
    assert stats.prefix_cache_hits > 10_000
    assert stats.pages_held == 0
    assert objects[-1] < objects[0] * 1.2 + 2000
