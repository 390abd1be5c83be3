"""A launch as data: a program, its flags and variables with a reason each, and which node starts which process.

Knows no engine and no file format.
"""

from dataclasses import dataclass
from typing import Literal

from longread.plan.deployment import Deployment
from longread.spec.errors import ConfigError

Engine = Literal["longread", "vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and why it is there. ``value`` None: a switch."""

    name: str
    value: str | None
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name,) if self.value is None else (self.name, self.value)


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable and why it is set."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start: on which node, with what besides the common flags. ``replica`` and ``part`` count from 0;
    ``part`` 0 answers HTTP on ``port``, the others of its replica only work for it.
    """

    node: int
    replica: int
    part: int
    port: int
    flags: tuple[Flag, ...] = ()
    variables: tuple[Variable, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run. ``program`` is followed by ``flags`` and a process's own flags; ``notes`` are said in the header.

    ``gpus``: cards that one node gives; ``host_bytes``: main memory that the caches of one node take.
    """

    engine: Engine
    version: str
    title: str
    program: tuple[str, ...]
    flags: tuple[Flag, ...]
    variables: tuple[Variable, ...]
    processes: tuple[Process, ...]
    notes: tuple[str, ...]
    gpus: int
    nodes: int
    host_bytes: int = 0

    def words(self, process: Process) -> list[str]:
        """The whole command line of one process."""
        return [*self.program, *(word for flag in (*self.flags, *process.flags) for word in flag.words)]


@dataclass(frozen=True, slots=True)
class Options:
    """What a launch needs to know besides the plan.

    ``engine_version``: None takes the newest that is known. ``model``: a folder or repository instead of DeepSeek's own
    (needed for converted experts and models without a public name). ``nodes``: addresses of the machines in order, the
    first is the head; node0, node1, ... where left out. ``interface``: network interface between the nodes.
    ``prefill_rate``: prompt tokens/s of one replica, where it was measured; None takes the planner's prediction.
    ``draft_tokens``: speculative tokens a step from the model's own drafter; 0: none. ``decode_context_parallel``:
    vLLM's, over the cards of tensor parallelism. ``prefix``: folder of the Python environment, for systemd.
    """

    engine_version: str | None = None
    model: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    nodes: tuple[str, ...] = ()
    interface: str | None = None
    prefill_rate: float | None = None
    draft_tokens: int = 0
    decode_context_parallel: int = 1
    prefix: str | None = None
    cache_folder: str = "/var/cache/{engine}"
    weights_folder: str = "/models"
    user: str = "llm"

    def address(self, node: int) -> str:
        return self.nodes[node] if node < len(self.nodes) else f"node{node}"


def version_of(options: Options, known: tuple[str, ...], engine: str) -> str:
    """The version asked for, or the newest of ``known`` (oldest first). Raises ``ConfigError``."""
    if options.engine_version is None:
        return known[-1]
    if options.engine_version not in known:
        raise ConfigError(
            f"{engine} {options.engine_version}: its flags are not known here; launches are written for "
            f"{' and '.join(known)}"
        )
    return options.engine_version


def place(d: Deployment, options: Options) -> tuple[Process, ...]:
    """Where each part of each replica runs. Raises ``ConfigError`` where replicas do not fit on whole nodes."""
    cards, gpus, nodes, replicas = d.strategy.gpus, d.hardware.gpus, d.hardware.nodes, d.strategy.replicas
    if cards <= gpus:
        a_node = gpus // cards
        if replicas > a_node * nodes:
            raise ConfigError(
                f"{replicas} replicas of {cards} GPUs: {nodes} nodes of {gpus} hold {a_node * nodes}; none may span two"
            )
        return tuple(_whole(d, options, replica, a_node) for replica in range(replicas))
    if cards % gpus:
        raise ConfigError(
            f"a replica of {cards} GPUs over nodes of {gpus}: every node must give equally many; use a multiple of "
            f"{gpus} or at most {gpus}"
        )
    parts = cards // gpus
    if parts * replicas > nodes:
        raise ConfigError(f"{replicas} replicas of {parts} nodes each need {parts * replicas} nodes, there are {nodes}")
    return tuple(
        Process(replica * parts + part, replica, part, options.port)
        for replica in range(replicas)
        for part in range(parts)
    )


def _whole(d: Deployment, options: Options, replica: int, a_node: int) -> Process:
    cards, slot = d.strategy.gpus, replica % a_node
    variables: tuple[Variable, ...] = ()
    if d.strategy.replicas > 1 or cards < d.hardware.gpus:
        ids = ",".join(str(card) for card in range(slot * cards, (slot + 1) * cards))
        why = f"replica {replica}: {cards} of the node's {d.hardware.gpus} GPUs, links between them only"
        variables = (Variable("CUDA_VISIBLE_DEVICES", ids, why),)
    return Process(replica // a_node, replica, 0, options.port + slot, variables=variables)


def parts_of(d: Deployment) -> int:
    """Nodes that one replica spans."""
    return max(d.strategy.gpus // d.hardware.gpus, 1)


def head_of(process: Process) -> int:
    """The first node of the process's replica."""
    return process.node - process.part
