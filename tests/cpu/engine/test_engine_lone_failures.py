"""What breaks for one request ends that one: the others' tokens are the same bits as without it, and the books balance.

Logits that are not finite, exceptions and failed allocations in a step, a pool without pages; alone and many times.
"""

import logging
import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor
from toy_model import MLA_GROUPS, RING_GROUPS, VOCAB, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.models.inputs import StepInputs
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent

GROUPS = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["pages", "rings"])
BAD = VOCAB - 1  # never drawn into a prompt below


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(2, BAD) for _ in range(length))


def asking(name: str, tokens: Sequence[int], output: int = 12, **sampling: object) -> GenerationRequest:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=3, **sampling)
    return GenerationRequest(name, tuple(tokens), params)


def run(engine: LocalEngine, *requests: GenerationRequest) -> dict[str, tuple[list[TokenEvent], FinishEvent]]:
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    ends: dict[str, FinishEvent] = {}
    for _ in range(5000):
        if not engine.has_work():
            break
        for event in engine.step():
            assert event.request_id not in ends, "an event behind the end"
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event)
            else:
                ends[event.request_id] = event
    assert not engine.has_work(), "the engine does not come to rest"
    assert engine.stats().pages_held == 0
    engine._core.cache.check()
    assert sorted(ends) == sorted(tokens)
    return {name: (tokens[name], ends[name]) for name in tokens}


def told(events: Sequence[TokenEvent]) -> list[tuple]:
    """Ids and log-probabilities, without the times."""
    return [(event.token_id, event.logprob, event.top) for event in events]


class Poisoned(ToyModel):
    """Rows of a sequence that begins with BAD are NaN, from its ``after``-th token on."""

    def __init__(self, groups: tuple, after: int = 0, value: float = float("nan")):
        super().__init__(groups)
        self.after, self.value = after, value

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(inputs, state)
        ends = {segment.offset + segment.length - 1: segment for segment in inputs.segments}
        for i, row in enumerate(inputs.logit_rows.tolist()):
            first = ends[row].pages[0]
            if state["latent"][0, first, 0, 0] == BAD and ends[row].end > self.after:
                logits[i] = self.value
        return logits


@GROUPS
@pytest.mark.parametrize("after", [0, 304])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_request_alone(groups: tuple, after: int, value: float) -> None:
    """In the prompt's last step or in the middle of the answer, beside decodes and prompts."""
    others = [asking("a", prompt(300, 1)), asking("b", prompt(700, 2)), asking("c", prompt(5, 3), 30)]
    bad = asking("bad", (BAD, *prompt(299, 4)))
    alone = run(toy_engine(groups), *others)
    found = run(toy_engine(groups, model=Poisoned(groups, after, value)), bad, *others)
    assert found["bad"][1].reason == "failed"
    assert "not finite" in (found["bad"][1].error or "")
    assert len(found["bad"][0]) == max(after - 299, 0)
    for other in others:
        assert found[other.request_id][1].reason == "length"
        assert told(found[other.request_id][0]) == told(alone[other.request_id][0])


@GROUPS
def test_a_step_that_breaks_ends_only_who_breaks_it(groups: tuple, caplog: pytest.LogCaptureFixture) -> None:
    others = [asking("a", prompt(300, 1)), asking("b", prompt(900, 2)), asking("c", prompt(5, 3), 40)]
    bad = asking("bad", (*prompt(400, 4), BAD, *prompt(100, 5)))
    alone = run(toy_engine(groups), *others)
    with caplog.at_level(logging.CRITICAL):
        engine = toy_engine(groups, model=ToyModel(groups, fail_on=BAD))
        found = run(engine, *others[:2], bad, others[2])
    assert found["bad"][1].reason == "failed"
    assert "told to fail" in (found["bad"][1].error or "")
    for other in others:
        assert found[other.request_id][1].reason == "length"
        assert told(found[other.request_id][0]) == told(alone[other.request_id][0])
    again = run(engine, asking("again", prompt(900, 2)))["again"]
    assert told(again[0]) == told(alone["b"][0])


