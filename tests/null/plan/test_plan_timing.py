"""Predicted times: published runs left out one by one, splits that matter, parts, bounds, speed."""

import math
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from counted import counted

from longread.plan import raw
from longread.plan.calibrate import (
    Factors,
    Sample,
    default_factors,
    hand_set,
    leave_one_out,
    median_error,
    path_of,
    published_samples,
)
from longread.plan.cards import parse_hardware
from longread.plan.communication import link, prefill_communication
from longread.plan.deployment import Deployment, Strategy, Tier, Workload
from longread.plan.efficiency import factor
from longread.plan.ops import decode_ops, prefill_ops, rows_touched
from longread.plan.published import left_out, published_runs, with_layers
from longread.plan.raw import _sampled, prefill, prefill_step
from longread.plan.runs_report import published_summary
from longread.plan.shapes import matrices
from longread.plan.timing import (
    loaded_tpot,
    request_cost,
    stalled_tpot,
    throughput,
    tpot,
    ttft_at_load,
    ttft_cold,
    ttft_warm,
)
from longread.spec.errors import ConfigError
from longread.spec.releases import release

S = 524288


def on(machine: str, model: str = "V4-Flash", **changes: object) -> Deployment:
    fields: dict[str, object] = {"strategy": Strategy(tp=8), "engine": "vllm"} | changes
    return Deployment(release(model), parse_hardware(machine), **fields)  # type: ignore[arg-type]


def test_each_published_run_from_the_others() -> None:
    held = leave_one_out()
    assert median_error(held) <= 0.20
    assert median_error([h for h in held if not h.run.own_cut]) <= 0.20  # without our own siblings
    fitted = [h for h in held if h.run.fit]
    missed = [h for h in held if not h.holds]
    assert len([h for h in missed if h.run.fit]) <= 0.05 * len(fitted)  # meant to hold 95 %
    for h in missed:
        assert len(h.reason) > 20, f"{h.run.label} lies outside {h.predicted} and nobody says why"


def test_a_whole_deployment_left_out_is_still_inside() -> None:
    """Its centre is further off than a run's whose siblings are known; the interval has to know that."""
    held = [h for h in leave_one_out(by="deployment") if h.run.fit]
    assert sum(h.holds for h in held) >= 0.95 * len(held)
    alone = [h for h in leave_one_out() if h.run.fit]
    pairs = [(h.predicted, one.predicted) for h, one in zip(held, alone, strict=True)]
    wider = [whole.high / whole.low >= one.high / one.low for whole, one in pairs]
    assert sum(wider) >= 0.9 * len(wider)


def test_no_prediction_excludes_the_runs_that_it_cites() -> None:
    """What ``plan`` prints for each fitted run's own deployment and load."""
    outside = []
    for run in published_runs():
        d = run.deployment
        if not run.fit or run.variant or run.metric == "prefill" or run.groups > 1:
            continue
        if run.metric == "tpot":
            shown = tpot(d, run.batch, run.isl).total
        elif run.metric == "throughput":
            shown = throughput(d, Workload(run.isl, run.osl, concurrency=run.concurrency))
        elif run.cached:
            shown = ttft_warm(d, run.isl, run.isl - run.cached, text=run.text).total
        else:
            shown = ttft_cold(d, run.isl).total
        if run.metric != "throughput":  # whose source is its weaker part's: the prompts'
            assert run.source in shown.source
        if not shown.holds(run.value):
            outside.append(run.label)
    # Prompts of one chunk on a pipeline of two machines: its siblings are a hundred times as long.
    assert set(outside) <= {"V4-Pro, two nodes, PP2 CP8: TTFT 4,096"}


def test_runs_of_one_deployment_that_disagree_widen_its_interval_only() -> None:
    place = ("decode", "dense MLA", "H20", "vllm")
    logs = {"a": [0.3, 1.8], "b": [0.9, 0.95, 1.0, 0.9], "c": [0.8, 0.85]}
    factors = Factors(
        Sample((*place, name, "H20-96"), log, False, name) for name, group in logs.items() for log in group
    )
    low, high = ({n: getattr(factors.scale((*place, n, "H20-96")), end) for n in logs} for end in ("low", "high"))
    assert low["a"] < math.exp(0.3) and high["a"] > math.exp(1.8)
    assert high["a"] / low["a"] > 4 * high["b"] / low["b"]
    assert "1.3 to 6.0 times above" in factors.scale((*place, "a", "H20-96")).source


