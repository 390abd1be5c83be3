"""Steps of decoding rows that are launched before the last one is booked: the order, and that nothing else changes.

The toy's launches are done at once, so that a launched step has written its rows and rings when the books, a cancel, a
session or an error find it.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_disk import MemoryDisk
from toy_model import MLA_GROUPS, RING_GROUPS, VOCAB, ToyModel, toy_engine

from longread.engine.device_runner import Decoding, DeviceRunner
from longread.engine.device_sampler import Choosing
from longread.engine.engine import LocalEngine
from longread.engine.sequence import Timeline
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import Event, FinishEvent, GenerationRequest, SamplingParams, TokenEvent
from longread.spec.errors import RequestError

GROUPS = pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["pages", "rings"])


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(2, VOCAB) for _ in range(length))


def asking(name: str, ids: Sequence[int], tokens: int = 12, **sampling: Any) -> GenerationRequest:
    given = {"temperature": 0.0, "ignore_eos": True} | sampling
    return GenerationRequest(name, tuple(ids), SamplingParams(max_tokens=tokens, **given))


@dataclass
class Seen:
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[str, FinishEvent] = field(default_factory=dict)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.request_id not in self.ends, "an event behind the end"
            if isinstance(event, TokenEvent):
                self.tokens[event.request_id].append(event.token_id)
            else:
                self.ends[event.request_id] = event


def run(engine: LocalEngine, seen: Seen | None = None) -> Seen:
    seen = seen or Seen()
    for _ in range(5000):
        if not engine.has_work():
            break
        seen.take(engine.step())
        if engine._ahead is None:
            engine._cache.check()
    assert not engine.has_work(), "the engine does not come to rest"
    assert engine.stats().pages_held == 0
    engine._cache.check()
    engine._scheduler.check()
    return seen


def answer(groups: tuple, request: GenerationRequest) -> list[int]:
    engine = toy_engine(groups, max_num_batched_tokens=2048, device=True)
    engine.submit(request)
    return run(engine).tokens[request.request_id]


def until_ahead(engine: LocalEngine, seen: Seen, rows: int) -> None:
    """Step until a step of so many rows is launched that is not booked."""
    for _ in range(100):
        seen.take(engine.step())
        if engine._ahead is not None and len(engine._ahead.grants) == rows:
            return
    raise AssertionError("no step is launched ahead")


def launched(engine: LocalEngine) -> list[tuple[int, int]]:
    model: Any = engine._core.runner._model
    return model.rows_at


@GROUPS
def test_answers_are_the_plain_runners(groups: tuple) -> None:
    requests = [asking(str(i), prompt(n, i), 40) for i, n in enumerate((1, 250, 256, 700, 513, 250))]
    plain, device = toy_engine(groups), toy_engine(groups, device=True)
    for request in requests:
        plain.submit(request)
        device.submit(request)
    expected, found = run(plain), run(device)
    assert found.tokens == expected.tokens
    assert {end.reason for end in found.ends.values()} == {"length"}
    steps = [len(tokens) - 1 for tokens in found.tokens.values()]  # the first token is the prompt's
    assert len(launched(device)) - sum(steps) in (0, 1)  # and that one prompt has one token only


@GROUPS
def test_the_next_step_is_launched_before_the_last_is_booked(groups: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen, order = toy_engine(groups, device=True), Seen(), []
    plain_launch, plain_advance = DeviceRunner.go_on, Timeline.advance

    def launch(self: DeviceRunner, before: Decoding, token_ids: Sequence[int], rows: Any) -> Decoding:
        order.append("launch")
        for grant, token in zip(engine._scheduler._rows.grants, token_ids, strict=True):
            assert grant.timeline.tokens[-1] == token  # no row runs ahead of its token
        return plain_launch(self, before, token_ids, rows)

    def advance(self: Timeline, *given: Any) -> None:
        order.append("book")
        plain_advance(self, *given)

    for i in range(2):
        engine.submit(asking(str(i), prompt(20, i), 30))
    until_ahead(engine, seen, 2)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceRunner, "go_on", launch)
        patched.setattr(Timeline, "advance", advance)
        for _ in range(5):
            before = [len(seen.tokens[name]) for name in "01"]
            seen.take(engine.step())
            assert [len(seen.tokens[name]) for name in "01"] == [count + 1 for count in before]
    assert order == ["launch", "book", "book"] * 5
    run(engine, seen)
    assert seen.tokens == {str(i): answer(groups, asking(str(i), prompt(20, i), 30)) for i in range(2)}


@GROUPS
@pytest.mark.parametrize("way", ["length", "eos", "stop"])
def test_who_ended_is_not_in_the_next_step(groups: tuple, way: str) -> None:
    whole = answer(groups, asking("x", prompt(30, 1), 20))
    end = whole.index(whole[9])  # the first place of that token
    request = {
        "length": asking("x", prompt(30, 1), end),
        "stop": asking("x", prompt(30, 1), 20, stop_token_ids=(whole[end],)),
        "eos": asking("x", prompt(30, 1), 20, ignore_eos=False),
    }[way]
    engine, seen = toy_engine(groups, device=True), Seen()
    if way == "eos":
        object.__setattr__(engine._info, "eos_id", whole[end])
    engine.submit(request)
    engine.submit(asking("y", prompt(40, 2), 60))
    run(engine, seen)
    assert seen.tokens["x"] == whole[:end]
    assert seen.tokens["y"] == answer(groups, asking("y", prompt(40, 2), 60))
    assert seen.ends["x"].reason == ("length" if way == "length" else "stop")
    assert len(launched(engine)) == end - (way == "length") + 59  # each row gave a token, or the end


@GROUPS
@pytest.mark.parametrize("rows", [1, 3])
def test_cancelled_while_its_step_is_computed(groups: tuple, rows: int) -> None:
    """No token of it comes behind that; its tail is kept, whole, for whoever goes on from there; others go on."""
    engine, seen = toy_engine(groups, device=True), Seen()
    for i in range(rows):
        engine.submit(asking(str(i), prompt(300 + i, i), 60))
    until_ahead(engine, seen, rows)
    for _ in range(7):
        seen.take(engine.step())
    assert engine._ahead is not None
    had = list(seen.tokens["0"])
    engine.cancel("0")
    assert engine._ahead is None and engine.explain("0") is None
    engine._cache.check()
    seen.take(engine.step())
    assert seen.ends["0"].reason == "cancelled" and seen.ends["0"].completion_tokens == len(had)
    assert seen.tokens["0"] == had
    more = asking("more", (*prompt(300, 0), *had, 5, 6))
    engine.submit(more)
    run(engine, seen)
    assert seen.tokens["more"] == answer(groups, more)
    assert seen.ends["more"].cached_tokens == 300 + len(had)
    for i in range(1, rows):
        assert seen.tokens[str(i)] == answer(groups, asking(str(i), prompt(300 + i, i), 60))


@GROUPS
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_launched_step_that_breaks(groups: tuple, rows: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: a step of one ends it, as ever, others are tried again alone. What was booked before it stays."""
    engine, seen, left = toy_engine(groups, device=True), Seen(), [4]
    plain_rows, plain_result = engine._core.runner._model.rows, Choosing.result  # type: ignore[union-attr]

    def breaks(*given: Any) -> Any:
        left[0] -= 1
        out = (plain_rows if where == "launch" else plain_result)(*given)
        if left[0] == 0:
            raise RuntimeError("on purpose")
        return out

    for i in range(rows):
        engine.submit(asking(str(i), prompt(20 + i, i), 30))
    until_ahead(engine, seen, rows)
    target = (engine._core.runner._model, "rows") if where == "launch" else (Choosing, "result")
    monkeypatch.setattr(*target, breaks)  # type: ignore[call-overload]
    run(engine, seen)
    wanted = {str(i): answer(groups, asking(str(i), prompt(20 + i, i), 30)) for i in range(rows)}
    if rows == 1:
        assert seen.ends["0"].reason == "failed" and "on purpose" in (seen.ends["0"].error or "")
        assert 4 <= len(seen.tokens["0"]) < 30 and seen.tokens["0"] == wanted["0"][: len(seen.tokens["0"])]
    else:
        assert {end.reason for end in seen.ends.values()} == {"length"}
        assert seen.tokens == wanted


