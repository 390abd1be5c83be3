"""What the reader makes of the driver's answers, its refusals and its traps."""

import threading
from pathlib import Path

from fake_nvml import DEFAULTS, NOT_SUPPORTED, FakeNvml, NVMLError

from longread.plan.doctor.checks_gpu import check_gpus
from longread.plan.doctor.facts import Facts
from longread.plan.doctor.nvml import read_gpus, read_gpus_in_time


def test_a_sound_machine(tmp_path: Path) -> None:
    for index in range(8):
        folder = tmp_path / f"0000:{0x1B + index:02x}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{index // 4}\n")
    nvml = FakeNvml()
    gpus, topology, unread, about = read_gpus(nvml, tmp_path)
    assert gpus is not None and topology is not None
    assert unread == {} and all(gpu.unread == {} for gpu in gpus)
    assert about == {"driver": "580.95.05", "cuda_driver": (13, 0)}
    gpu = gpus[5]
    assert (gpu.name, gpu.bus, gpu.compute_capability) == ("NVIDIA H200", "0000:20:00.0", (9, 0))
    assert (gpu.numa_node, gpu.cpus) == (1, frozenset(range(16, 32)))
    assert (gpu.power, gpu.power_limit, gpu.power_limit_max) == (76.5, 700, 700)
    assert gpu.event_reasons == {"GpuIdle"}
    assert gpu.temperature_memory == 38 and gpu.margin == 56 and gpu.recovery_action == "none"
    assert gpu.nvlink_count == 18 and gpu.nvlinks is not None and len(gpu.nvlinks) == 18
    assert (gpu.nvlinks[17].speed_mbps, gpu.nvlinks[17].version, gpu.nvlinks[17].remote) == (26_562, "4.0", "switch")
    assert gpu.fabric is not None and (gpu.fabric.state, gpu.fabric.status, gpu.fabric.unhealthy) == (
        "completed",
        "",
        (),
    )
    assert topology.links[0][:3] == ("X", "NV18", "NV18")
    assert topology.peer is not None and topology.peer[7][0] == "ok"
    assert nvml.open == 0, "the library is closed again"


def test_no_driver_is_said_and_nothing_else_happens() -> None:
    gpus, topology, unread, about = read_gpus(FakeNvml(initialises=9))
    assert gpus is None and topology is None and about == {}
    assert unread == {"gpus": "no NVIDIA driver answers here: Driver Not Loaded"}


def test_the_real_binding_without_a_driver_does_not_raise() -> None:
    from longread.plan.doctor.nvml import load

    gpus, _, unread, _ = read_gpus(load())
    assert gpus is not None or "no NVIDIA driver answers here" in unread["gpus"]


def test_what_a_card_lacks_is_none_with_the_reason(tmp_path: Path) -> None:
    lacking = {name: NVMLError(NOT_SUPPORTED) for name in DEFAULTS if name[0].isupper() and name != "Name"}
    gpus, _, _, _ = read_gpus(
        FakeNvml(1, changes={0: {**lacking, "links": None, "memory_temperature": None}}), tmp_path
    )
    assert gpus is not None
    gpu = gpus[0]
    assert (gpu.ecc, gpu.margin, gpu.power_limit, gpu.event_reasons, gpu.nvlinks, gpu.violations) == (None,) * 6
    assert gpu.unread["margin"] == "Not Supported"
    assert gpu.unread["numa_node"].startswith("sysfs does not say")
    assert "links" in gpu.unread["nvlink_count"]


def test_one_lost_gpu_leaves_the_others() -> None:
    gpus, topology, _, _ = read_gpus(FakeNvml(3, changes={1: {"lost": True}}))
    assert gpus is not None and topology is not None
    assert gpus[1].unread == {"device": "GPU is lost"} and gpus[2].name == "NVIDIA H200"
    assert topology.links[0] == ("X", "", "NV18")


def test_an_older_binding_without_a_call() -> None:
    nvml = FakeNvml(1)
    nvml.nvmlDeviceGetMarginTemperature = None  # type: ignore[attr-defined]
    gpus, _, _, _ = read_gpus(nvml)
    assert gpus is not None and gpus[0].margin is None
    assert "nvmlDeviceGetMarginTemperature" in gpus[0].unread["margin"]


def test_event_reasons_and_fabric_health_by_name() -> None:
    changes = {
        "CurrentClocksEventReasons": 0x44 | 1 << 12,
        "fabric": {"state": 3, "status": 0, "healthMask": 1 | 5 << 8},
    }
    gpus, _, _, _ = read_gpus(FakeNvml(1, changes={0: changes}))
    assert gpus is not None and gpus[0].fabric is not None
    assert gpus[0].event_reasons == {"SwPowerCap", "HwThermalSlowdown", "bit 12"}
    assert gpus[0].fabric.unhealthy == ("degraded bandwidth", "incorrect configuration: insufficient NVLinks")


def test_pairs_without_nvlink_show_the_way_over_pcie() -> None:
    gpus, topology, _, _ = read_gpus(FakeNvml(2, changes={1: {"links": 0, "TopologyCommonAncestor": 20}}))
    assert gpus is not None and topology is not None
    assert gpus[1].nvlinks == () and topology.links == (("X", "SYS"), ("PXB", "X"))


def test_a_driver_that_hangs_is_given_up_and_is_an_error() -> None:
    release = threading.Event()
    nvml = FakeNvml(1)
    nvml.nvmlInit = release.wait  # type: ignore[method-assign]
    gpus, _, unread, _ = read_gpus_in_time(nvml, seconds=0.05)
    assert gpus is None and unread == {"gpus": "the driver did not answer within 0.05 s"}
    assert [f.severity for f in check_gpus(Facts(unread=unread))] == ["error"]
    release.set()
    gpus, _, _, _ = read_gpus_in_time(FakeNvml(1))
    assert gpus is not None and len(gpus) == 1
