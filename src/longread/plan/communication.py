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
from longread.spec.hardware import Card, Figure, Hardware


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes/s through one card, and the start-up seconds of one collective."""

    name: str
    rate: float
    start: float


# Share of the link's printed rate that a collective reaches, and its start-up: assumed but for the last, see above.
NETWORK_START = 80e-6
_NVLINK, _PCIE, _NETWORK = (0.75, 12e-6), (0.60, 30e-6), (0.70, NETWORK_START)
HOST_SHARE = 49.5 / 64  # of PCIe's printed rate, from pinned memory: one H200, Gen5 x16
_PCIE_RATES = (8e9, 16e9, 32e9, 64e9, 128e9)  # sixteen lanes of generations 2 to 6, one direction
_UNKNOWN_PCIE, _UNKNOWN_NETWORK = 25e9, 50e9  # where the hardware's file does not say: PCIe 4 x16, one 400 Gb/s port


def sustained(rate: Figure, share: float) -> float:
    """Bytes/s that a link gives: a measured rate is that already, of a printed one a ``share``."""
    return rate.value if rate.mark == "measured" else rate.value * share


def host_rate(card: Card) -> float | None:
    """Bytes/s from pinned host memory to one card; None where PCIe's rate is not known."""
    return None if card.pcie is None else sustained(card.pcie, HOST_SHARE)


def host_peak(card: Card) -> float | None:
    """Bytes/s at most over that link: the printed rate, or of a measured one the generation's that allows it."""
    if card.pcie is None or card.pcie.mark != "measured":
        return None if card.pcie is None else card.pcie.value
    return next((rate for rate in _PCIE_RATES if rate >= card.pcie.value), card.pcie.value)


def link(hardware: Hardware, cards: int) -> Link:
    """The link that bounds a collective of ``cards`` neighbouring cards."""
    card = hardware.card
    if card.nvlink is not None:
        inside = Link("NVLink", sustained(card.nvlink, _NVLINK[0]), _NVLINK[1])
    else:
        rate = host_rate(card) or _UNKNOWN_PCIE * HOST_SHARE
        inside = Link("PCIe", rate * _PCIE[0] / HOST_SHARE, _PCIE[1])  # between cards, not from the host
    if cards <= hardware.gpus:
        return inside
    # As many rings as a machine has ports, each over all cards: what one card's share of a collective passes is spread
    # over all ports of its machine.
    return Link("network", min(network(hardware), inside.rate), _NETWORK[1])


def network(hardware: Hardware) -> float:
    """Bytes/s that one machine's ports together give a collective, one direction."""
    if hardware.network is None:
        return _UNKNOWN_NETWORK * hardware.gpus * _NETWORK[0]
    return sustained(hardware.network, _NETWORK[0])


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
    rate = network(d.hardware) / d.hardware.gpus if far else between.rate  # a card's own port
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
            rate = over.rate if ranks <= d.hardware.gpus else network(d.hardware) / d.hardware.gpus
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
