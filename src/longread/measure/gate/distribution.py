"""Next-token distributions as far as a server tells them, and how far two of them are apart.

A server tells its K most probable tokens. Everything here is a bound that holds whatever the rest is: the KL divergence
is computed on a partition that both sides know (data-processing inequality), so it is never above the true one.
Pure; knows no HTTP.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TINY = 1e-15
# Put into the tail of both sides alike: float32 log-probabilities add up to 1 only to about that, and a tail that is
# rounding on one side and nothing on the other would count for more than a real change. It makes the bound no larger
# (KL is jointly convex).
BLUR = 1e-6
REPLACEMENT = "�"  # part of a character: several tokens share this text


@dataclass(frozen=True, slots=True)
class Position:
    """What a server told at one position: the token that stands there, its log-probability (None: not among the best),
    and the best tokens with theirs, in falling order. Tokens are named by their text.
    """

    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]

    @property
    def best(self) -> str:
        """The most probable token."""
        return self.top[0][0]

    @property
    def margin(self) -> float:
        """Log-probability between the best and the second; infinite where only one was told."""
        return self.top[0][1] - self.top[1][1] if len(self.top) > 1 else math.inf

    def of(self, token: str) -> float | None:
        """Log-probability of a token; None where it was not told."""
        return dict(self.top).get(token, self.logprob if token == self.token else None)


def known(position: Position) -> dict[str, float]:
    """Probabilities by token, without texts that several tokens may share: those stay in the tail."""
    found: dict[str, float] = {}
    pairs = list(position.top)
    if position.logprob is not None and position.token not in dict(position.top):
        pairs.append((position.token, position.logprob))
    for token, logprob in pairs:
        if REPLACEMENT not in token:
            found[token] = found.get(token, 0.0) + math.exp(min(logprob, 0.0))
    return found


def kl_divergence(base: Position, candidate: Position) -> float:
    """A lower bound of KL(base || candidate) in nats, equal to it where both told everything.

    Buckets: each token that both told; those that only the base told, together, of which the candidate has at most its
    least told probability each; the tail.
    """
    p, q = known(base), known(candidate)
    both = [token for token in p if token in q]
    alone = [token for token in p if token not in q]
    # What adds up to more than 1 by rounding is brought back to it.
    scale_p, scale_q = (1 / max(1.0, math.fsum(side.values())) for side in (p, q))
    p = {token: value * scale_p for token, value in p.items()}
    q = {token: value * scale_q for token, value in q.items()}
    total = math.fsum(_term(p[token], q[token]) for token in both)
    rest_p = BLUR + max(0.0, 1.0 - math.fsum(p.values()))
    rest_q = BLUR + max(0.0, 1.0 - math.fsum(q[token] for token in both))
    alone_p = sum(p[token] for token in alone)
    if not alone_p:
        return max(0.0, total + _term(rest_p, rest_q)) / (1 + BLUR)
    untold = max(0.0, 1.0 - math.fsum(q.values()))
    least = math.exp(min(logprob for _, logprob in candidate.top)) * scale_q if candidate.top else 1.0
    most = min(len(alone) * least, untold)
    share = min(most, rest_q * alone_p / (alone_p + rest_p))
    return max(0.0, total + _term(alone_p, share) + _term(rest_p, rest_q - share)) / (1 + BLUR)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, TINY)) if p > TINY else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two servers at the same position of the same text. ``nll``: candidate's minus base's surprise at the token that
    stands there (a lower bound where the candidate did not tell it; None where the base did not). ``probability``: the
    change of that token's probability. ``flipped``: another token is the most probable, and by more than a tie.
    ``shared``: the base's probability of the tokens that both told; of the rest the KL knows only the sum.
    """

    kl: float
    flipped: bool
    tied: bool
    nll: float | None
    probability: float | None
    shared: float = 1.0


def difference(base: Position, candidate: Position, tie: float) -> Difference:
    """``tie``: log-probabilities closer than this are equal. Raises ValueError where one side told nothing."""
    if not base.top or not candidate.top:
        raise ValueError("no log-probabilities were told")
    other = base.best != candidate.best
    tied = other and _close(base, candidate, tie)
    least = candidate.top[-1][1]
    before, after = base.of(base.token), candidate.of(base.token)
    surprise = None if before is None else before - (least if after is None else after)
    change = None if before is None or after is None else math.exp(after) - math.exp(before)
    p, q = known(base), known(candidate)
    shared = min(1.0, math.fsum(p[token] for token in p if token in q))
    return Difference(kl_divergence(base, candidate), other and not tied, tied, surprise, change, shared)


def _close(base: Position, candidate: Position, tie: float) -> bool:
    """Whether each side holds the other's best token for as good as its own."""
    ours, theirs = base.of(candidate.best), candidate.of(base.best)
    if ours is None or theirs is None:
        return False
    return base.top[0][1] - ours <= tie and candidate.top[0][1] - theirs <= tie


def moved(one: Position, other: Position) -> float:
    """A lower bound of the total variation distance, the share of the probability that other tokens have; equal to it
    where both told everything. A token that a side did not tell has at most its least told probability there.
    """
    return max(_lost(one, other), _lost(other, one))


def _lost(one: Position, other: Position) -> float:
    """What tokens lose for certain, from one side to the other."""
    p, q = known(one), known(other)
    least = math.exp(min(other.top[-1][1], 0.0)) if other.top else 1.0
    return min(1.0, math.fsum(max(0.0, value - q.get(token, least)) for token, value in p.items()))


def largest_gap(one: Sequence[Position], other: Sequence[Position]) -> float:
    """max |difference of log-probability| over tokens that both told, position by position; infinite where at some
    position both told tokens and none of them is the same. 0 without positions.
    """
    return max((_gap(_named(x), _named(y)) for x, y in zip(one, other, strict=False)), default=0.0)


def _gap(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    if not one or not other:
        return 0.0
    return max((abs(one[token] - other[token]) for token in one if token in other), default=math.inf)


def _named(position: Position) -> dict[str, float]:
    """Log-probabilities of what was told, the token that stands there included, by texts that one token has."""
    pairs = list(position.top)
    if position.logprob is not None:
        pairs.append((position.token, position.logprob))
    return {token: logprob for token, logprob in pairs if REPLACEMENT not in token}


def divergence_point(one: Sequence[Position], other: Sequence[Position]) -> int:
    """Positions whose context is the same on both sides: up to and with the first where another token stands."""
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        if a.token != b.token:
            return i + 1
    return min(len(one), len(other))
