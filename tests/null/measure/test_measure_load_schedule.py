"""When requests are due, without sending any."""

import itertools
import json
import math
import random

import pytest

from longread.measure.load.schedule import Schedule, sessions
from longread.measure.load.target import Target, base_url, warmed
from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError

CHAT = ({"role": "user", "content": "hello"},)


def asks(*sessions_: str | None, at: float | None = None) -> list[Ask]:
    return [Ask(f"a{i}", CHAT, None, 8, at, session) for i, session in enumerate(sessions_)]


def test_arrivals_have_the_asked_rate_and_spread() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        starts = Schedule(10.0, burstiness, seed=3).starts(20_001)
        gaps = [b - a for a, b in itertools.pairwise(starts)]
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
        assert starts[0] == 0.0
        assert mean == pytest.approx(0.1, rel=1e-9)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert Schedule(4.0, math.inf).starts(4) == [0.0, 0.25, 0.5, 0.75]
    assert Schedule().starts(3) == [0.0, 0.0, 0.0]


def test_no_seed_has_a_rate_of_its_own() -> None:
    """Drawn gaps of 40 requests sum up to 16 % more or less (one sigma); as in vLLM's bench they are scaled."""
    for seed in range(5):
        assert Schedule(20.0, 0.5, seed=seed).starts(41)[-1] == pytest.approx(2.0)
    assert Schedule(20.0).starts(1) == [0.0]
    assert Schedule(20.0).starts(0) == []


def test_the_seed_decides_and_the_global_generator_does_not() -> None:
    first = Schedule(10.0, seed=1).starts(50)
    random.seed(99)
    assert Schedule(10.0, seed=1).starts(50) == first
    assert Schedule(10.0, seed=2).starts(50) != first


def test_a_rate_is_of_sessions_and_turns_keep_their_order() -> None:
    plan = sessions(asks("x", None, "y", "x", "y", "x"), Schedule(2.0, math.inf))
    assert [[turn.index for turn in turns] for turns in plan] == [[0, 3, 5], [1], [2, 4]]
    assert [turns[0].at for turns in plan] == [0.0, 0.5, 1.0]
    assert plan[0][1].at is None


def test_a_trace_keeps_its_times_and_nothing_is_mixed() -> None:
    rows = [Ask(f"a{i}", CHAT, None, 8, at) for i, at in enumerate((0.5, 0.0, 2.0))]
    assert [turns[0].index for turns in sessions(rows, Schedule(trace=True))] == [1, 0, 2]
    with pytest.raises(ConfigError, match="no arrival time"):
        sessions([*rows, *asks(None)], Schedule(trace=True))
    with pytest.raises(ConfigError, match="by the workload"):
        sessions(rows, Schedule(3.0))
    with pytest.raises(ConfigError, match="from 0 on"):
        sessions(asks(None, at=math.nan), Schedule(trace=True))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rate": 0.0}, "above 0"),
        ({"rate": math.nan}, "above 0"),
        ({"burstiness": 0.0, "rate": 1.0}, "above 0"),
        ({"burstiness": 2.0}, "finite request rate"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"trace": True, "rate": 1.0}, "contradicts"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(fields: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Schedule(**fields)


def test_bodies_carry_the_asks_fields_and_the_users_win() -> None:
    ask = Ask("k", CHAT, None, 8, extra={"temperature": 0.6, "top_p": 0.9})
    body = json.loads(Target("http://h", "m", extra={"top_p": 0.5}).body(ask))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 8,
        "temperature": 0.6,
        "top_p": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert json.loads(Target("http://h", "m", "openai").body(Ask("k", None, (5, 6), 8)))["prompt"] == [5, 6]
    assert json.loads(Target("http://h", "m").body(Ask("k", None, "text", 8)))["messages"][0]["content"] == "text"
    assert json.loads(Target("http://h", "m").body(Ask("k", None, "text", 8)))["temperature"] == 0.0


def test_what_cannot_be_sent_is_refused_before_anything_is() -> None:
    with pytest.raises(ConfigError, match="use --backend openai-chat"):
        Target("http://h", "m", "openai").body(asks(None)[0])
    with pytest.raises(ConfigError, match="token ids"):
        Target("http://h", "m").body(Ask("k", None, (5, 6), 8))
    for name in ("stream", "n", "model", "messages"):
        with pytest.raises(ConfigError, match=name):
            Target("http://h", "m", extra={name: 2})
    for url in ("ftp://h", "http://", "http://user:key@h", "http://h:99999", "http://h?x=1"):
        with pytest.raises(ConfigError):
            base_url(url)
    assert base_url("h:8000") == base_url("http://h:8000/v1/") == "http://h:8000"


def test_open_turns_are_filled_in_order() -> None:
    turns = (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": None},
    )
    ask = Ask("k", turns, None, 8, answers=True)
    sent = json.loads(Target("http://h", "m").body(ask, ["1", "2"]))["messages"]
    assert [message["content"] for message in sent] == ["one", "1", "two", None, "2"]
    with pytest.raises(ConfigError, match="wants 2 earlier answers"):
        Target("http://h", "m").body(ask, ["1"])


def test_warm_ups_share_no_beginning_with_what_is_measured() -> None:
    chat = warmed(Ask("k", CHAT, None, 8), 1)
    assert chat.messages is not None
    assert chat.messages[0]["content"] == "[warm-up 1] hello"
    parts = ({"role": "user", "content": [{"type": "text", "text": "x"}]},)
    first = (warmed(Ask("k", parts, None, 8), 0).messages or ())[0]
    assert first["role"] == "system"
    assert warmed(Ask("k", None, "text", 8), 0).prompt == "[warm-up 0] text"
    ids = warmed(Ask("k", None, tuple(range(100)), 8), 3).prompt
    assert ids is not None
    assert len(ids) == 100
    assert ids[0] != 0
