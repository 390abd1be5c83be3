"""Which factor multiplies a raw time: the runs' (``calibrate``), kept in order where their groups would contradict.

Groups of runs are fitted apart, so two neighbours may disagree by more than what separates them. A faster card is never
planned slower than one it beats in every figure, and more new tokens never cheaper than fewer. Both only move a centre
towards its neighbour's; no end of an interval is drawn in.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from longread.plan.calibrate import WARM_TOKENS, Factors, Phase, Scale, default_factors, path_of, phase
from longread.plan.cards import card, card_names
from longread.plan.deployment import Deployment
from longread.plan.efficiency import reached
from longread.spec.hardware import Card

# Of which architectures a card may be held against others: they run the same kernels, or their successors.
_COMPARED = {"hopper": ("hopper",), "blackwell": ("hopper", "blackwell")}


def scale_for(d: Deployment, which: Phase, raw: Callable[[Deployment], float], factors: Factors | None) -> Scale:
    """The factor of ``d`` for ``raw(d)`` seconds."""
    factors = default_factors() if factors is None else factors
    own = factors.scale(path_of(d, which))
    others = [replace(d, hardware=replace(d.hardware, card=one)) for one in _beaten(d.hardware.card)]
    kinds = {path_of(o, which)[2]: (o, factors.scale(path_of(o, which))) for o in others}  # the fastest of a kind last
    kinds.pop(path_of(d, which)[2], None)  # one factor for all cards of a kind
    for other, scale in kinds.values():
        if scale.centre < own.centre:
            ratio = raw(other) / raw(d)
            if scale.centre * ratio < own.centre:
                words = f"no slower than on {other.hardware.card.name} ({scale.source}); else {own.source}"
                low = min(own.low, scale.low * ratio)
                own = replace(own, low=low, centre=scale.centre * ratio, provenance="interpolated", source=words)
    return own


def reading_scale(
    d: Deployment, new: int, cached: int, raw: Callable[[Deployment, int, int], float], factors: Factors | None
) -> Scale:
    """The factor of ``raw(d, new, cached)`` seconds of reading. Past the last warm length, no cheaper than at it."""
    scale = scale_for(d, phase(new, cached), lambda o: raw(o, new, cached), factors)
    if not cached or new <= WARM_TOKENS:
        return scale
    before = new + cached - WARM_TOKENS
    warm = scale_for(d, "warm", lambda o: raw(o, WARM_TOKENS, before), factors)
    ratio = raw(d, WARM_TOKENS, before) / raw(d, new, cached)
    if warm.centre * ratio > scale.centre:
        scale = replace(scale, centre=warm.centre * ratio, provenance=warm.provenance, source=warm.source)
    return replace(scale, low=max(scale.low, warm.low * ratio), high=max(scale.high, warm.high * ratio))


def _beaten(fast: Card) -> Iterator[Card]:
    """Cards of the table that ``fast`` beats or equals in every figure, slowest first."""
    architectures = _COMPARED.get(fast.architecture, ())
    found = [slow for slow in _table() if slow.architecture in architectures and _beats(fast, slow)]
    yield from sorted(found, key=lambda slow: (slow.flops["bf16"].value, slow.bandwidth.value))


@cache
def _table() -> tuple[Card, ...]:
    return tuple(card(name) for name in card_names())


def _beats(fast: Card, slow: Card) -> bool:
    if any(rate not in fast.flops or _rate(fast, rate) < figure.value for rate, figure in slow.flops.items()):
        return False
    if fast.bandwidth.value * reached(fast, "bandwidth") < slow.bandwidth.value:
        return False
    pairs = [(fast.sms, slow.sms), (fast.nvlink, slow.nvlink)]
    return all(s is None or (f is not None and f.value >= s.value) for f, s in pairs)


def _rate(one: Card, rate: str) -> float:
    """FLOP/s of a peak, corrected by what this very card was measured at."""
    return one.flops[rate].value * reached(one, rate)
