"""What every test gets: a floor marker from its folder, a clean environment, and GPU tests skipped where there is none.

Property tests take the profile "quick" (the same few examples each time), or with ``--hypothesis-profile=thorough`` ten
times as many, random ones. Tests state no number of examples of their own, unless one example is unusually dear.

The ``null`` floor must not import torch, so the CUDA probe is deferred to the first GPU test that is about to run.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
FLOORS = ("null", "cpu", "gpu")

# No deadline in either: a machine that something else uses too must not fail a test.
_CALM = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", parent=_CALM, derandomize=True, max_examples=30)
settings.register_profile("thorough", parent=_CALM, max_examples=300)
settings.load_profile("quick")  # hypothesis' own plugin reads --hypothesis-profile after this file, so the option wins


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(TESTS).parts if item.path.is_relative_to(TESTS) else ()
        if parts and parts[0] in FLOORS:
            item.add_marker(parts[0])
        else:
            raise pytest.UsageError(f"{item.path}: tests live under tests/{{{','.join(FLOORS)}}}/")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or os.environ.get("TRITON_INTERPRET") == "1":
        return  # Triton's interpreter runs kernels on a CPU
    import torch  # only here: the null floor runs where torch is not installed

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False on this machine")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's LONGREAD_* settings must not change what a test sees."""
    for name in [n for n in os.environ if n.startswith("LONGREAD_")]:
        monkeypatch.delenv(name)
