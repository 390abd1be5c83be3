"""Claims: what is read from a sentence, and verdicts against the printed arithmetic and against published runs."""

import re
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longread.plan.calibrate import default_factors, predict
from longread.plan.cards import parse_hardware
from longread.plan.claims.claim import Case, Claim, TokenRate, Verdict
from longread.plan.claims.first_token import COLD, WARM, WARM_SPREAD, WARM_TOGETHER
from longread.plan.claims.judge import check, judge
from longread.plan.claims.limits import largest_suffix, suffix_seconds
from longread.plan.claims.output import INPUT, OUTPUT, PER_STREAM, PER_TOKEN
from longread.plan.claims.plans import candidates, input_rate
from longread.plan.claims.report import claim_document, claim_text
from longread.plan.claims.residency import MEMORY
from longread.plan.claims.text import parse_claim
from longread.plan.published import Run, published_runs
from longread.plan.shards import check_strategy
from longread.plan.space import Fixed, cache_formats, engine_limit, expert_formats, strategies
from longread.spec.errors import ConfigError
from longread.spec.releases import release

S = 524288
FAMOUS = "168 ms TTFT at 512K, 100 concurrent, 8xH20-96"


def verdict(text: str) -> Verdict:
    return judge(parse_claim(text))


def case(text: str) -> Case:
    found = verdict(text).cases
    assert len(found) == 1
    return found[0]


def famous(model: str) -> Case:
    return case(f"{FAMOUS}, {model}")


@pytest.mark.parametrize(("model", "floor"), [("V3", 596), ("V3.2", 90), ("V4-Flash", 14)])
def test_the_famous_claim_is_impossible_cold(model: str, floor: float) -> None:
    cold = famous(model).finding(COLD)
    assert cold.outcome == "impossible"
    assert round(cold.floor) == floor
    assert any("PFLOP / (8 x" in line for line in cold.arithmetic)


@pytest.mark.parametrize(("model", "micros"), [("V3", 7554), ("V3.2", 282), ("V4-Flash", 41)])
def test_the_famous_claim_warm_costs_per_new_token(model: str, micros: int) -> None:
    one = suffix_seconds(release(model), parse_hardware("8xH20-96"), 1, S)
    assert round(one * 1e6) == micros


@pytest.mark.parametrize(
    ("model", "alone", "half", "together", "half_together"),
    [
        ("V3", "22", "11", "0.2", "0.1"),
        ("V3.2", "596", "298", "5.9", "2.9"),
        ("V4-Flash", "4,130", "2,065", "41", "20"),
    ],
)
def test_the_famous_claim_allows_so_many_new_tokens(
    model: str, alone: str, half: str, together: str, half_together: str
) -> None:
    found = famous(model)
    said = [found.finding(aspect).arithmetic[-1] for aspect in (WARM_SPREAD, WARM_TOGETHER)]
    assert said[0] == f"168 ms allow {alone} new tokens at 100 % of the peak, {half} at 50 %"
    assert said[1] == f"168 ms allow {together} new tokens each at 100 % of the peak, {half_together} at 50 %"


def test_the_famous_claim_on_v3_fails_if_all_come_at_once() -> None:
    together = famous("V3").finding(WARM_TOGETHER)
    assert together.outcome == "impossible"
    assert round(together.floor, 3) == 0.755


def test_the_famous_claim_on_v3_2_needs_one_shared_document() -> None:
    found = famous("V3.2")
    assert found.outcome == "only if"
    assert "3.2 times the 163,840" in found.notes[0]
    for aspect in (WARM_TOGETHER, WARM_SPREAD):
        finding = found.finding(aspect)
        assert finding.outcome == "only if"
        conditions = " ".join(finding.conditions)
        assert "one shared document" in conditions
        assert "2.52 TB, which the cards do not hold" in conditions
        assert "509 ms over one link, 63.6 ms over 8" in conditions
        assert "900 ms" in conditions  # four NVMe


