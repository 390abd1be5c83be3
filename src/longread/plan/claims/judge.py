"""The verdict on a claim: every statement on every machine and model it fits, and what would settle it."""

from dataclasses import replace

from longread.plan.claims.advice import measurement, other_meanings, questions
from longread.plan.claims.claim import Case, Claim, Finding, Outcome, Verdict, best, worst
from longread.plan.claims.first_token import judge_first_token
from longread.plan.claims.output import judge_output
from longread.plan.claims.plans import split_problem
from longread.plan.claims.residency import MEMORY, judge_memory
from longread.spec.errors import ConfigError
from longread.spec.hardware import Hardware
from longread.spec.model import ModelSpec

_ROUNDED = 0.006  # shares are given in whole percent
_MOST = {"isl": 1e9, "osl": 1e9, "ttft": 1e9, "tpot": 1e9, "concurrency": 1e5, "suffix": 1e9, "tokens/s": 1e12}


def judge(claim: Claim) -> Verdict:
    """Raises ``ConfigError`` for a claim that says nothing that can be judged."""
    check(claim)
    cases = tuple(_case(claim, spec, hardware) for spec in claim.specs for hardware in claim.hardware)
    return Verdict(
        claim,
        best([case.outcome for case in cases]),
        cases,
        tuple(other_meanings(claim)),
        tuple(measurement(claim)),
        tuple(questions(claim)),
    )


def check(claim: Claim) -> None:
    """Raises ``ConfigError`` where something needed is missing or two statements exclude each other."""
    if not claim.hardware:
        raise ConfigError("the claim names no hardware; add such as 8xH20 (or --hardware 8xH20-96)")
    if claim.ttft is not None and claim.isl is None:
        raise ConfigError("the claim has a first-token time but no prompt length; add such as 512K (or --isl 524288)")
    if claim.ttft is None and claim.tpot is None and claim.rate is None and claim.isl is None:
        raise ConfigError(
            "the claim states nothing to judge; give a time to the first token or per token, tokens/s, or a context"
        )
    if claim.cached is not None and not 0 <= claim.cached <= 1:
        raise ConfigError(f"a prefix of {claim.cached:.3g} is outside 0..1 (0.98 or 98%)")
    if claim.suffix is not None and claim.isl is not None and claim.suffix > claim.isl:
        raise ConfigError(f"a suffix of {claim.suffix:,} tokens is longer than the whole prompt of {claim.isl:,}")
    if claim.suffix is not None and claim.cached is not None and claim.isl is not None:
        told = claim.isl - int(claim.isl * claim.cached)
        if abs(told - claim.suffix) > max(_ROUNDED * claim.isl, 1):
            raise ConfigError(
                f"a prefix of {claim.cached:.3g} leaves {told:,} of {claim.isl:,} tokens new, and the suffix is "
                f"{claim.suffix:,}; drop one of them"
            )
    if claim.state == "warm" and (claim.cached == 0 or (claim.suffix is not None and claim.suffix == claim.isl)):
        raise ConfigError("the claim says warm, and that nothing of the prompt was read before; drop one of them")
    if claim.state == "cold" and (claim.cached or (claim.suffix is not None and claim.suffix != claim.isl)):
        raise ConfigError("the claim says cold, and that part of the prompt was read before; drop one of them")
    for name, most in _MOST.items():
        value = claim.rate.value if name == "tokens/s" and claim.rate is not None else getattr(claim, name, None)
        if value is not None and not 0 < value <= most:
            raise ConfigError(f"{name} must be above 0 and at most {most:,.0f}, not {value:,.6g}")


def _case(claim: Claim, spec: ModelSpec, hardware: Hardware) -> Case:
    memory = judge_memory(claim, spec, hardware)
    first = [] if claim.ttft is None else judge_first_token(claim, spec, hardware)
    findings = [*first, *judge_output(claim, spec, hardware), memory]
    groups: dict[str, list[Outcome]] = {}
    for found in findings:
        groups.setdefault(found.group, []).append(found.outcome)
    # Contexts in turn need room for one; only a claim about nothing but memory stands or falls with all of them.
    parts = [best(outcomes) for name, outcomes in groups.items() if name != MEMORY]
    if memory.outcome == "impossible" or not parts:
        parts.append(memory.outcome)
    elif memory.outcome == "only if":
        one = memory if claim.streams == 1 else judge_memory(replace(claim, concurrency=1), spec, hardware)
        parts.append(one.outcome if one.outcome == "only if" else "conservative")
    outcome = worst(parts)
    return Case(
        spec.label or spec.family,
        hardware.label,
        outcome,
        _headline(findings, outcome),
        tuple(findings),
        _notes(claim, spec, hardware),
    )


def _headline(findings: list[Finding], outcome: Outcome) -> str:
    """One sentence: each statement's outcome."""
    said = "; ".join(f"{f.aspect}: {f.outcome}" for f in findings)
    return f"{outcome} ({said})"


def _notes(claim: Claim, spec: ModelSpec, hardware: Hardware) -> tuple[str, ...]:
    notes = []
    problem = split_problem(claim, spec, hardware)
    if problem is not None:
        notes.append(f"the claimed split cannot be run: {problem}")
    if claim.isl is not None and claim.isl > spec.max_position:
        notes.append(
            f"{claim.isl:,} tokens are {claim.isl / spec.max_position:.1f} times the {spec.max_position:,} that "
            f"{spec.label} was made for: speed can be shown, quality cannot be assumed; engines refuse it by default"
        )
    return tuple(notes)
