"""How far a server may be from itself, by what it computes in: level 0's rule.

Pure; knows answers' figures and the profile's limits. The same request is summed in another order when it is read in
other chunks, from the cache, or beside others. In float32 that moves a told log-probability by some 1e-5, so each of
them is held to ``logprob_gap``.

In bfloat16 (unit roundoff u = 2^-8) and FP8 it cannot be. A hidden state that is rounded n times on its way moves every
logit z by about u |z| sqrt(n), whatever the token's own probability: with |z| of 20 to 30 and a dozen roundings two
logits part by 0.3 to 0.5 nats, and where products round their inputs to FP8 (u = 2^-4) by more. Of a token with
probability e^-20 nobody ever sees that: what an answer is drawn by are the probabilities. So they are held to the limit
instead, as the share that moved to other tokens (the total variation distance): logits that part by g nats at most move
no more than tanh(g / 4) of it, and that much only between two tokens that are about equally likely. Where answers part,
the share that moved must be enough to explain that. Tails are held to a limit that no rounding has reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longread.measure.gate.abilities import Abilities
from longread.measure.gate.distribution import Position, largest_gap, moved
from longread.measure.gate.profiles import Profile

SAME = 1e-6  # of a probability: as told twice


@dataclass(frozen=True, slots=True)
class Apart:
    """Two answers over the positions whose context they share. ``gap``: the largest difference of a log-probability;
    ``moved``: the largest share of the probability at one position, and ``total`` over all ``positions``.
    """

    gap: float
    moved: float
    total: float
    positions: int


def apart(one: Sequence[Position], other: Sequence[Position]) -> Apart:
    """Position by position, as far as the shorter goes."""
    shares = [moved(a, b) for a, b in zip(one, other, strict=False) if a.top and b.top]
    return Apart(largest_gap(one, other), max(shares, default=0.0), sum(shares), len(shares))


@dataclass(frozen=True, slots=True)
class Rule:
    """``gap``: limit of ``Apart.gap``, by the name ``gap_name``. ``moved`` and ``mean``: limits of the probability at
    one position and on average; None: the gap says more. ``words``: which limits these are, and why.
    """

    gap_name: str
    gap: float
    moved: float | None
    mean: float | None
    words: str

    def holds(self, found: Apart) -> bool:
        """Whether two answers may be called the same."""
        return found.gap <= self.gap and (self.moved is None or found.moved <= self.moved)

    def tie(self, a: Position, b: Position) -> bool:
        """Whether two sides with another token each are as good as equal here. Where a share of m moved, the best
        tokens of both sides are at most 2 m apart: where ``holds``, it is enough that each was its side's best.
        """
        mine, theirs = a.of(b.token), b.of(a.token)
        if mine is None or theirs is None or a.logprob is None or b.logprob is None:
            return False
        if self.moved is not None:
            return all(side.top[0][1] - value <= SAME for side, value in ((a, a.logprob), (b, b.logprob)))
        return abs(a.logprob - mine) <= self.gap and abs(b.logprob - theirs) <= self.gap


def rule_of(abilities: Abilities, profile: Profile) -> Rule:
    """By what the server says that it computes in; as bfloat16 where it does not say."""
    told = {name for name in (abilities.dtype, abilities.cache_dtype) if name is not None}
    if abilities.dtype == "float32" and told == {"float32"}:
        gap = profile["logprob_gap"]
        return Rule("logprob_gap", gap, None, None, f"the limit of float32, as the server tells: {gap:g} nats")
    what = f"{' and '.join(sorted(told))}, as the server tells" if abilities.dtype else "the server does not tell which"
    share, mean, gap = profile["moved"], profile["moved_mean"], profile["tail_gap"]
    words = (
        f"the limits of bfloat16 and FP8 ({what}): {share:.1%} of the probability at a position, {mean:.1%} on "
        f"average, {gap:g} nats in the tail"
    )
    return Rule("tail_gap", gap, share, mean, words)
