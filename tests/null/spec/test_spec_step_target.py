"""How long a step may be: chosen by measured curves, bounded by promises, and told with its reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longread.spec.config import Slo
from longread.spec.cost import StepCost
from longread.spec.step_target import (
    LONGEST,
    LOSS,
    SHORTEST,
    STARTS,
    STEP_LAUNCHES,
    STRETCH,
    UNSURE,
    UTMOST,
    Bounds,
    StepTarget,
    bounds,
    current_target,
    least_seconds,
    quick_step,
)

SIZES = (32, 64, 128, 256, 512)
COST = StepCost(launch=0.01, decode=0.001, context=1e-7, chunk=0.002, token=2e-4, pair=1e-8)


@given(launch=st.floats(1e-4, 0.1), token=st.floats(1e-5, 1e-3), flat=st.booleans())
def test_the_chosen_step_reads_nearly_at_the_best_rate_and_a_shorter_one_does_not(
    launch: float, token: float, flat: bool
) -> None:
    """On a CPU (each step starts and then takes its time) and on a card (no step is shorter than its launches)."""

    def seconds(n: float) -> float:
        return max(launch, token * n) if flat else launch + token * n

    found = quick_step([[(n, seconds(n)) for n in SIZES]]).seconds
    longest = min(max(LONGEST, STARTS * seconds(32)), UTMOST)
    assert found is not None and SHORTEST <= found <= longest
    best = 512 / seconds(512)

    def rate(of: float) -> float:  # of the largest step that takes so long
        return (of if flat else of - launch) / token / of if of >= launch else 0.0

    if found < longest:
        # Between the measured sizes of a card the line is drawn too high: a step may be too long, never too short.
        assert rate(found * 1.001) >= (1 - LOSS) * best * 0.999 or found == pytest.approx(seconds(32))
    if SHORTEST < found < longest and not flat and found > seconds(32) * 1.01:
        assert rate(found * 0.95) < (1 - LOSS) * best


def test_a_larger_step_that_was_faster_shows_that_a_smaller_one_was_disturbed() -> None:
    clean = [(n, 0.02 + 1e-3 * n) for n in SIZES]
    disturbed = [(n, 9.0 if n == 64 else seconds) for n, seconds in clean]
    assert quick_step([disturbed]).seconds == pytest.approx(quick_step([clean]).seconds, rel=0.05)


def test_the_longest_of_several_curves_decides_within_what_anybody_wants() -> None:
    short, long = [(n, 0.02 + 2e-4 * n) for n in SIZES], [(n, 0.022 + 2e-4 * n) for n in SIZES]
    assert quick_step([short, long]) == quick_step([long, short]) == quick_step([long])
    assert quick_step([long]).seconds > quick_step([short]).seconds  # type: ignore[operator]
    slow = quick_step([[(n, 0.03 + 1e-3 * n) for n in SIZES]])
    assert slow.seconds == pytest.approx(STARTS * 0.062) and "at most 124 ms" in slow.reason
    assert quick_step([[(n, 1.0 + 1e-3 * n) for n in SIZES]]).seconds == UTMOST
    fast = quick_step([[(n, 1e-6 * n) for n in SIZES]])
    assert fast.seconds == SHORTEST and "at least 75 ms" in fast.reason


@pytest.mark.parametrize("curves", [[], [[]], [[(32, 0.1), (64, 0.11)]], [[(n, 0.0) for n in SIZES]]])
def test_what_was_not_measured_is_not_made_up(curves: list[list[tuple[int, float]]]) -> None:
    found = quick_step(curves)
    assert found.seconds == UNSURE and "could not be measured" in found.reason


def test_a_busy_machine_makes_no_step_long() -> None:
    curve = [(n, 0.5 + 1e-3 * n) for n in SIZES]
    assert quick_step([curve], sure=False).seconds == UNSURE
    assert quick_step([curve], sure=False).reason.endswith("on a busy machine")


def test_promises_are_kept_and_the_own_target_is_stretched() -> None:
    assert bounds(Slo(), None, COST, 3) == Bounds(None, None)
    assert bounds(Slo(), 0.1, COST, 0) == Bounds(0.1, STRETCH * 0.1)
    assert bounds(Slo(), 0.1, None, 0) == Bounds(0.1, STRETCH * 0.1)
    assert bounds(Slo(), 0.01, COST, 0).target == STEP_LAUNCHES * COST.launch
    assert bounds(Slo(tpot=0.15), 0.1, COST, 2) == Bounds(0.1, 0.15)
    assert bounds(Slo(tpot=0.02), 0.1, COST, 2) == Bounds(0.02, 0.02)
    assert bounds(Slo(tpot=0.02), 0.1, COST, 0) == Bounds(0.1, STRETCH * 0.1)
    assert bounds(Slo(ttft=0.4), 0.3, COST, 0) == bounds(Slo(ttft=0.4), None, COST, 5) == Bounds(0.1, 0.1)
    assert bounds(Slo(0.4, 0.05), None, COST, 5) == Bounds(0.05, 0.05)


def test_the_least_step_spends_as_much_on_its_prompt_as_on_starting() -> None:
    decodes = (4, 1000)
    for_prompt = least_seconds(COST, decodes) - COST.seconds(decodes) - COST.chunk
    assert for_prompt == pytest.approx(COST.launch + COST.chunk)


def test_what_bounds_a_step_now_is_named() -> None:
    chosen = StepTarget(0.1, "as measured")
    assert current_target(Slo(), chosen, COST, 0) == chosen
    assert current_target(Slo(), chosen, None, 0).seconds is None
    assert current_target(Slo(), StepTarget(None, "as given"), COST, 4) == StepTarget(None, "as given")
    assert "TPOT" in current_target(Slo(tpot=0.05), chosen, COST, 2).reason
    assert current_target(Slo(tpot=0.05), chosen, COST, 0) == chosen
    assert "TTFT" in current_target(Slo(ttft=0.2), chosen, COST, 1).reason
    assert "starting a step" in current_target(Slo(), StepTarget(0.01, "as given"), COST, 0).reason
