"""An experiment's folder: what was measured, each visit in a folder of its own with its results, gate and server log.

Knows files. Must not know what is done with them. A visit counts once its ``visit.json`` is there, which is written
last and whole.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longread.measure.experiment.plan import Visit, slug
from longread.measure.files import write_json
from longread.spec.errors import ConfigError

VISIT, REPORT, MARKDOWN = "visit.json", "experiment.json", "experiment.md"
GATES = "gates"


@dataclass(slots=True)
class Done:
    """A visit that was made. ``status``: "ok", or "failed" with its ``reason``. ``results``: files by workload."""

    label: str
    round: int
    identity: str
    status: str
    reason: str | None = None
    results: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    ready_s: float | None = None
    date: str = ""
    commit: str = ""
    command: str = ""


class Folder:
    """``path`` is made if it is not there."""

    def __init__(self, path: Path):
        self.path = path

    def begin(self, resume: bool, text: str) -> None:
        """Raises ConfigError where there are results already that the user did not mean to go on with."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; name a folder for the results")
        taken = self.path.is_dir() and any(self.path.iterdir())
        if taken and not resume:
            raise ConfigError(f"{self.path} holds results already: --resume goes on with them, or name another folder")
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "experiment.toml").write_text(text, encoding="utf-8")

    def of(self, visit: Visit) -> Path:
        return self.path / visit.folder

    def gate(self, label: str, identity: str) -> Path:
        """Of a configuration: what the gate said of it; of the base: what it said itself."""
        return self.path / GATES / f"{slug(label)}-{identity[:8]}.json"

    def done(self, visit: Visit) -> Done | None:
        """None where it was not made, or is not whole."""
        try:
            data = json.loads((self.of(visit) / VISIT).read_text(encoding="utf-8"))
            found = Done(**data)
        except (OSError, ValueError, TypeError):
            return None
        if found.identity != visit.identity:
            return None
        whole = all((self.of(visit) / str(name)).is_file() for name in found.results.values())
        return found if whole else None

    def keep(self, visit: Visit, done: Done) -> None:
        write_json(self.of(visit) / VISIT, asdict(done))

    def write(self, document: Mapping[str, Any], markdown: str) -> tuple[Path, Path]:
        """The report."""
        write_json(self.path / REPORT, document)
        target = self.path / MARKDOWN
        target.write_text(markdown, encoding="utf-8")
        return self.path / REPORT, target


def read_json(path: Path) -> dict[str, Any] | None:
    """None where it is not there, or is no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None
