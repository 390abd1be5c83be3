"""The simulator: clock, books and figures, against values by hand and against the planner."""

import json
import math
import random
import time
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from virtual_loads import fresh, small, two_h20

from longread.engine import virtual
from longread.engine.scheduler import Schedule, Scheduler
from longread.engine.virtual import VirtualEngine, alone
from longread.measure.arrivals import Arrival, Kind, Mix, generate
from longread.measure.planned_cost import PlannedCost, Table, calibrated, planned_limits
from longread.measure.simulate import PERCENTILES, SimulationError, by_class, plain, simulate, spread, sustained
from longread.measure.simulation_report import SCHEMA, Setting, document, print_simulation, request_rows
from longread.plan.cards import parse_hardware
from longread.plan.deployment import Strategy
from longread.plan.raw import decode_step, prefill
from longread.plan.space import Fixed
from longread.plan.survey import survey
from longread.spec.cost import StepCost
from longread.spec.errors import ConfigError
from longread.spec.releases import release

BY_HAND = StepCost(launch=1.0, token=0.01, decode=0.125)


def test_a_lone_requests_times_by_hand() -> None:
    done = simulate([fresh(2.0, 100, 3, "a")], small(), BY_HAND)
    (run,) = done.runs
    assert run.ttft == pytest.approx(1.64 + 1.36)
    assert run.e2e == pytest.approx(3.0 + 2 * 1.125)
    assert run.tpot == pytest.approx(1.125)
    assert (run.queue, run.chunks, run.computed, run.outputs) == (0.0, 2, 100, 3)
    assert run.longest_gap == pytest.approx(1.125)
    assert done.seconds == pytest.approx(2 + 5.25)
    assert done.totals.busy == pytest.approx(5.25)
    assert done.alone[0] is not None
    assert (done.alone[0].ttft, done.alone[0].e2e) == pytest.approx((run.ttft, run.e2e))


def test_a_second_request_waits_for_the_step_that_runs() -> None:
    first, second = simulate([fresh(0, 64, 1, "a"), fresh(0.5, 32, 1, "b")], small(), BY_HAND).runs
    assert first.ttft == pytest.approx(1.64)
    assert second.queue == pytest.approx(1.14)
    assert second.ttft == pytest.approx(1.14 + 1.32)


def test_the_same_document_is_read_once() -> None:
    book = fresh(0, 2048, 1, "book")
    later = Arrival(500.0, 2048 + 100, 1, (*book.blocks, 10**6), "question")
    _, asked = simulate([book, later], small(), BY_HAND).runs
    assert asked.cached == 2048
    assert asked.computed == 100
    other = replace(later, blocks=(*book.blocks[:2], *range(10**6, 10**6 + 3)))
    _, asked = simulate([book, other], small(), BY_HAND).runs
    assert asked.cached == 1024


@given(
    isl=st.integers(1, 3000),
    osl=st.integers(1, 300),
    question=st.integers(1, 400),
    rings=st.booleans(),
    budget=st.sampled_from([7, 64, 500, 4096]),
)
def test_alone_is_what_a_lone_request_gets(isl: int, osl: int, question: int, rings: bool, budget: int) -> None:
    limits = small(max_num_batched_tokens=budget, snapshots=9, rings=rings, snapshot_interval=1024, pages=80)
    cost = StepCost(0.01, 1e-3, 1e-6, 1e-3, 1e-4, 1e-8)
    book = fresh(0, isl, osl, "book")
    whole = isl // 512
    again = Arrival(1e6, whole * 512 + question, osl, (*book.blocks[:whole], 10**6), "again")
    done = simulate([book, again], limits, cost)
    assert done.runs[1].cached <= whole * 512
    for run, single in zip(done.runs, done.alone, strict=True):
        assert single is not None
        assert single.ttft == pytest.approx(run.ttft)
        assert single.e2e == pytest.approx(run.e2e, rel=1e-3)  # the mean context is a whole number


