"""The search: what is found, how it is ranked, what is refused with which limit, and what nobody would believe."""

import io
import json
from dataclasses import replace

import pytest
from counted import counted
from rich.console import Console

from longread.plan import search as searching
from longread.plan.calibrate import default_factors
from longread.plan.candidate import Candidate, SearchResult
from longread.plan.cards import parse_hardware
from longread.plan.communication import link
from longread.plan.deployment import Deployment, Strategy, Workload
from longread.plan.document import SCHEMA, search_document, survey_document
from longread.plan.estimate import Estimate
from longread.plan.judging import EQUAL, grade
from longread.plan.raw import decode_step
from longread.plan.report import print_search
from longread.plan.search import most_at_once, search
from longread.plan.shards import check_strategy
from longread.plan.space import Fixed, engine_limit, strategies
from longread.plan.survey import survey
from longread.spec.errors import ConfigError
from longread.spec.releases import release

LONG = Workload(524288, 512, 0.98, 8)
SHORT = Workload(8192, 512, 0.0, 16)


def found(model: str, machine: str, w: Workload, **options: object) -> SearchResult:
    return search(release(model), parse_hardware(machine), w, **options)  # type: ignore[arg-type]


def test_every_candidate_can_be_run_and_holds_what_it_says() -> None:
    for model, machine, w in (("V4-Flash", "8xH20-96", LONG), ("V3", "8xH20-96", SHORT), ("V3.2", "8xH20-141", SHORT)):
        r = found(model, machine, w)
        assert r.feasible and r.best is not None
        for c in r.feasible:
            check_strategy(c.deployment)
            assert engine_limit(c.deployment) is None
            assert c.memory.free > 0
            assert c.sessions >= w.concurrency
            assert c.deployment.max_model_len >= w.isl + w.osl
            assert c.times.rate.low <= c.score <= c.times.rate.high <= c.times.rate.floor * 1.001
            assert c.times.first.total.low >= r.floors["ttft"] * 0.999
            assert c.times.alone.total.low >= r.floors["tpot"] * 0.999


def test_engines_that_do_not_run_there_rank_behind() -> None:
    r = found("V4-Flash", "8xH20-96", LONG)
    today = [c.runs_today for c in r.feasible]
    assert today == sorted(today, reverse=True) and not all(today)
    assert {c.deployment.engine for c in r.feasible if not c.runs_today} == {"longread"}
    assert any("does not know its kernels" in note for note in r.notes)
    assert r.best is r.feasible[0]


def test_targets_come_first_then_throughput() -> None:
    w = replace(SHORT, ttft_target=1.5, tpot_target=0.1)
    r = found("V3", "8xH20-96", w, engines=("vllm", "sglang"))
    order = ("no", "unlikely", "likely", "yes")

    def worst(c: Candidate) -> int:
        return min(order.index(c.meets[name]) for name in ("ttft", "tpot"))

    ranks = [worst(c) for c in r.feasible]
    assert ranks == sorted(ranks, reverse=True)
    best = [c.score for c in r.feasible if worst(c) == ranks[0] and not c.lossy]
    assert best[0] * EQUAL >= max(best) * 0.999
    assert {c.binding.name for c in r.feasible} <= {"memory", "TTFT", "TPOT"}


def test_a_grade_is_read_from_the_interval() -> None:
    e = Estimate(1.0, 2.0, 4.0, "roofline")
    assert [grade(e, t) for t in (4.0, 2.0, 1.0, 0.9)] == ["yes", "likely", "unlikely", "no"]


def test_runner_ups_say_what_they_lose() -> None:
    r = found("V3", "8xH20-96", SHORT)
    assert r.feasible[0].lost == ""
    assert all(c.lost for c in r.feasible[1:])
    slower = next(c for c in r.feasible if c.runs_today and c.score < r.feasible[0].score / 1.2)
    assert "tokens/s" in slower.lost


