"""Searches at their edges: loads far too high, decisions that cannot be, and plans that need another checkpoint."""

from dataclasses import replace

import pytest
from counted import counted

from longread.plan import figures
from longread.plan import search as searching
from longread.plan.candidate import SearchResult
from longread.plan.cards import parse_hardware
from longread.plan.claims import words
from longread.plan.claims.claim import Claim
from longread.plan.claims.judge import judge
from longread.plan.claims.limits import granted_floors
from longread.plan.deployment import Workload
from longread.plan.engine_limits import engine_limit
from longread.plan.search import search
from longread.plan.space import Fixed, other_checkpoint
from longread.plan.survey import survey
from longread.spec.errors import ConfigError
from longread.spec.releases import release

LONG = Workload(131072, 512)


def found(model: str, machine: str, w: Workload, **options: object) -> SearchResult:
    return search(release(model), parse_hardware(machine), w, **options)  # type: ignore[arg-type]


def test_engines_that_run_today_do_not_vanish_behind_one_that_holds_more() -> None:
    for many in (400, 1000, 2000):
        r = found("V4-Flash", "8xH20-96", replace(LONG, concurrency=many), fixed=Fixed(experts="native"))
        assert {c.deployment.engine for c in r.feasible} == {"longread", "vllm", "sglang"}, many
        assert r.best is not None


def test_what_runs_at_once_does_not_fall_with_the_queue() -> None:
    before = 0
    for many in (1000, 10_000, 100_000, 1_000_000):
        r = found("V4-Flash", "8xH20-96", replace(LONG, concurrency=many))
        assert r.best is not None
        assert r.best.sessions >= before and r.best.deployment.chunk <= 32768
        before = r.best.sessions


def test_no_overrun_is_negative_and_no_cure_is_met_already() -> None:
    for model, machine, many in (("V4-Flash", "8xH20-96", 1_000_000), ("V3", "8xH20-96", 64), ("V4-Pro", "8xH200", 8)):
        for f in found(model, machine, replace(LONG, concurrency=many)).infeasible:
            assert "-" not in f.by.split(" GiB")[0], f
            assert "context of at most 1,048,576" not in f.cure
            if f.kind == "memory" and f.value is not None and f.bound is not None:
                assert f.value > f.bound