def test_an_h200_is_no_h20() -> None:
    kinds = {name: path_of(on(f"8x{name}"), "prefill")[2] for name in ("H20-96", "H20-141", "H200", "H100")}
    assert kinds["H20-96"] == kinds["H20-141"] != kinds["H200"] == kinds["H100"]


def test_a_sibling_card_of_the_kind_is_named() -> None:
    run = on("8xH20-141", "V3.2")
    assert tpot(run, 1, 2048).total.provenance == "measured elsewhere"
    other = tpot(on("8xH20-96", "V3.2"), 1, 2048).total
    assert other.provenance == "interpolated" and "on H20-141" in other.source


def test_factors_are_few_against_the_runs_and_not_what_makes_it_right() -> None:
    factors = default_factors()
    assert factors.runs >= 60
    assert factors.deployments <= factors.runs / 2.5
    # Without factors, on runs that no constant was set on: whole models that others ran.
    others = [(run, sample) for run, sample in published_samples() if run.fit and not run.own_cut]
    fair = [abs(math.exp(-s.log) - 1) for run, s in others if "tt-inference-server" not in run.source]
    assert len(fair) >= 30 and median(fair) <= 0.20


def test_the_published_table_says_what_leaving_out_does_not_show() -> None:
    """Own siblings of one H200 flatter a single median, and hand-set constants are in every prediction."""
    held = leave_one_out()
    words = published_summary(held)
    cut = [h for h in held if h.run.fit and h.run.own_cut]
    others = [h for h in held if h.run.fit and not h.run.own_cut]
    assert {h.run.source.split(" (")[0] for h in cut} == {"measured on one H200"}
    assert not any("one H200" in h.run.source for h in others)
    for group in (cut, others):
        assert f"{median_error(group):.1%}, {sum(h.holds for h in group)} of {len(group)}" in words
    assert median_error(cut) < median_error(others)
    assert len(hand_set()) == 7 and all(text in words for text in hand_set())
    assert "1.4 us" in words and "80 us" in words and "7 constants were set by hand" in words


def test_runs_that_do_not_calibrate_say_why() -> None:
    for run in published_runs():
        assert run.fit or run.why
        assert run.source
    assert all(what and why for what, why in left_out())


def test_the_named_runs_are_in_the_table() -> None:
    found = {(run.deployment.spec.label, run.deployment.hardware.label, run.isl, run.value) for run in published_runs()}
    for row in (
        ("DeepSeek-V3.1", "8xH20-141", 131072, 48.5),
        ("DeepSeek-V4-Pro", "2x8xH20-96", 1048576, 79.2),
        ("DeepSeek-V4-Pro", "4x8xH20-96", 524288, 20.3),
        ("DeepSeek-V3", "8xH20-96", 8192, 9.8),
        ("DeepSeek-V3", "8xH20-96", 512, 690),
    ):
        assert row in found


def test_a_sibling_narrows_and_a_stranger_widens() -> None:
    def width(d: Deployment) -> float:
        estimate = ttft_cold(d, 131072).total
        return estimate.high / estimate.low

    known = on("8xH20-141", "V3.1", engine="sglang", cache="bfloat16")
    assert ttft_cold(known, 131072).total.provenance == "measured elsewhere"
    stranger = on("8xL20", "V3.1", cache="bfloat16")
    assert ttft_cold(stranger, 131072).total.provenance == "roofline"
    own = replace(known, engine="longread")
    assert ttft_cold(own, 131072).total.provenance == "interpolated"
    assert width(known) < width(own) < width(stranger)


def test_without_any_run_it_is_a_roofline() -> None:
    scale = Factors([]).scale(path_of(on("8xH20"), "prefill"))
    assert scale.provenance == "roofline"
    assert scale.low < 1 < scale.high


