"""A verdict as text for the screen and as JSON."""

import textwrap
from itertools import groupby
from typing import Any

from longread.plan.claims.claim import Case, Claim, Finding, Outcome, Verdict
from longread.plan.claims.words import amount, many
from longread.plan.estimate import Estimate

SCHEMA = "longread.claim/1"
EXIT: dict[Outcome, int] = {"conservative": 0, "plausible": 0, "only if": 3, "impossible": 4}
WIDTH = 100  # columns where nobody says how many there are
Json = dict[str, Any]


def claim_text(verdict: Verdict, width: int = WIDTH) -> str:
    """The verdict, then all of why, in lines of ``width`` columns. What several machines share is said once."""
    claim = verdict.claim
    groups = [list(cases) for _, cases in groupby(verdict.cases, lambda case: case.model)]
    lines = [f"verdict: {verdict.outcome}", *(line for cases in groups for line in _outcomes(cases))]
    lines += [f"claim: {claim.text}"] if claim.text else []
    lines += [f"understood: {'; '.join(claim.understood)}"] if claim.understood else []
    lines += [f"assumed: {one}" for one in claim.assumed]
    for cases in groups:
        lines += ["", *_case_lines(cases)]
    for title, items in (
        ("other meanings of the same words", verdict.other_meanings),
        ("what would settle it", verdict.measurement),
        ("what to ask", verdict.questions),
    ):
        lines += ["", f"{title}:", *(f"  - {item}" for item in items)] if items else []
    return "\n".join(wrapped(line, width) for line in lines)


def wrapped(line: str, width: int) -> str:
    """On as many lines as it takes, each behind the indent of the first; fewer than 40 columns are not counted with."""
    indent = len(line) - len(line.lstrip(" -"))
    hanging = indent if line.lstrip().startswith("- ") else indent + 2
    return textwrap.fill(line, max(width, 40), subsequent_indent=" " * hanging, break_on_hyphens=False)


def _outcomes(cases: list[Case]) -> list[str]:
    """Of one model: one line for all machines with the same outcome."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.setdefault(case.outcome, []).append(case.hardware)
    return [f"  {cases[0].model} on {' and '.join(machines)}: {outcome}" for outcome, machines in found.items()]


def _case_lines(cases: list[Case]) -> list[str]:
    """All that is found of one model; a line that does not hold for every machine names its own."""
    machines = [case.hardware for case in cases]
    lines = [f"{cases[0].model} on {' and '.join(machines)}"]
    lines += [f"  note: {line}" for line in _merged(machines, [case.notes for case in cases])]
    said: set[str] = set()
    for aspect in dict.fromkeys(found.aspect for case in cases for found in case.findings):
        named = [
            (case.hardware, case.finding(aspect)) for case in cases if any(f.aspect == aspect for f in case.findings)
        ]
        lines += _finding_lines(aspect, [name for name, _ in named], [found for _, found in named], said)
    return lines


def _finding_lines(aspect: str, machines: list[str], found: list[Finding], said: set[str]) -> list[str]:
    lines = [f"  {aspect}: {line}" for line in _merged(machines, [(f.outcome,) for f in found])]
    lines += [f"    {line}" for line in _merged(machines, [(figures(f),) for f in found])]
    lines += [f"    why: {line}" for line in _merged(machines, [f.reasons for f in found])]
    lines += [f"    = {line}" for line in _merged(machines, [f.arithmetic for f in found])]
    conditions = _merged(machines, [f.conditions for f in found])
    if conditions:
        lines.append("    true only if:" if any(f.outcome == "only if" for f in found) else "    and:")
        lines += [f"      - {line}" for line in conditions if line not in said]
        again = sum(line in said for line in conditions)
        lines += [f"      - as above: {many(again, 'more condition')}"] if again else []
        said.update(conditions)
    return lines


def _merged(machines: list[str], lists: list[tuple[str, ...]]) -> list[str]:
    """Lines of several machines in their order: plain where all have them, else behind the machines that do."""
    whose: dict[str, list[str]] = {}
    for machine, lines in zip(machines, lists, strict=True):
        for line in lines:
            whose.setdefault(line, []).append(machine)
    return [line if len(own) == len(machines) else f"{' and '.join(own)}: {line}" for line, own in whose.items()]


def figures(found: Finding, *, predicted: bool = True) -> str:
    """Claimed against floor, and against the prediction, in one line."""
    bound = "floor" if found.unit == "s" else "most"
    text = f"claimed {amount(found.claimed, found.unit)}; {bound} {amount(found.floor, found.unit)}"
    e = found.predicted
    if e is not None and predicted:
        low, high = amount(e.low, found.unit), amount(e.high, found.unit)
        text += f"; predicted {amount(e.centre, found.unit)} ({low} to {high}; {e.provenance}; {found.plan})"
    return text


def claim_document(verdict: Verdict) -> Json:
    """Schema ``longread.claim/1``: base units, intervals as [low, centre, high]."""
    return {
        "schema": SCHEMA,
        "claim": _claim(verdict.claim),
        "outcome": verdict.outcome,
        "cases": [
            {
                "model": case.model,
                "hardware": case.hardware,
                "outcome": case.outcome,
                "headline": case.headline,
                "notes": list(case.notes),
                "findings": [_finding(found) for found in case.findings],
            }
            for case in verdict.cases
        ],
        "other_meanings": list(verdict.other_meanings),
        "measurement": list(verdict.measurement),
        "questions": list(verdict.questions),
    }


def _claim(claim: Claim) -> Json:
    rate = claim.rate
    return {
        "text": claim.text,
        "models": [spec.label for spec in claim.specs],
        "hardware": [machine.label for machine in claim.hardware],
        "isl": claim.isl,
        "osl": claim.osl,
        "ttft": claim.ttft,
        "tpot": claim.tpot,
        "rate": None if rate is None else {"value": rate.value, "of": rate.of, "scope": rate.scope},
        "concurrency": claim.concurrency,
        "prefix": claim.cached,
        "suffix": claim.suffix,
        "state": claim.state,
        "tier": claim.tier,
        "engine": claim.engine,
        "strategy": claim.strategy.label if claim.strategy is not None else None,
        "together": claim.together,
        "shared": claim.shared,
        "ids": claim.ids,
        "percentile": claim.percentile,
        "understood": list(claim.understood),
        "assumed": list(claim.assumed),
    }


def _finding(found: Finding) -> Json:
    return {
        "group": found.group,
        "aspect": found.aspect,
        "outcome": found.outcome,
        "claimed": found.claimed,
        "unit": found.unit,
        "floor": found.floor,
        "predicted": _estimate(found.predicted),
        "plan": found.plan,
        "reasons": list(found.reasons),
        "arithmetic": list(found.arithmetic),
        "conditions": list(found.conditions),
    }


def _estimate(e: Estimate | None) -> Json | None:
    if e is None:
        return None
    return {"interval": [e.low, e.centre, e.high], "provenance": e.provenance, "source": e.source}