@GROUPS
def test_a_token_that_breaks_its_step_ends_its_request_alone(groups: tuple) -> None:
    whole = answer(groups, asking("x", prompt(30, 1), 20))
    bad = next(token for token in whole[4:] if token not in prompt(31, 2))
    seen, others = Seen(), answer(groups, asking("y", prompt(31, 2), 3))
    assert bad not in others
    engine = toy_engine(groups, model=ToyModel(groups, fail_on=bad), device=True)
    engine.submit(asking("x", prompt(30, 1), 20))
    engine.submit(asking("y", prompt(31, 2), 3))
    run(engine, seen)
    assert seen.ends["x"].reason == "failed" and seen.ends["y"].reason == "length"
    assert seen.tokens == {"x": whole[: whole.index(bad) + 1], "y": others}


@GROUPS
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["launch", "book", "result"])
def test_interrupted(groups: tuple, error: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = toy_engine(groups, device=True, disk=MemoryDisk()), Seen()
    engine.submit(asking("0", prompt(400, 0), 60))
    engine.submit(asking("1", prompt(300, 1), 60))
    until_ahead(engine, seen, 2)

    def interrupt(*given: object) -> None:
        raise error

    target = {"launch": (DeviceRunner, "go_on"), "book": (Timeline, "advance"), "result": (Choosing, "result")}[where]
    with monkeypatch.context() as patched, pytest.raises(error):
        patched.setattr(*target, interrupt)
        engine.step()
    assert engine._ahead is None
    run(engine, seen)
    assert {end.reason for end in seen.ends.values()} == {"cancelled"}
    again = asking("again", (*prompt(400, 0), *seen.tokens["0"], 3))
    engine.submit(again)
    assert run(engine, seen).tokens["again"] == answer(groups, again)
    engine.close()


@GROUPS
@pytest.mark.parametrize("room", [16, 6])
def test_a_session_in_between(groups: tuple, room: int) -> None:
    """It takes a slot and pages, in a small pool of requests whose step is launched."""
    engine, seen = toy_engine(groups, num_pages=room, max_num_seqs=2, device=True), Seen()
    expected = toy_engine(groups).session()
    expected.sync(prompt(500, 9))
    with engine.session() as session:
        for i in range(2):
            engine.submit(asking(str(i), prompt(300 + i, i), 40))
        until_ahead(engine, seen, 2)
        session.sync(prompt(500, 9))
        assert engine._ahead is None
        assert torch.equal(session.logits, expected.logits)
        for _ in range(3):
            assert session.step(SamplingParams(temperature=0.0)) == expected.step(SamplingParams(temperature=0.0))
            seen.take(engine.step())
    run(engine, seen)
    assert seen.tokens == {str(i): answer(groups, asking(str(i), prompt(300 + i, i), 40)) for i in range(2)}


@GROUPS
def test_closed_in_between(groups: tuple) -> None:
    engine, seen = toy_engine(groups, device=True, disk=MemoryDisk()), Seen()
    engine.submit(asking("0", prompt(300, 0), 40))
    until_ahead(engine, seen, 1)
    engine.close()
    assert engine._ahead is None and not engine.has_work()
    engine._cache.check()


@GROUPS
def test_full_slots_and_a_queue_do_not_stop_it(groups: tuple) -> None:
    """Nobody can come, so nothing is to be decided; a higher class can."""
    engine, seen = toy_engine(groups, max_num_seqs=2, device=True), Seen()
    for i in range(3):
        engine.submit(GenerationRequest(str(i), prompt(20, i), asking("", (1,), 40).sampling, priority=1))
    until_ahead(engine, seen, 2)
    assert engine.stats().num_requests_waiting == 1
    engine.submit(asking("now", prompt(20, 7), 4))
    seen.take([*engine.step(), *engine.step()])
    assert "now" in seen.tokens
    run(engine, seen)
    assert {end.reason for end in seen.ends.values()} == {"length"}


@GROUPS
def test_who_waits_for_pages_does_not_stop_it_and_comes_when_there_are(groups: tuple) -> None:
    """Slots are free, and the books say that nothing was given back since: nothing is to be decided. A request that
    fits comes at once.
    """
    engine, seen = toy_engine(groups, num_pages=7, max_num_batched_tokens=2048, device=True), Seen()
    engine.submit(asking("runs", prompt(300, 0), 60))
    until_ahead(engine, seen, 1)
    large = asking("waits", prompt(1400, 1), 10)
    engine.submit(large)
    seen.take(engine.step())  # booked: the next one is looked at by a schedule
    seen.take(engine.step())
    standing = engine.explain("waits")
    assert standing is not None and standing.reason == "pages"
    for _ in range(20):
        seen.take(engine.step())
        assert engine._ahead is not None and engine.stats().num_requests_waiting == 1
    engine.submit(asking("fits", prompt(20, 2), 3))
    seen.take([*engine.step(), *engine.step()])
    assert "fits" in seen.tokens and "runs" not in seen.ends
    run(engine, seen)
    assert {end.reason for end in seen.ends.values()} == {"length"}
    assert seen.tokens["waits"] == answer(groups, large)


def test_slices_keep_to_a_promised_tpot() -> None:
    scheduler = toy_engine(slo=Slo(tpot=0.03))._scheduler
    assert scheduler.slice_seconds(0.04) == 0.03
    scheduler.cost = StepCost(launch=0.01)
    assert scheduler.slice_seconds(0.04) == pytest.approx(0.02)
    scheduler.cost = StepCost(launch=0.05)
    assert scheduler.slice_seconds(0.04) == 0.0
    assert toy_engine()._scheduler.slice_seconds(0.04) == 0.04


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 2.0, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.2},
    {"logprobs": 1},
    {"ignore_eos": False},
    {"min_tokens": 3, "stop_token_ids": tuple(range(40))},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": ((7, 5.0), (8, -100.0))},
)