def test_shrinkage_lies_between_own_mean_and_parent() -> None:
    groups = {"a": [0.5, 0.52], "b": [0.1], "c": [0.2, 0.22, 0.18]}
    factors = Factors(
        Sample(("prefill", "v4", "H20", "vllm", name), log, False, name)
        for name, logs in groups.items()
        for log in logs
    )
    means = {name: factors._means[("prefill", "v4", "H20", "vllm", name)] for name in groups}
    parent = factors._means[("prefill", "v4", "H20", "vllm")]
    assert parent < means["a"] < 0.51
    assert 0.1 < means["b"] < parent
    assert factors.deployments == 3


def test_replicating_the_indexer_costs_what_the_facts_say() -> None:
    cut, copied = (on("8xH20", "V3.2", strategy=s) for s in (Strategy(cp=8), Strategy(tp=8)))
    scores = [
        next(op.flops for op in prefill_ops(d, 8192, S - 8192) if op.name == "indexer scores") for d in (cut, copied)
    ]
    assert scores[1] == pytest.approx(8 * scores[0])
    padded = [next(op.flops for op in prefill_ops(d, 8192, S) if op.kind == "sparse attention") for d in (cut, copied)]
    assert padded[1] == pytest.approx(4 * padded[0])  # 16 heads computed as 64
    assert ttft_cold(cut, S).total.centre < 0.4 * ttft_cold(copied, S).total.centre


def test_decode_touches_more_experts_with_more_streams() -> None:
    assert rows_touched(256, 8, 1) == pytest.approx(8)
    assert 255 < rows_touched(256, 8, 1000) <= 256
    moved = [next(op.bytes for op in decode_ops(on("8xH200"), b, 8192) if op.kind == "experts") for b in (1, 8, 64)]
    assert moved[0] < moved[1] < moved[2] < 64 * moved[0]


def test_four_bit_experts_multiply_in_bfloat16_where_there_is_no_fp4() -> None:
    def rate(machine: str) -> str:
        return next(op.rate for op in prefill_ops(on(machine), 8192, 0) if op.kind == "experts")

    assert rate("8xH200") == "bf16"
    assert rate("8xB200") == "fp8"


def test_a_throttled_card_reaches_more_of_its_peak() -> None:
    op = prefill_ops(on("8xH20"), 8192, 0)[0]
    h20, h200 = (factor(op, parse_hardware(name).card) for name in ("H20", "H200"))
    assert 0.85 < h20.flops < 0.95  # 95 % in large products (tile-ai/TileOPs#1658)
    assert h200.flops == pytest.approx(0.68, rel=1e-3)


def test_all_reduce_volume_of_v3() -> None:
    d = on("8xH20", "V3", cache="bfloat16")
    seconds = sum(prefill_communication(d, S).values())
    assert seconds * link(d.hardware, 8).rate / 1e12 == pytest.approx(1.6, abs=0.05)  # TB a card at 512K


def test_context_parallelism_cuts_dense_weights_and_the_head() -> None:
    """As ``shards.degrees`` places them: shared experts and vocabulary over cp, attention on every card."""
    one, eight = (decode_ops(on("8xH20", "V3", strategy=s), 8, 8192) for s in (Strategy(), Strategy(cp=8)))
    head = [next(op.bytes for op in ops if op.name == "head") for ops in (one, eight)]
    assert head[0] == pytest.approx(8 * head[1])
    linears = [next(op for op in ops if op.name == "linears") for ops in (one, eight)]
    cut = matrices(release("V3"), False).dense * 7 / 8
    assert linears[0].bytes - linears[1].bytes == pytest.approx(cut)
    assert linears[0].flops - linears[1].flops == pytest.approx(2 * 8 * cut)
    whole, part = (prefill_ops(on("8xH20", "V3", strategy=s), 8192, 0)[0] for s in (Strategy(), Strategy(cp=8)))
    assert whole.flops == pytest.approx(8 * part.flops)


@pytest.mark.parametrize("count", [1, 9, 10, 11, 64, 513])
def test_sampled_chunks_are_exact_for_straight_lines(count: int) -> None:
    marks = _sampled(count)
    assert sum(w for _, w in marks) == pytest.approx(count)
    assert sum(i * w for i, w in marks) == pytest.approx(count * (count - 1) / 2)


def test_sampling_changes_nothing_that_matters() -> None:
    d = on("8xH20")
    each = sum(sum(prefill_step(d, 8192, i * 8192).values()) for i in range(64))
    found = prefill(d, S)
    assert sum(found.values()) - found["head"] - found["step overhead"] == pytest.approx(each, rel=1e-3)