def test_v3_on_96_gb_needs_eight_cards_and_says_so() -> None:
    r = found("V3", "8xH20-96", SHORT)
    assert {c.deployment.strategy.gpus for c in r.feasible} == {8}
    short = [f for f in r.infeasible if f.kind == "memory" and f.value is not None and f.bound is not None]
    assert short and all(f.value > f.bound and "GiB over" in f.by and f.cure for f in short)  # type: ignore[operator]
    assert any("8 cards or more" in f.cure for f in short)


def test_a_card_is_never_asked_for_more_than_it_can_allocate() -> None:
    r = found("V3", "8xH20-96", replace(SHORT, concurrency=2))
    for c in r.feasible:
        assert c.memory.usable <= c.deployment.hardware.card.usable.value
        assert c.memory.weight_total + c.memory.beside + c.memory.free == c.memory.usable


def test_what_engines_do_not_have_is_refused_with_the_reason() -> None:
    r = found("V4-Flash", "8xH20-96", LONG)
    assert any(f.kind == "engine" and f.engines == ("vllm",) and "vllm#52761" in f.limit for f in r.infeasible)
    ampere = found("V4-Flash", "8xA100", SHORT)
    assert any("compute capability" in f.limit and "8.0" in f.limit for f in ampere.infeasible)
    assert ampere.best is None and any("no engine that runs" in note for note in ampere.notes)


def test_sglang_serves_v4_1_without_pipeline_stages() -> None:
    """0.5.23: srt/models/deepseek_v4.py has V4.1's attention; its argument check refuses pp_size > 1."""
    r = found("V4.1-Flash", "2x8xH20-96", LONG, engines=("sglang",))
    assert r.feasible and {c.deployment.engine for c in r.feasible} == {"sglang"}
    assert {c.deployment.strategy.pp for c in r.feasible} == {1}
    assert any(f.kind == "engine" and "pipeline parallelism for V4.1" in f.limit for f in r.infeasible)


def test_the_published_split_is_the_quickest_to_a_first_token() -> None:
    """LMSYS 2026-08-19: V4-Pro on 2 x 8 H20-96 with PP2 and CP8 reads 128K tokens in 7.98 s."""
    r = found("V4-Pro", "2x8xH20-96", Workload(131072, 512), engines=("vllm", "sglang"))
    quickest = min(r.feasible, key=lambda c: c.ttft_cold.centre)
    assert quickest.deployment.engine == "sglang"
    assert quickest.deployment.strategy == Strategy(tp=1, pp=2, cp=8)
    assert quickest.ttft_cold.holds(7.98)


def test_where_nothing_holds_everybody_the_rest_waits() -> None:
    r = found("V3.2", "8xH20-96", Workload(131072, 512, 0.9, 64))
    assert r.feasible and any("nothing here holds 64" in note for note in r.notes)
    best = r.feasible[0]
    assert 1 <= best.sessions < 64 and best.meets["concurrency"] == "no" and best.binding.name == "memory"
    assert best.workload.tier == "host" and best.deployment.host_cache > 0
    groups = best.deployment.strategy.dp * best.deployment.strategy.replicas
    assert best.deployment.max_num_seqs * groups == best.sessions
    assert best.times.load.centre > best.times.first.total.centre


def test_more_at_once_is_never_sooner() -> None:
    r = found("V3", "8xH20-141", Workload(32768, 512, 0.0, 4), engines=("sglang",), fixed=Fixed(tp=8, dp=1, ep=False))
    many = found(
        "V3", "8xH20-141", Workload(32768, 512, 0.0, 16), engines=("sglang",), fixed=Fixed(tp=8, dp=1, ep=False)
    )
    assert many.feasible[0].ttft_load.centre > r.feasible[0].ttft_load.centre


