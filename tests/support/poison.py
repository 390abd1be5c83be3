"""Uninitialised memory made visible: every new tensor begins as NaN, so a row nobody wrote is seen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory() -> Iterator[None]:
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")  # what the fill hangs on
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.utils.deterministic.fill_uninitialized_memory = before
