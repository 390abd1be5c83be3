"""Physical floors against the printed tables: cold and suffix floors, KV loads, GFLOP a token."""

from dataclasses import replace

import pytest

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.floor import Floor, cold_floor, decode_floor, load_floor, peak, prompt_work, suffix_floor
from longread.plan.ops import decode_ops, prefill_ops
from longread.plan.shapes import matrices
from longread.spec.count import active_parameters, flops_per_token, prompt_parameters
from longread.spec.errors import ConfigError
from longread.spec.releases import release

S = 524288
NAMES = ("V2-Lite", "V2", "V3", "V3.2", "V4-Flash", "V4-Pro", "V4.1-Flash")


def whole(name: str, **changes: object) -> Deployment:
    cache = "bfloat16" if name in ("V2-Lite", "V2", "V3") else "fp8_ds_mla"
    return Deployment(release(name), parse_hardware("1xH200"), Strategy(), cache=cache, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_matrices_are_those_that_spec_counts(name: str) -> None:
    spec = release(name)
    for prompt, counted in ((True, prompt_parameters(spec)), (False, active_parameters(spec))):
        m = matrices(spec, prompt)
        met = m.split + m.whole + m.dense + m.router + m.hyper + m.engram
        met += m.expert * m.moe_layers * spec.moe.top_k + (0 if prompt else m.head)
        assert met == pytest.approx(counted, rel=1e-5)  # V4's hc_head, 4 rows, is left out


@pytest.mark.parametrize(
    ("name", "linear", "attention", "indexer", "total"),
    [("V3", 37.4, 686.8, 0.0, 724), ("V3.2", 38.3, 18.2, 137.4, 194), ("V4-Flash", 13.4, 3.9, 11.8, 29.1)],
)
def test_work_of_a_cold_512k_prompt(name: str, linear: float, attention: float, indexer: float, total: float) -> None:
    work = prompt_work(release(name), S)
    assert round(work.linear / 1e15, 1) == linear
    assert round(work.attention / 1e15, 1) == attention
    assert round(work.indexer / 1e15, 1) == indexer
    assert round(work.total / 1e15, 1 if total < 100 else 0) == total


def test_absorbed_and_routed_work() -> None:
    assert round(prompt_work(release("V3"), S, absorbed=True).attention / 1e15) == 2335
    assert round(prompt_work(release("V4-Flash"), S).experts / 1e15, 1) == 6.8


@pytest.mark.parametrize(
    ("name", "options", "printed"),
    [
        ("V3", {}, {"2xH20": 2384, "8xH20": 596, "1xH200": 713, "2xH200": 357, "8xH200": 89}),
        ("V3", {"attention": "fp8"}, {"2xH20": 1223, "8xH20": 306, "1xH200": 366, "2xH200": 183, "8xH200": 46}),
        ("V3.2", {}, {"2xH20": 358, "8xH20": 90, "1xH200": 107, "2xH200": 54, "8xH200": 13.4}),
        ("V3.2", {"index_copies": 8}, {"8xH20": 496, "8xH200": 74}),
        ("V4-Flash", {}, {"2xH20": 56, "8xH20": 14.0, "1xH200": 16.7, "2xH200": 8.3, "8xH200": 2.1}),
        ("V4-Flash", {"experts": "bf16"}, {"2xH20": 67, "8xH20": 16.8, "1xH200": 20.1, "2xH200": 10.1, "8xH200": 2.5}),
    ],
)
def test_cold_floors_at_512k(name: str, options: dict[str, object], printed: dict[str, float]) -> None:
    for machine, seconds in printed.items():
        floor = cold_floor(release(name), parse_hardware(machine), S, **options)  # type: ignore[arg-type]
        digits = 1 if isinstance(seconds, float) else 0
        assert round(floor.seconds, digits) == pytest.approx(seconds, abs=10**-digits * 0.51), machine


def test_cold_floors_by_part() -> None:
    def parts(floor: Floor) -> list[float]:
        return [round(x, 1) for x in (floor.linear, floor.attention, floor.indexer)]

    node = parse_hardware("8xH20")
    assert parts(cold_floor(release("V3"), node, S)) == [15.8, 580.1, 0.0]
    assert parts(cold_floor(release("V3.2"), node, S)) == [16.2, 15.4, 58.0]
    assert parts(cold_floor(release("V4-Flash"), node, S)) == [5.6, 3.3, 5.0]
    assert round(cold_floor(release("V3.1"), node, 131072).seconds, 1) == 40.2


@pytest.mark.parametrize(
    ("name", "micros", "tokens", "tokens_h200"),
    [("V3", 7554, 22, 149), ("V3.2", 282, 597, 3989), ("V4-Flash", 41, 4130, 27606)],
)
def test_suffix_floors_at_512k(name: str, micros: int, tokens: int, tokens_h200: int) -> None:
    spec = release(name)
    one = suffix_floor(spec, parse_hardware("8xH20"), 1, S - 1).compute
    assert round(one * 1e6) == micros
    assert 0.168 / one == pytest.approx(tokens, abs=1)
    on_h200 = suffix_floor(spec, parse_hardware("8xH200"), 1, S - 1).compute
    assert 0.168 / on_h200 == pytest.approx(
        tokens_h200, rel=5e-4, abs=0.5
    )  # printed with 989 TFLOP/s; the sheet has 989.4


def test_a_short_suffix_is_absorbed_and_a_long_one_projects_again() -> None:
    spec, node = release("V3"), parse_hardware("8xH20")
    absorbed = prompt_work(spec, 170, S, absorbed=True)
    assert suffix_floor(spec, node, 170, S).attention == pytest.approx(absorbed.attention / 148e12 / 8)
    long = suffix_floor(spec, node, 400, S)
    assert long.attention == pytest.approx(prompt_work(spec, 400, S).attention / 148e12 / 8)
    again = (long.linear * 296e12 * 8 - prompt_work(spec, 400).linear) / 1e15
    assert round(again, 2) == 1.07


@pytest.mark.parametrize(
    ("name", "packing", "printed"),
    [
        ("V3", "fp8_ds_mla", (53, 420, 750)),
        ("V3.2", "fp8_ds_mla", (63, 504, 900)),
        ("V4-Flash", "fp8_ds_mla", (5, 40, 72)),
    ],
)
def test_loads_of_a_512k_cache(name: str, packing: str, printed: tuple[int, ...]) -> None:
    found = [load_floor(release(name), packing, S, rate) * 1e3 for rate in (8 * 50e9, 50e9, 28e9)]
    assert [round(ms) for ms in found] == pytest.approx(list(printed), abs=1)


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("V2-Lite", {0: 4.9, 8192: 12.6, 131072: 128}),
        ("V2", {0: 41.7, 8192: 179, 131072: 2232}),
        ("V3", {0: 73.2, 8192: 212, 131072: 2300, 1048576: 17889}),
        ("V3.2", {0: 75.0, 8192: 118, 131072: 241, 1048576: 1158}),
        ("V4-Flash", {0: 26.5, 8192: 29.5, 131072: 42.6, 1048576: 140}),
        ("V4-Pro", {0: 97.7, 8192: 109, 131072: 132, 1048576: 303}),
    ],
)
def test_decode_operations_are_the_printed_gigaflops(name: str, printed: dict[int, float]) -> None:
    d = whole(name, engine="longread")
    for context, gigaflops in printed.items():
        found = sum(op.flops for op in decode_ops(d, 1, context))
        assert found == pytest.approx(flops_per_token(d.spec, context), rel=1e-3)
        assert round(found / 1e9, 1 if isinstance(gigaflops, float) else 0) == pytest.approx(gigaflops, abs=0.051)


