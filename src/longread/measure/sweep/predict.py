"""How long a sweep will take, from one request alone and from the points so far.

Pure arithmetic. Said as a span: from a server that serves requests beside one another for nothing to one that serves
them one after another.
"""

import math
from collections.abc import Sequence

from longread.measure.sweep.axis import Name


def requests(axis: Name, value: float, wanted: int, waves: int, seconds: float) -> int:
    """Requests of a point: ``wanted``, but at least ``waves`` a slot of a closed loop, or ``seconds`` of a rate."""
    if axis == "concurrency":
        return max(wanted, math.ceil(waves * value))
    return max(wanted, math.ceil(seconds * value))


def span(axis: Name, loads: Sequence[tuple[float, int]], alone: float) -> tuple[float, float]:
    """Seconds of points of (load, requests), when one request alone takes ``alone`` seconds: least, most."""
    least = most = 0.0
    for load, count in loads:
        one_by_one = count * alone
        if axis == "concurrency":
            least += one_by_one / min(load, count)
            most += one_by_one
        else:
            least += count / load + alone
            most += max(count / load, one_by_one) + alone
    return least, most


def left(axis: Name, loads: Sequence[tuple[float, int]], throughput: float, alone: float) -> float:
    """Seconds of what is left, at the best ``throughput`` (requests/s) seen so far."""
    total = 0.0
    for load, count in loads:
        rate = min(load, throughput) if axis == "rate" else throughput
        total += count / rate + alone if rate > 0 else 0.0
    return total


def duration(seconds: float) -> str:
    """``45 s``, ``3 min``, ``2.1 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
