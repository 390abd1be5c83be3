"""GPUs and their links as the driver shows them, through NVML. Reads only.

Knows: NVML's calls and their traps. Must not know: what is good or bad. A call that the card or the driver lacks leaves
its field None with NVML's own words as the reason. Without a driver there are no GPUs to speak of: ``unread["gpus"]``.

Traps: NVML_NVLINK_MAX_LINKS (36) is more than any card has, so the count is asked for (TensorRT-LLM#17060, #19210); the
fabric has a state of its own beside the links' (dstack#1167); the index constant of peer reads is a tuple in the
binding, by a stray comma; the NUMA id in NVML is that of GPU memory on coherent machines, the CPU's is in sysfs.
"""

import ctypes
import threading
from pathlib import Path
from typing import Any, Protocol

from longread.plan.doctor.facts import Fabric, FabricState, GpuFacts, NvLink, RowRemapping, Topology
from longread.spec.errors import LongreadError

HANGS = "the driver did not answer within"
ANSWER_SECONDS = 30  # without persistence mode eight GPUs take some of it
LINKS_ASKED_AT_MOST = 36
PEER_READ = 0
FABRIC_STATES: dict[int, FabricState] = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
# Shift, width and bad values of each condition in the fabric's health mask (nvml.h); 0 is "not supported" in all.
FABRIC_HEALTH = {
    "degraded bandwidth": (0, 2, {1: ""}),
    "route recovery under way": (2, 2, {1: ""}),
    "route unhealthy": (4, 2, {1: ""}),
    "access timeout recovery": (6, 2, {1: ""}),
    "incorrect configuration": (
        8,
        4,
        {
            2: "system GUID",
            3: "chassis serial number",
            4: "no partition",
            5: "insufficient NVLinks",
            6: "incompatible GPU firmware",
            7: "invalid location",
            8: "GPU state invalid",
        },
    ),
}
RECOVERY_ACTIONS = (
    "none",
    "reset the GPU",
    "reboot the node",
    "drain peer-to-peer traffic",
    "drain and reset",
    "recover the IMEX domain",
    "reset the bus",
    "reboot the system",
)
VIOLATIONS = {"power": 0, "thermal": 1, "sync boost": 2, "board limit": 3, "reliability": 5}
ANCESTORS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
PEER_STATUS = (
    "ok",
    "chipset not supported",
    "GPU not supported",
    "I/O hub topology not supported",
    "disabled by the driver's registry key",
    "not supported",
    "unknown",
)
NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
COMPUTE_MODES = ("default", "exclusive thread", "prohibited", "exclusive process")


class Nvml(Protocol):
    """The module ``pynvml``, or a test's stand-in. Functions are looked up by name: an older binding may lack some."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802


class Asked:
    """Calls on one device (or none), each answered or None with the reason kept under the field's name."""

    def __init__(self, nvml: Nvml, handle: Any = None):
        self.nvml = nvml
        self.handle = handle
        self.unread: dict[str, str] = {}

    def get(self, field: str, function: str, *arguments: Any) -> Any:
        call = getattr(self.nvml, function, None)
        if call is None:
            self.unread[field] = f"this nvidia-ml-py has no {function}"
            return None
        try:
            value = call(*([] if self.handle is None else [self.handle]), *arguments)
        except self.nvml.NVMLError as error:
            self.unread[field] = str(error)
            return None
        self.unread.pop(field, None)
        return value

    def number(self, field: str, function: str, *arguments: Any) -> int | None:
        value = self.get(field, function, *arguments)
        return None if value is None else int(value)

    def constant(self, name: str, fallback: int) -> int:
        return int(getattr(self.nvml, name, fallback))

    def fields(self, field: str, ids: list[Any]) -> list[float | None]:
        """Values of NVML field ids (or (id, scope) pairs); None for those the card does not have."""
        answers = self.get(field, "nvmlDeviceGetFieldValues", ids)
        if answers is None:
            return [None] * len(ids)
        return [_field_value(answer) for answer in answers]


def _field_value(answer: Any) -> float | None:
    if answer.nvmlReturn != 0:
        return None
    member = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")[answer.valueType]
    value = getattr(answer.value, member)
    return float(value) if member == "dVal" else int(value)


def load() -> Nvml:
    """The real thing. Importing it loads no library yet."""
    import pynvml

    return pynvml


Read = tuple[tuple[GpuFacts, ...] | None, Topology | None, dict[str, str], dict[str, Any]]


def read_gpus_in_time(nvml: Nvml, seconds: float = ANSWER_SECONDS) -> Read:
    """``read_gpus``, given up after ``seconds``: a lost GPU can make every call of the driver wait for ever.

    The thread that waits is left behind as a daemon: a call into the driver cannot be ended from outside.
    """
    answer: list[Read] = []
    thread = threading.Thread(target=lambda: answer.append(read_gpus(nvml)), name="nvml", daemon=True)
    thread.start()
    thread.join(seconds)
    if answer:
        return answer[0]
    if thread.is_alive():
        return None, None, {"gpus": f"{HANGS} {seconds:g} s"}, {}
    raise LongreadError("reading the driver failed; the error is above")


