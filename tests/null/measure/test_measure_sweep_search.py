"""The knee, the search for the most load and its verdicts, against curves and queues whose truth is known."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queues import answered, limit, md1_within, waits

from longread.measure.sweep.judging import RAMP, Seen, judge, needed, quantile, seen
from longread.measure.sweep.knee import Point, knee
from longread.measure.sweep.search import Search

SERVICE = 0.1
LOADS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]


def closed(load: float, slots: float, noise: float = 0.0, seed: int = 0) -> Point:
    """A closed loop over ``slots`` servers of one second: latency stands still up to there, throughput above."""
    latency = max(load / slots, 1.0) * (1 + noise * random.Random(seed + int(load)).uniform(-1, 1))
    return Point(load, load / latency, latency, latency * (1 - noise), latency * (1 + noise), closed=True)


@pytest.mark.parametrize("slots", [2.0, 4.0, 8.0, 12.0, 16.0, 32.0])
def test_the_knee_of_a_closed_loop_is_where_its_servers_are_full(slots: float) -> None:
    found, how = knee([closed(load, slots) for load in LOADS])
    assert found is not None
    assert found.interval[0] < slots < found.interval[1]
    assert found.value in (max(x for x in LOADS if x <= slots), min(x for x in LOADS if x >= slots))
    assert "Kleinrock" in how


def test_noise_widens_the_knee_and_does_not_move_it_out() -> None:
    widths = []
    for noise in (0.0, 0.05, 0.3):
        found, _ = knee([closed(load, 8.0, noise) for load in LOADS])
        assert found is not None
        assert found.interval[0] < 8 < found.interval[1]
        widths.append(found.interval[1] / found.interval[0])
    assert widths[0] <= widths[1] < widths[2]


def test_mm1_has_its_knee_at_half_load() -> None:
    """Power of M/M/1 is rho (1 - rho): greatest at one half (Kleinrock)."""
    points = [Point(r, r, 1 / (1 - r)) for r in (0.1, 0.3, 0.45, 0.5, 0.55, 0.7, 0.9)]
    found, how = knee(points)
    assert found is not None
    assert (found.value, found.interval) == (0.5, (0.45, 0.55))
    assert "no interval" in how


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([closed(load, 1000.0) for load in LOADS], "no knee up to 64"),
        ([closed(load, 1.0) for load in LOADS], "no knee from 1 on"),
        ([Point(x, 5.0, 1.0, 0.99, 1.01) for x in LOADS], "grow alike"),
        ([closed(load, 4.0) for load in LOADS[:3]], "from 3 points"),
        ([Point(x, 0.0, 1.0) for x in LOADS], "from 0 points"),
    ],
)
def test_where_there_is_no_knee_none_is_told(points: list[Point], said: str) -> None:
    found, why = knee(points)
    assert found is None
    assert said in why


def run_search(search: Search, limit_at: float, blur: float, rng: random.Random, budget: int = 60) -> int:
    """Verdicts that are right outside of ``blur`` around the limit, and undecided within."""
    tried = 0
    while tried < budget and (load := search.next()) is not None:
        assert search.low <= load <= search.high
        assert load not in search.verdicts, "a load is tried once"
        near = abs(load / limit_at - 1) < blur
        search.add(load, "undecided" if near else "met" if load <= limit_at else "missed")
        tried += 1
    return tried


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.02, 5000), st.floats(0.02, 5000), st.sampled_from([0.0, 0.02, 0.1]), st.sampled_from([0.01, 0.05, 0.2])
)
def test_a_search_ends_with_the_truth_inside(truth: float, start: float, blur: float, precision: float) -> None:
    search = Search(0.01, 10_000, start, False, precision)
    tried = run_search(search, truth, blur, random.Random(0))
    assert tried < 60
    assert search.met is not None
    assert search.missed is not None
    assert search.met <= truth * (1 + 1e-9)
    assert search.missed >= truth
    if blur == 0:
        assert search.missed / search.met <= 1 + precision + 1e-9
        assert search.ended() == "found"
    else:
        assert search.missed / search.met <= (1 + precision) ** 2 * (1 + blur) / (1 - blur) + 1e-9


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_search_of_whole_loads_is_exact(truth: int, start: int) -> None:
    search = Search(1, 4096, start, True, 0.0)
    run_search(search, truth + 0.5, 0.0, random.Random(0))
    assert search.met == truth
    assert search.missed == (truth + 1 if truth < 4096 else None)
    if truth == 4096:
        assert search.ended() == "no load up to 4096 is known to miss it"


def test_contradicting_verdicts_widen_the_interval() -> None:
    search = Search(1, 64, 4, True, 0.05)
    for load, said in ((4, "met"), (8, "missed"), (6, "met"), (7, "met"), (16, "met"), (32, "missed")):
        search.add(load, said)  # type: ignore[arg-type]
    assert search.contradicts
    assert (search.met, search.missed) == (7, 32)


def test_nothing_meets_and_nothing_misses_are_told() -> None:
    never = Search(1, 64, 8, True, 0.05)
    run_search(never, 0.1, 0.0, random.Random(0))
    assert (never.met, never.missed) == (None, 1)
    assert never.ended() == "no load from 1 on is known to meet it"
    always = Search(1, 64, 8, True, 0.05)
    run_search(always, 1e9, 0.0, random.Random(0))
    assert (always.met, always.missed) == (64, None)


@pytest.mark.parametrize("probes", [1, 12])
def test_needed_is_the_fewest_that_can_be_met(probes: int) -> None:
    z = quantile(probes, 3)
    least = needed(0.9, z)
    good = [Seen(True, 1.0)] * 10_000

    def said(count: int) -> str:
        kept = good[: math.ceil(count / (1 - RAMP)) + 1]
        return judge([kept], 0.9, z).said

    assert said(least) == "met"
    assert said(least - 3) == "undecided"


def test_a_backlog_that_grows_is_not_met_however_loose_the_limit() -> None:
    """Above capacity every request of a short run may be within a loose limit; the latency tells."""
    over = [answered(i, i * 0.09, i * 0.01, 0.1) for i in range(200)]
    slow = {"ttft": 10_000.0}
    verdict = judge([seen(over, slow)], 0.9, 2.0)
    assert (verdict.said, verdict.growing, verdict.good) == ("undecided", True, verdict.judged)
    steady = [answered(i, i * 0.2, 0.01 * (i % 3), 0.1) for i in range(200)]
    assert judge([seen(steady, slow)], 0.9, 2.0).said == "met"


def test_neighbours_in_one_queue_count_less() -> None:
    lumps = [Seen(i % 100 < 91, 1.0) for i in range(1000)]
    mixed = [Seen(i * 37 % 100 < 91, 1.0) for i in range(1000)]
    queue = [Seen(True, 0.1 + i % 100 / 1000) for i in range(1000)]  # all are good, the worst in lumps
    one, other = judge([lumps], 0.8, 1.96), judge([mixed], 0.8, 1.96)
    assert (one.judged, other.judged) == (800, 800)
    assert one.effective * 5 < other.effective
    assert judge([queue], 0.8, 1.96).effective * 5 < other.effective
    assert one.interval[0] < other.interval[0] < other.interval[1] < one.interval[1]


def test_unknown_requests_leave_it_undecided_and_failed_ones_are_not_good() -> None:
    rows = [answered(i, i * 1.0, 0.01, 0.1) for i in range(200)]
    for row in rows:
        row.output_tokens = None
    assert judge([seen(rows, {"tpot": 500.0})], 0.9, 2.0).said == "undecided"
    for row in rows[::2]:
        row.status = "refused"
    assert judge([seen(rows, {"ttft": 500.0})], 0.9, 2.0).said == "missed"


def test_the_waiting_times_of_the_queue_are_the_formulas() -> None:
    """The yardstick itself: simulated M/D/1 against Erlang's formula."""
    waited = [wait for _, wait in waits(8.0, 200_000, SERVICE, 1)]
    within = sum(wait <= 0.25 + 1e-9 for wait in waited) / len(waited)
    assert within == pytest.approx(md1_within(8.0, SERVICE, 0.25), abs=0.01)


