"""Numbers as people read them: seconds, bytes, tokens and intervals with a unit that fits."""

from longread.plan.deployment import Deployment
from longread.plan.estimate import Estimate
from longread.spec.hardware import GIB as GIB
from longread.spec.hardware import Hardware

_TIMES = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (1e-6, 1e6, "us"), (0.0, 1e9, "ns"))


def seconds(value: float) -> str:
    """Three figures: 1.23 s, 45.6 ms, 7.89 us, 0.5 ns, 123 s, 0 s."""
    factor, unit = _unit(value)
    return f"{_three(value * factor)} {unit}"


def span(e: Estimate) -> str:
    """Centre and ends in the centre's unit: 1.9 s (1.2-3.4)."""
    factor, unit = _unit(e.centre)
    low, centre, high = (_two(x * factor) for x in (e.low, e.centre, e.high))
    return f"{centre} {unit}" if low == centre == high else f"{centre} {unit} ({low}-{high})"


def rate(e: Estimate) -> str:
    """Tokens/s: 1,230 (800-2,100)."""
    return f"{_two(e.centre)} ({_two(e.low)}-{_two(e.high)})"


def gib(size: float) -> str:
    """GiB with a decimal where that says something; MiB below a tenth."""
    if abs(size) < GIB / 10:
        return f"{size / 2**20:,.0f} MiB"
    return f"{size / GIB:,.1f} GiB" if abs(size) < 1000 * GIB else f"{size / GIB:,.0f} GiB"


def length(tokens: int) -> str:
    """Tokens in K where they are whole K: 512K, 1,048,576 -> 1M."""
    if tokens % 2**20 == 0 and tokens:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}K" if tokens % 1024 == 0 and tokens else f"{tokens:,}"


def summary(d: Deployment) -> str:
    """A deployment's split, and its experts where they are not the checkpoint's."""
    return d.strategy.label + ("" if d.experts == "native" else f", {d.experts} experts")


def place(h: Hardware) -> str:
    """What has the memory: a card, or the machine itself where it computes on its CPU."""
    return "machine" if h.card.architecture == "cpu" else "card"


def more_memory(h: Hardware) -> str:
    """What helps where something does not fit."""
    return "a machine with more memory" if place(h) == "machine" else "more cards"


def too_much(size: float, h: Hardware) -> str:
    """So many bytes over, of each card where there are cards."""
    return f"{gib(size)} too much" if place(h) == "machine" else f"{gib(size)} a card too much"


def _unit(value: float) -> tuple[float, str]:
    for least, factor, unit in _TIMES if value > 0 else ():
        if value >= least:
            return factor, unit
    return 1.0, "s"


def _two(value: float) -> str:
    return _rounded(value, 2)


def _three(value: float) -> str:
    return _rounded(value, 3)


def _rounded(value: float, figures: int) -> str:
    if value == 0:
        return "0"
    text = f"{value:.{figures}g}"
    return f"{float(text):,.0f}" if abs(float(text)) >= 10 ** (figures - 1) else f"{float(text):g}"
