"""What the cards of one replica send each other in a step, and how long that takes over their links.

Knows a deployment. Volumes are those of ring or switch algorithms: an all-reduce of n ranks moves 2 (n - 1) / n of the
tensor through each card, an all-gather or reduce-scatter half of it. A group that spans machines is bound by the
network of a machine. Shares of the link rate and start-up times are assumed, not measured; the network's start-up is
from R1's decode over two machines (tenstorrent/tt-inference-server#356).
"""

from dataclasses import dataclass

from longread.plan.deployment import Deployment
from longread.plan.ops import attention_ranks, expert_ranks
from longread.plan.shapes import readings
from longread.spec.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes/s through one card, and the start-up seconds of one collective."""

    name: str
    rate: float
    start: float


# Share of the link's rate that a collective reaches, and its start-up. A measured NVLink rate is reached already.
_NVLINK, _PCIE, _NETWORK = (0.75, 12e-6), (0.60, 30e-6), (0.70, 80e-6)
_UNKNOWN_PCIE, _UNKNOWN_NETWORK = 25e9, 50e9  # where the hardware's file does not say: PCIe 4 x16, one 400 Gb/s port


def link(hardware: Hardware, cards: int) -> Link:
    """The link that bounds a collective of ``cards`` neighbouring cards."""
    card = hardware.card
    if card.nvlink is not None:
        share = 1.0 if card.nvlink.mark == "measured" else _NVLINK[0]
        inside = Link("NVLink", card.nvlink.value * share, _NVLINK[1])
    else:
        rate = card.pcie.value if card.pcie is not None else _UNKNOWN_PCIE  # host to device, whoever measured it
        inside = Link("PCIe", rate * _PCIE[0], _PCIE[1])
    if cards <= hardware.gpus:
        return inside
    # As many rings as a machine has ports, each over all cards: what one card's share of a collective passes is spread
    # over all ports of its machine.
    return Link("network", min(network(hardware) * _NETWORK[0], inside.rate), _NETWORK[1])


def network(hardware: Hardware) -> float:
    """Bytes/s of one machine's ports together, one direction."""
    return hardware.network.value if hardware.network is not None else _UNKNOWN_NETWORK * hardware.gpus


def prefill_communication(d: Deployment, chunk: float, groups: int = 1) -> dict[str, float]:
    """Seconds by collective for one chunk through all layers, without pipeline hand-over."""
    return _collectives(d, chunk / d.strategy.cp, chunk * groups)


def decode_communication(d: Deployment, batch: int) -> dict[str, float]:
    """The same for one decode step."""
    rows = -(-batch // d.strategy.dp)
    found = _collectives(d, rows, batch)
    if d.strategy.pp > 1:
        found["pipeline hand-over"] = (d.strategy.pp - 1) * hand_over(d, batch)
    return found


def hand_over(d: Deployment, tokens: float) -> float:
    """Seconds to give a chunk's residual streams to the next pipeline stage."""
    spec = d.spec
    streams = spec.hyper.mult if spec.hyper is not None else 1
    far = d.strategy.gpus > d.hardware.gpus
    between = link(d.hardware, d.hardware.gpus + 1 if far else 2)
    rate = network(d.hardware) / d.hardware.gpus * _NETWORK[0] if far else between.rate  # a card's own port
    share = d.strategy.tp * d.strategy.cp  # each rank of a stage sends its part
    return tokens * spec.hidden * 2 * streams / share / rate + between.start


def _collectives(d: Deployment, local: float, tokens: float) -> dict[str, float]:
    """``local`` rows on one card, ``tokens`` rows that meet in the experts."""
    spec, heads, ranks, found = d.spec, attention_ranks(d), expert_ranks(d), {}
    row = spec.hidden * 2.0
    if heads > 1:
        over = link(d.hardware, heads)
        found["attention all-reduce"] = spec.layers * (over.start + _ring(heads) * local * row / over.rate)
    if ranks > 1:
        over = link(d.hardware, ranks)
        if d.strategy.ep and d.strategy.dp > 1:  # FP8 out, BF16 back, each row to its top_k experts
            sent = tokens / ranks * spec.moe.top_k * spec.hidden * 3.0 * (ranks - 1) / ranks
            rate = over.rate if ranks <= d.hardware.gpus else network(d.hardware) / d.hardware.gpus * _NETWORK[0]
            found["expert all-to-all"] = spec.layers * (2 * over.start + sent / rate)
        else:  # all-reduce, or all-gather before and reduce-scatter after where attention is split by tokens
            found["FFN all-reduce"] = spec.layers * (over.start + _ring(ranks) * tokens * row / over.rate)
    if d.strategy.cp > 1:
        over = link(d.hardware, d.strategy.cp)
        width = sum(r.layers * r.bytes / r.ratio for r in readings(spec, d.cache) if r.name != "window")
        found["cache all-gather"] = spec.layers * over.start + local * d.strategy.cp * width / over.rate
    return found


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks
