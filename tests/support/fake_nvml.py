"""The driver's library as a test wants it: eight H200 on NVSwitch, sound and idle, with changes by GPU.

A value that is an exception is raised. A call that a card lacks: ``NVMLError(3)``, "Not Supported".
"""

# ruff: noqa: N802, N815 (the names are NVML's)

import ctypes
from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = 3
MEANINGS = {0: "Success", 3: "Not Supported", 9: "Driver Not Loaded", 15: "GPU is lost", 25: "Version Mismatch"}


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__(MEANINGS.get(value, f"error {value}"))
        self.value = value


class Fabric(ctypes.Structure):
    _fields_ = [
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("healthMask", ctypes.c_uint32),
    ]


DEFAULTS: dict[str, Any] = {
    "Name": "NVIDIA H200",
    "MemoryInfo": SimpleNamespace(total=143_771 * 2**20, used=4 * 2**20, free=0),
    "CudaComputeCapability": (9, 0),
    "ComputeRunningProcesses": [],
    "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "MigMode": [0, 0],
    "ComputeMode": 0,
    "PersistenceMode": 1,
    "EccMode": [1, 1],
    "TotalEccErrors": {(0, 0): 0, (1, 0): 0, (1, 1): 0},
    "RemappedRows": (0, 0, 0, 0),
    "RowRemapperHistogram": SimpleNamespace(none=0),
    "CurrentClocksEventReasons": 0x1,
    "ViolationStatus": {policy: SimpleNamespace(referenceTime=0, violationTime=0) for policy in range(6)},
    "ClockInfo": {1: 345, 2: 3201},
    "MaxClockInfo": {1: 1980, 2: 3201},
    "ApplicationsClock": {1: 1980},
    "DefaultApplicationsClock": {1: 1980},
    "TemperatureV": 31,
    "TemperatureThreshold": {1: 92, 2: 95},
    "MarginTemperature": 56,
    "PowerUsage": 76_500,
    "EnforcedPowerLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "PowerManagementLimitConstraints": [200_000, 700_000],
    "CurrPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "GpuMaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
    "PcieReplayCounter": 0,
    "NvLinkErrorCounter": 0,
    "NvLinkVersion": 6,
    "NvLinkRemoteDeviceType": 2,
    "TopologyCommonAncestor": 50,
    "P2PStatus": 0,
    # Not calls: field values, and what the structures hold.
    "links": 18,
    "links_down": (),
    "link_speed": 26_562,
    "memory_temperature": 38,
    "recovery_action": 0,
    "fabric": {"state": 3, "status": 0, "healthMask": 0},
}


class FakeNvml:
    """``changes``: by GPU index, names as in DEFAULTS. ``initialises``: the error that nvmlInit raises, if any."""

    NVMLError = NVMLError
    c_nvmlGpuFabricInfo_v3_t = Fabric

    def __init__(self, gpus: int = 8, initialises: int = 0, changes: dict[int, dict[str, Any]] | None = None):
        self.gpus = [{**DEFAULTS, **(changes or {}).get(index, {})} for index in range(gpus)]
        self.initialises = initialises
        self.open = 0

    def nvmlInit(self) -> None:
        if self.initialises:
            raise NVMLError(self.initialises)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.gpus[index].get("lost"):
            raise NVMLError(15)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x1B + handle:02X}:00.0")

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        return [0xFFFF if handle < 4 else 0xFFFF0000, *[0] * (words - 1)]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(link not in self.gpus[handle]["links_down"])

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> int:
        for name, value in self.gpus[handle]["fabric"].items():
            setattr(info._obj, name, value)
        return 0

    def nvmlDeviceGetFieldValues(self, handle: int, ids: list[Any]) -> list[SimpleNamespace]:
        gpu = self.gpus[handle]
        known = {82: gpu["memory_temperature"], 91: gpu["links"], 230: gpu["recovery_action"], 164: gpu["link_speed"]}
        answers = []
        for asked in ids:
            value = known[asked[0] if isinstance(asked, tuple) else asked]
            answers.append(
                SimpleNamespace(
                    nvmlReturn=NOT_SUPPORTED if value is None else 0,
                    valueType=1,
                    value=SimpleNamespace(uiVal=value),
                )
            )
        return answers

    def __getattr__(self, name: str) -> Any:
        """Every other call: the value of that name, looked up by its arguments where it is a dict."""
        key = name.removeprefix("nvmlDeviceGet")
        if key not in DEFAULTS:
            raise AttributeError(name)

        def call(handle: int, *arguments: Any) -> Any:
            value = self.gpus[handle][key]
            if isinstance(value, dict):
                value = value[arguments if len(arguments) > 1 else arguments[0]]
            if isinstance(value, Exception):
                raise value
            return value

        return call
