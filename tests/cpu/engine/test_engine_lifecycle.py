"""Requests from submission to their one end: finish rules, cancel, failures, limits, stats. Toy model, real cache."""

import inspect
import time
from collections import defaultdict
from dataclasses import replace

import pytest
from toy_model import EOS, MLA_GROUPS, RING_GROUPS, VOCAB, ToyModel, toy_engine

from longread.engine import runner, sampler
from longread.engine.engine import LocalEngine
from longread.spec.engine import Engine, FinishEvent, GenerationRequest, GrammarSpec, SamplingParams, TokenEvent
from longread.spec.errors import ContextLengthError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((i * i * 31 + seed * 17 + i) % (VOCAB - 2) + 2 for i in range(length))


def run(engine: LocalEngine, *requests: GenerationRequest) -> dict[str, tuple[list[int], FinishEvent]]:
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = defaultdict(list)
    ends: dict[str, FinishEvent] = {}
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.request_id].append(event.token_id)
            else:
                assert event.request_id not in ends
                ends[event.request_id] = event
        engine._core.cache.check()
    return {name: (tokens[name], end) for name, end in ends.items()}


def ask(sampling: SamplingParams, length: int = 20, name: str = "r") -> tuple[list[int], FinishEvent]:
    return run(toy_engine(), GenerationRequest(name, prompt(length), sampling))[name]


def test_it_is_an_engine() -> None:
    engine: Engine = toy_engine()
    assert engine.info.max_request_tokens == 4096
    assert not engine.has_work()
    assert list(engine.step()) == []


def test_length_stop_and_min_tokens() -> None:
    free, end = ask(GREEDY)
    assert len(free) == 6
    assert (end.reason, end.completion_tokens, end.stop_token) == ("length", 6, None)
    assert end.prompt_tokens == 20
    stop = free[3]
    first = free.index(stop)
    stopped, end = ask(SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=(stop,)))
    assert stopped == free[:first]
    assert (end.reason, end.stop_token, end.completion_tokens) == ("stop", stop, first + 1)
    held, end = ask(
        SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    )
    assert len(held) == 6
    assert stop not in held


def test_eos_ends_unless_ignored() -> None:
    bias = ((EOS, 100.0),)
    tokens, end = ask(SamplingParams(temperature=0.0, logit_bias=bias))
    assert (tokens, end.reason, end.stop_token, end.completion_tokens) == ([], "stop", EOS, 1)
    tokens, end = ask(SamplingParams(temperature=0.0, logit_bias=bias, max_tokens=3, ignore_eos=True))
    assert (tokens, end.reason) == ([EOS] * 3, "length")
    tokens, end = ask(SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=2))
    assert EOS not in tokens
    assert (len(tokens), end.reason) == (2, "stop")


def test_without_max_tokens_the_context_is_the_end() -> None:
    engine = toy_engine(max_model_len=64)
    tokens, end = run(engine, GenerationRequest("r", prompt(50), SamplingParams(temperature=0.0, ignore_eos=True)))["r"]
    assert (len(tokens), end.reason) == (14, "length")


@pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "ring"])
def test_a_slot_is_reset_between_requests(groups: tuple) -> None:
    engine = toy_engine(groups, max_num_seqs=1)
    run(engine, GenerationRequest("long", prompt(900), GREEDY))
    for length in (1, 2, 3):
        request = GenerationRequest(f"short{length}", prompt(length, seed=5), GREEDY)
        fresh = run(toy_engine(groups), request)[request.request_id][0]
        assert run(engine, request)[request.request_id][0] == fresh


def test_cancel_in_every_state() -> None:
    engine = toy_engine(max_num_seqs=1, max_num_batched_tokens=16)
    for name in ("running", "waiting"):
        engine.submit(GenerationRequest(name, prompt(100, seed=len(name)), GREEDY))
    engine.step()
    engine.submit(GenerationRequest("fresh", prompt(5), GREEDY))
    for name in ("running", "waiting", "fresh", "unknown"):
        engine.cancel(name)
        engine.cancel(name)
    assert engine.has_work()
    ends = [e for e in engine.step() if isinstance(e, FinishEvent)]
    assert sorted((e.request_id, e.reason) for e in ends) == [
        ("fresh", "cancelled"),
        ("running", "cancelled"),
        ("waiting", "cancelled"),
    ]
    assert list(engine.step()) == []
    assert not engine.has_work()
    assert engine.stats().pages_held == 0
    engine._core.cache.check()


