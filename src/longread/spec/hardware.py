"""What a card and a machine are: sizes and rates, each with where it comes from.

Knows no model and measures nothing: ``plan.cards`` holds the table of known cards and reads users' files,
``measure.probe`` writes such a file for the machine it runs on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GIB = 2**30
Mark = Literal["vendor sheet", "measured", "derived", "press"]
Rate = Literal["fp4", "fp8", "int8", "bf16", "tf32", "fp32"]
Architecture = Literal["ampere", "ada", "hopper", "blackwell", "cpu"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number in base units (bytes, bytes/s, FLOP/s, watts), how it is known, and the source in words."""

    value: float
    mark: Mark
    source: str


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator, or one CPU socket pair seen as one.

    ``memory`` is what the tools show, ``usable`` what a process can allocate of it. ``flops``: dense peak by type, with
    multiply and add as two; a type that the tensor cores lack is absent (Hopper has no fp4). ``measured_flops`` and
    ``measured_bandwidth``: what a large product or copy reached, where somebody measured it. ``nvlink``: bytes/s of all
    links in one direction, None without. ``pcie``: host to device, pinned, one direction.
    """

    name: str
    aliases: tuple[str, ...]
    architecture: Architecture
    compute_capability: tuple[int, int] | None
    sms: Figure | None
    memory: Figure
    usable: Figure
    bandwidth: Figure
    flops: Mapping[str, Figure]
    l2: Figure | None
    nvlink: Figure | None
    pcie: Figure | None
    power: Figure | None
    measured_bandwidth: Figure | None
    measured_flops: Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class Hardware:
    """``nodes`` machines with ``gpus`` equal cards each.

    ``network``: bytes/s of one node's links to the others, one direction; None for one node. ``host_memory`` in bytes a
    node; ``disk_read`` and ``disk_write`` bytes/s a node. None: not known, so that nothing is promised from it.
    """

    card: Card
    gpus: int
    nodes: int = 1
    network: Figure | None = None
    host_memory: Figure | None = None
    disk_read: Figure | None = None
    disk_write: Figure | None = None

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.nodes

    @property
    def label(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.gpus}x{self.card.name}"
