"""A second question about a text that was read: from whatever tier, less than a page of the text is computed again,
wherever page ends fall, and the answer is that of an engine that has read nothing. For that no step is cut: what is
inside a step can be landed on like what is at its end.
"""

import random
from functools import cache

import pytest
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, ToyModel, toy_engine

from longread.engine.engine import LocalEngine
from longread.kv.policy import landing_points
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


@cache
def cold(rings: bool, tokens: tuple[int, ...]) -> list[int]:
    """The answer of an engine that has read nothing, a page a step."""
    groups = RING_GROUPS if rings else MLA_GROUPS
    return ask(toy_engine(groups, num_pages=40, max_num_batched_tokens=256), list(tokens), "cold")[0]


def run(engine: LocalEngine) -> dict[str, tuple[list[int], FinishEvent]]:
    """All there is to do; the cache is audited behind each step."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, tuple[list[int], FinishEvent]] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens.setdefault(event.request_id, []).append(event.token_id)
            else:
                ends[event.request_id] = tokens.get(event.request_id, []), event
        engine._cache.check()
    return ends


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
    assert warm == restarted == cold(True, tuple(text + question(second, 2)))


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


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize("length", [2, 255, 256, 257, 300, 512, 513, 1100, 2048])
def test_a_prompt_takes_one_step_and_can_be_landed_on_at_each_of_its_points(length: int, rings: bool) -> None:
    groups = RING_GROUPS if rings else MLA_GROUPS
    model = ToyModel(groups)
    engine = toy_engine(groups, num_pages=40, num_snapshots=40, max_num_batched_tokens=2048, interval=400, model=model)
    engine.submit(GenerationRequest("first", tuple(TEXT[:length]), GREEDY))
    assert isinstance(engine.step()[0], TokenEvent) and model.tokens_run == length
    engine.cancel("first")
    run(engine)
    points = landing_points(length, 0, length, 400, rings)
    assert len(points) >= (rings and length >= 1100) * 6
    for point in reversed(points):  # the deepest first, since each leaves its own landing points behind
        asked = [*TEXT[:point], 95, 96]
        out, end = ask(engine, asked, f"behind {point}")
        assert end.cached_tokens == point and out == cold(rings, tuple(asked))
    engine._cache.check()


@pytest.mark.parametrize("budget", [150, 700, 2048])
def test_prompts_that_are_read_together_are_landed_on_each(budget: int) -> None:
    """With points inside a step and at its end, in all of them."""
    engine = toy_engine(num_pages=80, num_snapshots=120, max_num_batched_tokens=budget, interval=300)
    prompts = {str(n): [90 + n, *TEXT[: 599 + n * 41]] for n in range(3)}
    for name, prompt in prompts.items():
        engine.submit(GenerationRequest(name, tuple(prompt), GREEDY))
    for name, (out, _) in run(engine).items():
        assert out == cold(True, tuple(prompts[name]))
    for name, prompt in prompts.items():
        for point in landing_points(len(prompt), 0, len(prompt), 300, rings=True)[::-1]:
            asked = [*prompt[:point], 95, 96]
            out, end = ask(engine, asked, f"{name} behind {point}")
            assert end.cached_tokens == point and out == cold(True, tuple(asked))


def test_a_step_that_breaks_gives_its_snapshot_rows_back() -> None:
    """Beside one whose text is read again alone, and then landed on."""
    model = ToyModel(RING_GROUPS, fail_on=96)
    engine = toy_engine(num_pages=40, num_snapshots=8, max_num_batched_tokens=2048, model=model)
    good, bad = tuple(TEXT[:700]), (*TEXT[700:1400], 96)
    engine.submit(GenerationRequest("good", good, GREEDY))
    engine.submit(GenerationRequest("bad", bad, GREEDY))
    ends = run(engine)
    assert ends["bad"][1].reason == "failed" and ends["good"][0] == cold(True, good)
    assert engine._cache.match([*bad, 95]).cached_tokens == 0, "nothing of a broken step is served"
    assert engine.stats().snapshots_held == 4  # the good one's three points and its end
    asked = (*TEXT[:512], 95)
    out, end = ask(engine, list(asked), "again")
    assert end.cached_tokens == 512 and out == cold(True, asked)


def test_without_enough_snapshot_rows_the_deepest_points_stay() -> None:
    for rows in (1, 2, 3, 4, 5):
        engine = toy_engine(num_pages=40, num_snapshots=rows, max_num_batched_tokens=2048)
        out, _ = ask(engine, TEXT[:1500], "first")
        assert out == cold(True, tuple(TEXT[:1500]))
        kept = [1503, 1499, 1280, 1024, 768][:rows]  # the end of the turn and what is before it
        assert sorted(entry.end for entry in engine._cache.snapshots.owners.values()) == kept[::-1]
        engine._cache.check()


def test_a_session_takes_whole_steps_too() -> None:
    model = ToyModel(RING_GROUPS)
    engine = toy_engine(num_pages=40, num_snapshots=12, max_num_batched_tokens=2048, model=model)
    steps: list[int] = []
    forward = model.forward
    model.forward = lambda inputs, state: steps.append(len(inputs.token_ids)) or forward(inputs, state)  # type: ignore
    with engine.session() as session:
        assert session.sync(TEXT[:1500]) == 1500 and steps == [1500]
        assert session.sync(TEXT[:2000]) == 500 and steps == [1500, 500]
    for point in (1999, 1792, 1499, 1280, 768):
        with engine.session() as session:
            assert session.sync([*TEXT[:point], 95]) == 1
            assert engine._cache.match([*TEXT[:point], 95]).cached_tokens == point
    engine._cache.check()
