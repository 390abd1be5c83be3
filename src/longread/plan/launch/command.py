"""A launch as data: a program, its flags and variables with a reason each, and which node starts which process.

Knows no engine and no file format.
"""

import re
from dataclasses import dataclass

from longread.plan.calibrate import Factors
from longread.plan.deployment import Deployment, EngineName
from longread.spec.errors import ConfigError


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

    engine: EngineName
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


WEIGHTS = "/models"  # where checkpoints without a path of their own lie, for containers and longread
USER = "llm"  # of systemd's units
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*|\[?[0-9A-Fa-f:.]+\]?")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}(,[A-Za-z0-9][A-Za-z0-9._-]{0,31})*")
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Options:
    """What a launch needs to know besides the plan. Raises ``ConfigError`` for what no file can hold safely.

    ``engine_version``: None takes the newest that is known. ``name``: the release as it was asked for, where several
    share one architecture (R1, V3). ``model``: a folder or repository instead of DeepSeek's own (needed for converted
    experts and models without a public name). ``nodes``: addresses of the machines in order, the first is the head;
    node0, node1, ... where left out. ``interface``: network interface between the nodes. ``factors``: calibrated ones;
    None: of published runs. ``notes``: said in the header. ``layers``: how many of the model's were planned, with drawn
    weights, as ``longread serve --layers`` says it; None: all of a checkpoint.
    """

    engine_version: str | None = None
    name: str | None = None
    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    nodes: tuple[str, ...] = ()
    interface: str | None = None
    factors: Factors | None = None
    notes: tuple[str, ...] = ()
    layers: str | None = None

    def __post_init__(self) -> None:
        for what, text in (("model", self.model), ("name", self.name)):
            if text is not None and (not text.strip() or not text.isprintable()):
                raise ConfigError(f"{what} {text[:80]!r} is empty or holds control characters: no file can name it")
        if self.model is not None and self.model.startswith("-"):
            raise ConfigError(f"model {self.model[:80]!r} would be read as an option; write ./{self.model[:80]}")
        for address in (self.host, *self.nodes):
            if _ADDRESS.fullmatch(address) is None:
                raise ConfigError(f"{address[:80]!r} is no host name and no address")
        if self.interface is not None and _INTERFACE.fullmatch(self.interface) is None:
            raise ConfigError(f"{self.interface[:80]!r} is no network interface; write such as bond0")
        if not 1 <= self.port <= _PORT_MAX:
            raise ConfigError(f"port {self.port} is outside 1..{_PORT_MAX}")

    def address(self, node: int) -> str:
        return self.nodes[node] if node < len(self.nodes) else f"node{node}"


def cache_folder(engine: str) -> str:
    """Where compiled kernels, and documents on disk, are kept."""
    return f"/var/cache/{engine}"


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
    if options.nodes and len(options.nodes) != nodes:
        raise ConfigError(f"{len(options.nodes)} addresses for {nodes} nodes; name each once, the head first")
    if options.interface is not None and nodes == 1:
        raise ConfigError(f"interface {options.interface}: there is one node, nothing crosses a network")
    if cards <= gpus:
        a_node = gpus // cards
        if options.port + min(a_node, replicas) - 1 > _PORT_MAX:
            raise ConfigError(f"port {options.port}: {min(a_node, replicas)} replicas take as many ports from there on")
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