@pytest.mark.parametrize(("wait", "share"), [(0.1, 0.9), (0.3, 0.9), (0.3, 0.99), (1.0, 0.9)])
def test_the_most_load_of_a_queue_is_inside_the_interval(wait: float, share: float) -> None:
    """M/D/1 probed with few requests a load: the interval covers the exact limit; over 20 searches at most one may
    not (95 % each), and the intervals are not just wide. The last queue remembers for hundreds of requests.
    """
    truth = limit(SERVICE, wait, share)
    probes, z = 12, quantile(12, 3)
    base = max(400, needed(share, z))
    covered, widths = 0, []
    for seed in range(20):
        search = Search(0.1, 1000.0, 5.0, False, 0.05)
        turn = 0
        while len(search.verdicts) < probes and (rate := search.next()) is not None:
            rounds: list[list[Seen]] = []
            for count in (base, base, 2 * base):
                turn += 1
                queue = waits(rate, count, SERVICE, seed * 1000 + turn)
                rounds.append([Seen(waited <= wait, waited / wait) for _, waited in queue])
                verdict = judge(rounds, share, z)
                if verdict.said != "undecided":
                    break
            search.add(rate, verdict.said)
        assert search.met is not None
        assert search.missed is not None
        covered += search.met <= truth <= search.missed
        widths.append(search.missed / search.met)
    assert covered >= 19
    assert sorted(widths)[len(widths) // 2] < 2.5