def test_plans_that_need_another_checkpoint_rank_behind_unless_asked_for() -> None:
    r = found("V4-Flash", "8xH20-96", LONG, engines=("vllm", "sglang"))
    needs = [bool(other_checkpoint(c.deployment)) for c in r.feasible]
    assert needs == sorted(needs) and not needs[0] and any(needs)
    asked = found("V4-Flash", "8xH20-96", LONG, fixed=Fixed(experts="fp8"))
    assert asked.best is not None and asked.best.deployment.experts == "fp8"


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        (Fixed(tp=1_000_000_007), "tp=1000000007: it needs 1,000,000,007 GPUs, 8xH20-96 has 8"),
        (Fixed(tp=0), "tp=0"),
        (Fixed(tp=-8), "tp=-8"),
        (Fixed(tp=3), "3 cards"),
        (Fixed(tp=8, pp=8), "64 GPUs"),
        (Fixed(replicas=9), "9 GPUs"),
        (Fixed(dp=1_000_000_007), "dp must divide tp"),
        (Fixed(context=1000), "below isl"),
        (Fixed(context=10**9), "max_position_embeddings"),
        (Fixed(cache="fp9"), "'fp9' is not known"),
        (Fixed(cache="fp8"), "fp8"),
        (Fixed(memory_share=0.0), "above 0"),
        (Fixed(chunk=0), "at least 1"),
        (Fixed(host_cache=10**19), "64 TiB|65,536 GiB"),
    ],
)
def test_nonsense_is_an_error_with_its_limit(fixed: Fixed, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(monkeypatch, (searching, "times"), (searching, "glance"), (searching, "gpu_memory"))
    with pytest.raises(ConfigError, match=words):
        found("V4-Flash", "8xH20-96", LONG, fixed=fixed)
    assert not counts  # refused before any work
    if fixed.context != 1000:
        with pytest.raises(ConfigError):
            survey(release("V4-Flash"), parse_hardware("8xH20-96"), fixed=fixed)


def test_a_host_cache_of_nothing_and_a_load_from_the_host_contradict() -> None:
    w = replace(LONG, prefix=0.9, tier="host")
    with pytest.raises(ConfigError, match="host_cache_size=0"):
        found("V4-Flash", "8xH20-96", w, fixed=Fixed(host_cache=0))
    r = found("V4-Flash", "8xH20-96", w, fixed=Fixed(host_cache=2**30))
    assert all(c.deployment.host_cache == 2**30 for c in r.feasible)
    r = found("V3", "8xH20-96", replace(w, isl=8192, concurrency=64), fixed=Fixed(host_cache=2**20))
    assert not r.feasible and any("given host cache" in f.limit for f in r.infeasible)


@pytest.mark.parametrize(
    ("fixed", "cure"),
    [
        (Fixed(memory_share=0.0001), "gpu_memory_utilization of 0.92"),
        (Fixed(chunk=10**9), "max_num_batched_tokens of 8,192"),
    ],
)
def test_the_cure_names_what_was_decided(fixed: Fixed, cure: str) -> None:
    r = found("V4-Flash", "8xH20-96", LONG, engines=("vllm",), fixed=fixed)
    assert not r.feasible
    assert any(f.cure == cure for f in r.infeasible if f.kind == "memory"), [f.cure for f in r.infeasible]


def test_a_floor_is_that_of_the_formats_that_are_fixed() -> None:
    w = Workload(8192, 512, tpot_target=0.001)
    r = found("V3", "8xH20-96", w)
    assert r.floors["tpot"] > 0.001 and any(
        "below the floor of 1.19 ms" in note and "drafts" in note for note in r.notes
    )
    r = found("V3", "8xH20-96", w, fixed=Fixed(experts="int4"))
    assert r.floors["tpot"] < 0.001 and not any("below the floor" in note for note in r.notes)


def test_a_target_is_refused_where_a_claim_of_it_would_be_impossible() -> None:
    """A search and a claim have one limit: what all that can be granted leaves."""
    spec, hardware = release("V3"), parse_hardware("8xH20-96")
    least = granted_floors(spec, hardware, Workload(8192, 512))
    claim = Claim((spec,), (hardware,), isl=8192, osl=512)
    for name in ("ttft", "tpot"):
        for factor, refused in ((0.98, True), (1.02, False)):
            outcome = judge(replace(claim, state="cold", **{name: least[name] * factor})).outcome  # type: ignore[arg-type]
            assert (outcome == "impossible") == refused
            w = replace(Workload(8192, 512), **{f"{name}_target": least[name] * factor})  # type: ignore[arg-type]
            if refused:
                with pytest.raises(ConfigError, match="physical floor"):
                    found("V3", "8xH20-96", w)
            else:
                assert any("below the floor" in note for note in found("V3", "8xH20-96", w, engines=("vllm",)).notes)


def test_limits_depend_on_the_version_and_the_tier() -> None:
    d = found("V4.1-Flash", "8xH200", Workload(8192, 512), engines=("vllm",)).feasible[0].deployment
    assert engine_limit(d) is None
    assert "since 0.30" in (engine_limit(d, "0.26.0") or "")
    assert "no cache on disk" in (engine_limit(d, tier="disk") or "")


def test_one_formatter_of_times() -> None:
    shown = [figures.seconds(v) for v in (0, 5e-10, 7.89e-6, 0.0456, 1.234, 123.4)]
    assert shown == ["0 s", "0.5 ns", "7.89 us", "45.6 ms", "1.23 s", "123 s"]
    assert words.seconds is figures.seconds


def test_no_plan_keeps_more_on_the_host_than_machines_have() -> None:
    w = Workload(524288, 512, 0.98, 1_000_000)
    r = found("V4-Flash", "8xH20-96", w, engines=("vllm",))
    assert not r.feasible and any("host memory" in f.limit for f in r.infeasible)
