"""One thing that the doctor has to say, and how findings become an exit code and JSON.

Knows nothing about machines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "note", "ok"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "ok")  # worst first
SCHEMA = "longread.doctor/1"  # a field that changes its meaning or goes away makes it /2; new fields do not


@dataclass(frozen=True, slots=True)
class Finding:
    """``severity``: error = serving fails, gives wrong results or runs at a fraction of its speed; warning = slower,
    smaller or at risk; note = worth knowing, or could not be read; ok = looked at and fine.

    ``subject``: what it is about, stable enough to filter by ("GPU 3 ECC", "torch x vllm"). ``statement``: one
    sentence. ``evidence``: the value read beside the limit. ``remedy``: what to do, with the command, which the doctor
    itself never runs; "" where there is nothing to do. ``source``: where the limit comes from (a document,
    owner/repo#issue).
    """

    severity: Severity
    subject: str
    statement: str
    evidence: str = ""
    remedy: str = ""
    source: str = ""


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first; within a severity in the order in which they came."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def counts(findings: Sequence[Finding]) -> dict[Severity, int]:
    return {severity: sum(finding.severity == severity for finding in findings) for severity in SEVERITIES}


def exit_code(findings: Sequence[Finding]) -> int:
    """2 with an error among them, 1 with a warning, else 0."""
    found = {finding.severity for finding in findings}
    return 2 if "error" in found else 1 if "warning" in found else 0


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The findings' part of the ``longread.doctor/1`` document."""
    return {
        "schema": SCHEMA,
        "exit_code": exit_code(findings),
        "counts": counts(findings),
        "findings": [asdict(finding) for finding in ordered(findings)],
    }