def test_the_famous_claim_on_v4_flash_needs_sharding_snapshots_and_a_short_suffix() -> None:
    found = famous("V4-Flash")
    assert found.outcome == "only if"
    conditions = " ".join(found.finding(WARM_TOGETHER).conditions)
    assert "at most 41 new tokens each, 100 at once" in conditions
    assert "100 distinct contexts are 202 GB: they fit the cards only if sharded" in conditions
    assert "5,504 tokens = 224 ms at 100 % of the peak, over the budget by itself" in conditions
    assert "40.9 ms over one link, 5.11 ms over 8" in conditions
    assert "100 distinct contexts from host at once: 511 ms" in conditions
    assert "token ids come in" in conditions
    spread = " ".join(found.finding(WARM_SPREAD).conditions)
    assert "arrivals are spread" in spread


def test_the_famous_claim_has_another_meaning() -> None:
    v = verdict(f"{FAMOUS}, V4-Flash")
    assert v.outcome == "only if"
    assert "5,242 each" in v.other_meanings[0]
    assert "65.3 ms for one" in v.other_meanings[0]  # 56.6 of it in linears, which run the same everywhere
    asked = " ".join(v.questions)
    for word in ("hit ratio", "arrive", "clock", "percentile", "host memory"):
        assert word in asked
    assert "last byte of the request" in " ".join(v.measurement)


def test_h20_is_two_cards_and_no_model_is_three() -> None:
    v = verdict("168 ms TTFT at 512K, 100 concurrency, 8×H20")
    assert [c.hardware for c in v.cases] == ["8xH20-96", "8xH20-141"] * 3
    assert [c.model for c in v.cases[::2]] == ["DeepSeek-V3", "DeepSeek-V3.2", "DeepSeek-V4-Flash"]
    assumed = " ".join(v.claim.assumed)
    assert "96 GB or the 141 GB" in assumed
    assert "no model named" in assumed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("512K first token in 168 ms, 100 concurrent, 8xH20-96, V4-Flash", (S, 0.168, None, 100)),
        ("8卡H20-96跑DeepSeek-V4-Flash，512K上下文首字延迟168毫秒，100并发", (S, 0.168, None, 100)),
        ("8 x H20 96GB, DeepSeek V4 Flash, 524288 tokens, TTFT=0.168s, concurrency 100", (S, 0.168, None, 100)),
        ("V4-Flash H20-96 x 8 首token 168ms 524,288 tokens 100 路并发", (S, 0.168, None, 100)),
        ("time to first token of 2 s with a 100万 token prompt on 8xH200 with V4-Pro", (1000000, 2.0, None, None)),
        ("V3.2 8xH200 TPOT 30ms 64 streams 8K in 1K out", (8192, None, 0.030, 64)),
        ("V3.2 on 8xH200: 20 ms per token at batch 8, 131072 tokens context", (131072, None, 0.020, 8)),
        ("1M context on 2xH20-96 V4-Flash", (2**20, None, None, None)),
        ("V4-Flash 128K in 3 s on 8xH200", (131072, 3.0, None, None)),
        ("单卡H200 V2-Lite 输入8K 输出1K 首字 0.3秒", (8192, 0.3, None, None)),
    ],
)
def test_forms_that_are_read(text: str, wanted: tuple[int | None, float | None, float | None, int | None]) -> None:
    claim = parse_claim(text)
    assert (claim.isl, claim.concurrency) == (wanted[0], wanted[3])
    for found, value in ((claim.ttft, wanted[1]), (claim.tpot, wanted[2])):
        assert found == (pytest.approx(value) if value is not None else None)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("30 tok/s V3.2 8xH200", TokenRate(30, "output", None)),
        ("20k tok/s total on 8xH200 V3.2", TokenRate(20000, "output", "total")),
        ("30 tokens/s per user, V3.2, 8xH200", TokenRate(30, "output", "user")),
        ("每秒30个token，单用户，V3.2，8xH200", TokenRate(30, "output", None)),
        ("单用户每秒30个token，V3.2，8xH200", TokenRate(30, "output", "user")),
        ("总吞吐2万token/s V3.2 8xH200", TokenRate(20000, "output", "total")),
        ("16.5k input tok/s V3 8xH20-96", TokenRate(16500, "input", None)),
        ("714 tps per gpu, R1, 2x8xH20-96", TokenRate(714, "output", "gpu")),
    ],
)
def test_rates_that_are_read(text: str, rate: TokenRate) -> None:
    assert parse_claim(text).rate == rate