def test_parts_of_a_warm_first_token_by_tier() -> None:
    d = on("8xH20", strategy=Strategy(cp=8), engine="longread")
    device, host = (ttft_warm(d, S, 32, tier) for tier in ("device", "host"))  # type: ignore[arg-type]
    names = list(host.parts)
    order = ["receive", "parse", "render", "tokenise", "hash and lookup", "queue", "load host"]
    assert names[: len(order)] == order and names[-1] == "first byte"
    assert "load host" not in device.parts
    assert host.total.centre == pytest.approx(sum(e.centre for e in host.parts.values()))
    # 2.02 GB over eight links: 5 ms at 50 GB/s
    assert host.parts["load host"].centre == pytest.approx(0.005, rel=0.1)
    copied = ttft_warm(replace(d, strategy=Strategy(tp=8)), S, 32, "host").parts["load host"]
    assert copied.centre == pytest.approx(0.040, rel=0.1)


def test_a_disk_of_unknown_speed_is_not_guessed() -> None:
    d = on("8xH20")
    d = replace(d, hardware=replace(d.hardware, disk_read=None))
    with pytest.raises(ConfigError, match="disk_read"):
        ttft_warm(d, S, 32, "disk")


@pytest.mark.parametrize("machine", ["8xH20", "8xH200", "8xB200", "8xA100"])
@pytest.mark.parametrize("model", ["V3", "V3.2", "V4-Flash", "V4-Pro", "V4.1-Flash"])
@pytest.mark.parametrize(
    "strategy", [Strategy(tp=8), Strategy(cp=8), Strategy(tp=8, dp=8, ep=True), Strategy(tp=2, pp=4)]
)
def test_order_and_floor_of_every_prediction(machine: str, model: str, strategy: Strategy) -> None:
    d = on(machine, model, strategy=strategy)
    for engine in ("longread", "vllm", "sglang"):
        d = replace(d, engine=engine)  # type: ignore[arg-type]
        times = [ttft_cold(d, n).total for n in (1, 300, 8193, 131072)]
        times += [ttft_warm(d, 131072, 64).total, tpot(d, 1, 100).total, tpot(d, 64, 131072).total]
        for e in times:
            assert 0 < e.floor <= e.low <= e.centre <= e.high
        assert all(a.centre <= b.centre for a, b in pairwise(times[:4]))
        assert times[4].centre < times[3].centre and times[5].centre <= times[6].centre


@pytest.mark.parametrize("engine", ["longread", "vllm", "sglang"])
@pytest.mark.parametrize("model", ["V3", "V3.2", "V4-Flash", "V4.1-Flash"])
@pytest.mark.parametrize("strategy", [Strategy(tp=8), Strategy(cp=8), Strategy(tp=8, dp=8, ep=True)])
def test_a_faster_card_is_never_slower(engine: str, model: str, strategy: Strategy) -> None:
    """Cards' groups of runs are fitted apart; a measured slow one must not turn the order round."""
    slow_to_fast = ("H20-96", "H20-141", "H200", "B200")
    found = [on(f"8x{name}", model, strategy=strategy, engine=engine) for name in slow_to_fast]
    for ask in (
        lambda d: ttft_cold(d, 1024).total,
        lambda d: ttft_cold(d, 131072).total,
        lambda d: ttft_warm(d, 131072, 64).total,
        lambda d: tpot(d, 1, 65536).total,
        lambda d: tpot(d, 32, 8192).total,
        lambda d: request_cost(d, Workload(32768, 512, concurrency=8))[0],
    ):
        times = [ask(d) for d in found]
        assert all(slow.centre * (1 + 1e-9) >= fast.centre for slow, fast in pairwise(times)), times
        assert all(e.low <= e.centre <= e.high for e in times)


