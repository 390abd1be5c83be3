"""``longread demo`` as a user runs it: a process of its own, one small file, both tiny checkpoints, one table."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


def demo(folder: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    # Wide, so that no cell is folded; the command line itself needs no torch settings.
    environment = os.environ | {"COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "longread.cli.main", "demo", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def cells(said: str, label: str) -> list[str]:
    """The two models' cells of one row of the table."""
    line = next(line for line in said.splitlines() if re.match(rf"│ {re.escape(label)}\s*│", line))
    return [cell.strip() for cell in line.strip("│").split("│")[1:]]


def test_one_small_file_is_asked_twice_of_both_models(tmp_path: Path) -> None:
    # Two pages and more, so that the second question finds something in the cache.
    (tmp_path / "note.md").write_text("The lessor pays for the roof. The lessee pays for the floor.\n" * 60)
    done = demo(tmp_path, "--max-tokens", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "random weights" in said and re.search(r"┃\s+v3 ┃\s+v4-flash ┃", said)
    for prompt, cached in zip(cells(said, "prompt tokens"), cells(said, "cached tokens"), strict=True):
        reused, whole = (int(text.replace(",", "")) for text in (cached, prompt))
        assert 256 <= reused < whole
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


@pytest.mark.parametrize("content", [None, b"\x80\x81\xff\x00binary"], ids=["missing", "binary"])
def test_a_file_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "contract.bin").write_bytes(content)
    done = demo(tmp_path, "contract.bin")
    assert done.returncode == 2 and done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("longread: ") and "contract.bin" in lines[0] and "name a UTF-8 text file" in lines[0]


def test_a_text_too_short_to_reuse_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_text("")
    done = demo(tmp_path, "empty.md")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"longread: .*the text has 12 characters; the demo needs 2000.*\n", done.stderr)


def test_ended_from_outside_it_takes_its_server_and_folder_along(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("The lessor pays for the roof. The lessee pays for the floor.\n" * 600)
    environment = os.environ | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "longread.cli.main", "demo", "long.md", "--max-tokens", "100000"]
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
    assert not list(tmp_path.glob("longread-demo-*"))


def test_a_folder_without_a_text_is_one_line(tmp_path: Path) -> None:
    done = demo(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "name a text file" in done.stderr
