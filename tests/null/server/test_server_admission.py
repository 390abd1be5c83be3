"""Admission: never beyond a limit, nothing kept of what is refused, and there is room when it says so."""

import logging
from array import array
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longread.engine import policy
from longread.server import admission as admitting
from longread.server.admission import SPREAD_SECONDS, Admission, Pace
from longread.server.backlog import WEIGHTS, Backlog, KnownPages, Unread
from longread.server.commands import Watch
from longread.server.fake import FakeEngine
from longread.server.limits import Limits
from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.engine import FinishEvent, GenerationRequest, RequestTimes, class_of
from longread.spec.errors import AdmissionError, InvalidRequestError
from longread.spec.reuse import Reuse
from longread.spec.state import PAGE_TOKENS, HashedTokens, hash_pages
from longread.spec.step_target import bounds

COST = StepCost(launch=1e-3, decode=1e-4, token=1e-4)
INFO = replace(FakeEngine(max_num_seqs=1000).info, max_num_batched_tokens=2048)
PRIORITIES = {"interactive": 0, "batch": 1, "ingest": 100}


def request(name: str, tokens: int, priority: int = 0, owner: str = "") -> GenerationRequest:
    return GenerationRequest(name, tuple(range(tokens)), priority=priority, owner=owner)


def hashed_request(name: str, ids: range) -> GenerationRequest:
    data = array("i", ids).tobytes()
    return GenerationRequest(
        name, tuple(ids), hashed=HashedTokens(b"root", data, hash_pages(b"root", data), min(ids), max(ids))
    )


def end(name: str, times: RequestTimes | None = None, reuse: Reuse | None = None) -> FinishEvent:
    return FinishEvent(name, "length", 1, 1, 0, times=times or RequestTimes(), reuse=reuse)


def test_it_counts_as_the_schedule_does() -> None:
    assert dict(zip(policy.LEVELS, policy.WEIGHTS, strict=True)) == WEIGHTS


