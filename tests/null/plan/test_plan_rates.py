"""Measured rates of a user's own machine: they move predictions, and no share is taken off them twice."""

from dataclasses import replace

import pytest

from longread.plan.cards import card, parse_hardware
from longread.plan.communication import HOST_SHARE, host_peak, host_rate, link, network
from longread.plan.deployment import Deployment, Strategy
from longread.plan.efficiency import factor, reached
from longread.plan.frontend import load_seconds
from longread.plan.ops import Op
from longread.plan.timing import tpot, ttft_cold, ttft_warm
from longread.spec.hardware import Card, Figure, Hardware
from longread.spec.releases import release

S = 131072


def measured(value: float) -> Figure:
    return Figure(value, "measured", "a probe")


def throttled(one: Card, share: float) -> Card:
    """The same card with ``share`` of what the table's was measured at, as a probe file says it."""
    assert one.measured_bandwidth is not None
    return replace(
        one,
        measured_bandwidth=measured(one.measured_bandwidth.value * share),
        measured_flops={name: measured(figure.value * share) for name, figure in one.measured_flops.items()},
    )


def deployed(one: Card, **changes: object) -> Deployment:
    return Deployment(release("V4-Flash"), Hardware(one, 8), Strategy(tp=8), "vllm", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["H200", "H20-96", "H20-141"])
def test_a_card_at_half_its_rate_plans_slower(name: str) -> None:
    healthy, slow = deployed(card(name)), deployed(throttled(card(name), 0.5))
    for ask in (lambda d: ttft_cold(d, S).total, lambda d: ttft_warm(d, S, 32768).total):
        assert 1.3 < ask(slow).centre / ask(healthy).centre <= 2.1
    assert tpot(slow, 32, S).total.centre > 1.3 * tpot(healthy, 32, S).total.centre
    assert ttft_cold(deployed(throttled(card(name), 1.0)), S).total == ttft_cold(healthy, S).total


def test_rates_of_an_unknown_card_are_not_discounted_twice() -> None:
    """Its measured rates stand for its peaks: an H200 under another name plans about as an H200."""
    h200 = card("H200")
    assert h200.measured_bandwidth is not None
    stranger = replace(
        h200, name="Something", flops=dict(h200.measured_flops), bandwidth=h200.measured_bandwidth, aliases=()
    )
    op = Op("linears", "linear", 1e12, "fp8", 1e9, 0)
    ours, theirs = factor(op, h200), factor(op, stranger)
    assert theirs.bytes * stranger.bandwidth.value == pytest.approx(ours.bytes * h200.bandwidth.value)
    assert theirs.flops * stranger.flops["fp8"].value == pytest.approx(ours.flops * h200.flops["fp8"].value, rel=0.1)
    times = [ttft_cold(deployed(one), S).total.centre for one in (h200, stranger)]
    assert times[1] == pytest.approx(times[0], rel=0.1)


def test_the_table_itself_is_the_measure() -> None:
    for name in ("H200", "H20-96", "H100", "RTX-5090", "A100-80"):
        assert reached(card(name), "bandwidth") == reached(card(name), "bf16") == 1.0
    assert reached(parse_hardware("cpu").card, "bf16") == 1.0  # its peaks are measured


def test_a_measured_link_is_not_discounted() -> None:
    h200, h20 = card("H200"), card("H20-96")
    assert host_rate(h200) == 49.5e9 and host_peak(h200) == 64e9
    assert host_rate(h20) == pytest.approx(64e9 * HOST_SHARE) and host_peak(h20) == 64e9
    assert host_rate(replace(h200, pcie=measured(55.5e9))) == 55.5e9
    assert host_peak(replace(h200, pcie=measured(25e9))) == 32e9
    assert host_rate(replace(h200, pcie=None)) is None is host_peak(replace(h200, pcie=None))
    loads = [load_seconds(deployed(one), S, "host")["load host"] for one in (h200, h20)]
    assert loads[0] == pytest.approx(loads[1])


def test_a_measured_network_and_measured_neighbours_are_not_discounted() -> None:
    far = parse_hardware("2x8xH20-96")
    assert far.network is not None
    assert network(far) == pytest.approx(0.7 * far.network.value)
    assert network(replace(far, network=measured(3e11))) == 3e11
    bare = replace(card("H20-96"), nvlink=None)
    by_host = link(Hardware(bare, 8), 8).rate
    assert link(Hardware(replace(bare, pcie=measured(49.5e9)), 8), 8).rate == pytest.approx(by_host)


def test_the_floor_of_a_load_is_the_link_s_printed_rate() -> None:
    found = ttft_warm(deployed(card("H200"), cache="fp8_ds_mla"), S, 32, "host")
    device = ttft_warm(deployed(card("H200")), S, 32, "device")
    load = found.parts["load host"]
    least = found.total.floor - device.total.floor
    # TP8 loads the cache eight times over; the floor's cards share one copy at 64 GB/s each.
    assert least * 8 == pytest.approx(load.centre * 49.5 / 64, rel=0.02)