def test_what_a_faster_card_takes_from_a_slower_one_is_said() -> None:
    taken = tpot(on("8xH200", "V4.1-Flash"), 8, 65536).total
    assert "no slower than on H20-141" in taken.source and taken.provenance == "interpolated"
    assert "no slower" not in tpot(on("8xH200", "V3", engine="sglang"), 8, 1536).total.source


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize(
    ("model", "strategy"), [("V4-Flash", Strategy(cp=8)), ("V3", Strategy(tp=8)), ("V3.2", Strategy(tp=8))]
)
def test_more_new_tokens_are_never_cheaper(model: str, strategy: Strategy, tier: Tier) -> None:
    less = 1e-3 if tier == "host" else 1e-9  # fewer cached tokens are loaded, while the host issues kernels no faster
    for engine in ("longread", "vllm", "sglang"):
        d = on("8xH20", model, strategy=strategy, engine=engine)
        suffixes = (1, 32, 511, 512, 513, 1024, 8192, 65536, S - 1)
        alone = [ttft_warm(d, S, n, tier).total.centre for n in suffixes]
        assert all(a <= b * (1 + less) for a, b in pairwise(alone)), alone
        shared = [
            request_cost(d, Workload(S, 256, prefix=1 - n / S, concurrency=4, tier=tier))[0].centre for n in suffixes
        ]
        assert all(a <= b * (1 + less) for a, b in pairwise(shared)), shared
        assert alone[-1] == pytest.approx(ttft_cold(d, S).total.centre, rel=0.02)


def test_throughput_grows_and_pays_for_prompts() -> None:
    d = on("8xH200", "V3", cache="bfloat16", engine="sglang")
    rates = [throughput(d, Workload(4096, 512, concurrency=n)) for n in (1, 8, 32)]
    assert rates[0].centre < rates[1].centre < rates[2].centre
    assert all(r.low <= r.centre <= r.high <= r.floor for r in rates)
    read_before = throughput(d, Workload(4096, 512, prefix=0.98, concurrency=32))
    assert read_before.centre > rates[2].centre
    work = Workload(4096, 512, concurrency=8)
    assert loaded_tpot(d, work).centre > tpot(d, 8, 4352).total.centre
    assert stalled_tpot(d, 8, 65536).centre > tpot(d, 8, 65536).total.centre
    assert throughput(replace(d, strategy=Strategy(tp=8, replicas=2)), replace(work, concurrency=16)).centre == (
        pytest.approx(2 * rates[1].centre)
    )


def test_first_tokens_wait_for_each_other() -> None:
    d = on("8xH20", strategy=Strategy(cp=8))
    one, many = (ttft_at_load(d, Workload(65536, 256, concurrency=n)) for n in (1, 16))
    assert one[0].centre == one[1].centre == ttft_cold(d, 65536).total.centre
    assert one[0].centre < many[0].centre < many[1].centre
    assert many[1].centre > 8 * one[1].centre
    assert all(e.floor <= e.low <= e.centre <= e.high for e in (*one, *many))


def test_nonsense_is_refused() -> None:
    d = on("8xH200")
    for call in (lambda: ttft_cold(d, 0), lambda: tpot(d, 0, 10), lambda: ttft_warm(d, 10, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            call()


def test_fewer_layers_cost_their_share() -> None:
    whole, half = (Deployment(s, parse_hardware("H200"), Strategy(), engine="vllm") for s in (
        release("V4-Flash"), with_layers(release("V4-Flash"), 32)
    ))  # fmt: skip
    ratio = sum(prefill(half, S).values()) / sum(prefill(whole, S).values())
    assert ratio == pytest.approx(32 / 43, rel=0.06)


def test_a_long_prompt_is_as_little_work_as_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks hundreds of times: chunks between the samples are interpolated."""
    d = on("8xH20")
    default_factors()
    counts = counted(monkeypatch, (raw, "prefill_ops"))
    ttft_cold(d, S)
    assert 0 < counts["prefill_ops"] <= 12
    ttft_cold(d, S // 4)
    assert counts["prefill_ops"] <= 24


def test_one_request_at_once_waits_for_nobody_between_its_tokens() -> None:
    d = Deployment(release("V4-Flash"), parse_hardware("8xH20-96"), Strategy(tp=8), engine="vllm")
    for osl in (4, 512):
        load = Workload(131072, osl)
        alone = tpot(d, 1, 131072 + osl // 2).total
        assert loaded_tpot(d, load).centre == pytest.approx(alone.centre)
        assert loaded_tpot(d, replace(load, concurrency=2)).centre > alone.centre
