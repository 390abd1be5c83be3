"""Each check of a GPU and its links: a case that fires and one that does not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeNvml

from longread.plan.doctor.checks_gpu import check_gpus
from longread.plan.doctor.checks_links import check_links
from longread.plan.doctor.checks_xid import check_xids
from longread.plan.doctor.facts import Facts, HostFacts, Topology, Versions
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.merging import ranges
from longread.plan.doctor.nvml import read_gpus
from longread.plan.doctor.xid import parse_xids

BUSY = {"UtilizationRates": SimpleNamespace(gpu=97, memory=50), "ComputeRunningProcesses": [1]}


def slowed(policy: int, seconds: int) -> dict[int, SimpleNamespace]:
    return {at: SimpleNamespace(violationTime=seconds * 10**9 * (at == policy)) for at in range(6)}


FULL = {**BUSY, "CurrentClocksEventReasons": 0, "ClockInfo": {1: 1980, 2: 3201}}


def facts(gpus: int = 2, changes: dict[int, dict[str, Any]] | None = None) -> Facts:
    read, topology, unread, _ = read_gpus(FakeNvml(gpus, changes=changes))
    return Facts(gpus=read, topology=topology, unread=unread)


def worse(found: Facts) -> list[Finding]:
    findings = [*check_gpus(found), *check_links(found), *check_xids(found)]
    return [finding for finding in findings if finding.severity in ("warning", "error")]


def test_a_sound_machine_is_fine_idle_and_busy() -> None:
    for state in ({}, FULL):
        found = facts(8, dict.fromkeys(range(8), state))
        assert worse(found) == []
        subjects = {
            finding.subject for finding in [*check_gpus(found), *check_links(found)] if finding.severity == "ok"
        }
        wanted = ("clocks", "temperature", "power cap", "memory errors", "PCIe", "NVLink", "fabric")
        assert subjects >= {f"GPU 0-7 {topic}" for topic in wanted} | {"topology"}


BAD: list[tuple[str, str, str, dict[str, Any]]] = [
    ("error", "clocks", "HwThermalSlowdown", {**BUSY, "CurrentClocksEventReasons": 0x48}),
    ("error", "clocks", "HwPowerBrake", {"CurrentClocksEventReasons": 0x88}),
    ("error", "clocks", "HwSlowdown; SM", {"CurrentClocksEventReasons": 0x8}),
    ("warning", "clocks", "SwThermal", {"CurrentClocksEventReasons": 0x20}),
    ("warning", "clocks", "SyncBoost", {"CurrentClocksEventReasons": 0x10}),
    ("warning", "clocks", "ApplicationsClocksSetting", {"CurrentClocksEventReasons": 0x2}),
    ("warning", "clocks", "1200 MHz, default 1980", {"ApplicationsClock": {1: 1200}}),
    ("warning", "clocks", "1500 of 1980", {**FULL, "ClockInfo": {1: 1500, 2: 3201}}),
    ("warning", "memory clock", "1600 of 3201", {**FULL, "ClockInfo": {1: 1980, 2: 1600}}),
    ("warning", "clocks", "120 s", {"ViolationStatus": slowed(1, 120)}),
    ("warning", "temperature", "12 degrees", {"MarginTemperature": 12}),
    ("warning", "temperature", "3 degrees", {**FULL, "MarginTemperature": 3}),
    ("warning", "memory temperature", "93 of 95", {"memory_temperature": 93}),
    ("warning", "power cap", "500 W, default 700", {"EnforcedPowerLimit": 500_000}),
    ("warning", "ECC", "disabled", {"EccMode": [0, 0]}),
    ("error", "ECC", "2 uncorrected", {"TotalEccErrors": {(0, 0): 0, (1, 0): 2, (1, 1): 2}}),
    ("error", "row remapping", "failure", {"RemappedRows": (0, 3, 0, 1)}),
    ("warning", "row remapping", "pending", {"RemappedRows": (0, 1, 1, 0)}),
    ("warning", "row remapping", "1 banks", {"RowRemapperHistogram": SimpleNamespace(none=1)}),
    ("error", "recovery", "reset the GPU", {"recovery_action": 1}),
    ("error", "access", "GPU is lost", {"lost": True}),
    ("warning", "MIG", "enabled", {"MigMode": [1, 1]}),
    ("error", "compute mode", "prohibited", {"ComputeMode": 2}),
    ("warning", "memory", "40.0 of", {"MemoryInfo": SimpleNamespace(total=140 * 2**30, used=40 * 2**30)}),
    ("warning", "PCIe", "generation 4 of 5", {"MaxPcieLinkGeneration": 4}),
    ("warning", "PCIe", "x8 of x16", {"CurrPcieLinkWidth": 8}),
    ("warning", "PCIe", "generation 1 of 5", {**FULL, "CurrPcieLinkGeneration": 1}),
    ("warning", "PCIe", "5,000 replays", {"PcieReplayCounter": 5000}),
    ("warning", "NVLink", "down: 3-4", {"links_down": (3, 4)}),
    ("error", "NVLink", "0 of 18", {"links_down": tuple(range(18))}),
    ("warning", "NVLink", "20,000 MB/s", {"link_speed": 20_000}),
    ("warning", "NVLink", "1,800 in all", {"NvLinkErrorCounter": 50}),
    ("error", "fabric", "in progress", {"fabric": {"state": 2, "status": 0, "healthMask": 0}}),
    ("error", "fabric", "status", {"fabric": {"state": 3, "status": 999, "healthMask": 0}}),
    ("warning", "fabric", "route unhealthy", {"fabric": {"state": 3, "status": 0, "healthMask": 1 << 4}}),
]


@pytest.mark.parametrize(("severity", "topic", "evidence", "changes"), BAD)
def test_each_defect_is_found_on_its_gpu(severity: str, topic: str, evidence: str, changes: dict[str, Any]) -> None:
    found = worse(facts(2, {1: changes}))
    match = [f for f in found if f.subject == f"GPU 1 {topic}" and evidence in f.evidence]
    assert [f.severity for f in match] == [severity], found
    assert not [f for f in found if f.subject.startswith("GPU 0")], "the other one is sound"
    assert match[0].remedy and "{gpus}" not in match[0].remedy


FINE: list[dict[str, Any]] = [
    {"CurrPcieLinkGeneration": 1},  # idle GPUs lower it
    {"CurrentClocksEventReasons": 0x4, **BUSY},  # at the default power limit under load
    {"ClockInfo": {1: 345, 2: 3201}},  # idle
    {"MarginTemperature": 8, **FULL},
    {"TotalEccErrors": {(0, 0): 7, (1, 0): 0, (1, 1): 3}},  # long ago: a note
    {"RemappedRows": (2, 1, 0, 0)},  # done: a note
    {"fabric": {"state": 0, "status": 0, "healthMask": 0}},  # a card without NVSwitch
    {"PersistenceMode": 0},
    {"PcieReplayCounter": 3},
    {"ViolationStatus": slowed(0, 9999)},  # power: usual under load
]


@pytest.mark.parametrize("changes", FINE)
def test_what_looks_like_a_defect_and_is_none(changes: dict[str, Any]) -> None:
    assert worse(facts(2, {0: changes, 1: changes})) == []


def test_the_same_defect_on_several_gpus_is_said_once_with_all_of_them() -> None:
    capped = {"EnforcedPowerLimit": 500_000}
    (finding,) = worse(facts(8, {0: capped, 1: capped, 2: {"EnforcedPowerLimit": 450_000}, 5: capped}))
    assert finding.subject == "GPU 0-2,5 power cap"
    assert finding.evidence == "GPU 0-1,5: 500 W, default 700 W; GPU 2: 450 W, default 700 W"
    assert finding.remedy.startswith("`sudo nvidia-smi -i 0,1,2,5 -pl 700`")


def test_ranges() -> None:
    assert ranges([5, 0, 1, 2, 7]) == "0-2,5,7"
    assert ranges([]) == ""


def test_a_lone_gpu_with_links_down_is_no_defect() -> None:
    assert worse(facts(1, {0: {"links_down": tuple(range(18))}})) == []


def test_unequal_cards() -> None:
    (finding,) = worse(facts(2, {1: {"Name": "NVIDIA H20"}}))
    assert "NVIDIA H200" in finding.evidence and "the cards differ" in finding.statement


def test_no_driver_matters_where_torch_wants_one() -> None:
    none = Facts(unread={"gpus": "no driver"})
    assert [f.severity for f in check_gpus(none)] == ["note"]
    assert [f.severity for f in check_gpus(replace(none, versions=Versions(torch_cuda="13.0")))] == ["warning"]
    assert [f.severity for f in check_gpus(Facts(gpus=()))] == ["warning"]


def pairs(*rows: str) -> Topology:
    return Topology(links=tuple(tuple(row.split()) for row in rows))


@pytest.mark.parametrize(
    ("topology", "wanted"),
    [
        (pairs("X NV18", "NV18 X"), "ok"),
        (pairs("X PIX", "PIX X"), "note"),
        (pairs("X SYS", "SYS X"), "warning"),
        (pairs("X NV4 SYS", "NV4 X SYS", "SYS SYS X"), "warning"),
        (pairs("X NV4 NV2", "NV4 X NV4", "NV2 NV4 X"), "warning"),
    ],
)
def test_topology(topology: Topology, wanted: str) -> None:
    found = list(check_links(Facts(gpus=(), topology=topology)))
    assert [f.severity for f in found if f.subject == "topology"] == [wanted]


def test_refused_peers_and_a_translating_iommu() -> None:
    topology = replace(pairs("X SYS", "SYS X"), peer=(("ok", "chipset not supported"), ("chipset not supported", "ok")))
    found = {f.subject: f for f in check_links(Facts(gpus=(), topology=topology, host=HostFacts(iommu="on")))}
    assert found["peer-to-peer"].evidence == "0-1 chipset not supported"
    assert found["IOMMU"].severity == "warning"
    through = {f.subject for f in check_links(Facts(gpus=(), topology=topology, host=HostFacts(iommu="passthrough")))}
    assert "IOMMU" not in through


def test_numa_bindings() -> None:
    known = facts(2)
    assert known.gpus is not None
    placed = tuple(replace(gpu, numa_node=gpu.index, cpus=frozenset({gpu.index})) for gpu in known.gpus)
    two = HostFacts(numa_nodes=2, cpus_allowed=frozenset({0, 2}))
    found = [f for f in check_links(Facts(gpus=placed, host=two)) if f.subject == "NUMA"]
    assert [f.severity for f in found] == ["note", "warning"]
    assert found[0].evidence == "node 0: GPU 0; node 1: GPU 1" and found[1].evidence.startswith("GPU 1;")
    assert not [f for f in check_links(Facts(gpus=placed, host=HostFacts(numa_nodes=1))) if f.subject == "NUMA"]


LOG = """\
[  12.3] NVRM: Xid (PCI:0000:1c:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
Sep 18 20:58:08 node7 kernel: NVRM: Xid (PCI:0000:1b:00): 31, pid=1896, name=python, MMU Fault
Sep 18 20:58:09 node7 kernel: NVRM: Xid (PCI:0000:1b:00): 31, pid=1896, name=python, MMU Fault: again
nvidia-nvswitch1: SXid (PCI:0000:aa:00.0): 24007, Severity 1 Engine instance 12
NVRM: Xid (0000:03:00): 999, who knows
NVRM: GPU at PCI:0000:1b:00: GPU-b850f46d
"""


def test_driver_errors_out_of_a_log() -> None:
    xids = parse_xids(LOG.splitlines())
    assert [(x.code, x.bus, x.switch) for x in xids] == [
        (79, "0000:1c:00", False),
        (31, "0000:1b:00", False),
        (31, "0000:1b:00", False),
        (24007, "0000:aa:00.0", True),
        (999, "0000:03:00", False),
    ]
    found = {f.subject: f for f in check_xids(replace(facts(2), xids=xids))}
    assert {name: f.severity for name, f in found.items()} == {
        "GPU 1 Xid 79": "error",
        "GPU 0 Xid 31": "warning",
        "SXid 24007": "error",
        "Xid 999": "note",
    }
    assert found["GPU 0 Xid 31"].evidence.startswith("2 times, last Sep 18 20:58:09 node7: pid=1896")


def test_a_clean_log_is_fine_and_an_unread_one_is_not_judged() -> None:
    assert [f.severity for f in check_xids(replace(facts(1), xids=()))] == ["ok"]
    assert list(check_xids(facts(1))) == []
