"""``nvidia-smi -q -x`` (XML) and ``nvidia-smi -q`` (text) as GpuFacts.

Both are read into paths ("pci/pci_gpu_link_info/pcie_gen/max_link_gen", "PCI/GPU Link Info/PCIe Generation/Max") and
values; one table says which path fills which field. Names are those of drivers 535 to 580 (seen: 580, H200) and, where
a driver renamed something, the older one too. Knows: the formats. Must not know: what is good or bad.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.parsers import expat

from longread.plan.doctor.facts import Fabric, FabricState, GpuFacts, RowRemapping
from longread.plan.doctor.saved.text import Saved, value
from longread.spec.errors import ConfigError

DEPTH, ELEMENTS, GPUS = 24, 400_000, 64
MIB = 2**20
NOTHING = {"", "N/A", "Not Supported", "[N/A]", "None", "Unknown Error", "Requested functionality has been deprecated"}
Paths = Mapping[str, Sequence[str]]  # values by path, in order: repeated elements have several


def _number(text: str) -> int | None:
    found = re.match(r"-?\d{1,18}", text)
    return int(found[0]) if found else None


def _watts(text: str) -> float | None:
    found = re.match(r"\d{1,9}(?:\.\d{1,9})?", text)
    return float(found[0]) if found else None


def _mebibytes(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * MIB


def _enabled(text: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text)


def _yes(text: str) -> bool | None:
    return {"Yes": True, "No": False}.get(text)


def _mode(text: str) -> str:
    return text.lower().replace("_", " ")


def _bus(text: str) -> str:
    return text.lower()[-12:]


# Field, paths of the XML and of the text that may fill it (the first that says something does), and how it is read.
FIELDS: tuple[tuple[str, tuple[str, ...], Callable[[str], Any]], ...] = (
    ("name", ("product_name", "Product Name"), str),
    ("uuid", ("uuid", "GPU UUID"), str),
    ("bus", ("pci/pci_bus_id", "PCI/Bus Id"), _bus),
    ("memory_total", ("fb_memory_usage/total", "FB Memory Usage/Total"), _mebibytes),
    ("memory_used", ("fb_memory_usage/used", "FB Memory Usage/Used"), _mebibytes),
    ("ecc", ("ecc_mode/current_ecc", "ECC Mode/Current", "Ecc Mode/Current"), _enabled),
    ("ecc_pending", ("ecc_mode/pending_ecc", "ECC Mode/Pending", "Ecc Mode/Pending"), _enabled),
    ("sm_clock", ("clocks/sm_clock", "Clocks/SM"), _number),
    ("sm_clock_max", ("max_clocks/sm_clock", "Max Clocks/SM"), _number),
    ("sm_clock_application", ("applications_clocks/graphics_clock", "Applications Clocks/Graphics"), _number),
    (
        "sm_clock_application_default",
        ("default_applications_clocks/graphics_clock", "Default Applications Clocks/Graphics"),
        _number,
    ),
    ("memory_clock", ("clocks/mem_clock", "Clocks/Memory"), _number),
    ("memory_clock_max", ("max_clocks/mem_clock", "Max Clocks/Memory"), _number),
    ("temperature", ("temperature/gpu_temp", "Temperature/GPU Current Temp"), _number),
    ("temperature_memory", ("temperature/memory_temp", "Temperature/Memory Current Temp"), _number),
    ("temperature_slowdown", ("temperature/gpu_temp_slow_threshold", "Temperature/GPU Slowdown Temp"), _number),
    (
        "temperature_memory_max",
        ("temperature/gpu_temp_max_mem_threshold", "Temperature/Memory Max Operating Temp"),
        _number,
    ),
    ("margin", ("temperature/gpu_temp_tlimit", "Temperature/GPU T.Limit Temp"), _number),
    (
        "power",
        (
            "gpu_power_readings/instant_power_draw",
            "gpu_power_readings/power_draw",
            "power_readings/power_draw",
            "GPU Power Readings/Instantaneous Power Draw",
            "GPU Power Readings/Power Draw",
            "Power Readings/Power Draw",
        ),
        _watts,
    ),
    (
        "power_limit",
        (
            "gpu_power_readings/current_power_limit",
            "power_readings/enforced_power_limit",
            "power_readings/power_limit",
            "GPU Power Readings/Current Power Limit",
            "Power Readings/Enforced Power Limit",
            "Power Readings/Power Limit",
        ),
        _watts,
    ),
    (
        "power_limit_default",
        (
            "gpu_power_readings/default_power_limit",
            "power_readings/default_power_limit",
            "GPU Power Readings/Default Power Limit",
            "Power Readings/Default Power Limit",
        ),
        _watts,
    ),
    (
        "power_limit_max",
        (
            "gpu_power_readings/max_power_limit",
            "power_readings/max_power_limit",
            "GPU Power Readings/Max Power Limit",
            "Power Readings/Max Power Limit",
        ),
        _watts,
    ),
    ("utilization", ("utilization/gpu_util", "Utilization/GPU", "Utilization/Gpu"), _number),
    (
        "pcie_gen",
        ("pci/pci_gpu_link_info/pcie_gen/current_link_gen", "PCI/GPU Link Info/PCIe Generation/Current"),
        _number,
    ),
    (
        "pcie_gen_max",
        ("pci/pci_gpu_link_info/pcie_gen/max_link_gen", "PCI/GPU Link Info/PCIe Generation/Max"),
        _number,
    ),
    (
        "pcie_gen_device",
        ("pci/pci_gpu_link_info/pcie_gen/max_device_link_gen", "PCI/GPU Link Info/PCIe Generation/Device Max"),
        _number,
    ),
    (
        "pcie_width",
        ("pci/pci_gpu_link_info/link_widths/current_link_width", "PCI/GPU Link Info/Link Width/Current"),
        _number,
    ),
    (
        "pcie_width_max",
        ("pci/pci_gpu_link_info/link_widths/max_link_width", "PCI/GPU Link Info/Link Width/Max"),
        _number,
    ),
    ("pcie_replays", ("pci/replay_counter", "PCI/Replays Since Reset"), _number),
    ("mig", ("mig_mode/current_mig", "MIG Mode/Current"), _enabled),
    ("persistence", ("persistence_mode", "Persistence Mode"), _enabled),
    ("compute_mode", ("compute_mode", "Compute Mode"), _mode),
)
REASONS = {
    "gpu idle": "GpuIdle",
    "idle": "GpuIdle",
    "applications clocks setting": "ApplicationsClocksSetting",
    "sw power cap": "SwPowerCap",
    "hw slowdown": "HwSlowdown",
    "hw thermal slowdown": "HwThermalSlowdown",
    "hw power brake slowdown": "HwPowerBrakeSlowdown",
    "sync boost": "SyncBoost",
    "sw thermal slowdown": "SwThermalSlowdown",
    "display clocks setting": "DisplayClockSetting",
    "display clock setting": "DisplayClockSetting",
}
REASON_FOLDERS = ("clocks_event_reasons", "clocks_throttle_reasons", "Clocks Event Reasons", "Clocks Throttle Reasons")
FABRIC_STATES: dict[str, FabricState] = {
    "Not Supported": "not supported",
    "Not Started": "not started",
    "In Progress": "in progress",
    "Completed": "completed",
}
HEALTH = {
    "bandwidth": "degraded bandwidth",
    "route recovery in progress": "route recovery under way",
    "route unhealthy": "route unhealthy",
    "access timeout recovery": "access timeout recovery",
}
ARCHITECTURES = {"Hopper": (9, 0), "Ada Lovelace": (8, 9)}  # Ampere and Blackwell have several


Read = tuple[tuple[GpuFacts, ...], str | None, tuple[int, int] | None]


def read_smi_xml(saved: Saved) -> Read:
    """GPUs, driver version, newest CUDA it serves. ConfigError for broken XML, entities, or past the limits."""
    top, gpus = _parse_xml(saved)
    return _facts(gpus, top)


def read_smi_text(saved: Saved) -> Read:
    top: dict[str, list[str]] = {}
    gpus: list[dict[str, list[str]]] = []
    stack: list[tuple[int, str]] = []
    for line in saved.lines():
        if re.match(r"GPU [0-9A-Fa-f]{4,8}:", line):
            if len(gpus) >= GPUS:
                raise ConfigError(f"--from {saved.name}: more than {GPUS} GPUs")
            gpus.append({"PCI/Bus Id": [line[4:].strip()]})
            stack = []
            continue
        name, colon, text = line.partition(" : ")
        indent = len(line) - len(line.lstrip())
        if not name.strip() or indent > 4 * DEPTH:
            continue
        stack = [entry for entry in stack if entry[0] < indent]
        stack.append((indent, name.strip().rstrip(":").strip()))
        if colon:
            into = gpus[-1] if gpus and indent else top
            path = "/".join(key for _, key in stack)
            into.setdefault(path, []).append(value(text))
    if not gpus:
        raise ConfigError(f"--from {saved.name}: looks like `nvidia-smi -q` and shows no GPU")
    for gpu in gpus:  # the line that begins a GPU and its own entry say the same
        gpu["PCI/Bus Id"] = gpu["PCI/Bus Id"][-1:]
    return _facts(gpus, top)


def _parse_xml(saved: Saved) -> tuple[dict[str, list[str]], list[dict[str, list[str]]]]:
    """Values by path outside and inside each <gpu>. The document type of real files is named, never fetched."""
    parser = expat.ParserCreate()
    parser.buffer_text = True
    top: dict[str, list[str]] = {}
    gpus: list[dict[str, list[str]]] = []
    stack: list[str] = []
    texts: list[list[str]] = []
    seen = 0

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal seen
        seen += 1
        if len(stack) >= DEPTH or seen > ELEMENTS:
            raise ConfigError(f"--from {saved.name}: XML deeper than {DEPTH} or with more than {ELEMENTS:,} elements")
        stack.append(name)
        texts.append([])
        if stack == ["nvidia_smi_log", "gpu"]:
            if len(gpus) >= GPUS:
                raise ConfigError(f"--from {saved.name}: more than {GPUS} GPUs")
            gpus.append({"pci/pci_bus_id": [value(attributes.get("id", ""))]})

    def end(_: str) -> None:
        text = "".join(texts.pop())
        path = stack[1:]
        stack.pop()
        if path[:1] == ["gpu"]:
            gpus[-1].setdefault("/".join(path[1:]), []).append(value(text))
        elif path:
            top.setdefault("/".join(path), []).append(value(text))

    def characters(text: str) -> None:
        if texts and len(texts[-1]) < 64:
            texts[-1].append(text[:4096])

    def entity(*_: object) -> None:
        raise ConfigError(f"--from {saved.name}: the XML declares entities; nvidia-smi's does not")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = characters
    parser.EntityDeclHandler = entity
    parser.UnparsedEntityDeclHandler = entity
    try:
        parser.Parse(saved.data, True)
    except expat.ExpatError as error:
        raise ConfigError(f"--from {saved.name}: broken XML ({error}); was the file cut off?") from None
    if not gpus:
        raise ConfigError(f"--from {saved.name}: looks like `nvidia-smi -q -x` and shows no GPU")
    for gpu in gpus:
        gpu["pci/pci_bus_id"] = gpu["pci/pci_bus_id"][-1:]
    return top, gpus


def _facts(gpus: Sequence[Paths], top: Paths) -> Read:
    driver = _first(top, "driver_version", "Driver Version")
    cuda = re.match(r"(\d{1,3})\.(\d{1,3})", _first(top, "cuda_version", "CUDA Version") or "")
    read = tuple(_gpu(index, paths) for index, paths in enumerate(gpus))
    return read, driver, (int(cuda[1]), int(cuda[2])) if cuda else None


def _first(paths: Paths, *names: str) -> str | None:
    for name in names:
        for text in paths.get(name, ()):
            if text not in NOTHING:
                return text
    return None


def _gpu(index: int, paths: Paths) -> GpuFacts:
    fields: dict[str, Any] = {}
    for field, names, read in FIELDS:
        text = _first(paths, *names)
        fields[field] = None if text is None else read(text)
    action = (paths.get("gpu_recovery_action") or paths.get("GPU Recovery Action") or [""])[0]
    return GpuFacts(
        index=index,
        compute_capability=ARCHITECTURES.get(_first(paths, "product_architecture", "Product Architecture") or ""),
        recovery_action=None if action in NOTHING - {"None"} else action.lower(),
        event_reasons=_reasons(paths),
        violations=_violations(paths),
        rows=_rows(paths),
        fabric=_fabric(paths),
        processes=_processes(paths),
        **_errors(paths),
        **fields,
    )


def _below(paths: Paths, *folders: str) -> Iterator[tuple[str, str]]:
    """Last part of the name, in lower case with spaces, and value of everything in one of ``folders``."""
    for path, texts in paths.items():
        folder, slash, rest = path.partition("/")
        if slash and folder in folders and texts:
            yield rest.rpartition("/")[2].lower().replace("_", " "), texts[0]


def _reasons(paths: Paths) -> frozenset[str] | None:
    found = []
    said = False
    for name, text in _below(paths, *REASON_FOLDERS):
        reason = re.sub(r"^clocks (?:event|throttle) reason ", "", name)
        if text in ("Active", "Not Active"):
            said = True
            if text == "Active":
                found.append(REASONS.get(reason, reason))
    return frozenset(found) if said else None


def _violations(paths: Paths) -> dict[str, int] | None:
    """Microseconds, of newer drivers. Only heat is a matter of its own: what power takes is told by the reasons."""
    spent = [
        _number(text)
        for name, text in _below(paths, "clocks_event_reasons_counters", "Clocks Event Reasons Counters")
        if "therm" in name
    ]
    known = [number for number in spent if number is not None]
    return {"thermal": sum(known) * 1000} if known else None


def _errors(paths: Paths) -> dict[str, Any]:
    def total(when: str, what: str) -> int | None:
        numbers = []
        for path, texts in paths.items():
            low = path.lower().replace("_", " ").replace("-", " ")
            if low.startswith(f"ecc errors/{when}/") and low.rpartition("/")[2].split(" ")[1:2] == [what]:
                numbers += [_number(text) for text in texts if text not in NOTHING]
        known = [number for number in numbers if number is not None]
        return sum(known) if known else None

    return {
        "ecc_corrected": total("volatile", "correctable"),
        "ecc_uncorrected": total("volatile", "uncorrectable"),
        "ecc_uncorrected_ever": total("aggregate", "uncorrectable"),
    }


def _rows(paths: Paths) -> RowRemapping | None:
    def text(*names: str) -> str:
        return _first(paths, *names) or ""

    rows = RowRemapping(
        correctable=_number(text("remapped_rows/remapped_row_corr", "Remapped Rows/Correctable Error")),
        uncorrectable=_number(text("remapped_rows/remapped_row_unc", "Remapped Rows/Uncorrectable Error")),
        pending=_yes(text("remapped_rows/remapped_row_pending", "Remapped Rows/Pending")),
        failed=_yes(text("remapped_rows/remapped_row_failure", "Remapped Rows/Remapping Failure Occurred")),
        banks_without_spares=_number(
            text(
                "remapped_rows/row_remapper_histogram/row_remapper_histogram_none",
                "Remapped Rows/Bank Remap Availability Histogram/None",
            )
        ),
    )
    return None if rows == RowRemapping() else rows


def _fabric(paths: Paths) -> Fabric | None:
    state = FABRIC_STATES.get((paths.get("fabric/state") or paths.get("Fabric/State") or [""])[0])
    if state is None:
        return None
    status = _first(paths, "fabric/status", "Fabric/Status") or ""
    clique = _first(paths, "fabric/cliqueId", "Fabric/CliqueId")
    said = False
    unhealthy = []
    for name, text in _below({p: t for p, t in paths.items() if "ealth/" in p}, "fabric", "Fabric"):
        said = said or text not in ("", "N/A")
        if name in HEALTH and text in ("True", "Yes", "Degraded"):
            unhealthy.append(HEALTH[name])
        elif name == "incorrect configuration" and text not in NOTHING | {"False", "No"}:
            unhealthy.append(f"incorrect configuration: {text}")
    return Fabric(
        state=state,
        status="" if status == "Success" else status,
        clique=None if clique is None else _number(clique),
        cluster=_first(paths, "fabric/clusterUuid", "Fabric/ClusterUUID"),
        unhealthy=tuple(unhealthy) if said else None,
    )


def _processes(paths: Paths) -> int | None:
    """Compute processes; graphics ones (type G) do not count. None where the file has no such part."""
    kinds = paths.get("processes/process_info/type") or paths.get("Processes/Process ID/Type") or []
    if kinds:
        return sum("C" in kind for kind in kinds)
    return 0 if "processes" in paths or "Processes" in paths else None
