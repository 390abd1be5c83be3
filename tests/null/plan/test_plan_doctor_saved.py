"""Files from another machine: what is read of each kind, what is refused, what hostile ones can do."""

import json
import os
import re
from pathlib import Path

import pytest
from saved_files import CHECK_ENV, COLLECT_ENV, DMESG, NVLINK, PEERS, SMI_TEXT, TOPOLOGY, smi_xml

from longread.cli.main import main
from longread.plan.doctor.diagnose import diagnose
from longread.plan.doctor.facts import Facts
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.saved import text as limits
from longread.plan.doctor.saved.reading import read_saved
from longread.spec.errors import ConfigError

MIB = 2**20


def saved(folder: Path, *texts: str | bytes) -> list[Path]:
    paths = []
    for text in texts:
        path = folder / f"file{len(list(folder.iterdir()))}"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        paths.append(path)
    return paths


def facts_of(folder: Path, *texts: str | bytes) -> Facts:
    return read_saved(saved(folder, *texts))


def bad(facts: Facts) -> dict[str, Finding]:
    return {f.subject: f for f in diagnose(facts) if f.severity in ("error", "warning")}


def refused(folder: Path, *texts: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        facts_of(folder, *texts)
    return str(caught.value)


def test_a_sound_machine_in_xml_is_read_whole_and_fine(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, smi_xml(gpus=8))
    assert facts.gpus is not None and len(facts.gpus) == 8
    gpu = facts.gpus[0]
    assert (gpu.name, gpu.bus, gpu.compute_capability) == ("NVIDIA H20", "0000:19:00.0", (9, 0))
    assert (gpu.memory_total, gpu.processes, gpu.margin, gpu.power) == (97871 * MIB, 1, 46, 310.61)
    assert (gpu.pcie_gen, gpu.pcie_width_max, gpu.ecc_uncorrected, gpu.event_reasons) == (5, 16, 0, frozenset())
    assert gpu.fabric is not None and gpu.fabric.state == "completed" and gpu.fabric.unhealthy == ()
    assert gpu.recovery_action == "none" and gpu.violations == {"thermal": 0}
    assert facts.versions is not None and facts.versions.driver == "580.95.05" and facts.versions.cuda_driver == (13, 0)
    assert bad(facts) == {} and facts.xids is None


@pytest.mark.parametrize(
    ("element", "old", "new", "subject"),
    [
        ("clocks_event_reason_hw_thermal_slowdown", "Not Active", "Active", "GPU 0 clocks"),
        ("current_power_limit", "400.00 W", "300.00 W", "GPU 0 power cap"),
        ("current_ecc", "Enabled", "Disabled", "GPU 0 ECC"),
        ("dram_uncorrectable", "0", "3", "GPU 0 ECC"),
        ("remapped_row_failure", "No", "Yes", "GPU 0 row remapping"),
        ("gpu_recovery_action", "None", "Reset", "GPU 0 recovery"),
        ("current_link_width", "16x", "8x", "GPU 0 PCIe"),
        ("gpu_temp_tlimit", "46 C", "3 C", "GPU 0 temperature"),
        ("state", "Completed", "In Progress", "GPU 0 fabric"),
        ("status", "Success", "Insufficient Resources", "GPU 0 fabric"),
        ("bandwidth", "Full", "Degraded", "GPU 0 fabric"),
        ("current_mig", "Disabled", "Enabled", "GPU 0 MIG"),
        ("compute_mode", "Default", "Prohibited", "GPU 0 compute mode"),
        ("clocks_event_reasons_counters_sw_therm_slowdown", "0 us", "99000000 us", "GPU 0 clocks"),
    ],
)
def test_each_defect_that_the_xml_can_show(tmp_path: Path, element: str, old: str, new: str, subject: str) -> None:
    assert set(bad(facts_of(tmp_path, smi_xml(changes={element: (old, new)})))) == {subject}


def test_older_drivers_say_throttle_for_event(tmp_path: Path) -> None:
    old = smi_xml(changes={"clocks_event_reason_sw_thermal_slowdown": ("Not Active", "Active")})
    facts = facts_of(tmp_path, old.replace("clocks_event_reason", "clocks_throttle_reason"))
    assert facts.gpus is not None and facts.gpus[0].event_reasons == {"SwThermalSlowdown"}


def test_what_the_card_does_not_say_is_not_judged(tmp_path: Path) -> None:
    elements = "current_ecc|pending_ecc|gpu_temp_tlimit|current_power_limit|sm_clock|total|state"
    xml = re.sub(rf"<({elements})>[^<]*<", r"<\1>N/A<", smi_xml(gpus=1))
    facts = facts_of(tmp_path, xml)
    assert facts.gpus is not None and facts.gpus[0].ecc is None and facts.gpus[0].margin is None
    assert bad(facts) == {}


def test_the_text_of_nvidia_smi_says_the_same(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, SMI_TEXT)
    assert facts.gpus is not None
    gpu = facts.gpus[0]
    assert (gpu.name, gpu.memory_total, gpu.memory_used) == ("NVIDIA H20-3e", 143771 * MIB, 1000 * MIB)
    assert gpu.event_reasons == {"SwPowerCap", "HwSlowdown", "HwThermalSlowdown"}
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.ecc_uncorrected_ever) == (3, 3, 5)
    assert (gpu.pcie_gen, gpu.pcie_width, gpu.pcie_replays, gpu.compute_mode) == (4, 8, 12, "exclusive process")
    assert gpu.violations == {"thermal": 75_000_000_000} and gpu.processes == 0
    assert {"GPU 0 clocks", "GPU 0 ECC", "GPU 0 row remapping", "GPU 0 fabric", "GPU 0 power cap"} <= set(bad(facts))