def test_copies_without_work_give_nothing() -> None:
    one = Workload(8192, 512, 0.0, 1)
    split = Fixed(tp=2, pp=1, cp=1, dp=1, ep=False)
    r = found("V4-Flash", "8xH20-96", one, engines=("vllm",), fixed=replace(split, experts="native"))
    alone = found("V4-Flash", "2xH20-96", one, engines=("vllm",), fixed=replace(split, experts="native"))
    assert r.feasible[0].deployment.strategy.replicas == 4
    assert r.feasible[0].score == pytest.approx(alone.feasible[0].score, rel=0.05)


def test_the_most_at_once_meets_the_targets_and_one_more_does_not() -> None:
    w = Workload(32768, 512, 0.0, 16, "device", 10.0, 0.1)
    plain = Fixed(tp=8, pp=1, cp=1, dp=1, ep=False)
    d = found("V3", "8xH20-141", w, engines=("sglang",), fixed=plain).feasible[0].deployment
    most = most_at_once(d, w, 16, default_factors())
    assert 1 <= most < 16

    def fits(number: int) -> bool:
        r = search(
            d.spec,
            d.hardware,
            replace(w, concurrency=number),
            engines=("sglang",),
            chunks=(d.chunk,),
            fixed=replace(plain, cache=d.cache),
        )
        return all(g in ("yes", "likely") for g in r.feasible[0].meets.values())

    assert fits(most) and not fits(most + 1)


