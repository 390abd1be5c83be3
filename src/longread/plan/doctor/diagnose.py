"""All readers, and all checks.

Knows: their list and order. Must not know: what any of them looks at.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path

from longread.plan.doctor.checks_gpu import check_gpus
from longread.plan.doctor.checks_host import check_host
from longread.plan.doctor.checks_links import check_links
from longread.plan.doctor.checks_live import check_live
from longread.plan.doctor.checks_logs import check_conflicts, check_logs
from longread.plan.doctor.checks_serving import check_serving
from longread.plan.doctor.checks_versions import check_versions
from longread.plan.doctor.checks_xid import check_xids
from longread.plan.doctor.facts import Facts
from longread.plan.doctor.finding import Finding
from longread.plan.doctor.host import read_host
from longread.plan.doctor.merging import ranges
from longread.plan.doctor.nvml import Nvml, load, read_gpus_in_time
from longread.plan.doctor.servers import read_servers
from longread.plan.doctor.versions import read_versions
from longread.plan.doctor.xid import read_kernel_log

CHECKS = (
    check_conflicts,
    check_gpus,
    check_links,
    check_xids,
    check_versions,
    check_serving,
    check_host,
    check_logs,
    check_live,
)


def read_this_machine(storage: Sequence[Path] = (), ask_torch: bool = False, nvml: Nvml | None = None) -> Facts:
    """``storage``: folders that matter. ``nvml``: a stand-in for the driver's library."""
    gpus, topology, unread, about = read_gpus_in_time(load() if nvml is None else nvml)
    xids, why = read_kernel_log()
    return Facts(
        gpus=gpus,
        topology=topology,
        versions=read_versions(about, ask_torch),
        host=read_host(storage),
        servers=read_servers(),
        xids=xids,
        unread={**unread, **({"xids": why} if why else {})},
    )


def diagnose(facts: Facts) -> list[Finding]:
    """In the order of the checks; what could not be read comes last."""
    return [*(finding for check in CHECKS for finding in check(facts)), *unread(facts)]


def unread(facts: Facts) -> list[Finding]:
    """A note a reason: what nobody could look at is not fine, it is unknown."""
    by_reason: dict[tuple[str, str], tuple[str, list[int]]] = {}
    for gpu in facts.gpus or ():
        reasons: dict[str, list[str]] = {}
        for name, reason in gpu.unread.items():
            if name != "device":
                reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            listed = ", ".join(sorted(names))
            by_reason.setdefault((reason, listed), (listed, []))[1].append(gpu.index)
    found = [
        Finding("note", f"GPU {ranges(indices)} not read", f"not judged: {listed}", reason)
        for (reason, _), (listed, indices) in by_reason.items()
    ]
    for subject, told in (
        ("machine", facts),
        ("versions", facts.versions),
        ("host", facts.host),
        ("server", facts.live),
    ):
        for name, reason in (told.unread if told is not None else {}).items():
            if name != "gpus":  # the check of GPUs says so itself
                found.append(Finding("note", f"{subject} not read", f"not judged: {name}", reason))
    return found


def plain(value: object) -> object:
    """Facts as JSON has them: dataclasses as objects, sets as sorted lists, keys as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(plain(item) for item in value)  # type: ignore[type-var]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
