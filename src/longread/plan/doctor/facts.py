"""What was read of a machine, before anybody judges it.

Every field may be None: it could not be read, or the file that it came from does not say. ``unread`` holds the reason
by field name where there is one worth telling. Readers fill these, on this machine or from saved files; checks look.
Clocks are MHz, temperatures degrees Celsius, powers watts, sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FabricState = Literal["not supported", "not started", "in progress", "completed"]
StorageKind = Literal["nvme", "ssd", "hdd", "network", "memory", "overlay", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRemapping:
    """Rows of HBM replaced by spare ones. ``pending``: a reset is needed to do it; ``failed``: it could not be done.

    ``banks_without_spares``: banks that have used up all of theirs.
    """

    correctable: int | None = None
    uncorrectable: int | None = None
    pending: bool | None = None
    failed: bool | None = None
    banks_without_spares: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One link. ``speed_mbps``: MB/s in one direction (25,000 nominal and 26,562 shown for NVLink 4)."""

    index: int
    active: bool | None = None
    speed_mbps: float | None = None
    version: str | None = None
    remote: str | None = None  # "GPU", "switch"
    errors: int | None = None  # recovery and replay events since the driver was loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What the fabric manager says of a GPU on NVSwitch. ``status``: its error in words, "" without one.

    ``unhealthy``: the named conditions that the health mask reports; empty = reported and none.
    """

    state: FabricState
    status: str = ""
    clique: int | None = None
    cluster: str | None = None
    unhealthy: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """A driver error out of the kernel log. ``bus``: the PCI address as logged ("0000:3b:00"); ``when``: as logged, may
    be "". ``switch``: an SXid, of an NVSwitch, whose codes are others.
    """

    code: int
    bus: str
    text: str
    when: str = ""
    switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as NVML, or ``nvidia-smi -q -x``, shows it.

    ``event_reasons``: names of the clock event reasons that are set, as NVML spells them without the prefix, GpuIdle
    included ("SwPowerCap", "HwThermalSlowdown"...). ``margin``: degrees to the slowdown temperature. ``pcie_gen`` and
    ``pcie_width`` hold at this moment (an idle GPU lowers the generation), ``…_max`` what GPU and slot can do together,
    ``pcie_gen_device`` what the GPU alone could. ``violations``: nanoseconds spent slowed, by reason, since the driver
    was loaded. ``recovery_action``: what the driver asks for ("none", "reset"...). ``processes``: compute processes.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    bus: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    ecc: bool | None = None
    ecc_pending: bool | None = None  # what it is after the next reset
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None  # the same
    ecc_uncorrected_ever: int | None = None
    rows: RowRemapping | None = None
    recovery_action: str | None = None
    sm_clock: int | None = None
    sm_clock_max: int | None = None
    sm_clock_application: int | None = None  # the ceiling in force for programs...
    sm_clock_application_default: int | None = None  # ...and the one before anybody set it
    memory_clock: int | None = None
    memory_clock_max: int | None = None
    event_reasons: frozenset[str] | None = None
    violations: Mapping[str, int] | None = None
    temperature: int | None = None
    temperature_memory: int | None = None
    temperature_slowdown: int | None = None
    temperature_memory_max: int | None = None
    margin: int | None = None
    power: float | None = None
    power_limit: float | None = None  # the one in force
    power_limit_default: float | None = None
    power_limit_max: float | None = None
    utilization: int | None = None  # percent
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_gen_device: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    nvlink_count: int | None = None  # what the card has, from NVML_FI_DEV_NVLINK_LINK_COUNT; 0: none
    nvlinks: tuple[NvLink, ...] | None = None
    fabric: Fabric | None = None
    mig: bool | None = None
    persistence: bool | None = None
    compute_mode: str | None = None  # "default", "exclusive process", "prohibited"
    processes: int | None = None
    numa_node: int | None = None
    cpus: frozenset[int] | None = None  # CPUs of that node, as the driver says
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """How GPUs reach each other. ``links[i][j]``: as in ``nvidia-smi topo -m``: "X", "NV18", "PIX", "PXB", "PHB",
    "NODE", "SYS". ``peer[i][j]``: "ok", or why the driver does not allow peer-to-peer reads ("chipset not supported").
    Both [GPUs, GPUs], in the order of ``Facts.gpus``; a pair that could not be read is "".
    """

    links: tuple[tuple[str, ...], ...]
    peer: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installed distribution. ``requires``: its own Requires-Dist lines without extras; None where only the version
    is known."""

    name: str  # normalised: lower case, "-" for "_" and "."
    version: str
    requires: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """``driver``: as text, "580.95.05". ``cuda_driver``: the newest CUDA that the driver serves. ``torch_cuda``: the
    CUDA that torch was built for, "" for a build without one. ``torch_arch``: what torch's wheel has kernels for
    ("sm_90", "compute_120"); ``torch_arch_from``: whether that was asked of torch or is out of a table.
    ``kernel_tables``: by engine, the names of the tuned tables in its wheel without ".json"
    ("E=256,N=256,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128,128]"). ``environment``: variables of torch,
    NCCL, CUDA, vLLM and SGLang that are set, without those that may hold secrets.
    """

    python: str | None = None
    driver: str | None = None
    cuda_driver: tuple[int, int] | None = None
    packages: Mapping[str, Package] | None = None
    torch_cuda: str | None = None
    torch_arch: tuple[str, ...] | None = None
    torch_arch_from: str = ""
    kernel_tables: Mapping[str, frozenset[str]] | None = None
    environment: Mapping[str, str] | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A folder's file system. ``kind`` of the device below; ``device`` and ``filesystem`` as mounted."""

    path: str
    free: int | None = None
    total: int | None = None
    free_inodes: int | None = None
    kind: StorageKind = "unknown"
    device: str | None = None
    filesystem: str | None = None
    read_only: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The machine around the GPUs. Limits: None = could not be read, -1 = unlimited.

    ``huge_pages``: reserved ones and their size. ``thp``: "always", "madvise", "never". ``container``: which kind was
    recognised, "" for none. ``cgroup_memory``/``cgroup_cpus``: what a control group allows; None without a limit.
    ``cpus_online``: of the machine; ``cpus_allowed``: those that this process may use. ``iommu``: "on", "passthrough"
    or "off".
    """

    kernel: str | None = None
    cpu: str | None = None
    cpus_online: int | None = None
    cpus_allowed: frozenset[int] | None = None
    cpu_flags: frozenset[str] | None = None
    governor: str | None = None
    clock_source: str | None = None
    numa_nodes: int | None = None
    numa_balancing: bool | None = None
    memory_total: int | None = None
    memory_available: int | None = None
    swap_total: int | None = None
    swap_used: int | None = None
    thp: str | None = None
    huge_pages: tuple[int, int] | None = None
    nofile: int | None = None
    nofile_hard: int | None = None
    memlock: int | None = None
    core: int | None = None
    container: str | None = None
    cgroup_memory: int | None = None
    cgroup_memory_used: int | None = None
    cgroup_cpus: float | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    iommu: str | None = None
    storage: tuple[Storage, ...] | None = None
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A model server's command line, running here or out of a file. ``arguments`` begins after the program."""

    engine: Literal["longread", "vllm", "sglang"]
    arguments: tuple[str, ...]
    pid: int | None = None

    def value(self, *names: str) -> str | None:
        """What follows the first of the options ``names`` ("--tensor-parallel-size", "-tp"); "" for a bare flag."""
        for at, argument in enumerate(self.arguments):
            name, equals, value = argument.partition("=")
            if name in names:
                following = self.arguments[at + 1 : at + 2]
                return value if equals else "" if not following or following[0].startswith("--") else following[0]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHit:
    """A known text in a log. ``kind``: its key in ``known_texts``. ``line``: number of its first line, ``text`` that
    line, shortened. ``phase``: "start" or "serving", "" where the log does not show it. ``values``: what the text says
    in numbers and names, by ``known_texts``' pattern. ``around``: which part of the engine the lines before it name.
    """

    kind: str
    file: str
    line: int
    text: str
    count: int = 1
    phase: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    around: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds, out of a histogram. Percentiles are interpolated inside a bucket: no better than its width; None where
    they lie beyond the last bucket. ``since``: "interval" between two readings, or "start" of the server where the
    interval saw none.
    """

    count: int
    mean: float
    p50: float | None
    p90: float | None
    p99: float | None
    since: Literal["interval", "start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A live server's metrics, read twice. ``seconds`` lie between. ``gauges``: at the second reading, summed over
    replicas (KV usage: the fullest), ``gauges_before`` at the first. ``totals``: counters at the second reading,
    ``grown``: by how much they grew between. Names are those of ``series``; what the server does not have is in
    ``missing`` and nowhere else. ``restarted``: a counter went backwards.
    """

    url: str
    engine: Literal["longread", "vllm", "sglang"]
    seconds: float
    version: str | None = None
    models: tuple[str, ...] | None = None
    max_model_len: int | None = None
    gauges: Mapping[str, float] = field(default_factory=dict)
    gauges_before: Mapping[str, float] = field(default_factory=dict)
    totals: Mapping[str, float] = field(default_factory=dict)
    grown: Mapping[str, float] = field(default_factory=dict)
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    old_names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    restarted: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two sources that cannot both be right about one machine: ``first`` was taken."""

    field: str
    first: str
    first_from: str
    second: str
    second_from: str


THIS_MACHINE = "this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that one run of the doctor knows. ``origin``: "this machine", or the files. ``gpus``: None where it is
    not known whether there are any (``unread["gpus"]`` says why), empty where there are none. ``xids``: oldest first.
    ``logs``: None where no log was read, empty where one was and says nothing that is known.
    """

    origin: str = THIS_MACHINE
    gpus: tuple[GpuFacts, ...] | None = None
    topology: Topology | None = None
    versions: Versions | None = None
    host: HostFacts | None = None
    servers: tuple[Server, ...] | None = None
    xids: tuple[Xid, ...] | None = None
    logs: tuple[LogHit, ...] | None = None
    live: Live | None = None
    conflicts: tuple[Conflict, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