def test_the_last_events_come_before_the_audit_and_each_busy_time_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine()
    audits: list[int] = []
    monkeypatch.setattr(engine._core.cache, "check", lambda: audits.append(len(events)))
    for round_ in (1, 2):
        events: list[object] = []
        engine.submit(GenerationRequest("r", prompt(300), GREEDY))
        while engine.has_work():
            events += engine.step()
            if events and isinstance(events[-1], FinishEvent) and len(audits) < round_:
                assert engine.has_work(), "the audit is still to come"
        assert audits == [7] * round_
    engine.step()
    assert audits == [7, 7], "an idle engine is audited once"
    engine._audited = time.monotonic(), 3600.0
    engine.submit(GenerationRequest("r", prompt(300), GREEDY))
    while engine.has_work():
        engine.step()
    assert audits == [7, 7], "audits have a hundredth of the time"


def test_a_failing_step_fails_its_request_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = toy_engine(model=ToyModel(RING_GROUPS, fail_on=96), max_num_seqs=2)
    good, bad = prompt(300), (96, *prompt(30))
    engine.submit(GenerationRequest("bad", bad, GREEDY))
    engine.submit(GenerationRequest("beside", prompt(10), GREEDY))
    engine.submit(GenerationRequest("later", good, GREEDY))
    ended = run(engine)
    assert (ended["bad"][1].reason, ended["beside"][1].reason) == ("failed", "length")
    assert "told to fail" in (ended["bad"][1].error or "")
    assert ended["later"][1].reason == "length"
    assert "a step of" in caplog.text
    assert ended["later"][0] == run(toy_engine(), GenerationRequest("x", good, GREEDY))["x"][0]


def test_a_failed_step_publishes_nothing() -> None:
    engine = toy_engine(model=ToyModel(RING_GROUPS, fail_on=96), max_num_batched_tokens=2048)
    run(engine, GenerationRequest("bad", (*prompt(700), 96), GREEDY))
    assert engine._core.cache.match(prompt(700)).cached_tokens <= 512


def test_refusals_keep_nothing() -> None:
    engine = toy_engine(num_pages=2)
    with pytest.raises(ContextLengthError, match="2 pages hold 512"):
        engine.submit(GenerationRequest("r", prompt(600), GREEDY))
    with pytest.raises(InvalidRequestError, match="temperature"):
        engine.submit(GenerationRequest("r", prompt(6), SamplingParams(temperature=float("nan"))))
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        engine.validate(GenerationRequest("r", prompt(6), SamplingParams(grammar=GrammarSpec("json_object"))))
    assert not engine.has_work()
    engine.submit(GenerationRequest("r", prompt(6), GREEDY))
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.submit(GenerationRequest("r", prompt(6), GREEDY))
    assert run(engine)["r"][1].reason == "length"
    engine.submit(GenerationRequest("r", prompt(6), GREEDY))  # an ended id may be used again


def test_a_long_prompt_counts_as_it_is_read_and_no_token_twice() -> None:
    model = ToyModel(RING_GROUPS)
    engine, other = toy_engine(model=model, max_num_batched_tokens=500), toy_engine(device=True)
    engine.submit(GenerationRequest("r", prompt(1300), GREEDY))
    engine.step()
    assert engine.stats().prompt_tokens == 500
    engine.step()
    assert engine.stats().prompt_tokens == 1000
    engine._scheduler._preempt(engine._scheduler._running[0], keep_tail=False)
    run(engine)
    assert engine.stats().prompt_tokens == 1300 < model.tokens_run - 5  # what was lost was computed again
    other.submit(GenerationRequest("r", prompt(1300), GREEDY))
    other.step()
    other.cancel("r")
    run(other, GenerationRequest("again", prompt(1300), GREEDY))  # finds 512 of them
    assert other.stats().prompt_tokens == 512 + 1300


