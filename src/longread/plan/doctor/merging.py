"""The same finding on several GPUs said once.

Knows: findings whose subject is a topic ("power cap") and that may say "{gpus}" in their remedy. Must not know: topics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from longread.plan.doctor.facts import GpuFacts
from longread.plan.doctor.finding import Finding

Check = Callable[[GpuFacts], Iterable[Finding]]


def over_gpus(gpus: Sequence[GpuFacts], check: Check) -> Iterator[Finding]:
    """``check`` on every GPU; findings that differ in nothing but their evidence become one."""
    merged: dict[tuple[str, str, str, str, str], list[tuple[int, str]]] = {}
    for gpu in gpus:
        for found in check(gpu):
            key = (found.severity, found.subject, found.statement, found.remedy, found.source)
            merged.setdefault(key, []).append((gpu.index, found.evidence))
    for (severity, subject, statement, remedy, source), where in merged.items():
        indices = [index for index, _ in where]
        yield Finding(
            severity,  # type: ignore[arg-type]
            f"GPU {ranges(indices)} {subject}",
            statement,
            _evidence(where),
            remedy.replace("{gpus}", ",".join(map(str, indices))),
            source,
        )


def _evidence(where: Sequence[tuple[int, str]]) -> str:
    """Once where it is the same everywhere, else by GPU."""
    by_text: dict[str, list[int]] = {}
    for index, text in where:
        by_text.setdefault(text, []).append(index)
    if len(by_text) == 1:
        return next(iter(by_text))
    return "; ".join(f"GPU {ranges(indices)}: {text}" for text, indices in by_text.items())


def ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
