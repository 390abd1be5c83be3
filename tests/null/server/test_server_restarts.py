"""When an engine that died is made again."""

from longread.server.restarts import Restarts


def test_the_wait_doubles_up_to_its_limit() -> None:
    restarts = Restarts(first=0.5, most=3.0, deaths=100, useful=60)
    assert [restarts.died(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_a_useful_life_begins_a_new_row() -> None:
    restarts = Restarts(first=0.5, deaths=3, useful=60)
    assert [restarts.died(life) for life in (0, 0, 60, 0, 59, 0.9)] == [0.5, 1.0, 0.5, 1.0, 2.0, None]


def test_a_crash_loop_is_given_up() -> None:
    restarts = Restarts(deaths=5, useful=60)
    assert [restarts.died(11.9) for _ in range(5)][3:] == [4.0, None]
    assert "5 times within 60 s" in restarts.told()
    steady = Restarts(deaths=5, useful=60)
    assert None not in [steady.died(12.0) for _ in range(100)]