class Crowded(ToyModel):
    """A step of more than ``limit`` sequences has no memory."""

    def __init__(self, groups: tuple, limit: int):
        super().__init__(groups)
        self.limit = limit
        self.failures = 0

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(inputs, state)  # what it left is to be of no consequence
        if len(inputs.segments) > self.limit:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory")
        return logits


@GROUPS
def test_a_failed_allocation_costs_time_and_no_request(groups: tuple, caplog: pytest.LogCaptureFixture) -> None:
    """Steps together never fit: everything is computed alone in the end, each time a step further."""
    requests = [asking(str(i), prompt(200 * i + 3, i), 10) for i in range(4)]
    alone = run(toy_engine(groups), *requests)
    model = Crowded(groups, 1)
    with caplog.at_level(logging.CRITICAL):
        found = run(toy_engine(groups, model=model), *requests)
    assert model.failures > 3
    for name, (events, end) in found.items():
        assert end.reason == "length"
        assert told(events) == told(alone[name][0])


class Unlucky(ToyModel):
    """Any step may break, by the throw of a die."""

    def __init__(self, groups: tuple, rng: random.Random):
        super().__init__(groups)
        self.rng = rng

    def forward(self, inputs: StepInputs, state: Mapping[str, Tensor]) -> Tensor:
        logits = super().forward(inputs, state)
        if self.rng.random() < 0.15:
            raise RuntimeError("no luck")
        return logits


@GROUPS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_breaks_when_the_books_balance_and_no_token_is_wrong(
    groups: tuple, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Few pages and slots, cancels at any time: preemption, waiting, prefill and decode all meet broken steps."""
    rng = random.Random(seed)
    requests = [
        GenerationRequest(
            str(i),
            prompt(rng.choice((4, 200, 600)), rng.randrange(5)),
            SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 30), ignore_eos=True),
            priority=rng.choice((0, 0, 1, 100)),
            owner=rng.choice("ab"),
        )
        for i in range(24)
    ]
    right = run(toy_engine(groups, num_pages=64, max_num_seqs=24), *requests)
    engine = toy_engine(groups, num_pages=7, max_num_seqs=3, model=Unlucky(groups, rng))
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    waiting = list(requests)
    with caplog.at_level(logging.CRITICAL):
        for _ in range(5000):
            if waiting and rng.random() < 0.5:
                engine.submit(waiting.pop())
            if rng.random() < 0.02:
                engine.cancel(str(rng.randrange(24)))
            if not engine.has_work() and not waiting:
                break
            for event in engine.step():
                assert event.request_id not in ends
                if isinstance(event, FinishEvent):
                    ends[event.request_id] = event.reason
                else:
                    tokens.setdefault(event.request_id, []).append(event.token_id)
    assert len(ends) == len(requests)
    assert engine.stats().pages_held == 0
    engine._core.cache.check()
    assert {"length"} <= set(ends.values()) <= {"length", "failed", "cancelled"}
    for name, found in tokens.items():
        expected = [event.token_id for event in right[name][0]]
        assert found == expected[: len(found)]
        assert len(found) == len(expected) or ends[name] != "length"


def test_who_is_alone_and_cannot_start_keeps_nobody_waiting_for_ever() -> None:
    """An open session takes the pages that a suspect gave back."""
    engine = toy_engine(MLA_GROUPS, num_pages=4, max_num_seqs=3, model=Crowded(MLA_GROUPS, 1))
    engine.submit(asking("a", prompt(300, 1), 3))
    engine.submit(asking("b", prompt(300, 2), 3))
    engine.step()  # breaks
    session = engine.session()
    session.sync(prompt(600, 3))
    ends: dict[str, str] = {}
    for _ in range(200):
        ends |= {event.request_id: event.reason for event in engine.step() if isinstance(event, FinishEvent)}
    session.close()
    assert set(ends) == {"a", "b"} or engine.has_work()
    while engine.has_work():
        ends |= {event.request_id: event.reason for event in engine.step() if isinstance(event, FinishEvent)}
    assert sorted(ends) == ["a", "b"]
    engine._core.cache.check()
