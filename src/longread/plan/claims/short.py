"""A verdict on one screen: what was decided, what decides it, and what would have to be granted.

Knows the verdict; ``report`` has all of it.
"""

from longread.plan.claims.claim import OUTCOMES, Case, Finding, Verdict
from longread.plan.claims.report import WIDTH, figures, wrapped
from longread.plan.claims.words import many

LINES = 25
_MORE = "--full: every reading with its arithmetic, what would settle it, what to ask; --json: all figures"


def claim_short(verdict: Verdict, width: int = WIDTH) -> str:
    """At most ``LINES`` lines of ``width`` columns: the case that suits the claim best, of the others their outcome."""
    claim = verdict.claim
    suits = [case for case in verdict.cases if case.outcome == verdict.outcome]
    best = min(suits, key=lambda case: _asked(binding_finding(case)))
    binding = binding_finding(best)
    lines = [f"verdict: {verdict.outcome}"]
    lines.append(f"{best.model} on {best.hardware}: {best.outcome}; what decides: {binding.aspect}")
    lines.append(f"  {figures(binding)}")
    lines += [f"  why: {reason}" for reason in binding.reasons[:1]]
    others = (found for found in best.findings if found is not binding)
    tail = [f"  also: {found.aspect}: {found.outcome}; {figures(found, predicted=False)}" for found in others]
    tail += [f"on {machines}: {outcome}" for machines, outcome in _others(verdict, best)]
    tail += [f"understood: {'; '.join(claim.understood)}"] if claim.understood else []
    tail += [f"assumed: {'; '.join(claim.assumed)}"] if claim.assumed else []
    more = wrapped(_MORE, width).split("\n")
    room = LINES - len(more) - sum(_height(line, width) for line in (*lines, *tail))
    lines += [*_conditions(binding, room, width), *tail]
    shown = "\n".join(wrapped(line, width) for line in lines).split("\n")
    if len(shown) + len(more) > LINES:  # only in very narrow terminals
        shown = [*shown[: LINES - len(more) - 1], "..."]
    return "\n".join([*shown, *more])


def _height(line: str, width: int) -> int:
    return wrapped(line, width).count("\n") + 1


def binding_finding(case: Case) -> Finding:
    """What the case's outcome hangs on: of each statement its best reading, and of these the worst."""
    groups: dict[str, list[Finding]] = {}
    for found in case.findings:
        groups.setdefault(found.group, []).append(found)
    read = [max(found, key=lambda f: OUTCOMES.index(f.outcome)) for found in groups.values()]
    return next((f for f in read if f.outcome == case.outcome), read[0])


def _asked(found: Finding) -> float:
    """How near the claim is to the floor, above 1 beyond it."""
    return found.floor / found.claimed if found.unit == "s" else found.claimed / max(found.floor, 1e-9)


def _conditions(found: Finding, room: int, width: int) -> list[str]:
    """As many of them as ``room`` lines take, in their order, and how many are left out."""
    if not found.conditions:
        return []
    lines, room = ["  true only if:" if found.outcome == "only if" else "  and:"], room - 2
    for at, condition in enumerate(found.conditions):
        line = f"    - {condition}"
        room -= _height(line, width)
        if room < 0:
            left = len(found.conditions) - at
            return [*lines, f"    - {many(left, 'more condition')}"] if at else []
        lines.append(line)
    return lines


def _others(verdict: Verdict, best: Case) -> list[tuple[str, str]]:
    """Each other case's outcome, those of one model and outcome together."""
    found: dict[tuple[str, str], list[str]] = {}
    for case in verdict.cases:
        if case is not best:
            found.setdefault((case.model, case.outcome), []).append(case.hardware)
    return [(f"{' and '.join(machines)}, {model}", outcome) for (model, outcome), machines in found.items()]