def _load(seed: int, rate: float) -> list[Arrival]:
    kinds = (Kind("short", 0.8, 200, 60, spread=0.9), Kind("long", 0.2, 3000, 20, spread=0.5))
    return generate(Mix(kinds, rate, 40, seed))


@pytest.mark.parametrize("rate", [0.001, 0.1, math.inf])
def test_steps_taken_together_are_the_same_as_one_by_one(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = StepCost(0.02, 1e-3, 1e-7, 1e-3, 1e-4, 1e-8)
    limits = small(max_num_seqs=8, pages=60)
    together = simulate(_load(1, rate), limits, cost)
    monkeypatch.setattr(VirtualEngine, "_repeats", lambda self, plan, until, one: 1)
    single = simulate(_load(1, rate), limits, cost)
    assert together.totals.steps == pytest.approx(single.totals.steps, rel=0.02)
    if rate < math.inf:
        assert together.totals.decisions < 0.6 * single.totals.decisions
    for mine, other in zip(together.runs, single.runs, strict=True):
        assert mine.outputs == other.outputs
        # A step may begin while a request arrives; it then waits for one step more or less.
        assert mine.first_token == pytest.approx(other.first_token, rel=0.01, abs=0.1)
        assert mine.finished == pytest.approx(other.finished, rel=0.01, abs=0.1)


@given(seed=st.integers(0, 1000), rate=st.sampled_from([0.5, 5.0, math.inf]), pages=st.sampled_from([18, 30, 64]))
def test_the_books_of_a_simulation_balance(seed: int, rate: float, pages: int) -> None:
    arrivals = _load(seed, rate)
    engines: list[VirtualEngine] = []
    clock = [0.0]

    def watch(engine: VirtualEngine) -> None:
        assert engine.now >= clock[0]
        clock[0] = engine.now
        engines[:] = [engine]

    done = simulate(arrivals, small(pages=pages, context=pages * 256), StepCost(0.02, 1e-3, 0, 0, 1e-4), watch=watch)
    engines[0].cache.check()
    assert engines[0].cache.pages_held == 0
    assert done.totals.output_tokens == sum(each.osl for each in arrivals)
    for run, each in zip(done.runs, arrivals, strict=True):
        assert run.error is None
        assert run.arrived == each.at <= run.admitted <= run.prefill_started < run.first_token <= run.finished
        assert run.computed >= each.isl - run.cached
        assert run.preemptions or run.computed == each.isl - run.cached
    gaps = sum(weight for each in done.totals.gaps.values() for _, weight in each)
    assert gaps == sum(each.osl - 1 for each in arrivals)
    assert done.totals.busy <= done.seconds * (1 + 1e-9)


def test_what_can_never_be_served_is_refused_with_the_limit() -> None:
    rows = [fresh(0, 3000, 10, "a"), fresh(0, 10, 10, "a"), fresh(0, 1000, 600, "b")]
    done = simulate(rows, small(pages=4, context=1200), BY_HAND)
    assert [run.error for run in done.runs] == [
        "3,010 tokens, and 1,024 are the most that one request can have here",
        None,
        "1,600 tokens, and 1,024 are the most that one request can have here",
    ]
    first, second = by_class(done, {"ttft": 100.0})
    assert first.refused == {done.runs[0].error: 1}
    assert (first.good, second.good, second.ttft) == (0.5, 0.0, None)


def test_a_schedule_that_grants_nothing_is_an_error_not_an_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "schedule", lambda self: Schedule())
    with pytest.raises(SimulationError, match=r"1 requests wait at 3\.0 s and nothing is granted"):
        simulate([fresh(3, 10, 10, "a")], small(), BY_HAND)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5)), min_size=1, max_size=30))
def test_percentiles_are_nearest_rank(values: list[tuple[float, int]]) -> None:
    found = spread(values)
    flat = sorted(value for value, weight in values for _ in range(weight))
    assert found is not None
    assert found.count == len(flat)
    assert found.mean == pytest.approx(sum(flat) / len(flat))
    assert found.percentiles == {p: flat[math.ceil(p / 100 * len(flat)) - 1] for p in PERCENTILES}
    assert found.most == flat[-1]
    assert spread([]) is None