@pytest.mark.parametrize("name", NAMES)
def test_prefill_operations_add_up_to_the_work_of_a_prompt(name: str) -> None:
    d = whole(name)
    found = sum(op.flops for op in prefill_ops(d, 4096, 0))
    assert found == pytest.approx(prompt_work(d.spec, 4096).total, rel=1e-6)


def test_projecting_the_prefix_again_costs_410_over_the_chunk() -> None:
    d = whole("V3")
    for chunk, share in ((2048, 0.20), (4096, 0.10), (8192, 0.05), (16384, 0.025)):
        ops = {op.name: op.flops for op in prefill_ops(d, chunk, 10**8)}
        assert ops["prefix projected again"] / ops["attention"] == pytest.approx(share, rel=0.01)


def test_a_rate_that_no_type_of_the_card_can_give_is_an_error() -> None:
    assert peak(parse_hardware("A100").card, "fp8") == peak(parse_hardware("A100").card, "bf16")
    with pytest.raises(ConfigError, match="no rate"):
        peak(parse_hardware("A100").card, "int1")


def test_four_bit_experts_are_bounded_by_what_a_kernel_could_do() -> None:
    """On Hopper engines multiply them as BF16; the floor is FP8's, so that a faster kernel is not called impossible."""
    hardware = parse_hardware("8xH20-96")
    spec = release("DeepSeek-V4-Flash")
    d = Deployment(spec, hardware, Strategy(tp=8), engine="vllm")
    ops = decode_ops(replace(d, strategy=Strategy(), engine="longread"), 4096, 1024)
    experts = next(op for op in ops if op.kind == "experts")
    assert experts.rate == "bf16"
    assert decode_floor(d, 4096, 1024) < sum(o.flops / peak(hardware.card, o.rate) for o in ops) / 8 * 0.999
    assert decode_floor(d, 4096, 1024) >= experts.flops / peak(hardware.card, "fp8") / 8
