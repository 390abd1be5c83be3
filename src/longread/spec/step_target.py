"""How long a step may be: one rule for the schedule, for admission, which predicts the schedule, and for the simulator.

Knows targets, what a step costs, and what steps of several sizes were measured at. Must not know prompts or clocks.

Whoever comes waits for the end of the running step, so steps should be short; but starting one costs, so short ones
read more slowly. Where the user leaves the choice open, a step is as long as the smallest chunk that is still read
within ``LOSS`` of the best rate. That is measured at several sizes and not derived from a linear cost: on a GPU a step
takes the same time up to some hundred tokens, on a CPU the threads' barriers cost what they cost. And it is measured
deep in a book, too: a chunk reads what was kept of all that is before it, so that small ones become dearer on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longread.spec.config import Slo
from longread.spec.cost import StepCost

LOSS = 0.1  # of the best rate that was measured; where it was measured deep in a book, the whole book loses less
SHORTEST, LONGEST = 0.075, 0.1  # seconds; less is not noticed, and more makes a chat's first token 2.5 times as late
STARTS = 2  # times the smallest step that was measured is what a step may take instead: no step is shorter anyhow
UTMOST = 0.25  # seconds, even so
UNSURE = 0.1  # where the machine was too busy to be measured
WIDTH = 4  # times its smallest size a curve must reach
STEP_LAUNCHES = 5  # times the time of starting a step is the least target: machines become busy later, too
STRETCH = 2  # times its target a step may take where every prompt that is waited for ends with it
LEAST_TOKENS = 16  # of prompts in a step, whatever its target is

Curve = Sequence[tuple[int, float]]  # (tokens, seconds) of steps of one chunk, all behind equally many tokens


@dataclass(frozen=True, slots=True)
class StepTarget:
    """``seconds`` that a step may take (None: any), and why."""

    seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one step, in seconds: what it should take, and the ``most`` it may take if it brings all first tokens that are
    waited for. None: any.
    """

    target: float | None = None
    most: float | None = None


def bounds(slo: Slo, step_target: float | None, cost: StepCost | None, rows: int) -> Bounds:
    """The bounds of a step beside ``rows`` decoding rows: the SLO's targets are promises, the step's own is none."""
    promised = [slo.tpot] if rows and slo.tpot is not None else []
    if slo.step is not None:
        promised.append(slo.step)
    if slo.step is not None or step_target is None:
        most = min(promised, default=None)
        return Bounds(most, most)
    own = max(step_target, STEP_LAUNCHES * cost.launch if cost is not None else 0.0)
    return Bounds(min((own, *promised)), min((STRETCH * own, *promised)))


def slice_seconds(slo: Slo, longest: float, cost: StepCost | None, decodes: tuple[int, int]) -> float:
    """How long a chunk, at most ``longest``, may keep ``decodes`` (rows, tokens of their contexts) waiting between two
    steps: what a TPOT target leaves beside such a step.
    """
    if slo.tpot is None:
        return longest
    return max(0.0, min(longest, slo.tpot - (cost.decode_seconds(*decodes) if cost is not None else 0.0)))


def least_seconds(cost: StepCost, decodes: tuple[int, int], prefix: int = 0) -> float:
    """What a step with a prompt behind ``prefix`` tokens takes whatever its target is: as much for the prompt as for
    starting both.
    """
    return cost.seconds(decodes) + 2 * (cost.chunk + cost.prefix * prefix) + cost.launch


def quick_step(curves: Sequence[Curve], sure: bool = True) -> StepTarget:
    """The target by measured curves, each of ascending sizes: long enough for each of them, within what whoever comes
    can bear. ``sure``: the machine was quiet enough to be measured. A curve that ends early shows no best rate.
    """
    seconds, smallest, told = 0.0, UTMOST, ""
    for curve in curves:
        if not curve or curve[-1][0] < WIDTH * curve[0][0] or any(taken <= 0 for _, taken in curve):
            continue
        size, taken = _smallest_quick(curve)
        smallest = min(smallest, curve[0][1])
        if taken > seconds:
            seconds = taken
            told = f"{size:,} tokens in {taken * 1e3:.0f} ms, against {curve[-1][0]:,} in {curve[-1][1] * 1e3:.0f} ms"
    if not told:
        return StepTarget(UNSURE, "the usual: steps of several sizes could not be measured at the start")
    longest = min(max(LONGEST, STARTS * smallest), UTMOST) if sure else UNSURE
    found = min(max(seconds, SHORTEST), longest)
    reason = f"the smallest step that reads within {LOSS:.0%} of the best rate: {told}, measured at the start"
    if found != seconds:
        reason += f"; at least {SHORTEST * 1e3:g} ms" if found > seconds else f"; at most {found * 1e3:.0f} ms"
    return StepTarget(found, reason if sure else reason + ", on a busy machine")


def _smallest_quick(curve: Curve) -> tuple[int, float]:
    """(tokens, seconds) of the smallest step within ``LOSS`` of the curve's best rate, linear between its points. A
    larger step that was faster shows that a smaller one was disturbed.
    """
    points = list(curve)
    for i in range(len(points) - 2, -1, -1):
        points[i] = points[i][0], min(points[i][1], points[i + 1][1])
    least = (1 - LOSS) * max(size / taken for size, taken in points)
    before: tuple[int, float] | None = None
    for size, taken in points:
        if size / taken >= least:
            break
        before = size, taken
    if before is None:
        return size, taken
    # Where the line between the two points reaches the rate: n = least * t(n).
    slope = (taken - before[1]) / (size - before[0])
    exact = least * (before[1] - slope * before[0]) / (1 - least * slope)
    return round(exact), exact / least


def current_target(slo: Slo, step_target: StepTarget, cost: StepCost | None, rows: int) -> StepTarget:
    """What bounds a step beside ``rows`` decoding rows now, and why."""
    target = bounds(slo, step_target.seconds, cost, rows).target
    if target is None or cost is None:
        return StepTarget(None, step_target.reason)
    if rows and target == slo.tpot:
        return StepTarget(target, "the TPOT target of --slo")
    if target == slo.step:
        return StepTarget(target, "a quarter of the TTFT target of --slo")
    if target != step_target.seconds:
        return StepTarget(target, f"{STEP_LAUNCHES} times what starting a step takes by now")
    return StepTarget(target, step_target.reason)
