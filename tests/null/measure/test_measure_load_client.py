"""The load client against a server that answers by script: every instant is the one at which the server wrote.

Both run on one loop whose time passes only in waits, and the server writes its instants down: what is compared is exact
on a busy machine too.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import virtual_time
from scripted_server import (
    DONE,
    Bytes,
    Drop,
    End,
    Hang,
    Head,
    Plain,
    ScriptedServer,
    Seen,
    Step,
    Wait,
    answer,
    delta,
    event,
    refusal,
    scripted,
    text,
    usage,
)

from longread.measure.load.metrics import Wanted, flat, summarise
from longread.measure.load.outcome import Outcome, Run
from longread.measure.load.run import Limits, LoadError, Progress, Stop, run
from longread.measure.load.schedule import Schedule
from longread.measure.load.target import Target
from longread.measure.workloads.ask import Ask
from longread.spec.errors import ConfigError

EXACT = 1e-6  # seconds
CHAT = ({"role": "user", "content": "hello"},)


def asks(count: int, **fields: Any) -> list[Ask]:
    return [Ask(f"a{i}", CHAT, None, 8, extra={"user": f"a{i}"}, **fields) for i in range(count)]


def seen_of(server: ScriptedServer, outcome: Outcome) -> Seen:
    """The server's record of it; a warm-up with the same name came before."""
    return [seen for seen in server.seen if seen.body.get("user") == outcome.key][-1]


def measure(
    script: Callable[[int, dict], Sequence[Step]],
    workload: Sequence[Ask] | int = 1,
    schedule: Schedule | None = None,
    limits: Limits | None = None,
    backend: str = "openai-chat",
    during: Callable[[ScriptedServer, Stop], Awaitable[None]] | None = None,
    progress: Progress | None = None,
) -> tuple[Run, ScriptedServer]:
    async def work() -> tuple[Run, ScriptedServer]:
        async with scripted(script) as server:
            target, stop = Target(server.url, "scripted", backend), Stop()  # type: ignore[arg-type]
            rows = asks(workload) if isinstance(workload, int) else workload
            other = asyncio.create_task(during(server, stop)) if during is not None else None
            clock = asyncio.get_running_loop().time
            result = await run(rows, target, schedule or Schedule(), limits or Limits(20.0), progress, stop, clock)
            if other is not None:
                await other
            return result, server

    return virtual_time.run(work())


class Zero(Progress):
    """When the run's clock was at 0, on the loop's: it starts when this returns."""

    at = math.nan

    def started(self, total: int) -> None:
        self.at = asyncio.get_running_loop().time()


