"""What a step costs, as the log says it."""

from longread.engine.calibrate import told
from longread.spec.cost import StepCost


def test_costs_are_told_in_units_that_fit() -> None:
    said = told(StepCost(4.39, 0.0121, 2e-9, 0.0, 4.4e-6, 3e-12))
    assert said.startswith("4.39 s, 12.1 ms a decoding sequence and 2 us a 1,000 tokens of its context")
    assert "e-" not in said and "e+" not in said
