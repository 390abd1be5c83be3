"""Plan against measured against floor: what a plan of ``longread plan --json`` said of the load that a run had.

Knows the plan's document (schema longread.plan/1) and runs; trusts no value of either. What was not the same load is
not compared, and the reason is told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longread.measure.report.numbers import amount, items, mapping, plain, words
from longread.measure.report.run import Run
from longread.plan.drawing import Bar, Picture, bars
from longread.plan.figures import seconds

CLOSE = 0.1  # how far lengths may be apart
WARM = 0.5  # cached share from which a run alone is compared with the plan's warm time
_STYLES = {"floor": 7, "plan": 5, "measured": 0, "red": 6}


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity of one run, in seconds (or tokens/s). ``which``: the plan's case; ``low``, ``high``: its ends."""

    run: Run
    quantity: str
    which: str
    engine: str
    floor: float | None
    low: float
    plan: float
    high: float
    measured: float

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high


def lines(name: str, plan: Mapping[str, object], runs: Sequence[Run]) -> tuple[list[Line], list[str]]:
    """What can be compared, and why the rest is not."""
    found: list[Line] = []
    said: list[str] = []
    feasible = [mapping(each) for each in items(plan.get("feasible"))]
    if not feasible:
        return [], [f"{name}: holds no plan that fits, so nothing is compared with it"]
    load = mapping(plan.get("workload"))
    for run in runs:
        engine = run.part("server", "engine")
        candidate = next((each for each in feasible if _engine(each) == engine), feasible[0])
        if _engine(candidate) != engine:
            told = f"{run.label} ran on {words(engine) or 'an unknown engine'}, for which {name} has no plan: "
            said.append(
                f"{told}it is compared with the best one, of {words(_engine(candidate)) or 'an unknown engine'}"
            )
        why = _other_load(run, load)
        if why is not None:
            said.append(f"{run.label} is not compared with {name}: {why}")
            continue
        found += _lines(run, candidate, load)
    return found, said


def planned(plan: Mapping[str, object]) -> str:
    """What was planned, in words."""
    parts = (plan.get("model"), mapping(plan.get("hardware")).get("label"))
    return " on ".join(text for text in map(words, parts) if text)


def _of(candidate: Mapping[str, object]) -> str:
    deployment = mapping(candidate.get("deployment"))
    parts = (deployment.get("engine"), mapping(deployment.get("strategy")).get("label"))
    return " ".join(text for text in map(words, parts) if text) or "unnamed"


def _engine(candidate: Mapping[str, object]) -> object:
    return mapping(candidate.get("deployment")).get("engine")


def _other_load(run: Run, load: Mapping[str, object]) -> str | None:
    planned, real = amount(load.get("isl")), run.load.get("context")
    if planned is None or real is None:
        return "the length of its prompts is not known"
    if abs(real / max(planned, 1.0) - 1) > CLOSE:
        return f"its prompts had {plain(real)} tokens on average, the plan's have {plain(planned)}"
    return None


def _lines(run: Run, candidate: Mapping[str, object], load: Mapping[str, object]) -> list[Line]:
    at_once, planned = run.load.get("concurrency"), amount(load.get("concurrency"))
    ttft, tpot = mapping(candidate.get("ttft")), mapping(candidate.get("tpot"))
    cases: list[tuple[str, str, object, float | None, float]] = []
    first, each = run.figures.get("ttft"), run.figures.get("tpot")
    if at_once is not None and at_once == planned:
        cases.append(("TTFT", "at load", ttft.get("at_load"), first.mean if first else None, 1000.0))
        cases.append(("TPOT", "at load", tpot.get("at_load"), each.mean if each else None, 1000.0))
        cases.append(
            ("output tokens/s", "at load", candidate.get("throughput"), run.rates.get("output_throughput"), 1.0)
        )
    elif at_once == 1:
        warm = (amount(run.part("cached_tokens", "share")) or 0.0) >= WARM and ttft.get("warm") is not None
        which = "warm" if warm else "cold"
        cases.append(("TTFT", f"alone, {which}", ttft.get(which), first.mean if first else None, 1000.0))
        cases.append(("TPOT", "alone", tpot.get("alone"), each.mean if each else None, 1000.0))
    found = []
    for quantity, which, told, value, factor in cases:
        estimate = mapping(told)
        ends = [amount(x) for x in items(estimate.get("interval"))]
        if value is not None and len(ends) == 3 and None not in ends:
            low, centre, high = (x or 0.0 for x in ends)
            found.append(
                Line(
                    run,
                    quantity,
                    which,
                    _of(candidate),
                    amount(estimate.get("floor")),
                    low,
                    centre,
                    high,
                    value / factor,
                )
            )
    return found


def show(line: Line, value: float) -> str:
    return f"{plain(value)} tokens/s" if "tokens" in line.quantity else seconds(value)


def bound(line: Line) -> str:
    """A time has a floor, a rate a ceiling."""
    return "ceiling" if "tokens" in line.quantity else "floor"


def picture(found: Sequence[Line], quantity: str, key: str) -> Picture | None:
    """Bars of floor, plan and measured of one quantity, the plan's interval in words."""
    chosen = [each for each in found if each.quantity == quantity]
    if not chosen:
        return None
    rows, values = [], []
    whole = max(max(each.plan, each.measured, each.floor or 0.0) for each in chosen) or 1.0
    for case in dict.fromkeys(each.which for each in chosen):
        same = [each for each in chosen if each.which == case]
        first = same[0]
        if first.floor:
            rows.append(
                Bar(f"{bound(first)}: {show(first, first.floor)}", ((bound(first), first.floor, _STYLES["floor"]),))
            )
        span = f"{show(first, first.low)} to {show(first, first.high)}"
        rows.append(
            Bar(
                f"plan, {case}, {first.engine}: {show(first, first.plan)} ({span})",
                (("plan", first.plan, _STYLES["plan"]),),
            )
        )
        for each in same:
            style = _STYLES["red" if each.run.red else "measured"]
            red = ", failed the quality gate" if each.run.red else ""
            rows.append(
                Bar(f"{each.run.label}: {show(each, each.measured)}{red}", (("measured", each.measured, style),))
            )
            inside = "inside" if each.inside else "outside"
            values.append(f"{each.run.label}: {show(each, each.measured)}, {inside} the plan's {span}")
    unit = chosen[0]
    svg = bars(
        f"plan-{key}", f"{quantity}: plan, measured and floor", "; ".join(values), rows, whole, lambda v: show(unit, v)
    )
    legend = ((7, f"{bound(unit)}: all cards at their peak"), (5, "plan"), (0, "measured"))
    return Picture(
        svg, f"{quantity}: what physics allows, what the plan said, what was measured.", legend, tuple(values)
    )
