"""What predicted times mean: whether targets are met, what binds, how candidates rank, what a runner-up loses.

Knows intervals and targets; predicts nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from longread.plan.candidate import Binding, Candidate, Grade
from longread.plan.deployment import Workload
from longread.plan.estimate import Estimate
from longread.plan.evaluate import Times
from longread.plan.space import other_checkpoint, simplicity

GRADES: tuple[Grade, ...] = ("no", "unlikely", "likely", "yes")
EQUAL = 1.10  # throughput and times closer than this rank as equal: less than any interval here is wide
HOPELESS = 4.0
TOLD = 1.05  # what differs by less is not mentioned
RULE = (
    "engines that exist for this hardware first; then the checkpoint as it is released; then all requests at once in "
    "memory; then the worst of the targets "
    "(yes, likely, unlikely, no by the interval; misses by how far, up to 4 times); then the release's own precision; "
    "then output tokens/s; then the first token at load; then the longest stall between tokens; then fewer things to "
    "run. Within 10 % counts as equal."
)
_RESOURCES = {
    "interconnect": ("all-reduce", "all-to-all", "all-gather", "hand-over"),
    "pipeline fill": ("pipeline fill",),
    "host link": ("load host",),
    "disk": ("load disk",),
    "CPU before the engine": ("receive", "parse", "render", "tokenise", "hash and lookup"),
    "kernel issue": ("issue of kernels", "step overhead", "first byte"),
}


def grade(estimate: Estimate, target: float) -> Grade:
    if estimate.high <= target:
        return "yes"
    if estimate.centre <= target:
        return "likely"
    return "unlikely" if estimate.low <= target else "no"


def verdicts(w: Workload, t: Times, sessions: int) -> dict[str, Grade]:
    """By concurrency and by each target that was given, at load."""
    found: dict[str, Grade] = {"concurrency": "yes" if sessions >= w.concurrency else "no"}
    if w.ttft_target is not None:
        found["ttft"] = grade(t.load, w.ttft_target)
    if w.tpot_target is not None:
        found["tpot"] = grade(t.steady, w.tpot_target)
    return found


def missed(c: Candidate) -> bool:
    """Whether a target of seconds is likely missed."""
    return any(found in ("no", "unlikely") for name, found in c.meets.items() if name != "concurrency")


def targets(w: Workload, t: Times) -> dict[str, tuple[Estimate, float]]:
    pairs = {"TTFT": (t.load, w.ttft_target), "TPOT": (t.steady, w.tpot_target)}
    return {name: (estimate, target) for name, (estimate, target) in pairs.items() if target is not None}


def binding(w: Workload, t: Times, sessions: int) -> Binding:
    """The least spare of memory and targets; without targets memory binds only where it is short."""
    memory = Binding(
        "memory",
        w.concurrency,
        sessions,
        "sessions",
        sessions / w.concurrency,
        f"{sessions:,} sequences of {w.isl + w.osl:,} tokens fit at once",
    )
    found = [memory]
    for name, (estimate, target) in targets(w, t).items():
        why = _first_token(t) if name == "TTFT" else _between(t)
        found.append(Binding(name, estimate.centre, target, "s", target / max(estimate.centre, 1e-12), why))
    worst = min(found, key=lambda b: b.margin)
    if len(found) == 1 and memory.margin >= 1:
        why = _first_token(t) if t.reading > 0.5 else _between(t)
        return Binding("speed", t.rate.centre, t.rate.floor, "tokens/s", 1.0, why)
    return worst


def _first_token(t: Times) -> str:
    share = t.first.total.centre / max(t.load.centre, 1e-12)
    if share < 0.5:
        return f"waiting for other prompts {1 - share:.0%}; of its own time {dominant(t.first.parts)}"
    return dominant(t.first.parts)


def _between(t: Times) -> str:
    share = t.alone.total.centre / max(t.steady.centre, 1e-12)
    if share < 0.5:
        return f"others' prompts read between tokens {1 - share:.0%}"
    return dominant(t.alone.parts)


def dominant(parts: Mapping[str, Estimate]) -> str:
    """The largest resource of a time, and its largest part."""
    whole = sum(e.centre for e in parts.values()) or 1.0
    by: dict[str, float] = {}
    for name, e in parts.items():
        by[resource(name)] = by.get(resource(name), 0.0) + e.centre
    kind = max(by, key=lambda key: by[key])
    part = max((name for name in parts if resource(name) == kind), key=lambda name: parts[name].centre)
    share = f"{by[kind] / whole:.0%}"
    return f"{kind} {share}" + (f", most of it {part}" if part != kind else "")


def resource(part: str) -> str:
    """What a part of a time is spent on."""
    for name, words in _RESOURCES.items():
        if any(word in part for word in words):
            return name
    return "queue" if part == "queue" else "device"


def ranked(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best first, by ``RULE``: each criterion splits what the one before left equal."""
    return _split(list(candidates), _CRITERIA)


