"""``longread demo`` as a user runs it: a process of its own, tiny checkpoints, answers beside what was expected."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from longread.weights.fixture import write_fixture

NOTE = "The lessor pays for the roof. The lessee pays for the floor.\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Untrained checkpoints of both architectures, as arguments."""
    paths = [tmp_path_factory.mktemp("tiny") / kind for kind in ("v3", "v4-flash")]
    for path in paths:
        write_fixture(path, path.name)
    return [word for path in paths for word in ("--checkpoint", str(path))]


def demo(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    # Wide, so that no cell is folded; the command line itself needs no torch settings.
    environment = os.environ | {"COLUMNS": "300", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "longread.cli.main", "demo", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


def cells(said: str, label: str) -> list[str]:
    """The models' cells of one row of the table."""
    line = next(line for line in said.splitlines() if re.match(rf"│ {re.escape(label)}\s*│", line))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_a_contract_is_asked_about_cold_and_warm(tmp_path: Path, tiny: list[str]) -> None:
    done = demo(tmp_path, *tiny, "--tokens", "2048", "--max-tokens", "4", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert said.count("seed 3") == 2 and re.search(r"┃\s+v3 ┃\s+v4-flash ┃", said)
    # Noise is told as wrong, and is no failure. Both models are asked the same of the same contract.
    assert said.count("  WRONG") >= 6 and "6 of 6 questions were answered WRONG" in said and "  right" not in said
    assert cells(said, "right answers") == ["0 of 3"] * 2
    questions = re.findall(r"^[123]\. (.*)$", said, re.M)
    assert len(questions) == 6 and questions[:3] == questions[3:]
    assert [question.endswith("(thinking)") for question in questions[:3]] == [False, False, True]
    value, clause = re.search(r"expected  (.+) \(clause (\d+\.\d+)\)", said).groups()
    assert re.search(rf"the text  {re.escape(clause)} .*{re.escape(value)}.*\(line \d+\)", said)
    assert said.count("expected  Not in the document.") == 2
    for prompt, cached in zip(cells(said, "prompt tokens"), cells(said, "cached tokens"), strict=True):
        reused, whole = (int(text.replace(",", "")) for text in (cached, prompt))
        assert 1024 <= reused < whole and 1950 <= whole <= 2200
    for label, unit in (
        ("cold TTFT", " s"),
        ("warm TTFT, another question", " ms"),
        ("cold : warm", "x"),
        ("decode", " tokens/s"),
        ("peak memory of the server", " MiB"),
        ("planned (an upper bound)", " MiB"),
    ):
        figures = cells(said, label)
        assert len(figures) == 2
        assert all(float(cell.removesuffix(unit).replace(",", "")) > 0 for cell in figures), (label, figures)


def test_a_bundled_reader_is_right(tmp_path: Path) -> None:
    done = demo(tmp_path, "--checkpoint", "reader-v4", "--tokens", "2048", "--language", "zh")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 3 questions were answered right, cold and warm." in done.stdout
    assert re.search(r"thought   在第\d+\.\d+条", done.stdout) and done.stdout.count("文中没有。") == 2
    assert "longread serve reader-v4 " in done.stdout


def test_a_file_is_asked_the_users_question_and_nothing_is_judged(tmp_path: Path, tiny: list[str]) -> None:
    (tmp_path / "note.md").write_text(NOTE * 60)
    done = demo(tmp_path, "note.md", *tiny[:2], "--question", "Who pays for the [roof]?", "--max-tokens", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The text: note.md; " in done.stdout and "What would be right is not known" in done.stdout
    assert "1. Who pays for the [roof]?\n" in done.stdout
    assert "expected" not in done.stdout and "WRONG" not in done.stdout
    assert cells(done.stdout, "right answers") == ["not known"]
    assert int(cells(done.stdout, "cached tokens")[0].replace(",", "")) >= 256


@pytest.mark.parametrize("content", [None, b"\x80\x81\xff\x00binary"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path, tiny: list[str]) -> None:
    if content is not None:
        (tmp_path / "contract.bin").write_bytes(content)
    done = demo(tmp_path, "contract.bin", *tiny)
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("longread: ") and "contract.bin" in lines[0] and "name a UTF-8 text file" in lines[0]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["empty.md"], "the text has 12 characters; the demo needs 2000"),
        (["empty.md", "--seed", "1"], "--tokens and --seed are about a written contract"),
        (["--question", "Why?"], "name its FILE"),
        (["--tokens", "100"], "100 tokens: v3 can be shown with 2,048 to 163,840"),
        (["--language", "de"], "choose from"),
        (["--checkpoint", "reeder-v3"], "did you mean reader-v3?"),
    ],
)
def test_what_cannot_be_shown_is_refused(argv: list[str], says: str, tmp_path: Path, tiny: list[str]) -> None:
    (tmp_path / "empty.md").write_text("")
    done = demo(tmp_path, *argv, *tiny)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_ended_from_outside_it_takes_its_server_along(tmp_path: Path, tiny: list[str]) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "longread.cli.main", "demo", *tiny]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    servers: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not servers and time.monotonic() < deadline:
        servers = psutil.Process(process.pid).children()
        time.sleep(0.05)
    assert servers
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(server.is_running() for server in servers)