def test_times_stats_and_cached_tokens() -> None:
    engine, text = toy_engine(), prompt(700)
    before = time.monotonic()
    (_, cold), (_, warm) = (run(engine, GenerationRequest(n, text, GREEDY))[n] for n in ("cold", "warm"))
    assert before <= cold.times.arrived <= cold.times.scheduled <= cold.times.first_token <= cold.times.finished
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 699)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (1400, 12)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (1400, 699)
    assert stats.num_requests_running == stats.num_requests_waiting == stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == 16


def test_a_resumed_request_is_looked_up_once_and_evictions_are_counted() -> None:
    engine = toy_engine(num_pages=4, max_num_seqs=2, num_snapshots=2)
    engine.submit(GenerationRequest("r", prompt(300), GREEDY))
    engine.step()
    engine.step()
    engine._core.scheduler.preempt_latest()
    while engine.has_work():
        engine.step()
    stats = engine.stats()
    assert (stats.num_preemptions, stats.prefix_cache_queries, stats.prefix_cache_hits) == (1, 300, 0)
    assert stats.pages_evicted == 0
    run(engine, *(GenerationRequest(f"n{i}", prompt(900, i), GREEDY) for i in range(4)))
    stats = engine.stats()
    assert stats.pages_evicted > 0 < stats.snapshots_evicted


@pytest.mark.parametrize("groups", [MLA_GROUPS, RING_GROUPS], ids=["mla", "ring"])
def test_each_turn_starts_where_the_last_one_ended(groups: tuple) -> None:
    engine, text, computed = toy_engine(groups), [*prompt(300)], 0
    for turn in range(4):
        stops = turn % 2  # a stop token is not part of the answer; the last token of a cut answer is not computed
        sampling = replace(GREEDY, max_tokens=90, logit_bias=((EOS, 100.0),) if stops else (), ignore_eos=not stops)
        sampling = replace(sampling, min_tokens=40 if stops else 0)
        said, end = run(engine, GenerationRequest(f"t{turn}", tuple(text), sampling))[f"t{turn}"]
        assert end.reason == ("stop" if stops else "length")
        fresh, _ = run(toy_engine(groups), GenerationRequest("r", tuple(text), sampling))["r"]
        assert said == fresh
        assert end.cached_tokens == computed
        computed = len(text) + len(said) - (not stops)
        text += [*said, *prompt(33, seed=turn)]


def test_same_prompts_at_once_are_computed_once() -> None:
    model = ToyModel(RING_GROUPS)
    engine = toy_engine(model=model)
    ended = run(engine, *(GenerationRequest(f"n{i}", prompt(1500), GREEDY) for i in range(4)))
    assert len({tuple(tokens) for tokens, _ in ended.values()}) == 1
    assert model.tokens_run < 1500 + 4 * 16


def test_unseeded_draws_differ_and_seeded_ones_repeat() -> None:
    engine = toy_engine(max_num_seqs=4)
    hot = SamplingParams(temperature=50.0, max_tokens=20, ignore_eos=True)
    seeded = SamplingParams(temperature=50.0, max_tokens=20, ignore_eos=True, seed=5)
    ended = run(
        engine,
        *(GenerationRequest(f"u{i}", prompt(9), hot) for i in range(2)),
        *(GenerationRequest(f"s{i}", prompt(9), seeded) for i in range(2)),
    )
    assert ended["u0"][0] != ended["u1"][0]
    assert ended["s0"][0] == ended["s1"][0]


def test_close_gives_everything_back() -> None:
    engine = toy_engine()
    engine.submit(GenerationRequest("r", prompt(300), GREEDY))
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work()
    assert engine.stats().pages_held == 0
    engine._core.cache.check()


def test_the_loop_fits_a_screen_and_the_sampler_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(inspect.getsource(LocalEngine.step).splitlines()) <= 40
    chains: list[list[str]] = []

    def spy(*arguments: object) -> object:
        names = [frame.function for frame in inspect.stack(0)[1:]]
        chains.append(names[: names.index("step") + 1])
        return sampler.sample(*arguments)

    monkeypatch.setattr(runner, "sample", spy)
    ask(GREEDY)
    assert chains[0] == ["choose", "_run", "_step", "step"]