@pytest.mark.parametrize(
    ("w", "words"),
    [
        (Workload(0, 512), ["isl=0"]),
        (Workload(8192, 0), ["osl=0"]),
        (Workload(8192, 512, 0.0, 0), ["concurrency=0"]),
        (Workload(8192, 512, 1.5), ["prefix=1.5", "from 0 to 1"]),
        (Workload(163840, 512), ["164,352", "163,840", "max_position_embeddings"]),
        (replace(SHORT, ttft_target=0.01), ["ttft=10 ms", "floor", "389 ms", "8xH20-96"]),
        (replace(SHORT, tpot_target=5e-5), ["tpot=50 us", "floor", "bandwidth", "with drafts"]),
        (replace(SHORT, osl=1, tpot_target=0.05), ["osl of at least 2"]),
        (replace(SHORT, ttft_target=-1.0), ["above 0"]),
    ],
)
def test_loads_that_cannot_be(w: Workload, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        found("V3", "8xH20-96", w)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        (Fixed(tp=3), ["128 attention heads", "3 cards"]),
        (Fixed(tp=8, pp=2), ["16 GPUs", "has 8"]),
        (Fixed(dp=3, tp=8), ["dp=3"]),
        (Fixed(tp=8, context=4096), ["max_model_len=4096"]),
        (Fixed(replicas=0), ["replicas=0"]),
    ],
)
def test_splits_that_cannot_be(fixed: Fixed, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        found("V3", "8xH20-96", SHORT, engines=("vllm",), fixed=fixed)
    for word in words:
        assert word in str(error.value)


def test_what_is_fixed_is_kept() -> None:
    fixed = Fixed(tp=8, dp=2, ep=True, cache="fp8", chunk=2048, memory_share=0.95)
    for c in found("V3", "8xH20-96", SHORT, fixed=fixed).feasible:
        d = c.deployment
        assert (d.strategy.tp, d.strategy.dp, d.strategy.ep) == (8, 2, True)
        assert (d.cache, d.chunk, d.memory_share) == ("fp8", 2048, 0.95)
        assert c.lossy


def test_lossy_formats_rank_behind_exact_ones() -> None:
    r = found("V3", "8xH20-96", replace(SHORT, concurrency=64), engines=("sglang",))
    lossy = [bool(c.lossy) for c in r.feasible]
    assert lossy == sorted(lossy)


def test_two_nodes_are_split_where_blocks_allow() -> None:
    kinds = set(strategies(release("V4-Pro"), parse_hardware("2x8xH20-96"), "sglang", Fixed()))
    assert Strategy(tp=8, pp=2) in kinds and Strategy(tp=1, pp=2, cp=8) in kinds
    assert all(s.gpus * s.replicas <= 16 for s in kinds)
    r = found("V4-Pro", "2x8xH20-96", Workload(32768, 512))
    assert any(f.kind == "strategy" and "sglang#23602" in f.limit for f in r.infeasible)


def test_a_measured_link_is_not_cut_again() -> None:
    sheet = parse_hardware("8xH20-96")
    assert sheet.card.nvlink is not None
    reached = replace(sheet, card=replace(sheet.card, nvlink=replace(sheet.card.nvlink, mark="measured")))
    assert link(sheet, 8).rate == pytest.approx(0.75 * sheet.card.nvlink.value)
    assert link(reached, 8).rate == sheet.card.nvlink.value


def test_stages_decode_different_sequences() -> None:
    d = Deployment(release("V3"), parse_hardware("2x8xH20-96"), Strategy(tp=8, pp=2), "sglang", cache="bfloat16")
    assert sum(decode_step(d, 32, 8192).values()) == pytest.approx(sum(decode_step(d, 31, 8192).values()))
    one = replace(d, strategy=Strategy(tp=8))
    assert sum(decode_step(d, 32, 8192).values()) < sum(decode_step(one, 32, 8192).values()) * 1.02


def test_documents_are_plain_json_in_base_units() -> None:
    r = found("V4-Flash", "8xH20-96", replace(LONG, ttft_target=20.0))
    document = json.loads(json.dumps(search_document(r), allow_nan=False))
    assert document["schema"] == SCHEMA == "longread.plan/1"
    first = document["feasible"][0]
    low, centre, high = first["ttft"]["warm"]["interval"]
    assert low <= centre <= high and first["ttft"]["warm"]["provenance"] and first["ttft"]["warm"]["floor"] > 0
    parts = first["ttft"]["warm"]["parts"]
    assert sum(p["interval"][1] for p in parts.values()) == pytest.approx(centre, rel=0.01)
    assert document["infeasible"][0]["limit"]
    assert document["workload"]["slo"] == {"ttft": 20.0, "tpot": None}


def test_a_survey_says_what_fits_and_what_peers_hold() -> None:
    s = survey(release("V4-Flash"), parse_hardware("2xH20-96"))
    assert s.fits and s.deployment.strategy == Strategy(tp=2)
    assert s.peer_longest["vllm"] <= s.longest and s.peer_longest["sglang"] <= s.longest
    assert [c.context for c in s.capacities] == [p.context for p in s.peers if p.engine == "vllm"]
    for c, p in zip(s.capacities, [p for p in s.peers if p.engine == "vllm"], strict=True):
        assert p.sessions <= c.sessions
    assert json.loads(json.dumps(survey_document(s), allow_nan=False))["max_context"] == s.longest
    tight = survey(release("V3"), parse_hardware("8xH20-96"))
    assert 0 < tight.longest < release("V3").max_position
    assert not survey(release("V3"), parse_hardware("4xH20-96")).fits


def test_the_largest_search_predicts_few_of_what_it_considers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole prediction takes 10 to 20 ms, a glance and a memory a tenth of that."""
    counts = counted(monkeypatch, (searching, "times"), (searching, "glance"), (searching, "gpu_memory"))
    result = found("V4-Pro", "2x8xH20-96", Workload(524288, 512, 0.98, 100, "device", 2.0, 0.05))
    assert result.considered > 400
    assert 0 < counts["times"] <= 30
    assert 0 < counts["glance"] <= 70
    assert 0 < counts["gpu_memory"] <= 750


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_terminal_is_too_narrow_for_a_rank_and_its_figures(width: int) -> None:
    result = search(release("V4-Flash"), parse_hardware("8xH20-96"), Workload(131072, 512, concurrency=16))
    printed = io.StringIO()
    print_search(Console(width=width, file=printed, highlight=False), result, 3)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    first = next(line for line in lines if line[:1] == ["1"])
    assert first[1] == result.feasible[0].deployment.engine and "…" not in "".join(first)