def read_gpus(nvml: Nvml, devices: Path = Path("/sys/bus/pci/devices")) -> Read:
    """Look now. Returns GPUs, their topology, reasons for what could not be read, and ``driver``/``cuda_driver``.

    ``devices``: sysfs's PCI devices, for the NUMA node of each GPU.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, None, {"gpus": f"no NVIDIA driver answers here: {error}"}, {}
    try:
        system = Asked(nvml)
        cuda = system.number("cuda_driver", "nvmlSystemGetCudaDriverVersion_v2")
        about = {
            "driver": system.get("driver", "nvmlSystemGetDriverVersion"),
            "cuda_driver": None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
        }
        handles: list[Any] = []
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                handles.append(None)
                gpus.append(GpuFacts(index=index, unread={"device": str(error)}))
                continue
            handles.append(handle)
            gpus.append(_read_gpu(Asked(nvml, handle), index, devices))
        return tuple(gpus), _topology(nvml, handles, gpus), system.unread, about
    finally:
        nvml.nvmlShutdown()


def _read_gpu(ask: Asked, index: int, devices: Path) -> GpuFacts:
    memory = ask.get("memory_total", "nvmlDeviceGetMemoryInfo")
    capability = ask.get("compute_capability", "nvmlDeviceGetCudaComputeCapability")
    processes = ask.get("processes", "nvmlDeviceGetComputeRunningProcesses")
    utilization = ask.get("utilization", "nvmlDeviceGetUtilizationRates")
    mig = ask.get("mig", "nvmlDeviceGetMigMode")
    mode = ask.number("compute_mode", "nvmlDeviceGetComputeMode")
    bus = _bus(ask)
    count, links = _links(ask)
    persistence = ask.number("persistence", "nvmlDeviceGetPersistenceMode")
    return GpuFacts(
        index=index,
        name=_text(ask.get("name", "nvmlDeviceGetName")),
        uuid=_text(ask.get("uuid", "nvmlDeviceGetUUID")),
        bus=bus,
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        utilization=None if utilization is None else int(utilization.gpu),
        processes=None if processes is None else len(processes),
        mig=None if mig is None else bool(mig[0]),
        persistence=None if persistence is None else bool(persistence),
        compute_mode=None if mode is None else COMPUTE_MODES[mode] if mode < len(COMPUTE_MODES) else str(mode),
        nvlink_count=count,
        nvlinks=links,
        fabric=_fabric(ask),
        numa_node=_numa_node(ask, bus, devices),
        cpus=_cpus(ask),
        **_errors(ask),
        **_clocks(ask),
        **_heat_and_power(ask),
        **_pcie(ask),
        unread=ask.unread,
    )


def _errors(ask: Asked) -> dict[str, Any]:
    mode = ask.get("ecc", "nvmlDeviceGetEccMode")
    rows = ask.get("rows", "nvmlDeviceGetRemappedRows")
    spares = None if rows is None else ask.get("banks_without_spares", "nvmlDeviceGetRowRemapperHistogram")
    action = ask.fields("recovery_action", [ask.constant("NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)])[0]
    corrected, uncorrected, since_load, ever = 0, 1, 0, 1
    return {
        "ecc": None if mode is None else bool(mode[0]),
        "ecc_pending": None if mode is None else bool(mode[1]),
        "ecc_corrected": ask.number("ecc_corrected", "nvmlDeviceGetTotalEccErrors", corrected, since_load),
        "ecc_uncorrected": ask.number("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", uncorrected, since_load),
        "ecc_uncorrected_ever": ask.number("ecc_uncorrected_ever", "nvmlDeviceGetTotalEccErrors", uncorrected, ever),
        "rows": None
        if rows is None
        else RowRemapping(
            correctable=int(rows[0]),
            uncorrectable=int(rows[1]),
            pending=bool(rows[2]),
            failed=bool(rows[3]),
            banks_without_spares=None if spares is None else int(spares.none),
        ),
        "recovery_action": None
        if action is None
        else RECOVERY_ACTIONS[int(action)]
        if action < len(RECOVERY_ACTIONS)
        else f"action {int(action)}",
    }


def _clocks(ask: Asked) -> dict[str, Any]:
    sm, memory = 1, 2
    reasons = ask.number("event_reasons", "nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:  # the name before driver 535
        reasons = ask.number("event_reasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
    violations = {}
    for name, policy in VIOLATIONS.items():
        found = ask.get("violations", "nvmlDeviceGetViolationStatus", policy)
        if found is not None:
            violations[name] = int(found.violationTime)
    if violations:
        ask.unread.pop("violations", None)
    return {
        "sm_clock": ask.number("sm_clock", "nvmlDeviceGetClockInfo", sm),
        "sm_clock_max": ask.number("sm_clock_max", "nvmlDeviceGetMaxClockInfo", sm),
        "sm_clock_application": ask.number("sm_clock_application", "nvmlDeviceGetApplicationsClock", sm),
        "sm_clock_application_default": ask.number(
            "sm_clock_application_default", "nvmlDeviceGetDefaultApplicationsClock", sm
        ),
        "memory_clock": ask.number("memory_clock", "nvmlDeviceGetClockInfo", memory),
        "memory_clock_max": ask.number("memory_clock_max", "nvmlDeviceGetMaxClockInfo", memory),
        "event_reasons": None if reasons is None else _reason_names(reasons),
        "violations": violations or None,
    }


# Bits of nvmlClocksEventReason (nvml.h). A bit that is not named here is shown by its number.
EVENT_REASONS = {
    0x1: "GpuIdle",
    0x2: "ApplicationsClocksSetting",
    0x4: "SwPowerCap",
    0x8: "HwSlowdown",
    0x10: "SyncBoost",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
    0x100: "DisplayClockSetting",
}


def _reason_names(bits: int) -> frozenset[str]:
    return frozenset(EVENT_REASONS.get(1 << at, f"bit {at}") for at in range(bits.bit_length()) if bits >> at & 1)


def _heat_and_power(ask: Asked) -> dict[str, Any]:
    temperature = ask.number("temperature", "nvmlDeviceGetTemperatureV", 0)
    if temperature is None:
        temperature = ask.number("temperature", "nvmlDeviceGetTemperature", 0)
    hbm = ask.fields("temperature_memory", [ask.constant("NVML_FI_DEV_MEMORY_TEMP", 82)])[0]
    limits = ask.get("power_limit_max", "nvmlDeviceGetPowerManagementLimitConstraints")
    slowdown, memory_max = 1, 2
    return {
        "temperature": temperature,
        "temperature_memory": int(hbm) if hbm else None,  # 0: a card without the sensor
        "temperature_slowdown": ask.number("temperature_slowdown", "nvmlDeviceGetTemperatureThreshold", slowdown),
        "temperature_memory_max": ask.number("temperature_memory_max", "nvmlDeviceGetTemperatureThreshold", memory_max),
        "margin": ask.number("margin", "nvmlDeviceGetMarginTemperature"),
        "power": _watts(ask.number("power", "nvmlDeviceGetPowerUsage")),
        "power_limit": _watts(ask.number("power_limit", "nvmlDeviceGetEnforcedPowerLimit")),
        "power_limit_default": _watts(ask.number("power_limit_default", "nvmlDeviceGetPowerManagementDefaultLimit")),
        "power_limit_max": None if limits is None else _watts(int(limits[1])),
    }


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _pcie(ask: Asked) -> dict[str, Any]:
    calls = {
        "pcie_gen": "nvmlDeviceGetCurrPcieLinkGeneration",
        "pcie_gen_max": "nvmlDeviceGetMaxPcieLinkGeneration",
        "pcie_gen_device": "nvmlDeviceGetGpuMaxPcieLinkGeneration",
        "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
        "pcie_width_max": "nvmlDeviceGetMaxPcieLinkWidth",
        "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    }
    return {field: ask.number(field, function) for field, function in calls.items()}


def _links(ask: Asked) -> tuple[int | None, tuple[NvLink, ...] | None]:
    count = ask.fields("nvlink_count", [ask.constant("NVML_FI_DEV_NVLINK_LINK_COUNT", 91)])[0]
    if count is None:
        ask.unread.setdefault("nvlink_count", "the driver does not say how many links the card has")
        return None, None
    indices = range(min(int(count), LINKS_ASKED_AT_MOST))
    if not indices:
        return 0, ()
    speeds = ask.fields("nvlinks", [(ask.constant("NVML_FI_DEV_NVLINK_GET_SPEED", 164), link) for link in indices])
    return int(count), tuple(_link(ask, link, speed) for link, speed in zip(indices, speeds, strict=True))


def _link(ask: Asked, index: int, speed: float | None) -> NvLink:
    state = ask.number("nvlinks", "nvmlDeviceGetNvLinkState", index)
    if not state:
        return NvLink(index=index, active=None if state is None else False)
    replay, recovery = 0, 1
    errors = [ask.number("nvlinks", "nvmlDeviceGetNvLinkErrorCounter", index, kind) for kind in (replay, recovery)]
    version = ask.number("nvlinks", "nvmlDeviceGetNvLinkVersion", index)
    remote = ask.number("nvlinks", "nvmlDeviceGetNvLinkRemoteDeviceType", index)
    return NvLink(
        index=index,
        active=True,
        speed_mbps=speed or None,
        version=None if version is None else NVLINK_VERSIONS.get(version, f"code {version}"),
        remote={0: "GPU", 2: "switch"}.get(remote) if remote is not None else None,
        errors=None if None in errors else sum(value or 0 for value in errors),
    )


def _fabric(ask: Asked) -> Fabric | None:
    """Newest structure first; an older driver refuses it by its version."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        structure = getattr(ask.nvml, name, None)
        if structure is None:
            continue
        info = structure()
        if ask.get("fabric", "nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is not None:
            state = FABRIC_STATES.get(int(info.state))
            if state is None:
                ask.unread["fabric"] = f"state {int(info.state)} is not one that this version knows"
                return None
            return Fabric(
                state=state,
                status="" if info.status == 0 else _error_text(ask.nvml, int(info.status)),
                clique=int(info.cliqueId),
                cluster=bytes(info.clusterUuid).hex(),
                unhealthy=_unhealthy(int(info.healthMask)),
            )
    return None


def _error_text(nvml: Nvml, code: int) -> str:
    return str(nvml.NVMLError(code))


def _unhealthy(mask: int) -> tuple[str, ...]:
    found = []
    for name, (shift, width, bad) in FABRIC_HEALTH.items():
        value = mask >> shift & (1 << width) - 1
        if value in bad:
            found.append(f"{name}: {bad[value]}" if bad[value] else name)
    return tuple(found)


def _bus(ask: Asked) -> str | None:
    """As sysfs and the kernel log write it: "0000:3b:00.0"."""
    info = ask.get("bus", "nvmlDeviceGetPciInfo")
    text = None if info is None else _text(info.busId)
    return None if text is None else text.lower()[-12:]


def _numa_node(ask: Asked, bus: str | None, devices: Path) -> int | None:
    if bus is None:
        return None
    try:
        node = int((devices / bus / "numa_node").read_text(encoding="ascii"))
    except OSError as error:
        ask.unread["numa_node"] = f"sysfs does not say: {error.strerror}"
        return None
    except ValueError:
        ask.unread["numa_node"] = "sysfs does not say a number"
        return None
    if node < 0:
        ask.unread["numa_node"] = "the firmware or the virtual machine does not say"
        return None
    return node


def _cpus(ask: Asked) -> frozenset[int] | None:
    words = 64  # of 64 CPUs
    mask = ask.get("cpus", "nvmlDeviceGetCpuAffinity", words)
    if mask is None:
        return None
    return frozenset(64 * at + bit for at, word in enumerate(mask) for bit in range(64) if word >> bit & 1)


def _topology(nvml: Nvml, handles: list[Any], gpus: list[GpuFacts]) -> Topology | None:
    if len(handles) < 2:
        return None
    size = range(len(handles))
    links = [[_between(nvml, handles, gpus, i, j) for j in size] for i in size]
    peer = [["ok" if i == j else _peer(nvml, handles[i], handles[j]) for j in size] for i in size]
    return Topology(links=tuple(map(tuple, links)), peer=tuple(map(tuple, peer)))


def _between(nvml: Nvml, handles: list[Any], gpus: list[GpuFacts], i: int, j: int) -> str:
    if i == j:
        return "X"
    if handles[i] is None or handles[j] is None:
        return ""
    bonded = _bonded(Asked(nvml, handles[i]), gpus[i], gpus[j])
    if bonded:
        return f"NV{bonded}"
    level = Asked(nvml, handles[i]).number("links", "nvmlDeviceGetTopologyCommonAncestor", handles[j])
    return "" if level is None else ANCESTORS.get(level, f"level {level}")


def _bonded(ask: Asked, one: GpuFacts, other: GpuFacts) -> int:
    """How many active NVLinks join the two, through switches or directly."""
    active = [link for link in one.nvlinks or () if link.active]
    opposite = sum(link.active is True and link.remote == "switch" for link in other.nvlinks or ())
    switched = min(sum(link.remote == "switch" for link in active), opposite)
    direct = 0
    for link in active:
        if link.remote == "GPU":
            info = ask.get("links", "nvmlDeviceGetNvLinkRemotePciInfo", link.index)
            bus = None if info is None else _text(info.busId)
            direct += bus is not None and bus.lower()[-12:] == other.bus
    return switched or direct


def _peer(nvml: Nvml, one: Any, other: Any) -> str:
    if one is None or other is None:
        return ""
    status = Asked(nvml, one).number("peer", "nvmlDeviceGetP2PStatus", other, PEER_READ)
    return "" if status is None else PEER_STATUS[status] if status < len(PEER_STATUS) else f"status {status}"


def _text(value: Any) -> str | None:
    """Older bindings answer in bytes."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
