"""A second question about a text that was read: from whatever tier, less than a page of the text is computed again,
wherever page ends fall, and the answer is that of an engine that has read nothing.
"""

import random

import pytest
from memory_disk import MemoryDisk
from toy_model import RING_GROUPS, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.plan.resolve import SNAPSHOTS_PER_SEQ
from longread.spec.engine import FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.state import PAGE_TOKENS

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
DRAW = random.Random(3)
TEXT = [DRAW.randrange(2, 90) for _ in range(2100)]


def ask(engine: LocalEngine, tokens: list[int], name: str) -> tuple[list[int], FinishEvent]:
    engine.submit(GenerationRequest(name, tuple(tokens), GREEDY))
    out: list[int] = []
    end: FinishEvent | None = None
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                out.append(event.token_id)
            else:
                end = event
    assert end is not None and end.reason == "length"
    return out, end


def question(length: int, mark: int) -> list[int]:
    """Of ``length`` tokens; the first tells questions apart, so that they share the text and no more."""
    return [90 + mark, *TEXT[: length - 1]]


@pytest.mark.parametrize("first, second", [(1, 300), (40, 40), (258, 1), (300, 300)])
@pytest.mark.parametrize("shared", [256, 700, 1023, 1024, 1025, 1279, 1990])
def test_another_question_computes_less_than_a_page_of_the_text(shared: int, first: int, second: int) -> None:
    text, options = TEXT[:shared], {"num_pages": 40, "num_snapshots": 12}
    one = toy_engine(disk=MemoryDisk(), **options)
    ask(one, text + question(first, 1), "first")
    assert one.flush(10)
    disk = MemoryDisk(records=dict(one._tiers.disk.records))
    warm, end = ask(one, text + question(second, 2), "second")
    assert shared - end.cached_tokens < PAGE_TOKENS and end.reuse.device_tokens == end.cached_tokens
    one.close()
    two = toy_engine(disk=disk, **options)
    restarted, again = ask(two, text + question(second, 2), "second")
    assert again.cached_tokens == end.cached_tokens == again.reuse.disk_tokens
    two.close()
    cold, _ = ask(toy_engine(model=ToyModel(RING_GROUPS), **options), text + question(second, 2), "cold")
    assert warm == restarted == cold


def test_a_question_that_came_at_the_same_time_waits_for_the_text() -> None:
    """It lands where the first one still had to go."""
    engine = toy_engine(num_pages=40, num_snapshots=12, max_num_batched_tokens=256)
    engine.submit(GenerationRequest("first", tuple(TEXT[:1500] + question(300, 1)), GREEDY))
    engine.submit(GenerationRequest("second", tuple(TEXT[:1500] + question(40, 2)), GREEDY))
    ends = {}
    while engine.has_work():
        ends |= {event.request_id: event for event in engine.step() if isinstance(event, FinishEvent)}
    assert ends["second"].cached_tokens == 1500 // PAGE_TOKENS * PAGE_TOKENS


def test_as_many_snapshots_as_a_sequence_is_given_hold_all_its_landing_points() -> None:
    """With one sequence's share alone, a first question and its answer keep what the next question lands on."""
    engine = toy_engine(num_pages=40, num_snapshots=SNAPSHOTS_PER_SEQ, interval=32768)
    ask(engine, TEXT[:1279] + question(300, 1), "first")
    _, end = ask(engine, TEXT[:1279] + question(300, 2), "second")
    assert end.cached_tokens == 1024
