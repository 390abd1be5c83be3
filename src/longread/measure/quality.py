"""A quality gate beside a measurement of speed: run it, and say in a result what it said.

Knows the gate and the shape of a result's ``quality`` block. Must not know how speed is measured.

The block: ``verdict``, ``profile`` (its name and origin), ``levels`` (verdicts by number, or why one was not run),
``failed`` (sentences), ``needed`` (samples that would decide an INCONCLUSIVE one, where known), ``base`` (file name or
None), ``speed_counts`` (False behind a FAIL), ``gate`` (the gate's whole document).
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longread.measure.gate import record
from longread.measure.gate.profiles import Profile, profile_of
from longread.measure.gate.record import Sayings
from longread.measure.gate.run import Outcome, Settings, Watch, make_base, run_gate
from longread.measure.gate.verdict import LEVELS, Finding
from longread.spec.errors import ConfigError

ALONE, AGAINST_BASE = (0,), (1, 4)  # levels that are quick: without a base, and with one
QUICK_LENGTHS, QUICK_DOCUMENTS = (1024,), 4


@dataclass(frozen=True, slots=True)
class Check:
    """A gate to be run. ``settings``: its address and model are filled in by ``check``. ``base``: what to compare
    with, and the file that it was read from.
    """

    settings: Settings
    profile: Profile
    base: Sayings | None = None
    base_file: Path | None = None


def check_of(profile: str, base_file: Path | None, levels: tuple[int, ...] | None, seconds: float) -> Check:
    """``levels`` None: quick ones. Raises ConfigError for what is no profile, and a base that is none or empty."""
    base = None if base_file is None else record.read(base_file)
    if base is not None and not base.said:
        raise ConfigError(f"{base_file}: holds no answers; make it anew with `longread gate base`")
    settings = Settings(
        "http://127.0.0.1",
        levels=levels or (ALONE if base is None else AGAINST_BASE),
        lengths=QUICK_LENGTHS,
        documents=QUICK_DOCUMENTS,
        seconds=seconds,
    )
    return Check(settings, profile_of(profile), base, base_file)


def with_server(settings: Settings, base_url: str, model: str | None, headers: Mapping[str, str]) -> Settings:
    """For one server; of its headers the key is passed on."""
    key = next((value for name, value in headers.items() if name.lower() == "authorization"), None)
    token = None if key is None else key.removeprefix("Bearer ").strip()
    return replace(settings, base_url=base_url, model=model, api_key=token or settings.api_key)


def check(
    wanted: Check,
    base_url: str,
    model: str | None,
    headers: Mapping[str, str],
    progress: Callable[[int, int, str], None] = lambda done, total, words: None,
) -> Outcome:
    """Run the gate. Raises KeyboardInterrupt where it was interrupted, GateError where it cannot be run at all."""
    settings = with_server(wanted.settings, base_url, model, headers)
    outcome = asyncio.run(run_gate(settings, wanted.profile, wanted.base, Watch(progress=progress)))
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome


def gated(wanted: Check, base_url: str, model: str | None, headers: Mapping[str, str]) -> dict[str, Any]:
    """The gate with its progress on stderr, as a result's block."""

    def progress(done: int, total: int, words: str) -> None:
        print(f"gate {wanted.profile.name}: {words}", file=sys.stderr, flush=True)

    return block(check(wanted, base_url, model, headers, progress), wanted.base_file)


def record_base(
    settings: Settings,
    base_url: str,
    model: str | None,
    headers: Mapping[str, str],
    path: Path,
    progress: Callable[[int, int, str], None] = lambda done, total, words: None,
) -> Sayings:
    """What a server says, to compare others with, also written to ``path``. Raises as ``check``."""
    found = asyncio.run(make_base(with_server(settings, base_url, model, headers), None, Watch(progress=progress)))
    if found.provenance.get("stopped") == "interrupted":
        raise KeyboardInterrupt
    found.write(path)
    return found


def block(outcome: Outcome, base_file: Path | None) -> dict[str, Any]:
    """For a result."""
    failed = [
        f"level {level.level} ({LEVELS[level.level]}), {finding.name}: {finding.note or _beyond(finding)}"
        for level in outcome.levels
        for finding in level.findings
        if finding.verdict == "FAIL"
    ]
    return {
        "verdict": outcome.verdict,
        "profile": {"name": outcome.profile.name, "origin": outcome.profile.origin},
        "levels": {str(level.level): level.not_run or level.verdict for level in outcome.levels},
        "failed": failed,
        "needed": max((level.needed for level in outcome.levels if level.needed is not None), default=None),
        "base": None if base_file is None else base_file.name,
        "speed_counts": outcome.verdict != "FAIL",
        "gate": outcome.document(),
    }


def _beyond(finding: Finding) -> str:
    return "no value" if finding.value is None else f"{finding.value:.4g}, and the limit is {finding.limit}"


def sentence(told: Mapping[str, Any]) -> str:
    """The block in one line."""
    name, verdict = told["profile"]["name"], told["verdict"]
    if verdict == "FAIL":
        return (
            f"the quality gate {name} FAILED, so the speed figures count for nothing: {'; '.join(told['failed'])[:600]}"
        )
    if verdict == "INCONCLUSIVE":
        return f"the quality gate {name} is INCONCLUSIVE: nothing says that the answers are right"
    return f"the quality gate {name} passed"