def test_topology_peers_and_links(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, TOPOLOGY, PEERS)
    assert facts.topology is not None and facts.topology.links[0] == ("X", "NV18", "SYS")
    assert facts.topology.peer is not None and facts.topology.peer[2][0] == "chipset not supported"
    assert facts.gpus is not None and [gpu.numa_node for gpu in facts.gpus] == [0, 0, 1]
    assert facts.gpus[2].cpus == frozenset(range(48, 96)) | frozenset(range(144, 192))
    assert set(bad(facts)) == {"topology", "peer-to-peer"}
    links = facts_of(tmp_path, NVLINK)
    assert set(bad(links)) == {"GPU 0 NVLink"}
    # A matrix of peers alone cannot be placed.
    assert "topo -m" in facts_of(tmp_path, PEERS).unread["peer"]


def test_collect_env(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, COLLECT_ENV)
    versions, host = facts.versions, facts.host
    assert versions is not None and versions.packages is not None and host is not None
    assert (versions.driver, versions.torch_cuda, versions.python) == ("550.127.08", "13.0", "3.12.11")
    assert versions.packages["vllm"].version == "0.26.0" and versions.torch_arch is not None
    assert versions.environment == {"NCCL_P2P_DISABLE": "1", "LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    assert (host.cpus_online, host.numa_nodes, host.kernel) == (192, 2, "5.15.0-60-generic")
    assert facts.gpus is not None and facts.gpus[1].name == "NVIDIA H20" and facts.topology is not None
    found = bad(facts)
    assert "vllm x torch" in found  # 0.26.0 wants 2.11.0
    assert "driver x torch" in found  # CUDA 13 wants 580
    assert "NCCL_P2P_DISABLE" in found
    assert "sk-secret" not in str(facts)


def test_check_env(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, CHECK_ENV)
    assert facts.gpus is not None and facts.gpus[0].compute_capability == (9, 0) and facts.topology is not None
    assert facts.versions is not None and facts.versions.packages is not None
    assert "vllm" not in facts.versions.packages and facts.versions.torch_cuda == "12.8"
    found = bad(facts)
    assert {"flashinfer-python x flashinfer-cubin", "sgl-kernel", "ulimit nofile"} <= set(found)


def test_kernel_log(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, DMESG, smi_xml())
    found = bad(facts)
    assert "GPU 0 Xid 79" in found and "host memory" in found
    assert "python3 (process 4242)" in found["host memory"].statement
    clean = facts_of(tmp_path, "[    0.000000] Linux version 5.15\n", smi_xml())
    assert clean.xids == () and "Xid" in {f.subject for f in diagnose(clean) if f.severity == "ok"}
    # A server's log says nothing of driver errors: that is not "none".
    assert facts_of(tmp_path, "INFO 11-29 18:03:46 [api_utils.py:347] hello\n").xids is None


def test_a_report_of_this_program_is_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xml, topology = saved(tmp_path, smi_xml(gpus=3, changes={"current_ecc": ("Enabled", "Disabled")}), TOPOLOGY)
    code = main(["doctor", "--json", "--from", str(xml), str(topology)])
    report = json.loads(capsys.readouterr().out)
    again = facts_of(tmp_path, json.dumps(report))
    assert code == report["exit_code"] == 1
    first = read_saved([xml, topology])
    assert again.gpus == first.gpus and again.topology == first.topology and again.versions == first.versions
    assert [f for f in diagnose(again) if f.severity == "warning"] == [
        f for f in diagnose(first) if f.severity == "warning"
    ]
    # A newer version's unknown field is left out, a wrong type is told with its place.
    report["facts"]["gpus"][0]["colour"] = "green"
    assert facts_of(tmp_path, json.dumps(report)).gpus == first.gpus
    report["facts"]["gpus"][0]["memory_total"] = "much"
    assert "facts.gpus[0].memory_total is 'much', not a whole number" in refused(tmp_path, json.dumps(report))
    report["facts"]["gpus"][0]["memory_total"] = 10**30
    assert "not a whole number" in refused(tmp_path, json.dumps(report))
    report["facts"]["gpus"] = []
    assert "facts.topology.links is not a matrix of 0 x 0 GPUs" in refused(tmp_path, json.dumps(report))
    report["schema"] = "longread.doctor/9"
    assert "this version reads 'longread.doctor/1'" in refused(tmp_path, json.dumps(report))


def test_several_files_fill_each_other_and_contradictions_are_told(tmp_path: Path) -> None:
    together = facts_of(tmp_path, smi_xml(), COLLECT_ENV.replace("550.127.08", "580.95.05"))
    assert together.gpus is not None and together.gpus[0].numa_node == 0 and together.gpus[0].ecc is True
    assert together.versions is not None and together.versions.cuda_driver == (13, 0)
    assert together.topology is not None and together.conflicts == ()
    apart = facts_of(tmp_path, smi_xml(gpus=3), COLLECT_ENV, CHECK_ENV)
    told = {conflict.field: conflict for conflict in apart.conflicts}
    assert {"number of GPUs", "driver", "torch"} <= set(told)
    assert told["driver"].first == "580.95.05" and told["driver"].second_from.endswith("file4")
    assert apart.topology is None  # of two GPUs, and there are three
    assert "files" in bad(apart)
    # What moves is no contradiction.
    assert facts_of(tmp_path, smi_xml(), smi_xml(changes={"gpu_temp": ("41 C", "77 C")})).conflicts == ()


def test_kinds_are_told_by_content_and_utf16_is_read(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, b"\xff\xfe" + smi_xml().encode("utf-16-le"))
    assert facts.gpus is not None and len(facts.gpus) == 2
    assert facts_of(tmp_path, b"\xef\xbb\xbf" + SMI_TEXT.encode()).gpus is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("  \n\n", "empty"),
        ("a,b,c\n1,2,3\n", "not recognised. Understood are `nvidia-smi -q -x`"),
        ("| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05 |\n", "save `nvidia-smi -q -x` instead"),
        (b"\x1f\x8b\x08\x00\x00\x00", "binary"),
        ("<nvidia_smi_log>\n<gpu>", "broken XML"),
        ("<nvidia_smi_log></nvidia_smi_log>", "shows no GPU"),
        ("==============NVSMI LOG==============\n", "shows no GPU"),
        ('{"schema": "longread.doctor/1"', "broken JSON"),
        ('{"schema": "longread.doctor/1", "facts": []}', "holds no facts"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_can(tmp_path: Path, text: str | bytes, says: str) -> None:
    assert says in refused(tmp_path, text)


def test_files_that_are_none(tmp_path: Path) -> None:
    for path, says in (
        (tmp_path / "gone", "No such file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "regular"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_saved([path])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_saved([fifo])
    with pytest.raises(ConfigError, match="at most 64"):
        read_saved([tmp_path / "x"] * 65)


ENTITIES = (
    '<?xml version="1.0"?><!DOCTYPE nvidia_smi_log [<!ENTITY a "aaaaaaaaaa">%s]><nvidia_smi_log>&%s;</nvidia_smi_log>'
)


def test_xml_bombs(tmp_path: Path) -> None:
    bomb = ENTITIES % (
        "".join(f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        "i",
    )
    assert "declares entities" in refused(tmp_path, bomb)
    outside = '<!DOCTYPE nvidia_smi_log [<!ENTITY x SYSTEM "file:///etc/passwd">]><nvidia_smi_log><gpu>&x;</gpu></nvidia_smi_log>'
    assert "declares entities" in refused(tmp_path, outside)
    assert "deeper" in refused(tmp_path, "<nvidia_smi_log>" + "<gpu>" * 1000)
    assert "more than 64 GPUs" in refused(tmp_path, "<nvidia_smi_log>" + "<gpu></gpu>" * 65 + "</nvidia_smi_log>")
    assert "elements" in refused(tmp_path, "<nvidia_smi_log><gpu>" + "<a></a>" * 400_001)


def test_deep_json_and_escape_sequences(tmp_path: Path) -> None:
    assert "broken JSON" in refused(tmp_path, '{"schema": "longread.doctor/1", "facts": ' + "[" * 100_000)
    facts = facts_of(tmp_path, smi_xml(name="NVIDIA \x9b31m H20\x7f"))
    assert facts.gpus is not None and (facts.gpus[0].name or "").isprintable()


def test_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FILE_BYTES", 300_000)
    monkeypatch.setattr(limits, "HEAD_BYTES", 100_000)
    line = b"INFO 11-29 18:03:46 [loggers.py:1] nothing to see here\n"
    text = b"first CUDA error: out of memory\n" + line * 10_000 + b"last: an illegal memory access was encountered\n"
    facts = facts_of(tmp_path, text)
    assert {hit.kind for hit in facts.logs or ()} == {"cuda oom bare", "illegal access"}
    assert "left out" in facts.unread["log"]
    monkeypatch.setattr("longread.plan.doctor.saved.reading.STRUCTURED_BYTES", 1000)
    assert "at most 1,000 for this kind" in refused(tmp_path, smi_xml())
    monkeypatch.setattr("longread.plan.doctor.saved.reading.ALL_BYTES", 1000)
    assert "together" in refused(tmp_path, line * 50)


@pytest.mark.timeout(120)  # a pattern that looks back at every place would take hours
def test_a_log_of_one_line_and_one_of_many_hits_come_to_an_end(tmp_path: Path) -> None:
    facts_of(tmp_path, b"INFO " + b"a" * (20 * MIB))
    facts = facts_of(tmp_path, b"WARNING KV cache pool is full. Retract requests. #retracted_reqs: 1\n" * 300_000)
    assert [hit.count for hit in facts.logs or ()] == [300_000]
    spaces = (b"a" + b" " * 500 + b"\n") * 10_000
    facts_of(tmp_path, COLLECT_ENV.encode() + spaces)
    facts_of(tmp_path, (b"OpType=" + b"a" * 40) * 80 + b" Watchdog caught collective operation timeout\n" * 5000)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken = saved(tmp_path, smi_xml(), "a,b\n")
    assert main(["doctor", "--from", str(good)]) == 0
    assert "2 found: NVIDIA H20" in capsys.readouterr().out
    assert main(["doctor", "--from", str(broken)]) == 2
    assert "not recognised" in capsys.readouterr().err
    assert main(["doctor", "--from", str(good), "--store", "/tmp"]) == 2
    assert main(["doctor", "--from", str(good), "--ask-torch"]) == 2