def _split(candidates: list[Candidate], criteria: Sequence[Callable[[Candidate], float]]) -> list[Candidate]:
    """By the first criterion (less is better) into those within ``EQUAL`` of the best, of the next best, and so on."""
    if len(candidates) < 2 or not criteria:
        return candidates
    left, result = sorted(candidates, key=criteria[0]), []
    while left:
        best = criteria[0](left[0])
        group = [c for c in left if criteria[0](c) <= best + _NEAR]
        result += _split(group, criteria[1:])
        left = left[len(group) :]
    return result


def _worst(c: Candidate) -> float:
    grades = [GRADES.index(g) for name, g in c.meets.items() if name != "concurrency"]
    return -min(grades, default=len(GRADES) - 1)


def _miss(c: Candidate) -> float:
    """Beyond ``HOPELESS`` times a target nobody is served better by a little less."""
    if not missed(c):
        return 0.0
    return min(max(math.log(e.centre / t) for e, t in targets(c.workload, c.times).values()), math.log(HOPELESS))


def _short(c: Candidate) -> float:
    """Everybody in memory is enough; otherwise more is better."""
    return 0.0 if c.sessions >= c.workload.concurrency else -math.log(c.sessions)


_NEAR = math.log(EQUAL)
# Ratios as logarithms, so that one distance holds for all; whole numbers differ by more than it.
_CRITERIA: tuple[Callable[[Candidate], float], ...] = (
    lambda c: not c.runs_today,
    lambda c: other_checkpoint(c.deployment) != "",
    _short,
    _worst,
    _miss,
    lambda c: len(c.lossy),
    lambda c: -math.log(max(c.score, 1e-12)),
    lambda c: math.log(c.times.load.centre),
    lambda c: math.log(c.times.stall.centre),
    lambda c: simplicity(c.deployment),
    lambda c: c.times.first.total.centre,
)


def lost(best: Candidate, other: Candidate) -> str:
    """In words, what ``other`` gives up against ``best``, and what it gains."""
    worse, better = [], []
    for words, ratio in _ratios(best, other):
        if ratio > TOLD:
            worse.append(words)
        elif ratio < 1 / TOLD:
            better.append(words)
    if other.lossy and not best.lossy:
        worse.append("lossy")
    if other_checkpoint(other.deployment) and not other_checkpoint(best.deployment):
        worse.append("needs another checkpoint")
    if not other.runs_today:
        worse.insert(0, "a prediction that does not know its engine's kernels")
    if not worse and not better:
        more = simplicity(other.deployment) - simplicity(best.deployment)
        return "equal within 5 %" + (f", with {more} more things to run" if more > 0 else "")
    text = "; ".join(worse) or "nothing above 5 %"
    if better:
        text += f" (but {', '.join(better)})"
    if worse and best.deployment.engine != other.deployment.engine and _overlap(best, other):
        text += "; the intervals overlap"
    return text


def _ratios(best: Candidate, other: Candidate) -> list[tuple[str, float]]:
    """Comparisons as words, with how many times worse ``other`` is."""
    a, b = best.times, other.times
    rows = [
        (f"{_change(b.rate.centre, a.rate.centre)} tokens/s", a.rate.centre / max(b.rate.centre, 1e-12)),
        (f"TTFT at load {_change(b.load.centre, a.load.centre)}", b.load.centre / max(a.load.centre, 1e-12)),
        (f"TPOT {_change(b.steady.centre, a.steady.centre)}", b.steady.centre / max(a.steady.centre, 1e-12)),
        (
            f"{other.sessions:,} sessions instead of {best.sessions:,}",
            best.sessions / max(other.sessions, 1),
        ),
    ]
    if other.sessions >= other.workload.concurrency and best.sessions >= best.workload.concurrency:
        rows.pop()  # both hold everybody: more room is not what was asked for
    return rows


def _change(new: float, old: float) -> str:
    ratio = new / max(old, 1e-12)
    return f"{ratio:.1f}x" if ratio >= 2 or ratio < 0.1 else f"{ratio - 1:+.0%}"


def _overlap(best: Candidate, other: Candidate) -> bool:
    a, b = best.times.rate, other.times.rate
    return b.high >= a.low and a.high >= b.low
