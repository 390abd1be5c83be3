"""Numbers as a reader wants them. Three digits, units that fit."""

import math

from longread.plan.figures import seconds as seconds


def size(value: float) -> str:
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{value:.0f} B"


def work(flops: float) -> str:
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= factor:
            return f"{_digits(flops / factor)} {unit}"
    return f"{_digits(flops / 1e6)} MFLOP"


def amount(value: float, unit: str) -> str:
    """A claimed, least or predicted figure in its unit."""
    if unit == "s":
        return seconds(value)
    return f"{_digits(value)} {unit}"


def tokens(value: float) -> str:
    """Whole tokens from ten up, below with a decimal; never more than they are."""
    return f"{int(value):,}" if value >= 10 else f"{math.floor(value * 10) / 10:g}"


def share(ratio: float) -> str:
    """Before "the peak": percent of it, or how many times it."""
    return f"{ratio:.0%} of" if ratio < 10 else f"{_digits(ratio)} times"


def many(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}" + ("" if count == 1 else "s")


def times(ratio: float) -> str:
    return f"{_digits(ratio)} times"


def _digits(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
