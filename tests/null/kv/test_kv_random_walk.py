"""Random walks of the prefix cache against the naive cache (see kv_walk): no wrong hit, no lost hit, no lost page."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kv_contents import WITH_RINGS
from kv_walk import Walk


class RingWalk(Walk):
    groups = WITH_RINGS


@pytest.mark.null
@pytest.mark.parametrize("walk", [Walk, RingWalk])
def test_random_walk(walk: type[Walk]) -> None:
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=settings.default.max_examples * 2 // 3,  # a walk is thirty examples in one
            stateful_step_count=30,
            database=None,
            phases=[Phase.explicit, Phase.generate],  # shrinking a walk takes minutes: add it by hand
            suppress_health_check=list(HealthCheck),
        ),
    )
