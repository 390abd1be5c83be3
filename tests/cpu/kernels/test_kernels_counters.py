"""Counters that programs of a launch share: zeros, aligned whatever was asked for before, apart from the last ones."""

import pytest
import torch

from longread.kernels import counters as held


def test_each_begins_at_sixteen_bytes_and_apart_from_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "_held", {})
    monkeypatch.setattr(held, "COUNTERS", 64)
    last = range(0)
    for count in (1, 7, 3, 16, 5, 8, 30, 64, 2):
        row = held.counters(torch.device("cpu"), count)
        assert row.numel() == count and not row.any()
        assert row.data_ptr() % 16 == 0
        here = range(row.storage_offset(), row.storage_offset() + count)
        assert here.stop <= 64
        assert count == 64 or not set(here) & set(last) or here.start == 0
        last = here
