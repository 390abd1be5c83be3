"""`longread doctor`: exit codes, JSON, text, and that it neither loads torch nor changes anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml

from longread.cli.doctor import show
from longread.cli.main import main
from longread.plan.doctor.diagnose import diagnose, plain, read_this_machine
from longread.plan.doctor.facts import Facts, GpuFacts, HostFacts
from longread.plan.doctor.finding import SCHEMA, Finding, as_json, exit_code, ordered
from longread.plan.doctor.summary import matrix, summary

NOTE, WARNING, ERROR, OK = (Finding(severity, severity, "s") for severity in ("note", "warning", "error", "ok"))


def test_exit_code_by_the_worst() -> None:
    assert [exit_code(found) for found in ([], [OK, NOTE], [NOTE, WARNING], [WARNING, ERROR, OK])] == [0, 0, 1, 2]
    assert ordered([OK, NOTE, ERROR, WARNING]) == [ERROR, WARNING, NOTE, OK]


def test_json_of_a_whole_machine_with_gpus(tmp_path: Path) -> None:
    facts = read_this_machine([tmp_path], nvml=FakeNvml(8, changes={2: {"EnforcedPowerLimit": 500_000}}))
    findings = diagnose(facts)
    told = json.loads(json.dumps({**as_json(findings), "facts": plain(facts)}))
    assert told["schema"] == SCHEMA and sum(told["counts"].values()) == len(told["findings"]) == len(findings)
    assert "GPU 2 power cap" in {finding["subject"] for finding in told["findings"]}
    assert told["facts"]["gpus"][2]["power_limit"] == 500
    assert set(told["findings"][0]) == {"severity", "subject", "statement", "evidence", "remedy", "source"}


def test_what_could_not_be_read_is_said_once_a_reason() -> None:
    gpus = tuple(
        GpuFacts(index=index, unread={"margin": "Not Supported", "ecc": "Not Supported"}) for index in range(4)
    )
    found = [
        f
        for f in diagnose(Facts(gpus=gpus, host=HostFacts(unread={"shm_total": "no /dev/shm"})))
        if "read" in f.subject
    ]
    assert [(f.subject, f.statement, f.evidence) for f in found] == [
        ("GPU 0-3 not read", "not judged: ecc, margin", "Not Supported"),
        ("host not read", "not judged: shm_total", "no /dev/shm"),
    ]


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "--store", str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    assert code == told["exit_code"] in (0, 1, 2)
    assert f"disk {tmp_path}" in {finding["subject"] for finding in told["findings"]}


def test_the_text_groups_by_severity_and_quotes_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    show([NOTE, Finding("error", "X", "broken", "[bold]x[/nope]", "`run me`", "a#1")], Console(width=100), "here")
    lines = capsys.readouterr().out
    assert lines.index("errors (1)") < lines.index("notes (1)")
    for text in ("evidence: [bold]x[/nope]", "remedy: `run me`", "source: a#1", "here: 1 errors, 0 warnings, 1 notes"):
        assert text in lines


def test_what_the_machine_is(tmp_path: Path) -> None:
    facts = read_this_machine([tmp_path], nvml=FakeNvml(2))
    told = dict(summary(facts))
    assert told["GPU 0-1"] == "NVIDIA H200, 140.4 GiB, compute capability 9.0"
    assert told["driver"] == "580.95.05, serves CUDA up to 13.0"
    assert [line.split()[:3] for line in matrix(facts)] == [
        ["GPU0", "GPU1", "NUMA"],
        ["GPU0", "X", "NV18"],
        ["GPU1", "NV18", "X"],
    ]
    assert summary(Facts(origin="a file")) == [("machine", "a file")] and matrix(Facts()) == []


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jsn"]) == 2
    assert "did you mean --json?" in capsys.readouterr().err


def test_the_doctor_loads_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from longread.cli.main import main\n"
        "code = main(['doctor', '--json']); sys.exit(0 if code in (0, 1, 2) else 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == SCHEMA