def check(measured: Sequence[float | None], true: Sequence[float], what: str) -> None:
    """The same, for most: the system may hold a segment back for longer than the loop waits, once."""
    assert len(measured) == len(true)
    off = sorted(abs(a - b) if a is not None else math.inf for a, b in zip(measured, true, strict=True))
    assert not off or off[len(off) // 2] < EXACT, (what, off, true)


def check_instants(run: Run, server: ScriptedServer, zero: float) -> None:
    """Every metric of every request that was answered against the instants that the server wrote down."""
    outcomes = [each for each in run.outcomes if each.status == "ok"]
    rows = [(each, seen_of(server, each), seen_of(server, each).times) for each in outcomes]
    for each, seen, times in rows:
        assert len(each.chunk_times) == len(times("text", "reasoning"))
        assert each.sent + zero <= seen.received + EXACT
        for measured, wrote in zip(each.chunk_times, times("text", "reasoning"), strict=True):
            assert measured + zero >= wrote - EXACT  # nothing is seen before it is sent
    for name, labels in (
        ("ttfc", ("role", "text", "reasoning")),
        ("ttft", ("text", "reasoning")),
        ("ttfrt", ("reasoning",)),
        ("ttfat", ("text",)),
    ):
        known = [(each, times(*labels)[0] - zero - each.sent) for each, _, times in rows if times(*labels)]
        check([getattr(each, name) for each, _ in known], [true for _, true in known], name)
        assert all(getattr(each, name) is None for each, _, times in rows if not times(*labels))
    lasts = [times("finish", "text")[-1] for _, _, times in rows]
    check(
        [each.e2el for each, _, _ in rows],
        [t - zero - e.sent for t, (e, _, _) in zip(lasts, rows, strict=True)],
        "e2el",
    )
    gaps = [(m, b - a) for e, _, t in rows for m, (a, b) in zip(e.gaps, pairwise(t("text", "reasoning")), strict=True)]
    check([measured for measured, _ in gaps], [true for _, true in gaps], "gaps")
    counted = [
        (e, (last - t("text", "reasoning")[0]) / (e.output_tokens - 1))
        for last, (e, _, t) in zip(lasts, rows, strict=True)
        if (e.output_tokens or 0) > 1
    ]
    check([each.tpot for each, _ in counted], [true for _, true in counted], "tpot")


LATE_USAGE: list[Step] = [
    *answer(["a"] * 4, first=0.02, gap=0.01, counted=False)[:-3],
    *(Wait(0.02), delta("finish", finish="stop"), Wait(0.04), usage(7, 4), DONE, End()),
]


def test_usage_after_the_answer_is_in_the_run_but_not_in_its_latency() -> None:
    """As in vLLM's bench: the last event with a choice ends the answer, the last event of all its place in the cap."""
    result, _ = measure(lambda n, body: LATE_USAGE, 4, Schedule(max_concurrency=1))
    after = [(each.ended or 0.0) - (each.last or 0.0) for each in result.outcomes]
    check(after, [0.04] * 4, "after the answer")
    assert result.duration == result.outcomes[-1].ended


@pytest.mark.parametrize(
    "script",
    [
        answer(["a"] * 12, first=0.04, gap=0.006),
        answer(["a"] * 5, first=0.03, gap=0.01, role=None),
        answer(["a"] * 4, first=0.03, gap=0.012, role=0.02, reasoning=["r"] * 6),
        answer(["several tokens here"] * 6, first=0.02, gap=0.015, tokens=31),
        answer(["a"], first=0.02),
        answer(["a"] * 6, first=0.02, gap=0.01, counted=False),
        LATE_USAGE,
    ],
    ids=["plain", "no role chunk", "reasoning", "several tokens a chunk", "one token", "no usage", "late usage"],
)
def test_every_instant_is_when_the_server_sent_it(script: list[Step]) -> None:
    limits, zero = Limits(20.0, warmups=2), Zero()
    result, server = measure(lambda n, body: script, 6, Schedule(max_concurrency=2), limits, progress=zero)
    assert [each.status for each in result.outcomes] == ["ok"] * 6
    assert len(server.seen) == 8
    assert len(result.warmups) == 2
    check_instants(result, server, zero.at)
    assert flat(summarise(result))["completed"] == 6


def test_goodput_is_the_share_that_was_scripted_good() -> None:
    fast, slow = answer(["a"] * 3, first=0.005), answer(["a"] * 3, first=0.2)
    result, _ = measure(lambda n, body: slow if n % 4 == 0 else fast, 12, Schedule(max_concurrency=4))
    told = summarise(result, Wanted(slos={"ttft": 100.0})).goodput
    assert told is not None
    assert (told.good, told.counted, told.fraction) == (9, 12, 0.75)
    assert told.rate == pytest.approx(9 / result.duration)


def test_chunks_that_tcp_cuts_or_joins_are_the_same_answer() -> None:
    data = b"".join(step.data for step in (delta(content="中"), delta(content="b"), delta(finish="stop"), DONE))
    cut = [Head(), *(step for i in range(0, len(data), 3) for step in (Bytes(data[i : i + 3]), Wait(0.0))), End()]
    whole = [Head(), Bytes(data, "text"), End()]
    for script in (cut, whole):
        result, _ = measure(lambda n, body, script=script: script)
        assert (result.outcomes[0].status, result.outcomes[0].text) == ("ok", "中b")
        assert len(result.outcomes[0].chunk_times) == 2
    times = result.outcomes[0].chunk_times
    assert times[0] == times[1]  # of one segment: no gap was seen


def test_completions_are_measured_the_same_way() -> None:
    steps = [Head(), Wait(0.02), text("a"), Wait(0.01), text("b", finish="stop"), usage(3, 2), DONE, End()]
    rows = [Ask(f"k{i}", None, (1, 2, 3), 2, extra={"user": f"k{i}"}) for i in range(5)]
    zero = Zero()
    result, server = measure(lambda n, body: steps, rows, Schedule(max_concurrency=1), backend="openai", progress=zero)
    assert server.seen[0].path == "/v1/completions"
    assert server.seen[0].body["prompt"] == [1, 2, 3]
    check_instants(result, server, zero.at)


BROKEN: dict[str, tuple[list[Step], str, str]] = {
    "half a stream": ([Head(), delta(content="a"), Drop()], "failed", "half a stream"),
    "reset": ([Head(), delta(content="a"), Wait(0.01), Drop(reset=True)], "failed", "half a stream"),
    "ended without end": ([Head(), delta(content="a"), End()], "failed", "half a stream"),
    "only the role": ([Head(), delta(role="assistant"), Drop()], "failed", "half a stream"),
    "dropped": ([Drop()], "failed", "connection lost"),
    "429": (refusal(429, "busy"), "refused", "http 429"),
    "400": (refusal(400, "too long"), "refused", "http 400"),
    "503": (refusal(503, "loading"), "refused", "http 503"),
    "500": (refusal(500, "broken"), "failed", "http 500"),
    "307": ([Head(307, headers=(("location", "/elsewhere"),)), End()], "failed", "http 307"),
    "malformed": ([Head(), Bytes(b"data: {oops\n\n"), End()], "failed", "malformed stream"),
    "error inside": (
        [Head(), delta(content="a"), event({"error": {"message": "oom"}}), End()],
        "failed",
        "error in the",
    ),
    "not a stream": ([Head(content_type="application/json"), Bytes(b"{}"), End()], "failed", "no event stream"),
    "not http": ([Plain(b"hello\r\n\r\n"), Drop()], "failed", "connection lost"),
    "empty": ([Head(), DONE, End()], "failed", "empty answer"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_is_told_by_its_kind_and_never_sent_again(name: str) -> None:
    script, status, failure = BROKEN[name]
    result, server = measure(lambda n, body: script, 3, Schedule(max_concurrency=1))
    assert len(server.seen) == 3  # once each
    for each in result.outcomes:
        assert each.status == status, each
        assert each.failure is not None
        assert each.failure.startswith(failure), each
        assert each.e2el is None
    told = flat(summarise(result))
    assert (told["completed"], told["failed"], told["mean_e2el_ms"]) == (0, 3, None)


def test_a_storm_of_refusals_leaves_the_others_right() -> None:
    good = answer(["a"] * 3, first=0.02)
    script = lambda n, body: good if n % 10 == 0 else refusal(429, "busy")  # noqa: E731
    zero = Zero()
    result, server = measure(script, 40, Schedule(max_concurrency=8), progress=zero)
    assert len(server.seen) == 40
    summary = summarise(result)
    assert (summary.completed, summary.failed, summary.counts["refused"]) == (4, 36, 36)
    check_instants(result, server, zero.at)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ([Hang()], "timeout before the head"),
        ([Head(), delta(role="assistant"), Hang()], "timeout before the first token"),
        ([Head(), delta(content="a"), Hang()], "timeout within the answer"),
    ],
)
def test_a_server_that_falls_silent_is_a_timeout_and_says_where(script: list[Step], failure: str) -> None:
    result, server = measure(lambda n, body: script, 2, Schedule(max_concurrency=1), Limits(0.15))
    assert [(each.status, each.failure) for each in result.outcomes] == [("timeout", failure)] * 2
    assert len(server.seen) == 2
    for each in result.outcomes:
        assert each.ended is not None
        assert each.ended - each.sent == pytest.approx(0.15)


def test_done_ends_a_stream_that_the_server_does_not_close() -> None:
    script = [Head(), delta(content="a"), delta(finish="stop"), DONE, Hang()]
    result, _ = measure(lambda n, body: script, 1)
    assert result.outcomes[0].status == "ok"
    assert result.outcomes[0].ended == result.outcomes[0].last


def test_connections_are_kept_and_one_that_was_closed_is_not_used() -> None:
    kept, server = measure(lambda n, body: answer(["a"], first=0.0), 8, Schedule(max_concurrency=1))
    assert {seen.connection for seen in server.seen} == {1}
    assert [each.new_connection for each in kept.outcomes] == [True, *[False] * 7]
    assert kept.overhead.new_connections == 1

    def closing(n: int, body: dict) -> list[Step]:
        return [*answer(["a"], first=0.0), Wait(0.0), Drop()]

    pause = [Ask(f"a{i}", CHAT, None, 8, session="s", think_seconds=0.03) for i in range(4)]
    closed, server = measure(closing, pause)
    assert [each.status for each in closed.outcomes] == ["ok"] * 4
    assert len({seen.connection for seen in server.seen}) == 4


def test_a_long_body_arrives_whole() -> None:
    document = "word " * 500_000
    result, server = measure(
        lambda n, body: answer(["a"]), [Ask("k", ({"role": "user", "content": document},), None, 8)]
    )
    assert result.outcomes[0].status == "ok"
    assert server.seen[0].body["messages"][0]["content"] == document
    assert "transfer-encoding" not in server.seen[0].headers


def test_the_cap_holds_and_closed_loop_requests_are_due_when_there_is_room() -> None:
    result, server = measure(lambda n, body: answer(["a"], first=0.03), 9, Schedule(max_concurrency=3))
    assert server.most == result.peak == 3
    assert all(each.held == 0.0 for each in result.outcomes)
    check([each.lateness for each in result.outcomes], [0.0] * 9, "lateness")
    assert 0.09 - EXACT < result.duration < 0.13  # three after each other


def test_an_open_loop_does_not_wait_for_answers_and_a_cap_on_it_is_told() -> None:
    schedule = Schedule(100.0, math.inf)
    result, server = measure(lambda n, body: answer(["a"], first=0.15), 8, schedule)
    assert server.most == 8
    assert sorted(each.due for each in result.outcomes) == pytest.approx([i / 100 for i in range(8)])
    assert all(each.held == 0.0 for each in result.outcomes)

    capped, server = measure(lambda n, body: answer(["a"], first=0.15), 4, Schedule(100.0, math.inf, 2))
    assert server.most == 2
    last = max(capped.outcomes, key=lambda each: each.index)
    assert last.due == pytest.approx(0.03)
    assert last.sent == pytest.approx(last.due + last.held)
    assert 0.12 < last.held < 0.15  # from 0.03 until the second answer ends, at 0.16


def test_asks_with_times_are_sent_at_them() -> None:
    rows = [Ask(f"a{i}", CHAT, None, 8, at) for i, at in enumerate((0.0, 0.12, 0.05))]
    result, _ = measure(lambda n, body: answer(["a"], first=0.0), rows, Schedule(trace=True))
    for each in result.outcomes:
        assert each.due == rows[each.index].at
        assert each.sent == pytest.approx(each.due, abs=EXACT)
    assert [each.index for each in sorted(result.outcomes, key=lambda each: each.sent)] == [0, 2, 1]


def test_a_session_waits_thinks_and_carries_its_answers() -> None:
    def turn(i: int) -> Ask:
        past = [({"role": "user", "content": f"q{j}"}, {"role": "assistant", "content": None}) for j in range(i)]
        messages = (*(message for pair in past for message in pair), {"role": "user", "content": f"q{i}"})
        return Ask(f"s/{i}", messages, None, 8, session="s", think_seconds=0.04, answers=i > 0)

    result, server = measure(lambda n, body: answer([f"answer {n}"], first=0.02), [turn(i) for i in range(3)])
    sent = [message["content"] for message in server.seen[2].body["messages"]]
    assert sent == ["q0", "answer 0", "q1", "answer 1", "q2"]
    assert server.most == 1
    for before, after in pairwise(result.outcomes):
        assert before.ended is not None
        assert after.sent - before.ended == pytest.approx(0.04)


def test_a_session_whose_answer_is_missing_goes_no_further() -> None:
    messages = (CHAT[0], {"role": "assistant", "content": None}, CHAT[0])
    rows = [
        Ask("s/0", CHAT, None, 8, session="s"),
        Ask("s/1", messages, None, 8, session="s", answers=True),
        Ask("other", CHAT, None, 8),
    ]
    result, server = measure(
        lambda n, body: refusal(500, "no") if len(body["messages"]) == 1 and n == 0 else answer(["a"]),
        rows,
        Schedule(max_concurrency=1),
    )
    assert {each.key: (each.status, each.failure) for each in result.outcomes} == {
        "s/0": ("failed", "http 500"),
        "s/1": ("cancelled", "an earlier turn failed"),
        "other": ("ok", None),
    }
    assert len(server.seen) == 2
    assert not result.partial  # all that could be asked was


def test_stopping_waits_for_what_is_in_flight_and_a_second_time_does_not() -> None:
    async def once(server: ScriptedServer, stop: Stop) -> None:
        while len(server.seen) < 2:
            await asyncio.sleep(0.005)
        stop.ask()

    async def twice(server: ScriptedServer, stop: Stop) -> None:
        await once(server, stop)
        stop.ask()

    waited, server = measure(lambda n, body: answer(["a"], first=0.1), 9, Schedule(max_concurrency=2), during=once)
    assert [each.status for each in waited.outcomes] == ["ok", "ok"]
    assert waited.partial
    assert waited.planned == 9
    assert len(server.seen) == 2

    cut, server = measure(
        lambda n, body: [Head(), delta("text", content="a"), Hang()], 9, Schedule(max_concurrency=2), during=twice
    )
    assert [each.status for each in cut.outcomes] == ["cancelled"] * 2
    assert cut.partial
    assert summarise(cut).failed == 0


def test_stopping_ends_thinking_and_warming_up() -> None:
    rows = [Ask(f"a{i}", CHAT, None, 8, session="s", think_seconds=600.0) for i in range(2)]

    async def stopped(server: ScriptedServer, stop: Stop) -> None:
        while not server.seen:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        stop.ask()

    thinking, _ = measure(lambda n, body: answer(["a"], first=0.0), rows, during=stopped)
    assert (len(thinking.outcomes), thinking.partial) == (1, True)
    warming, _ = measure(lambda n, body: [Hang()], 3, limits=Limits(60.0, warmups=1), during=stopped)
    assert (warming.outcomes, warming.partial) == ([], True)


def test_a_run_of_bounded_time_sends_nothing_after_it() -> None:
    result, server = measure(
        lambda n, body: answer(["a"], first=0.05), 400, Schedule(max_concurrency=1), Limits(20.0, seconds=0.22)
    )
    assert result.partial
    assert len(server.seen) == 5  # at 0, 0.05, 0.1, 0.15 and 0.2
    assert all(each.status == "ok" for each in result.outcomes)


def test_outcomes_are_told_as_they_end() -> None:
    class Told(Progress):
        def __init__(self) -> None:
            self.keys: list[str] = []
            self.order: list[str] = []

        def preparing(self, done: int, total: int) -> None:
            self.order.append("preparing")

        def warming(self, done: int, total: int) -> None:
            self.order.append("warming")

        def started(self, total: int) -> None:
            self.order.append(f"started {total}")

        def finished(self, outcome: Outcome, in_flight: int) -> None:
            self.keys.append(outcome.key)

    told = Told()
    result, _ = measure(lambda n, body: answer(["a"]), 3, limits=Limits(20.0, warmups=1), progress=told)
    assert told.order == ["preparing"] * 3 + ["warming", "started 3"]
    assert told.keys == [each.key for each in result.outcomes]


def test_a_server_that_answers_no_warm_up_is_no_measurement() -> None:
    with pytest.raises(LoadError, match=r"http 500 \(broken\)"):
        measure(lambda n, body: refusal(500, "broken"), 3, limits=Limits(20.0, warmups=2))


def test_no_server_is_a_failure_of_each_request() -> None:
    async def work() -> Run:
        return await run(asks(2), Target("http://127.0.0.1:9", "m"), Schedule(), Limits(5.0))

    result = asyncio.run(work())
    assert [each.failure for each in result.outcomes] == ["connection refused"] * 2


def test_what_makes_no_sense_is_refused_before_anything_is_sent() -> None:
    for workload, limits, said in (
        ([], None, "empty"),
        ([Ask("k", None, (1, 2), 8)], None, "token ids"),
    ):
        with pytest.raises(ConfigError, match=said):
            measure(lambda n, body: answer(), workload, limits=limits)
    for fields in ({"request_timeout": 0.0}, {"request_timeout": math.inf}, {"seconds": 0.0}, {"warmups": -1}):
        with pytest.raises(ConfigError):
            Limits(**fields)  # type: ignore[arg-type]


def test_an_ask_that_cannot_be_built_in_the_run_ends_it() -> None:
    rows = [Ask("a", (CHAT[0], {"role": "assistant", "content": None}), None, 8, answers=True), *asks(3)]
    with pytest.raises(ConfigError, match="earlier answers"):
        measure(lambda n, body: answer(["a"]), rows, Schedule(max_concurrency=1))


def test_the_body_and_headers_are_what_was_asked_for() -> None:
    async def work() -> Seen:
        async with scripted(lambda n, body: answer(["a"])) as server:
            target = Target(server.url, "m", headers={"Authorization": "Bearer k"}, extra={"ignore_eos": True})
            await run(asks(1), target, Schedule(), Limits(5.0))
            return server.seen[0]

    seen = asyncio.run(work())
    assert seen.headers["authorization"] == "Bearer k"
    assert seen.headers["accept-encoding"] == "identity"
    assert json.loads(json.dumps(seen.body))["ignore_eos"] is True


def test_without_another_clock_it_is_the_machines() -> None:
    async def work() -> Run:
        async with scripted(lambda n, body: answer(["a"] * 3, first=0.03, gap=0.02)) as server:
            return await run(asks(2), Target(server.url, "m"), Schedule(max_concurrency=1), Limits(60.0))

    date, before = time.time(), time.perf_counter()
    result = asyncio.run(work())
    passed = time.perf_counter() - before
    assert date <= result.started <= date + passed
    assert 2 * 0.068 < result.duration < passed  # a timer of the system may end up to 1 ms early
    assert all(each.ttft is not None and each.ttft > 0.029 for each in result.outcomes)
