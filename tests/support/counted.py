"""Counts of work, where a test would else measure time."""

from collections import Counter
from types import ModuleType

import pytest


def counted(monkeypatch: pytest.MonkeyPatch, *places: tuple[ModuleType, str]) -> Counter[str]:
    """From now on each call of a module's function counts under its name."""
    counts: Counter[str] = Counter()
    for module, name in places:
        monkeypatch.setattr(module, name, _counting(counts, name, getattr(module, name)))
    return counts


def _counting(counts: Counter[str], name: str, function):
    def call(*args, **options):
        counts[name] += 1
        return function(*args, **options)

    return call
