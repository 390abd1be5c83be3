"""What a measurement must carry to be believed: machine, versions, commit, command line, and the figures themselves."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a figure was measured."""

    cpu: str
    cores: int
    system: str
    python: str
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity, measured for us and for a peer in turn, in the same run.

    ``better`` says which direction wins; both lists of samples are in run order; ``aim`` is the ratio aimed at.
    """

    model: str
    quantity: str
    unit: str
    context: int
    batch: int
    better: str
    samples: list[float]
    peer: str
    peer_samples: list[float]
    aim: float | None = None

    @property
    def ratio(self) -> float:
        """How many times better than the peer, by medians; above 1 is a win in either direction."""
        ours, theirs = median(self.samples), median(self.peer_samples)
        return ours / theirs if self.better == "higher" else theirs / ours


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark run, as written to results/. ``models``: config.json by the names that the figures use."""

    benchmark: str
    commit: str
    command: str
    date: str
    machine: Machine
    figures: list[Figure]
    notes: list[str] = field(default_factory=list)
    models: dict[str, dict] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON, with the derived ratios beside the samples."""
        document = {"schema": SCHEMA, **asdict(self)}
        for row, figure in zip(document["figures"], self.figures, strict=True):
            row["ratio"] = round(figure.ratio, 3)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def this_machine(packages: Sequence[str]) -> Machine:
    """Describe this machine and the versions of ``packages`` (those that are installed)."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(_cpu_name(), os.cpu_count() or 0, platform.platform(), platform.python_version(), versions)


def this_commit() -> str:
    """The commit of the checkout that runs, "+changes" where the tree differs from it, "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def command_line() -> str:
    """The command that was typed, without the interpreter's path."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