def test_targets_count_who_meets_both() -> None:
    done = simulate([fresh(0, 64, 5, "a"), fresh(0, 64, 5, "a"), fresh(100, 64, 1, "a")], small(), BY_HAND)
    (result,) = by_class(done, {"ttft": 2.0, "tpot": 1.3})
    assert [round(run.ttft, 2) for run in done.runs] == [2.64, 2.64, 1.64] or result.good == pytest.approx(1 / 3)
    assert by_class(done)[0].good is None
    assert by_class(done, {"ttft": 100.0})[0].good == 1.0


def test_the_sustained_rate_is_requests_over_the_time_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [fresh(float(i), 32, 1, "a") for i in range(10)]
    assert sustained(rows, small(), BY_HAND) == pytest.approx(10 / (5 * 1.64))
    monkeypatch.setattr("longread.measure.simulate.SAMPLE_TOKENS", 70)
    assert sustained(rows, small(), BY_HAND) == pytest.approx(2 / 1.64), "of the first 70 tokens"


def test_tables_are_exact_on_their_grid_and_linear_between_and_past() -> None:
    table = Table((1, 2, 4), (0, 10), ((0.0, 1.0), (2.0, 3.0), (6.0, 7.0)))
    assert table.at(2, 10) == 3.0
    assert table.at(3, 0) == 4.0
    assert table.at(3, 5) == 4.5
    assert table.at(8, 0) == 14.0
    assert table.at(1, 30) == 3.0


@pytest.mark.parametrize("isl", [8192, 131072, 1_000_000])
def test_a_lone_prompt_takes_what_the_planner_says(isl: int) -> None:
    limits, cost = two_h20()
    read, _ = cost.scales
    planned = sum(prefill(deployment(), isl).values()) * read.centre
    assert alone(limits, cost, isl, 1)[0] == pytest.approx(planned, rel=0.02)


def test_pipeline_stages_share_the_chunks() -> None:
    d = replace(deployment(), strategy=Strategy(pp=2))
    cost, limits = PlannedCost(d), replace(two_h20()[0], rings=False)
    parts = prefill(d, 524_288)
    planned = (sum(parts.values()) - parts["pipeline fill"]) * cost.scales[0].centre
    assert alone(limits, cost, 524_288, 1)[0] == pytest.approx(planned, rel=0.02)


def deployment():  # type: ignore[no-untyped-def]
    return survey(release("V4-Flash"), parse_hardware("2xH20-96"), engines=("longread",), fixed=Fixed()).deployment


def test_planned_steps_grow_with_their_work_and_share_one_pass() -> None:
    _, cost = two_h20()
    d = deployment()
    for batch, context in ((1, 256), (8, 65536), (16, 8192)):
        planned = sum(decode_step(d, batch, context).values()) * cost.scales[1].centre
        assert cost.seconds((batch, batch * context)) == pytest.approx(planned + 1e-3)
    draw = random.Random(1)
    for _ in range(200):
        rows, tokens, prefix = draw.randrange(1, 17), draw.randrange(1, 8192), draw.randrange(0, 900_000)
        context = draw.randrange(1, 500_000)
        chunk, decode = cost.seconds((0, 0), ((tokens, prefix),)), cost.seconds((rows, rows * context))
        mixed = cost.seconds((rows, rows * context), ((tokens, prefix),))
        assert chunk <= mixed
        assert mixed <= (chunk + decode) * 1.01, "weights are read once"
        assert chunk <= cost.seconds((0, 0), ((tokens, prefix + 10_000),)) + 1e-9
        assert chunk <= cost.seconds((0, 0), ((tokens + 500, prefix),)) + 1e-9
        both = cost.seconds((0, 0), ((tokens, prefix), (tokens, 0)))
        assert both <= (chunk + cost.seconds((0, 0), ((tokens, 0),))) * 1.01