def test_more_that_is_read() -> None:
    claim = parse_claim(
        "V4-Flash, 16xH20-96 TP8 PP2, vLLM 0.26.0, 512K, TTFT 1 s p99, 98% prefix hit, suffix 32, from host memory, "
        "distinct documents, simultaneous, pre-tokenised"
    )
    assert claim.hardware[0].label == "2x8xH20-96"
    assert claim.strategy is not None
    assert claim.strategy.label == "TP8-PP2"
    assert (claim.engine, claim.percentile, claim.cached, claim.suffix, claim.tier) == ("vllm", "p99", 0.98, 32, "host")
    assert (claim.shared, claim.together, claim.ids) == (False, True, True)
    assert parse_claim("V4.1 8xH200 1M").specs == (release("V4.1-Flash"),)
    assert parse_claim("V4 8xH200 1M").specs == (release("V4-Flash"), release("V4-Pro"))
    assert parse_claim("cold 128K in 3 s, 8xH200 V4-Flash").state == "cold"
    assert parse_claim("缓存命中 128K 首字 3 秒, 8xH200 V4-Flash").state == "warm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("512K in 1 s, V3", "no hardware"),
        ("8xH200 V3", "nothing to judge"),
        ("8xH200 V3 TTFT 1 s", "no prompt length"),
        ("512K in 3 s on 8xH20 with turbo V3", "'turbo' .* understood are lengths"),
        ("512K 首字 3 秒 8xH20 V3 魔法", "'魔法'"),
        ("V5 on 8xH20 512K in 1s", "'v5' is not a known model; did you mean"),
        ("Qwen3 on 8xH20 512K in 1s", "'qwen3' is not a DeepSeek model"),
        ("V3 on 8xH20 512K in 1s and 2s", "two times, .* write which"),
        ("V3 on 8xH20 512K TTFT 1s, TTFT 2s", "two first-token times"),
        ("V3 and V4-Flash on 8xH20 512K", "two models"),
        ("V3 on 8xH20 and 8xH200 512K", "two machines"),
        ("V3 on 8xH200 20 tok/s, 30 tok/s", "two rates"),
        ("V3 on 8xH200 8K suffix 16K TTFT 1 s", "longer than the whole prompt"),
        ("V3 on 8xH200 8K cold suffix 32 TTFT 1 s", "says cold"),
        ("V3 on 8xH200 8K TTFT 0 s", "ttft must be above 0"),
        ("V3 on 8xH200 8K TTFT ≥ 60 s", "'≥ 60 s'.* exceeded"),
        ("V3 on 8xH200 8K TTFT > 60 s", "'> 60 s'.* exceeded"),
        ("V3 on 8xH200 8K TTFT >= 60 s", "'>= 60 s'.* exceeded"),
        ("V3 on 8xH200 8K over 60 s TTFT", "'over 60 s'.* exceeded"),
        ("V3 on 8xH200 8K 首字超过60秒", "'超过60秒'.* exceeded"),
        ("V3 on 8xH200 TPOT at least 30 ms 8K", "'at least 30 ms'.* exceeded"),
        ("V3 on 8xH200 128K 50% hit suffix 10 TTFT 1 s", "leaves 65,536 of 131,072 tokens new, and the suffix is 10"),
        ("V3 on 8xH200 128K warm suffix 128K TTFT 1 s", "says warm"),
        ("V3 on 8xH200 128K TTFT 1 s p101", "'p101' is none"),
        ("V3 on 8xH200 128K TTFT 1 s p00", "'p00' is none"),
        ("V3 on 8xH200 8K 0.5 concurrent", "whole number"),
        ("V3 on 0xH200 8K", "0 is no number of GPUs"),
        ("V3 on 8xA100-40G 8K", "40 GB is not a known card"),
        ("x" * 3000, "at most"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_it(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        judge(parse_claim(text))


def test_splits_are_read_as_engines_write_them() -> None:
    def split(text: str) -> str:
        strategy = parse_claim(f"V4-Flash 8K {text}").strategy
        assert strategy is not None
        return strategy.label

    assert split("8xH200 TP8 DP8 EP") == "TP8-DP8-EP"  # SGLang's way: dp inside tp
    assert split("8xH200 TP2-DP4") == "TP8-DP4"  # vLLM's: dp beside tp
    assert split("2x8xH200 tp=8, pp=2") == "TP8-PP2"
    assert split("8xH200 DP8+EP8") == "TP8-DP8-EP"
    found = case("V4-Flash 8xH200 8K TTFT 2 s TP3")
    assert "cannot be run" in found.notes[0]
    assert "64 attention heads cannot be split over 3 cards" in found.notes[0]


WORDS = re.split(
    ", *",
    """512K, TTFT 168ms, TPOT 45ms, 30 tok/s, per user, total, 100 concurrent, 98% hit, suffix 32, cold, warm, %, /,
    host memory, 8xH20, 8xH200, V3.2, V4, TP8, EP, vLLM, p99, same document, together, 0, -1, 1e9, x, cpu, 4090,
    首字, 秒, 并发, 万, 100万, 输入8K, 99999999999999999999""".replace("\n", ""),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=12))
def test_any_words_are_a_claim_or_one_error(words: list[str]) -> None:
    try:
        claim = parse_claim(" ".join(words))
        check(claim)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert claim.hardware
    assert claim.specs


@pytest.mark.parametrize("text", ["仅需" * 1000, "ttft in" * 280, "1 " * 1000, "9" * 2000, "tp8 " * 500, "1k" * 1000])
def test_long_nonsense_is_refused(text: str) -> None:
    """With a pattern that backtracks without end this would not come back."""
    with pytest.raises(ConfigError):
        parse_claim(text)


def claim_of(run: Run, value: float) -> Claim:
    """A published measurement as its claimant would have stated it."""
    d = run.deployment
    claim = Claim(
        (d.spec,),
        (d.hardware,),
        engine=d.engine,
        strategy=d.strategy,
        experts=d.experts,
        cache=d.cache,
        isl=run.isl,
        ids=None if run.text else True,
    )
    if run.metric == "ttft":
        new = run.isl - run.cached
        warm = {"state": "warm", "suffix": new} if run.cached else {"state": "cold"}
        return replace(claim, ttft=value, concurrency=run.groups if run.groups > 1 else None, **warm)
    if run.metric == "tpot":
        return replace(claim, tpot=value, concurrency=run.batch)
    if run.metric == "prefill":
        return replace(claim, rate=TokenRate(value, "input", "total"), state="cold")
    return replace(
        claim, rate=TokenRate(value, "output", "total"), concurrency=run.concurrency, osl=run.osl, state="cold"
    )


@cache
def judged(index: int, bold: bool) -> Verdict:
    """A published run as it was measured, or claimed a hundred times better."""
    run = published_runs()[index]
    better = 1 / 100 if run.metric in ("ttft", "tpot") else 100.0
    return judge(claim_of(run, run.value * (better if bold else 1)))


RUNS = range(len(published_runs()))


@pytest.mark.parametrize("index", RUNS, ids=lambda index: published_runs()[index].label)
def test_no_published_measurement_is_impossible_and_a_hundredth_is_where_physics_says_so(index: int) -> None:
    assert judged(index, False).outcome in ("plausible", "only if", "conservative")
    bold = judged(index, True)
    finding = bold.cases[0].findings[0]
    if finding.unit == "s":
        beyond = finding.claimed < finding.floor / 16
    else:
        beyond = finding.claimed > finding.floor * 16
    assert bold.outcome == "impossible" or not beyond
    if bold.outcome != "impossible":
        assert bold.outcome == "only if"
        assert finding.conditions


def test_runs_that_calibrate_are_mostly_plausible_and_a_hundredth_mostly_impossible() -> None:
    true = [judged(index, False).outcome for index in RUNS if published_runs()[index].fit]
    assert true.count("only if") <= 0.1 * len(true)
    bold = [judged(index, True).outcome for index in RUNS]
    assert bold.count("impossible") >= 0.7 * len(bold)


@pytest.mark.parametrize("model", ["V3", "V3.2", "V4-Flash", "V4-Pro", "V4.1-Flash", "V2-Lite"])
def test_verdicts_are_monotonic_in_the_claimed_time(model: str) -> None:
    order = ("impossible", "only if", "plausible", "conservative")
    base = Claim((release(model),), (parse_hardware("2x8xH200"),), isl=131072, concurrency=8)
    times = [10.0**exponent for exponent in range(-6, 5, 2)]
    for state, field in (("cold", "ttft"), ("warm", "ttft"), (None, "ttft"), (None, "tpot")):
        found = [order.index(judge(replace(base, state=state, **{field: t})).outcome) for t in times]  # type: ignore[arg-type]
        assert found == sorted(found)
        assert found[0] == 0
        assert found[-1] >= 2


def test_rates_are_read_in_both_ways() -> None:
    found = case("30 tok/s V3.2 8xH200")
    assert found.finding(OUTPUT).outcome == "conservative"
    assert found.finding(PER_STREAM).outcome == "conservative"
    assert found.finding(PER_STREAM).claimed == pytest.approx(1 / 30)
    assert case("20k tok/s on 8xH200 V3.2").outcome in ("plausible", "only if")
    assert case("2M tok/s on 8xH200 V3.2").outcome == "impossible"
    assert case("20k tok/s per user on 8xH200 V3.2").outcome == "impossible"


def test_time_per_token_below_one_step_needs_drafts_or_smaller_experts() -> None:
    found = case("V3 8xH200 TPOT 0.5 ms").finding(PER_TOKEN)
    assert found.outcome == "only if"
    assert found.claimed < found.floor
    assert any("drafts" in c or "4-bit" in c for c in found.conditions)
    assert case("V3 8xH200 TPOT 0.05 ms").outcome == "impossible"


def test_prompt_tokens_faster_than_the_cards_count_cached_ones() -> None:
    found = case("1m input tok/s V3 8xH20-96").finding(INPUT)
    assert found.outcome == "only if"
    assert "hit ratio" in found.conditions[0]
    assert case("1m input tok/s cold V3 8xH20-96").outcome == "impossible"


def test_prompt_tokens_are_predicted_as_the_calibration_predicts_them() -> None:
    run = next(r for r in published_runs() if r.metric == "prefill" and r.fit)
    mine = input_rate(run.isl)(run.deployment)
    theirs = predict(run, default_factors())
    assert (mine.low, mine.centre, mine.high) == pytest.approx((theirs.low, theirs.centre, theirs.high))
    twice = replace(run.deployment, strategy=replace(run.deployment.strategy, replicas=2))
    assert input_rate(run.isl)(twice).centre == pytest.approx(2 * mine.centre)


def test_memory_claims() -> None:
    assert case("1M context on 2xH20-96 V4-Flash").outcome in ("plausible", "conservative")
    assert case("128K V3 on 2xH20-96").outcome == "impossible"
    assert "4-bit" in case("128K V3 on 2xH20-96").finding(MEMORY).reasons[0]
    many = case("512K, 100 concurrent, distinct documents, V3.2, 8xH20-96")
    assert many.outcome == "impossible"
    assert case("512K, 100 concurrent, V4-Flash, 8xH20-96").outcome == "only if"


def test_a_claim_is_true_only_if_where_others_ran_out_of_memory() -> None:
    """LMSYS 2026-01-15: V3.1 at 128K did not run on 8 x 96 GB; 2026-08-19: one sequence of 1M on 8 x 141 GB."""
    found = case("V3 8xH20-96 128K TTFT 48.5 s cold")
    assert found.finding(COLD).outcome == "plausible" and found.outcome == "only if"
    conditions = " ".join(found.finding(MEMORY).conditions)
    assert "98% of the memory" in conditions and "fp8" in conditions and "ran out of memory at 128K" in conditions
    assert case("V3 8xH20-141 128K TTFT 48.5 s cold").outcome == "plausible"
    two = case("V4-Pro 8xH20-141 1M 2 concurrent sglang")
    assert two.outcome == "only if"
    assert any("only batch 1 fits" in line for line in two.finding(MEMORY).conditions)
    assert case("V4-Pro 8xH20-141 1M sglang").outcome in ("plausible", "conservative")


@pytest.mark.parametrize("model", ["V3", "V3.2", "V4-Flash", "V4-Pro", "V4.1-Flash"])
@pytest.mark.parametrize("machine", ["8xH20-96", "8xH20-141", "2x8xH200", "8xA100-80"])
def test_claims_are_held_against_plans_that_the_search_would_place(model: str, machine: str) -> None:
    spec, hardware = release(model), parse_hardware(machine)
    plans = candidates(Claim((spec,), (hardware,)), spec, hardware, 131072)
    for d in plans:
        assert engine_limit(d) is None
        check_strategy(d)
        assert d.strategy in set(strategies(spec, hardware, d.engine, Fixed()))
        assert d.cache in cache_formats(spec, hardware, Fixed())
        assert d.experts == "int4" or d.experts in expert_formats(spec, Fixed())
        assert d.engine == "longread" or not (d.strategy.cp > 1 and spec.indexer is None)
    if machine == "8xA100-80" and spec.indexer is not None:
        assert not plans  # sparse attention has no kernels there
    elif (model, machine) != ("V4-Pro", "8xH20-96"):
        assert plans


def test_a_machine_without_an_engine_is_said() -> None:
    found = case("V4-Flash 8xA100-80 128K TTFT 5 s")
    assert found.finding(COLD).predicted is None
    assert "compute capability" in found.finding(MEMORY).reasons[0]


def test_a_warm_claim_that_says_all_is_held_against_the_prediction() -> None:
    told = case("V4-Flash 8xH200 512K 98% hit TTFT 20 s warm").finding(WARM)
    assert told.outcome in ("plausible", "conservative")
    assert told.predicted is not None
    assert case("V4-Flash 8xH200 512K 98% hit TTFT 1 ms warm").outcome == "impossible"
    assert case("V4-Flash 8xH200 512K suffix 32 TTFT 0.9 s warm pre-tokenised").outcome in ("plausible", "conservative")


def test_a_claim_that_even_a_cold_prompt_meets_needs_no_cache() -> None:
    found = case("V4-Flash 8xH200 8K TTFT 60 s")
    assert found.outcome == "conservative"
    assert found.finding(WARM).outcome == "conservative"


def test_largest_suffix_fills_its_budget() -> None:
    machine = parse_hardware("8xH20-96")
    for model in ("V3", "V3.2", "V4-Flash"):
        spec = release(model)
        for budget in (0.01, 0.168, 5.0, 60.0):
            fits = largest_suffix(spec, machine, S, budget)
            assert suffix_seconds(spec, machine, fits, S) <= budget * 1.001
            assert fits == S or suffix_seconds(spec, machine, fits + 2, S) > budget * 0.999


def test_text_and_json_hold_the_same() -> None:
    v = verdict(f"{FAMOUS}, V4-Flash")
    text, document = claim_text(v), claim_document(v)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert document["outcome"] == v.outcome
    assert document["cases"][0]["findings"][0]["floor"] == v.cases[0].findings[0].floor
    joined = " ".join(text.split())
    for found in v.cases[0].findings:
        for line in (*found.reasons, *found.arithmetic, *found.conditions):
            assert " ".join(line.split()) in joined


def test_the_verdict_comes_first_and_what_machines_share_is_said_once() -> None:
    v = verdict("168 ms TTFT at 512K, 100 concurrent, 8xH20, V3.2")
    lines = claim_text(v).splitlines()
    assert lines[:2] == ["verdict: only if", "  DeepSeek-V3.2 on 8xH20-96 and 8xH20-141: only if"]
    assert len([line for line in lines if "PFLOP / (8 x" in line]) == len(
        [line for line in v.cases[0].finding(COLD).arithmetic if "PFLOP / (8 x" in line]
    )
    assert any(line.strip().startswith("= 8xH20-96: 8 x 102 GB usable") for line in lines)
    assert any(line.strip().startswith("= 8xH20-141: 8 x 150 GB usable") for line in lines)
    one = len(claim_text(verdict("168 ms TTFT at 512K, 100 concurrent, 8xH20-96, V3.2")).splitlines())
    assert len(lines) < 1.4 * one
