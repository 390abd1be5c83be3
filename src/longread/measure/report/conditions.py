"""Whether two runs may be compared: what differs between them beside what was changed on purpose.

Knows runs. A grave difference is one that makes the ratio say something else than it seems to; the rest is told.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from longread.measure.report.definitions import TOOLS
from longread.measure.report.numbers import amount, mapping, percent, plain, words
from longread.measure.report.run import Run

CACHED_POINTS = 0.05
FAILED_POINTS = 0.01
_SCHEDULE = ("open_loop", "trace", "rate", "burstiness", "max_concurrency", "seed")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Difference:
    """``grave``: the comparison is refused for it unless it is asked for all the same."""

    what: str
    grave: bool


def differences(a: Run, b: Run) -> list[Difference]:
    return [*_asked(a, b), *_quality(a, b), *_happened(a, b)]


def same_asks(a: Run, b: Run) -> bool:
    """Whether a key means the same ask in both."""
    left, right = a.part("provenance", "workload"), b.part("provenance", "workload")
    return isinstance(left, dict) and left == right


def _asked(a: Run, b: Run) -> list[Difference]:
    """What was sent, to whom, and how."""
    found = []
    if a.tool != b.tool:
        found.append(
            Difference(
                f"A was measured by {TOOLS[a.tool]}, B by {TOOLS[b.tool]}: the same words mean different things; only "
                "quantities that are the same are compared, and each client adds its own time",
                False,
            )
        )
    if a.model != b.model:
        found.append(Difference(f"model: {a.model or 'not told'} and {b.model or 'not told'}", True))
    left, right = mapping(a.part("provenance")), mapping(b.part("provenance"))
    if a.own and b.own:
        for name, title in (("workload", "workload"), ("extra_body", "extra body")):
            found += [Difference(f"{title} {text}", True) for text in _between(left.get(name), right.get(name))]
    else:
        found.append(Difference("not told, so not checked: whether both sent the same prompts and body fields", False))
    schedules = [{k: mapping(side.get("schedule")).get(k) for k in _SCHEDULE} for side in (left, right)]
    if a.own and b.own:
        found += [Difference(f"load: {text}", True) for text in _between(schedules[0], schedules[1])]
    else:
        for name in ("concurrency", "rate"):
            one, other = a.load.get(name), b.load.get(name)
            if one != other:
                found.append(Difference(f"load: {name} {_value(one)} and {_value(other)}", True))
    if a.own and b.own:
        for name in ("endpoint", "request_timeout_s"):
            if left.get(name) != right.get(name):
                found.append(Difference(f"{name}: {_value(left.get(name))} and {_value(right.get(name))}", False))
    return found


def _between(left: object, right: object, where: str = "") -> list[str]:
    """Leaves that differ, in words, the first few of them."""
    if isinstance(left, dict) and isinstance(right, dict):
        found = [
            text
            for name in dict.fromkeys([*left, *right])
            for text in _between(left.get(name), right.get(name), f"{where}.{name}" if where else str(name))
        ]
        return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more differences"]
    if left == right:
        return []
    return [f"{words(where) or 'told'}: {_value(left)} and {_value(right)}"]


def _value(value: object) -> str:
    if value is None:
        return "not told"
    if value == "inf":
        return "unlimited"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    number = amount(value)
    if number is not None:
        return plain(number)
    return words(value if isinstance(value, str) else json.dumps(value), 80) or "empty"


def _quality(a: Run, b: Run) -> list[Difference]:
    found = []
    for side, run in (("A", a), ("B", b)):
        gate = run.gate
        if gate is None:
            found.append(Difference(f"{side} has no quality gate: nothing says that its answers are right", False))
        elif gate.verdict == "FAIL":
            found.append(
                Difference(
                    f"{side} failed the quality gate {gate.profile} ({gate.source}): its speed counts for nothing", True
                )
            )
        elif gate.verdict == "INCONCLUSIVE":
            found.append(Difference(f"{side}: the quality gate {gate.profile} is inconclusive ({gate.source})", False))
    return found


def _happened(a: Run, b: Run) -> list[Difference]:
    """What happened in the runs that moves latencies by itself."""
    found = []
    for side, run in (("A", a), ("B", b)):
        if run.partial:
            found.append(Difference(f"{side} is partial: it was stopped before its end", False))
        if run.part("server", "restarted") is True:
            found.append(Difference(f"{side}: the server restarted during the run", False))
        found += [Difference(f"{side}: {text}", False) for text in run.warnings]
    shares = [_failed(run) for run in (a, b)]
    if abs(shares[1] - shares[0]) > FAILED_POINTS:
        found.append(
            Difference(
                f"not answered: {percent(shares[0])} of A and {percent(shares[1])} of B; latencies are of the others",
                False,
            )
        )
    cached = [amount(run.part("cached_tokens", "share")) for run in (a, b)]
    if cached[0] is not None and cached[1] is not None and abs(cached[1] - cached[0]) > CACHED_POINTS:
        found.append(
            Difference(
                f"prompt tokens from the prefix cache: {percent(cached[0])} in A, {percent(cached[1])} in B; was one "
                "server warmer than the other?",
                False,
            )
        )
    hosts = [mapping(run.part("provenance", "machine")).get("host") for run in (a, b)]
    if hosts[0] and hosts[1] and hosts[0] != hosts[1]:
        found.append(Difference(f"the client ran on {_value(hosts[0])} and on {_value(hosts[1])}", False))
    return found


def _failed(run: Run) -> float:
    total = run.answered + run.bad
    return run.bad / total if total else 0.0


def only_grave(found: Iterable[Difference]) -> list[str]:
    return [each.what for each in found if each.grave]


def repeats_differ(runs: list[Run]) -> list[str]:
    """What differs between runs that are taken as repeats of one another."""
    first: Mapping[str, None] = {}
    for other in runs[1:]:
        first = {**first, **dict.fromkeys(only_grave(differences(runs[0], other)))}
    return [text for text in first if "quality gate" not in text]