def test_the_linear_model_is_near_the_planned_steps() -> None:
    limits, cost = two_h20()
    linear = calibrated(cost, limits).cost
    off = []
    for tokens in (1024, 3000, 8000):
        for prefix in (0, 10_000, 100_000, 700_000):
            work = (0, 0), ((tokens, prefix),)
            off.append(linear.seconds(*work) / cost.seconds(*work))
    for rows in (1, 3, 16):
        for context in (500, 30_000, 400_000):
            off.append(linear.seconds((rows, rows * context)) / cost.seconds((rows, rows * context)))
    assert min(off) > 0.8
    assert max(off) < 1.25


def test_limits_fill_the_memory_that_the_planner_leaves() -> None:
    limits, _ = two_h20()
    assert limits.rings
    assert 2_300_000 < limits.pages * 256 < 2_550_000
    assert limits.context == 2**20
    assert planned_limits(deployment(), pages=100).context == 25_600
    with pytest.raises(ConfigError, match="nothing is left for the cache"):
        planned_limits(replace(deployment(), max_num_seqs=2000))


def test_a_million_tokens_are_simulated_in_well_under_a_second_each() -> None:
    limits, cost = two_h20()
    begun = time.process_time()
    done = simulate([fresh(0, 1_000_000, 64, "book")], limits, cost)
    assert time.process_time() - begun < 2.0  # about 0.2 s; the rest is for a busy machine
    assert done.seconds > 300
    (run,) = done.runs
    assert run.computed == 1_000_000


def _setting(seed: int = 3) -> Setting:
    limits, cost = two_h20()
    return Setting(deployment(), limits, "a load", seed, cost.scales, {"ttft": 10.0}, "longread simulate", "abc")


def _small_mix() -> list[Arrival]:
    return generate(Mix((Kind("short", 0.75, 2000, 20), Kind("long", 0.25, 60_000, 5)), 0.5, 12, 3))


def test_the_document_is_json_and_the_same_for_the_same_seed() -> None:
    limits, cost = two_h20()

    def made() -> dict:
        done = simulate(_small_mix(), limits, cost)
        return json.loads(json.dumps(document(done, by_class(done, {"ttft": 10.0}), _setting()), allow_nan=False))

    first, second = made(), made()
    assert first.pop("wall_seconds") > 0
    second.pop("wall_seconds")
    assert first == second
    assert first["schema"] == SCHEMA == "longread.simulation/1"
    assert set(first["classes"]) == {"short", "long"}
    short = first["classes"]["short"]
    assert short["ttft"]["p50"] <= short["ttft"]["p99"] <= short["ttft"]["max"]
    assert short["slower"]["mean"] >= 0.99
    assert 0 <= short["good"] <= 1
    assert first["deployment"]["strategy"] == "TP2"


def test_request_rows_and_the_table_say_what_happened() -> None:
    limits, cost = two_h20()
    done = simulate([*_small_mix(), fresh(1e4, 2**20, 9, "huge")], limits, cost)
    rows = [json.loads(json.dumps(row)) for row in request_rows(done)]
    assert len(rows) == 13
    assert rows[-1]["error"].startswith("1,048,585 tokens")
    assert all(row["ttft"] >= row["ttft_alone"] * 0.99 for row in rows[:-1])
    out = StringIO()
    print_simulation(Console(file=out, width=300), done, by_class(done), _setting())
    text = out.getvalue()
    assert "DeepSeek-V4-Flash on 2xH20-96, TP2" in text
    assert "huge: 1 not served: 1,048,585 tokens" in text
    assert "times real time" in text
    assert plain([]) is None
    assert virtual.OUTPUT_IDS > 2**29


def test_a_plan_with_no_work_in_a_chunk_is_the_floor_of_a_step() -> None:
    cost = PlannedCost(deployment())
    assert cost.seconds((0, 0), ((1, 0),)) == cost.seconds((0, 0), ((64, 500_000),)), "kernels' issue bounds both"