@given(
    st.integers(0, 2**32),
    st.sampled_from([MLA_GROUPS, RING_GROUPS]),
    st.sampled_from([6, 9, 16]),
    st.sampled_from([(512, None), (2048, None), (2048, Slo(tpot=1e-6)), (7, None)]),
)
def test_whatever_happens_in_between_each_answers_as_alone(
    seed: int, groups: tuple, pages: int, steps: tuple[int, Slo | None]
) -> None:
    """Requests come and are cancelled, sessions take room, steps break before or behind the model: a prefix of the
    answer alone, or all of it. Steps of 2,048 tokens are computed in slices.
    """
    draw = random.Random(seed)
    engine = toy_engine(
        groups, num_pages=pages, max_num_batched_tokens=steps[0], slo=steps[1], host_cache_size=1 << 16, device=True
    )
    breaking = draw.random() < 0.5
    model: Any = engine._core.runner._model

    def breaks(launch: Any) -> Any:
        def launched(*given: Any) -> Any:
            at = draw.random()
            if breaking and at < 0.01:
                raise RuntimeError("on purpose, before")
            out = launch(*given)
            if breaking and at > 0.99:
                raise RuntimeError("on purpose, behind")
            return out

        return launched

    model.rows, model.chunk = breaks(model.rows), breaks(model.chunk)
    seen, asked, cancelled = Seen(), dict[str, GenerationRequest](), set[str]()
    text = prompt(700, 5)
    for turn in range(120):
        if len(asked) < 12 and draw.random() < 0.15:
            ids = (
                *text[: draw.choice((0, 200, 250, 255, 256, 400, 506, 700))],
                *prompt(draw.choice((1, 2, 9)), seed + turn),
            )
            tokens, sampling = draw.choice((1, 5, 30)), draw.choice(SAMPLINGS)
            if sampling.get("min_tokens", 0) > tokens:
                sampling = {}
            request = asking(f"r{turn}", ids, tokens, seed=turn, **sampling)
            asked[request.request_id] = request
            engine.submit(request)
        live = [name for name in asked if name not in seen.ends]
        if live and draw.random() < 0.04:
            engine.cancel(name := draw.choice(live))
            cancelled.add(name)
        if draw.random() < 0.03:
            try:
                with engine.session() as session:
                    session.sync(text[: draw.choice((100, 300))])
                    session.step(SamplingParams(temperature=0.0))
            except (RequestError, RuntimeError):
                pass
        seen.take(engine.step())
    run(engine, seen)
    assert set(seen.ends) == set(asked)
    for name, request in asked.items():
        alone, found, reason = answer(groups, request), seen.tokens.get(name, []), seen.ends[name].reason
        ended = reason in ("cancelled", "failed")
        assert found == (alone[: len(found)] if ended else alone), name
        assert reason in ("length", "stop") or (name in cancelled if reason == "cancelled" else breaking)
    engine.close()