def test_the_pace_is_that_of_the_steps_that_the_schedule_makes() -> None:
    cost = StepCost(launch=0.01, decode=1e-3, chunk=1e-3, token=2e-4, pair=1e-8)
    for slo, target, rows in (
        (Slo(), 0.1, 0),
        (Slo(tpot=0.08), None, 8),
        (Slo(ttft=0.4), 0.03, 2),
        (Slo(tpot=1e-3), None, 4),
    ):
        decodes, prompt = (rows, 1000 * rows), policy.Demand(50_000, 50_000, admitting.REFERENCE_TOKENS // 2)
        (tokens,) = policy.fit(4096, [prompt], decodes, cost, bounds(slo, target, cost, rows))
        rate = tokens / cost.seconds(decodes, [(tokens, prompt.prefix)])
        assert Pace(cost, 4096, decodes, slo, target).rate() == pytest.approx(rate, rel=0.1)


class World:
    """The accepted prompts, read by the engine's own policy in steps that take what ``COST`` says."""

    def __init__(self, admission: Admission):
        self.admission = admission
        self.prompts: dict[str, tuple[GenerationRequest, Watch]] = {}

    def admit(self, wanted: GenerationRequest) -> AdmissionError | None:
        before = (self.admission.in_flight, self.admission.queued_tokens)
        try:
            self.admission.admit([wanted], INFO, COST)
        except AdmissionError as error:
            assert (self.admission.in_flight, self.admission.queued_tokens) == before
            return error
        watch = Watch(wanted.request_id)
        self.admission.follow(wanted.request_id, watch)
        self.prompts[wanted.request_id] = (wanted, watch)
        return None

    def unread_before(self, kind: str) -> int:
        """Tokens of the class ``kind`` and above that are not read."""
        return sum(
            len(each.prompt) - watch.tokens
            for each, watch in self.prompts.values()
            if WEIGHTS[class_of(each.priority)] >= WEIGHTS[kind]
        )

    def read(self, seconds: float) -> None:
        turn = 0
        while seconds > 0 and self.prompts:
            items = list(self.prompts.items())
            demands = [
                policy.Demand(
                    len(each.prompt) - watch.tokens,
                    len(each.prompt) - watch.tokens,
                    watch.tokens,
                    policy.LEVELS.index(class_of(each.priority)),
                    each.owner,
                )
                for _, (each, watch) in items
            ]
            lengths = policy.split(INFO.max_num_batched_tokens, demands, turn)
            seconds -= COST.seconds((0, 0), policy.chunks(demands, lengths))
            turn += 1
            for (name, (each, watch)), length in zip(items, lengths, strict=True):
                watch.tokens += length
                if watch.tokens == len(each.prompt):
                    self.admission.first_token(name)
                    self.admission.ended(end(name))
                    del self.prompts[name]


prompts = st.tuples(st.integers(1, 30_000), st.sampled_from(sorted(PRIORITIES)), st.sampled_from(["", "", "a", "b"]))


@settings(max_examples=150, deadline=None)
@example([*[(tokens, "interactive", "") for tokens in (9000, 9000, 4900)], (2488, "batch", "")], None, None, 1.0, 0.0)
@given(
    arrivals=st.lists(prompts, max_size=14),
    ttft=st.sampled_from([None, 0.5, 2.0]),
    tokens=st.sampled_from([None, 1, 5000]),
    timeout=st.sampled_from([None, 1.0]),
    pause=st.floats(0, 1),
)
def test_no_more_than_the_limits_and_room_when_it_says_so(
    arrivals: list[tuple[int, str, str]], ttft: float | None, tokens: int | None, timeout: float | None, pause: float
) -> None:
    limits = Limits(max_num_queued_tokens=tokens, max_num_queued_reqs=None, ttft_timeout=timeout)
    world = World(Admission(limits, Slo(ttft=ttft)))
    for i, (length, kind, owner) in enumerate(arrivals):
        wanted = request(f"r{i}", length, PRIORITIES[kind], owner)
        queued = world.unread_before(kind)
        refused = world.admit(wanted)
        if refused is None:
            assert tokens is None or queued < tokens
        else:
            assert refused.status == 429 and refused.retry_after is not None
            assert refused.retry_after == int(refused.retry_after) and refused.retry_after >= 1
            world.read(refused.retry_after)
            assert world.admit(wanted) is None, "there was no room when it said so"
        world.read(pause)
    world.read(1e6)
    assert (world.admission.in_flight, world.admission.queued_tokens) == (0, 0)


seconds = st.sampled_from([0.0, 1e-300, 1e-9, 1e-3, 1.0, 1e300])
timeouts = st.sampled_from([None, 1e-6, 1.0, 86400.0])


@given(
    cost=st.none() | st.builds(StepCost, *[seconds] * 6),
    limits=st.builds(
        Limits, st.sampled_from([None, 0, 5]), st.sampled_from([None, 1, 10**9]), timeouts, timeouts, timeouts
    ),
    slo=st.builds(Slo, timeouts, timeouts),
    step_target=timeouts,
    arrivals=st.lists(prompts, min_size=1, max_size=8),
    slots=st.sampled_from([1, 3, 1000]),
)
def test_whatever_is_measured_and_asked_for_it_accepts_or_says_when(
    cost: StepCost | None, limits: Limits, slo: Slo, step_target: float | None, arrivals: list, slots: int
) -> None:
    admission, info = Admission(limits, slo), replace(INFO, max_num_seqs=slots, step_target=step_target)
    assert admission.told(info, cost)
    for i, (length, kind, owner) in enumerate(arrivals):
        wanted = request(f"r{i}", length, PRIORITIES[kind], owner)
        try:
            admission.check_room(owner, info, cost)
            admission.admit([wanted], info, cost)
            if i % 3 == 1:
                admission.first_token(wanted.request_id)
            if i % 3 == 2:
                admission.ended(end(wanted.request_id, RequestTimes(scheduled=1.0, first_token=2.0, finished=1e6 * i)))
        except AdmissionError as error:
            assert error.code in admitting.REASONS
            assert error.retry_after is not None and 1 <= error.retry_after <= admitting.MAX_RETRY_SECONDS
        assert all(value is None or value >= 0 for value in admission.outlook(info, cost).values())


backlogs = st.lists(prompts, max_size=12)


def backlog_of(entries: list[tuple[int, str, str]]) -> Backlog:
    backlog = Backlog()
    for i, (tokens, kind, owner) in enumerate(entries):
        backlog.add(str(i), Unread(kind, owner, tokens, tokens))
    return backlog


@given(entries=backlogs, one=st.integers(1, 30_000), other=st.integers(1, 30_000), mine=prompts, passing=st.booleans())
def test_what_is_ahead_is_part_of_what_waits_and_grows_with_the_prompt(
    entries: list, one: int, other: int, mine: tuple[int, str, str], passing: bool
) -> None:
    backlog = backlog_of(entries)
    short, long = (backlog.ahead(tokens, *mine[1:], passing=passing) for tokens in sorted((one, other)))
    assert 0 <= short <= long + 1e-6
    assert long <= backlog.tokens + 1e-6
    assert backlog.below(backlog.tokens + 1) and not backlog.below(backlog.tokens)


def test_a_book_does_not_get_short_prompts_refused() -> None:
    world = World(Admission(slo=Slo(ttft=0.2)))
    assert world.admit(request("book", 1_000_000)) is None
    for i in range(3):
        assert world.admit(request(f"chat{i}", 500)) is None
    assert world.admission.queued_tokens == 1_001_500


def test_a_book_is_not_refused_for_a_target_that_it_cannot_meet_alone() -> None:
    world = World(Admission(slo=Slo(ttft=0.2)))
    for i in range(4):
        assert world.admit(request(f"chat{i}", 450)) is None
    assert world.admit(request("book", 1_000_000)) is None
    refused = world.admit(request("another", 1800))
    assert refused is not None and refused.code == "predicted_wait"
    assert "--slo ttft=0.2s" in refused.message


def test_one_owners_flood_does_not_get_anothers_request_refused() -> None:
    world = World(Admission(slo=Slo(ttft=1.0)))
    flood = 0
    while world.admit(request(f"f{flood}", 1000, owner="a")) is None:
        flood += 1
    assert 5 < flood < 20
    assert world.admit(request("b", 1000, owner="b")) is None
    assert world.admit(request("book", 500_000, PRIORITIES["ingest"], owner="a")) is None
    assert world.admit(request("c", 1000, owner="c")) is None


def test_queued_tokens_are_limited_as_in_vllm() -> None:
    world = World(Admission(Limits(max_num_queued_tokens=1000)))
    assert world.admit(request("a", 999)) is None
    assert world.admit(request("b", 5000)) is None
    refused = world.admit(request("c", 1))
    assert refused is not None and refused.code == "queued_tokens"
    assert "5999 prompt tokens" in refused.message and "max_num_queued_tokens is 1000" in refused.message
    assert f"try again in {refused.retry_after} s" in refused.message


def test_queued_tokens_of_lower_classes_do_not_count() -> None:
    world = World(Admission(Limits(max_num_queued_tokens=1000)))
    assert world.admit(request("document", 10**6, PRIORITIES["ingest"])) is None
    assert world.admit(request("chat", 2000)) is None
    assert world.admit(request("other chat", 10)) is not None
    refused = world.admit(request("document", 5, PRIORITIES["ingest"]))
    assert refused is not None and "1002000 prompt tokens" in refused.message


def test_without_a_step_cost_there_is_no_prediction() -> None:
    admission = Admission(Limits(ttft_timeout=0.001, max_num_queued_tokens=100), Slo(ttft=0.001))
    admission.admit([request("a", 5000)], INFO, None)
    with pytest.raises(AdmissionError, match="max_num_queued_tokens") as caught:
        admission.admit([request("b", 5)], INFO, None)
    assert caught.value.retry_after == 1
    assert admission.predicted_wait(INFO, None) is None
    assert admission.outlook(INFO, None)["predicted_queue_seconds"] is None


def test_the_count_of_requests_is_all_or_none() -> None:
    info = replace(INFO, max_num_seqs=2)
    admission = Admission(Limits(max_num_queued_reqs=2))
    admission.admit([request(f"a{i}", 3) for i in range(3)], info, COST)
    with pytest.raises(
        AdmissionError, match="3 requests are in flight, max_num_seqs is 2 and max_num_queued_reqs is 2"
    ):
        admission.admit([request("b", 3), request("c", 3)], info, COST)
    assert admission.in_flight == 3
    admission.admit([request("b", 3)], info, COST)
    with pytest.raises(InvalidRequestError, match="at most 4"):
        admission.admit([request(f"d{i}", 3) for i in range(5)], info, COST)


def test_one_key_alone_does_not_fill_the_queue_once_there_are_others() -> None:
    info = replace(INFO, max_num_seqs=2)
    admission = Admission(Limits(max_num_queued_reqs=16))

    def admit(name: str, owner: str) -> None:
        admission.admit([request(name, 3, owner=owner)], info, COST)

    for i in range(18):
        admit(f"a{i}", "a")  # nobody else is known
    with pytest.raises(AdmissionError, match="18 requests are in flight"):
        admit("b", "b")
    for i in range(3):
        admission.ended(end(f"a{i}"))
    admit("b", "b")
    with pytest.raises(
        AdmissionError, match=r"15 of your requests are in flight, of 18 .* 16 may be one API key's"
    ) as caught:
        admission.admit([request("x", 3, owner="a"), request("y", 3, owner="a")], info, COST)
    assert caught.value.code == "queue_full"
    admit("a18", "a")
    with pytest.raises(AdmissionError, match="for you"):
        admission.check_room("a", info, COST)
    admission.check_room("b", info, COST)
    admit("c", "c")
    assert admission.in_flight == 18


def test_a_full_queue_says_how_long_requests_take_here() -> None:
    info = replace(INFO, max_num_seqs=2)
    admission = Admission(Limits(max_num_queued_reqs=0))
    admission.admit([request("a", 3), request("b", 3)], info, COST)
    admission.first_token("a")
    admission.ended(end("a", RequestTimes(arrived=1, scheduled=2, first_token=3, finished=62)))
    admission.admit([request("c", 3)], info, COST)
    with pytest.raises(AdmissionError) as caught:
        admission.admit([request("d", 3)], info, COST)
    assert caught.value.retry_after == 30  # one of two that take 60 s each


def test_waiting_for_a_slot_counts_too() -> None:
    info = replace(INFO, max_num_seqs=1)
    admission = Admission(slo=Slo(ttft=5.0))
    admission.admit([request("a", 3)], info, COST)
    admission.ended(end("a", RequestTimes(scheduled=1, first_token=2, finished=21)))
    admission.admit([request("b", 3)], info, COST)
    admission.first_token("b")
    with pytest.raises(AdmissionError, match="about 20 s") as caught:
        admission.admit([request("c", 3)], info, COST)
    assert (caught.value.code, caught.value.retry_after) == ("predicted_wait", 15)
    admission.admit([request("later", 3, PRIORITIES["batch"])], info, COST)  # the target is for whoever waits for it


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    world = World(Admission(Limits(ttft_timeout=0.5)))
    assert world.admit(request("book", 900_000)) is None  # its own reading is not held against it: it may be cached
    assert world.admit(request("short", 4000)) is None
    refused = world.admit(request("long", 20_000))
    assert refused is not None and (refused.code, refused.status) == ("deadline", 429)
    assert "ttft_timeout is 0.5 s" in refused.message


def test_a_prompt_begins_at_once_where_a_slot_is_free() -> None:
    admission = Admission(Limits(queue_timeout=0.5))
    info = replace(INFO, max_num_seqs=2)
    admission.admit([request("a", 90_000)], info, COST)
    admission.admit([request("b", 90_000)], info, COST)
    with pytest.raises(AdmissionError, match=r"queue_timeout is 0.5 s"):
        admission.admit([request("c", 10)], info, COST)


def test_what_was_read_before_is_not_counted() -> None:
    admission = Admission()
    book, tail = range(10 * PAGE_TOKENS), range(5000, 5020)
    admission.admit([hashed_request("a", book)], INFO, COST)
    assert admission.queued_tokens == 10 * PAGE_TOKENS
    admission.first_token("a")
    admission.ended(end("a", RequestTimes(first_token=1.0)))
    again = hashed_request("b", book)
    data = array("i", [*book, *tail]).tobytes()
    again = replace(
        again, prompt=(*book, *tail), hashed=HashedTokens(b"root", data, hash_pages(b"root", data), 0, 5019)
    )
    admission.admit([again], INFO, COST)
    assert admission.queued_tokens == len(tail)
    admission.lost()
    admission.admit([replace(again, request_id="c")], INFO, COST)
    assert admission.queued_tokens == 2 * len(tail) + len(book)


def test_what_was_cancelled_before_it_was_read_is_not_known() -> None:
    admission = Admission()
    book = hashed_request("a", range(8 * PAGE_TOKENS))
    admission.admit([book], INFO, COST)
    watch = Watch("a", tokens=3 * PAGE_TOKENS)
    admission.follow("a", watch)
    admission.ended(end("a"))
    admission.admit([replace(book, request_id="b")], INFO, COST)
    assert admission.queued_tokens == 5 * PAGE_TOKENS


def test_choices_of_one_prompt_are_read_once() -> None:
    admission = Admission()
    first = request("a", 3000)
    admission.admit([first, replace(first, request_id="b"), replace(first, request_id="c")], INFO, COST)
    assert admission.queued_tokens == 3002


def test_an_engine_without_a_cache_reads_all_again() -> None:
    admission = Admission()
    book = hashed_request("a", range(4 * PAGE_TOKENS))
    admission.admit([book], INFO, COST)
    admission.first_token("a")
    admission.ended(end("a", RequestTimes(first_token=1.0), Reuse(4 * PAGE_TOKENS, reason="caching off")))
    admission.admit([replace(book, request_id="b")], INFO, COST)
    assert admission.queued_tokens == 4 * PAGE_TOKENS


def test_known_pages_are_bounded_and_lose_ends_first() -> None:
    known = KnownPages()
    known.limit = 10
    data = array("i", range(8 * PAGE_TOKENS)).tobytes()
    first = HashedTokens(b"x", data, hash_pages(b"x", data), 0, 1)
    second = HashedTokens(b"y", data, hash_pages(b"y", data), 0, 1)
    known.add(first.hashes)
    known.add(second.hashes)
    assert known.tokens(second, 10_000) == 8 * PAGE_TOKENS
    assert known.tokens(first, 10_000) == 2 * PAGE_TOKENS
    assert known.tokens(second, 8 * PAGE_TOKENS) == 8 * PAGE_TOKENS - 1
    assert known.tokens(None, 100) == 0


def test_the_pace_beside_decodes_and_under_a_target() -> None:
    idle = Pace(COST, 2048).rate()
    assert idle == pytest.approx(2048 / (1e-3 + 2048e-4))
    beside = Pace(COST, 2048, (100, 0)).rate()
    assert beside == pytest.approx(1948 / (1e-3 + 100e-4 + 1948e-4))
    short = Pace(COST, 2048, (100, 0), Slo(tpot=0.05)).rate()
    assert short == pytest.approx(390 / 0.05, rel=0.01)
    assert Pace(COST, 2048, (0, 0), Slo(tpot=0.05)).rate() == idle
    assert Pace(COST, 2048, (100, 0), Slo(tpot=1e-6)).rate() == pytest.approx(16 / (1e-3 + 100e-4 + 16e-4))
    assert Pace(COST, 2048, slo=Slo(ttft=0.2)).rate() == pytest.approx(490 / 0.05, rel=0.01)  # a quarter of it
    assert Pace(COST, 2048, step_target=0.03).rate() == pytest.approx(290 / 0.03, rel=0.01)
    assert Pace(COST, 2048, step_target=1e-6).rate() == pytest.approx(40 / 0.005, rel=0.01)  # five times the launch
    assert Pace(StepCost(), 2048).rate() == float("inf")


def test_the_queue_is_told_with_reasons_and_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    admission = Admission(slo=Slo(ttft=2.0))
    told = admission.told(INFO, COST)
    assert "1,024 requests may wait (max_num_queued_reqs)" in told
    assert "19,902 prompt tokens before an interactive one (--slo ttft=2s at 9,951 tokens/s" in told
    assert "not limited" in Admission(Limits(max_num_queued_reqs=None)).told(INFO, COST)
    assert "500 prompt tokens (max_num_queued_tokens, as given)" in Admission(Limits(max_num_queued_tokens=500)).told(
        INFO, COST
    )
    with caplog.at_level(logging.INFO):
        admission.admit([request("a", 3)], INFO, StepCost(token=1.2e-4))
        assert not caplog.records
        admission.admit([request("b", 3)], INFO, StepCost(token=2e-4))
        admission.admit([request("c", 3)], INFO, StepCost(token=2e-4))
    assert [record.message for record in caplog.records if "now 10000, not 19902" in record.message] != []
    assert len(caplog.records) == 1


def test_who_is_refused_together_does_not_come_back_together() -> None:
    now = [0.0]
    admission = Admission(Limits(max_num_queued_tokens=1), clock=lambda: now[0])
    admission.admit([request("a", 10_000)], INFO, COST)

    def told() -> float:
        with pytest.raises(AdmissionError) as caught:
            admission.admit([request("b", 10_000)], INFO, COST)
        assert caught.value.retry_after is not None
        return caught.value.retry_after

    first = told()
    assert first == 2  # what is left of the one before, and nobody else comes back
    times = [told() for _ in range(300)]
    assert first <= min(times) and max(times) <= first + SPREAD_SECONDS
    assert max(times.count(each) for each in set(times)) <= 15  # of 300, over 30 s
    now[0] += SPREAD_SECONDS
    assert told() == first


def test_limits_may_change_while_it_serves() -> None:
    world = World(Admission(Limits(max_num_queued_tokens=10)))
    assert world.admit(request("a", 100)) is None
    assert world.admit(request("b", 100)) is not None
    world.admission.limits = Limits(max_num_queued_tokens=1000)
    assert world.admit(request("b", 100)) is None
    world.admission.limits = Limits(max_num_queued_tokens=10)
    assert world.admission.in_flight == 2


def test_before_costs_are_known_nobody_is_refused_for_a_guess_and_who_is_refused_is_told_so() -> None:
    info = replace(INFO, max_num_seqs=2)
    admission = Admission(Limits(max_num_queued_reqs=1, queue_timeout=0.001), Slo(ttft=0.001))
    assert "once it is known" in admission.told(info, None)
    for name in "abc":
        admission.admit([request(name, 100_000)], info, None)
    with pytest.raises(AdmissionError, match="not known yet; try again in") as refused:
        admission.admit([request("d", 1)], info, None)
    assert refused.value.retry_after is not None and 1 <= refused.value.retry_after <= SPREAD_SECONDS + 1
    assert admission.outlook(info, None)["predicted_queue_seconds"] is None
    with pytest.raises(AdmissionError) as refused:
        admission.admit([request("d", 1)], info, COST)
    assert "not known" not in str(refused.value)


def test_the_engines_step_target_sets_the_pace() -> None:
    slow = StepCost(launch=0.02, token=1e-4)
    waits = [Admission().predicted_wait(replace(INFO, step_target=target), slow) for target in (None, 0.15)]
    assert waits == [0.0, 0.0]
    found = []
    for target in (None, 0.15):
        admission, info = Admission(), replace(INFO, step_target=target, max_num_seqs=4)
        admission.admit([request("first", 3000)], info, slow)
        found.append(admission.predicted_wait(info, slow))
    assert found[0] < found[1]  # short steps start more often
