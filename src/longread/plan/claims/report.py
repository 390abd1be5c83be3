"""A verdict as text for the screen and as JSON."""

import textwrap
from typing import Any

from longread.plan.claims.claim import Case, Claim, Finding, Outcome, Verdict
from longread.plan.claims.words import amount
from longread.plan.estimate import Estimate

SCHEMA = "longread.claim/1"
EXIT: dict[Outcome, int] = {"conservative": 0, "plausible": 0, "only if": 3, "impossible": 4}
_WIDTH = 100
Json = dict[str, Any]


def claim_text(verdict: Verdict) -> str:
    """Lines of at most 100 characters."""
    claim = verdict.claim
    lines = [f"claim: {claim.text}"] if claim.text else []
    lines += [f"understood: {'; '.join(claim.understood)}"] if claim.understood else []
    lines += [f"assumed: {one}" for one in claim.assumed]
    for case in verdict.cases:
        lines += ["", *_case_lines(case)]
    for title, items in (
        ("other meanings of the same words", verdict.other_meanings),
        ("what would settle it", verdict.measurement),
        ("what to ask", verdict.questions),
    ):
        lines += ["", f"{title}:", *(f"  - {item}" for item in items)] if items else []
    lines += ["", f"verdict: {verdict.outcome}"]
    return "\n".join(_wrapped(line) for line in lines)


def _wrapped(line: str) -> str:
    indent = len(line) - len(line.lstrip(" -"))
    hanging = indent if line.lstrip().startswith("- ") else indent + 2
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * hanging, break_on_hyphens=False)


def _case_lines(case: Case) -> list[str]:
    lines = [f"{case.model} on {case.hardware}: {case.outcome.upper()}"]
    lines += [f"  note: {note}" for note in case.notes]
    for found in case.findings:
        lines += [f"  {found.aspect}: {found.outcome}", f"    {figures(found)}"]
        lines += [f"    why: {reason}" for reason in found.reasons]
        lines += [f"    = {line}" for line in found.arithmetic]
        lines += ["    true only if:" if found.outcome == "only if" else "    and:"] if found.conditions else []
        lines += [f"      - {condition}" for condition in found.conditions]
    return lines


def figures(found: Finding) -> str:
    """Claimed against floor and prediction in one line."""
    bound = "floor" if found.unit == "s" else "most"
    text = f"claimed {amount(found.claimed, found.unit)}; {bound} {amount(found.floor, found.unit)}"
    e = found.predicted
    if e is not None:
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
