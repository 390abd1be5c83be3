"""Figures of made-up outcomes: each by its definition, few samples, none, and what is missing."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.measure.intervals import percentile
from longread.measure.load.calibrate import Calibration, warnings
from longread.measure.load.estimates import (
    Interval,
    estimate,
    mean_interval,
    percentile_interval,
    samples_needed,
)
from longread.measure.load.goodput import goodput, parse_goodput
from longread.measure.load.metrics import Wanted, flat, parse_metrics, parse_percents, summarise
from longread.measure.load.outcome import Outcome, Overhead, Run, Spread
from longread.measure.load.overhead import spread
from longread.spec.errors import ConfigError

FLOATS = st.lists(st.floats(0, 1e4), min_size=1, max_size=60)


def outcome(
    sent: float = 0.0,
    ttft: float | None = 0.1,
    gaps: tuple[float, ...] = (0.01, 0.01, 0.01),
    tokens: int | None = 4,
    status: str = "ok",
    **fields: object,
) -> Outcome:
    found = Outcome("k", "chat", status=status, sent=sent, due=sent, output_tokens=tokens, prompt_tokens=10)  # type: ignore[arg-type]
    if ttft is not None:
        times = [sent + ttft]
        for gap in gaps:
            times.append(times[-1] + gap)
        found.chunk_times = array("d", times)
        found.first_chunk, found.first_answer, found.last = sent + ttft / 2, times[0], times[-1]
    found.ended = found.last if found.last is not None else sent + 1.0
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def run_of(*outcomes: Outcome, duration: float = 2.0, **fields: object) -> Run:
    quiet = Overhead(Spread(10, 0.0, 0.0, 0.0), Spread(10, 0.0, 0.0, 0.0), 0.1, 0)
    return Run(list(outcomes), [], 1e9, duration, len(outcomes), False, fields.pop("overhead", quiet), **fields)  # type: ignore[arg-type]


def test_every_metric_by_its_definition() -> None:
    told = flat(summarise(run_of(outcome(), outcome(sent=1.0, ttft=0.3, gaps=(0.02, 0.04), tokens=7))))
    assert told["mean_ttft_ms"] == pytest.approx(200)
    assert told["mean_ttfc_ms"] == pytest.approx(100)
    assert told["mean_tpot_ms"] == pytest.approx((0.03 / 3 + 0.06 / 6) / 2 * 1000)
    assert told["mean_itl_ms"] == pytest.approx(np.mean([10, 10, 10, 20, 40]))
    assert told["std_itl_ms"] == pytest.approx(np.std([10, 10, 10, 20, 40]))
    assert told["mean_e2el_ms"] == pytest.approx((130 + 360) / 2)
    assert told["p90_ttft_ms"] == pytest.approx(280)
    assert told["request_throughput"] == 1.0
    assert told["output_throughput"] == 5.5
    assert told["total_token_throughput"] == 15.5


def test_reasoning_is_told_apart_only_where_there_is_some() -> None:
    assert "mean_ttfrt_ms" not in flat(summarise(run_of(outcome())))
    told = flat(summarise(run_of(outcome(first_reasoning=0.1, first_answer=0.12), outcome())))
    assert told["mean_ttfrt_ms"] == pytest.approx(100)  # of the one that reasoned
    assert told["mean_ttfat_ms"] == pytest.approx(110)


def test_answers_of_one_token_have_no_tpot_and_are_counted_as_left_out() -> None:
    summary = summarise(run_of(outcome(), outcome(gaps=(), tokens=1), outcome(tokens=None)))
    assert summary.estimates["tpot"].count == 1
    assert any("1 answers of at most one token" in text for text in summary.missing)
    assert any("1 answers of an unknown number" in text for text in summary.missing)


def test_a_missing_count_makes_totals_missing_and_never_0() -> None:
    told = flat(summarise(run_of(outcome(), outcome(tokens=None))))
    assert told["total_output_tokens"] is None
    assert told["output_throughput"] is None
    assert told["total_token_throughput"] is None
    assert told["total_input_tokens"] == 20


def test_failed_requests_are_in_no_latency_and_cancelled_ones_are_not_the_servers() -> None:
    bad = [outcome(status=s, ttft=9.0, tokens=None) for s in ("failed", "refused", "timeout", "cancelled")]
    summary = summarise(run_of(outcome(), *bad))
    assert (summary.completed, summary.failed) == (1, 3)
    assert flat(summary)["mean_ttft_ms"] == pytest.approx(100)
    assert flat(summary)["total_output_tokens"] == 4


def test_nothing_answered_is_missing_everywhere() -> None:
    told = flat(summarise(run_of(outcome(status="failed", ttft=None)), Wanted(slos={"ttft": 100})))
    assert told["mean_ttft_ms"] is told["p99_tpot_ms"] is told["std_itl_ms"] is None
    assert told["request_goodput"] == 0.0  # that it met no SLO is known
    assert flat(summarise(run_of(duration=0.0)))["request_throughput"] is None


@given(FLOATS, st.floats(0.001, 0.999))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(np.percentile(values, share * 100), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("share", "needed"), [(0.5, 6), (0.9, 36), (0.95, 72), (0.99, 368), (0.999, 3688)])
def test_a_percentile_says_how_many_samples_bound_it(share: float, needed: int) -> None:
    assert samples_needed(share) == needed
    values = [float(i) for i in range(needed)]
    assert percentile_interval(values, share).needs is None
    few = percentile_interval(values[:-1], share)
    assert few.needs == needed
    assert few.high is None


def test_order_statistics_as_in_the_tables() -> None:
    values = [float(i) for i in range(1, 101)]
    assert percentile_interval(values, 0.5) == Interval(40.0, 61.0)
    large = percentile_interval([float(i) for i in range(1, 40_001)], 0.5)
    assert large.low == pytest.approx(20_000 - 196, abs=2)
    assert large.high == pytest.approx(20_000 + 196, abs=3)
    assert percentile_interval([], 0.99) == Interval(None, None, 368)


def test_the_interval_of_a_mean_covers_it_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        interval = mean_interval([[float(v)] for v in draw.exponential(1.0, 30)])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 1.0 <= interval.high
    assert 0.88 < covered / 400 < 0.98


def test_gaps_of_one_request_are_one_source() -> None:
    """Two requests with 50 equal gaps each are two samples, not a hundred."""
    apart = mean_interval([[10.0] * 50, [20.0] * 50])
    assert apart.low is not None
    assert apart.low < 0
    assert estimate([[10.0] * 50, [20.0] * 50], (50.0,)).intervals == {50.0: None}
    assert mean_interval([[1.0, 2.0]]) == Interval(None, None, 2)


def test_goodput_counts_what_met_all() -> None:
    slos = parse_goodput(["ttft:150", "tpot:15", "e2el:200"])
    rows = [
        outcome(),
        outcome(ttft=0.151, gaps=(0.01,)),
        outcome(gaps=(0.016,) * 3),
        outcome(gaps=(0.04,), tokens=9),
        outcome(gaps=(), tokens=1),  # no TPOT is asked of it
        outcome(status="failed"),
        outcome(status="cancelled"),
    ]
    told = goodput(rows, slos, 2.0)
    assert (told.good, told.counted, told.unknown) == (3, 6, 0)
    assert (told.rate, told.fraction) == (1.5, 0.5)
    assert told.interval is not None
    assert told.interval[0] < 0.5 < told.interval[1]


def test_goodput_is_missing_where_a_count_is() -> None:
    told = goodput([outcome(), outcome(tokens=None)], {"tpot": 50}, 2.0)
    assert (told.rate, told.fraction, told.unknown) == (None, None, 1)
    late = goodput([outcome(), outcome(tokens=None, ttft=0.9)], {"tpot": 50, "ttft": 500}, 2.0)
    assert (late.good, late.fraction) == (1, 0.5)  # what it missed is known without the count


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tttf:200"], "did you mean ttft"),
        (["itl:20"], "no SLO is called 'itl'"),
        (["ttft=200"], "NAME:MILLISECONDS"),
        (["ttft:fast"], "not a number"),
        (["ttft:0"], "above 0"),
        (["ttft:-5"], "above 0"),
        (["ttft:nan"], "above 0"),
        (["ttft:inf"], "above 0"),
        (["ttft:200", "ttft:300"], "twice"),
    ],
)
def test_nonsense_in_goodput_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_goodput(words)


def test_names_and_percents_are_checked() -> None:
    assert parse_metrics("ttft, itl,ttft") == ("ttft", "itl")
    assert parse_percents("99,50,99.9") == (50.0, 99.0, 99.9)
    assert "p99.9_ttft_ms" in flat(summarise(run_of(outcome()), Wanted(percents=(99.9,))))
    for text in ("0", "100", "-1", "x", "nan", "99,,5"):
        with pytest.raises(ConfigError):
            parse_percents(text)
    with pytest.raises(ConfigError, match="no metric is called"):
        parse_metrics("ttft,latency")


def test_kinds_are_told_apart_where_there_are_several() -> None:
    summary = summarise(run_of(outcome(), outcome(kind="long", ttft=1.0), outcome(kind="long", status="failed")))
    assert {name: (k.requests, k.completed) for name, k in summary.kinds.items()} == {"chat": (1, 1), "long": (2, 1)}
    assert summary.kinds["long"].estimates["ttft"].mean == pytest.approx(1000)
    assert summarise(run_of(outcome())).kinds == {}


def test_a_client_that_was_late_says_so() -> None:
    fine = summarise(run_of(outcome(), outcome()))
    assert warnings(fine, None) == []
    busy = Overhead(Spread(9, 0.001, 0.02, 0.03), Spread(9, 0.001, 0.05, 0.05), 0.95, 0)
    said = " | ".join(warnings(summarise(run_of(outcome(), overhead=busy)), None))
    assert "event loop woke 20.0 ms late" in said
    assert "sent 50.0 ms" in said
    assert "95% of a core" in said
    added = Calibration(Spread(9, 0.001, 0.001, 0.001), Spread(9, 0.001, 0.04, 0.05), 8, 0.01)
    assert "adds 40.0 ms" in " ".join(warnings(fine, added))


def test_what_the_answers_tell_about_the_run() -> None:
    rows = [outcome(counted_tokens=20, tokens_from="usage"), outcome(status="failed"), outcome(held=0.5)]
    said = " | ".join(warnings(summarise(run_of(*rows)), None))
    assert "is it the model's tokenizer" in said
    assert "1 of 3 requests were not answered" in said
    assert "held back for up to 0.5 s" in said


def test_lateness_is_without_what_was_held_on_purpose() -> None:
    late = outcome(sent=3.0)
    late.due, late.held = 1.0, 1.9
    assert late.lateness == pytest.approx(0.1)
    assert spread([]) is None
    assert math.isclose(late.ttft or 0, 0.1)
