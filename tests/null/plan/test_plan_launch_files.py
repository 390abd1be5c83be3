"""Compose files are YAML that starts the launch; units are what systemd takes."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # comes with transformers
from launches import Case, plan, sglang_cases, vllm_cases

from longread.plan.cards import parse_hardware
from longread.plan.deployment import Deployment, Strategy
from longread.plan.launch import Options, emit, launch
from longread.spec.releases import release

CASES = list((vllm_cases() | {f"sglang {n}": c for n, c in sglang_cases().items()}).items())
IDS = [name for name, _ in CASES]


def undollar(words: list[str]) -> list[str]:
    return [word.replace("$$", "$") for word in words]


@pytest.mark.parametrize("case", [c for _, c in CASES], ids=IDS)
def test_compose_is_yaml_and_starts_the_launch(case: Case) -> None:
    d, workload, options = case
    made = launch(d, workload, options)
    services = yaml.safe_load(emit(d, workload, "compose", options))["services"]
    assert len(services) == len(made.processes)
    for service, process in zip(services.values(), made.processes, strict=True):
        assert undollar(service["entrypoint"] + service["command"]) == made.words(process)
        assert (
            service["image"]
            == {
                "vllm": f"vllm/vllm-openai:v{made.version}",
                "sglang": f"lmsysorg/sglang:v{made.version}",
            }[made.engine]
        )
        assert service["ulimits"]["memlock"] == -1 and service["shm_size"] == "32gb"
        assert all(isinstance(value, str) for value in service["environment"].values())
        device = service["deploy"]["resources"]["reservations"]["devices"][0]
        assert device["capabilities"] == ["gpu"] and ("count" in device) != ("device_ids" in device)
        assert len(service["volumes"]) == 2
        assert ("healthcheck" in service) == (process.part == 0)
        if made.nodes > 1:
            assert service["profiles"] == [f"node{process.node}"]


def test_replicas_get_their_own_cards() -> None:
    d, workload, options = vllm_cases()["v4 replicas"]
    services = yaml.safe_load(emit(d, workload, "compose", options))["services"]
    found = [s["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for s in services.values()]
    assert found == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert all("CUDA_VISIBLE_DEVICES" not in s["environment"] for s in services.values())
    health = [s["healthcheck"]["test"][-1] for s in services.values()]
    assert "8000/health" in health[0] and "8001/health" in health[1]


def test_compose_takes_dollars_and_quotes_as_they_are() -> None:
    d, workload, _ = vllm_cases()["r1 dp ep"]
    odd = Options(model='/m/$HOME "x": y')
    (service,) = yaml.safe_load(emit(d, workload, "compose", odd))["services"].values()
    assert undollar(service["entrypoint"])[-1] == odd.model
    mounted = service["volumes"][0]
    assert undollar([mounted["source"], mounted["target"]]) == [odd.model, odd.model] and mounted["read_only"]


def units(text: str) -> list[tuple[str, str]]:
    """Names and texts of the units in ``text``."""
    parts = re.split(r"(?m)^# /etc/systemd/system/(\S+?)(?:,.*)?$", text)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def exec_start(unit: str) -> str:
    """The command line as systemd reads it: comments between continued lines do not count."""
    lines, taken = [], False
    for line in unit.splitlines():
        taken = taken or line.startswith("ExecStart=")
        if not taken or line.startswith("#"):
            continue
        lines.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            break
    return " ".join(lines).removeprefix("ExecStart=")


@pytest.mark.parametrize("case", [c for _, c in CASES], ids=IDS)
def test_units_start_the_launch(case: Case) -> None:
    d, workload, options = case
    made = launch(d, workload, options)
    found = units(emit(d, workload, "systemd", options))
    assert len(found) == len(made.processes) == len({name for name, _ in found})
    for (_, unit), process in zip(found, made.processes, strict=True):
        words = made.words(process)
        line = exec_start(unit)
        assert line.startswith(f"/opt/{made.engine}/bin/{words[0]} ")
        flat = line.replace('\\"', '"').replace('"', "")
        assert flat.split()[1:] == " ".join(words[1:]).replace('"', "").split()
        for setting in ("Restart=on-failure", "LimitMEMLOCK=infinity", "KillMode=mixed", "WantedBy=multi-user.target"):
            assert f"\n{setting}\n" in f"{unit}\n"


def test_a_hardware_name_cannot_add_settings(tmp_path: Path) -> None:
    d = plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8))
    card = replace(d.hardware.card, name="%n x # y")
    text = emit(replace(d, hardware=replace(d.hardware, card=card)), None, "systemd")
    assert "Description=DeepSeek-V4-Flash on 8x%%n x # y, TP8: vllm" in text


def cpu_unit() -> Deployment:
    spec = release("DeepSeek-V2-Lite")
    hardware = parse_hardware("cpu")
    return Deployment(spec, hardware, Strategy(1), cache="bfloat16", max_model_len=8192)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_itself_finds_nothing_wrong(tmp_path: Path) -> None:
    """With /bin/true for the engine, since systemd looks whether the program is there."""
    names = ("v4 tp8 host", "r1 dp ep", "v4 replicas", "v3.1 two nodes pp")
    texts = [emit(*c[:2], "systemd", c[2]) for n, c in vllm_cases().items() if n in names]
    odd = Options(model='/m/50% $HOME "x"; y')
    texts += [emit(plan("DeepSeek-V4-Flash", "8xH20-96", Strategy(8)), None, "systemd", odd)]
    texts += [emit(cpu_unit(), None, "systemd", Options())]
    files = []
    for number, (name, unit) in enumerate(pair for text in texts for pair in units(text)):
        files.append(tmp_path / f"n{number}-{name}")
        unit = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", unit).replace("User=llm", "User=root")
        files[-1].write_text(unit)
    assert len(files) == 8
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, files)], capture_output=True, text=True, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or re.search(r"n\d-\w+", line)]
    assert said == []
