"""What a step costs in time: a linear model of its work, and how it is learnt from measured steps.

Knows numbers only. Used by the schedule (how large a step may be), by admission (how long a queue takes) and by the
simulator (how far the clock moves). Must not know requests, tensors or clocks.

A step over ``d`` decoding rows with contexts summing to ``c`` and prompt chunks of ``n`` tokens behind ``p`` others:

    seconds = launch + decode * d + context * c
              + sum over chunks (chunk + token * n + pair * n * (p + (n + 1) / 2) + prefix * p)

``pair`` is what a prompt token pays for each token that it looks back at; sparse attention makes it small, not zero.
``prefix`` is what a chunk pays for each token before it, however short it is: what was kept of them is read once. It is
why small chunks deep in a book are dear.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

FEATURES = 7
_TINY = 1e-14
_SURPRISE = 0.2  # of a step's predicted time that it was off by: solved again at once
_EACH = 16  # observations after which a model that has settled is solved again; solving takes longer than observing


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in seconds: of a step, a decoding row, a token of a row's context, a chunk, a prompt token, a prompt
    token's look at one token before it, and a token before a chunk. None is negative.
    """

    launch: float = 0.0
    decode: float = 0.0
    context: float = 0.0
    chunk: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    prefix: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{field.name}: a cost must be a finite number of seconds from 0 on, not {value!r}")

    def seconds(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]] = ()) -> float:
        """Seconds of one step. ``decodes``: (rows, tokens of their contexts together); ``chunks``: (tokens, tokens
        before them) each.
        """
        rows, context = decodes
        total = self.launch + self.decode * rows + self.context * context
        for tokens, prefix in chunks:
            total += self.chunk + self.prefix * prefix + tokens * (self.token + self.pair * (prefix + (tokens + 1) / 2))
        return total

    def tokens_within(self, seconds: float, prefix: int = 0) -> float:
        """How many tokens of one prompt behind ``prefix`` others fit into ``seconds`` beside everything else of the
        step; not a whole number. ``inf`` where tokens cost nothing.
        """
        left = seconds - self.chunk - self.prefix * prefix
        if left <= 0:
            return 0.0
        linear, square = self.token + self.pair * (prefix + 0.5), self.pair / 2
        if not linear:
            return math.inf
        # The positive root of square * n² + linear * n = left, in the form that stays exact for a small ``square``.
        return 2 * left / (linear + math.sqrt(linear * linear + 4 * square * left))

    def prefill_seconds(self, tokens: int, prefix: int = 0, step_tokens: int = 2048) -> float:
        """Seconds to read ``tokens`` behind ``prefix`` others alone, in steps of ``step_tokens``."""
        if tokens <= 0:
            return 0.0
        step_tokens = max(step_tokens, 1)
        steps = -(-tokens // step_tokens)
        behind = steps * prefix + step_tokens * steps * (steps - 1) / 2
        starts = (self.launch + self.chunk) * steps + self.prefix * behind
        return starts + tokens * (self.token + self.pair * (prefix + (tokens + 1) / 2))

    def decode_seconds(self, rows: int, context: int) -> float:
        """Seconds of a step of nothing but ``rows`` decoding rows with ``context`` tokens together: the TPOT."""
        return self.seconds((rows, context))


def features(decodes: tuple[int, int], chunks: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """What each of ``StepCost``'s coefficients is multiplied with, in their order."""
    tokens = sum(n for n, _ in chunks)
    pairs = sum(n * (p + (n + 1) / 2) for n, p in chunks)
    behind = sum(p for _, p in chunks)
    return 1.0, float(decodes[0]), float(decodes[1]), float(len(chunks)), float(tokens), pairs, float(behind)


class CostModel:
    """Learns a ``StepCost`` from measured steps: exponentially weighted least squares of the relative error, towards a
    prior, without negative coefficients.

    ``memory``: steps after which an observation counts a third. ``prior_weight``: how many steps the prior counts like,
    for each coefficient at the size of work seen so far; what no step has exercised keeps the prior's value. Beside
    that, a coefficient leaves the order of its prior only for what matters: short prompts tell next to nothing of what
    looking back costs, and their noise would be multiplied by the length of a book. Robust
    (Huber): a step pulls with at most ``CLIP`` times what was predicted for it, so that a machine that stalls once
    moves nothing far and a lasting change is followed within a few dozen steps.
    """

    FAITH = 0.1  # of a step's whole time: what it must explain that a coefficient is twice its prior
    CLIP = 3.0
    COLD = 16  # first observations, which are not held against a prior that may be far off
    REAL = 32  # observed steps of real load after which what is predicted may be told

    def __init__(self, prior: StepCost, *, memory: int = 256, prior_weight: float = 0.3):
        assert memory > 0 and prior_weight > 0
        self._prior = prior
        self._decay = math.exp(-1 / memory)
        self._prior_weight = prior_weight
        self._normal = [[0.0] * FEATURES for _ in range(FEATURES)]
        self._right = [0.0] * FEATURES
        self._cost = prior
        self._stale = False
        self._effective = 0.0  # observations, as they count by now
        self.observations = 0
        self.error = 0.0  # running mean of |measured / predicted - 1|, clipped like the observations
        self._needed = 0  # observations until it is ``known``

    @property
    def known(self) -> bool:
        """Whether predictions may be told to somebody who waits, not only used where being wrong costs little."""
        return self.observations >= self._needed

    def doubt(self) -> None:
        """What was learnt so far was disturbed: not ``known`` before ``REAL`` more steps."""
        self._needed = self.observations + self.REAL

    @property
    def cost(self) -> StepCost:
        """The current model, as of at most ``_EACH`` observations ago that were not surprising."""
        if self._stale:
            self._cost = self._solve()
            self._stale = False
        return self._cost

    def observe(self, decodes: tuple[int, int], chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from one step that took ``seconds``. Impossible times (not above 0, not finite) are ignored."""
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        predicted = self.cost.seconds(decodes, chunks)
        # Relative errors: a step of 5 ms is as much evidence as one of 5 s. Relative to the prediction, not to what was
        # measured, or a machine that became slower would convince less than one that became faster.
        weight = 1 / (seconds * seconds)
        if predicted > 0 and self.observations >= self.COLD:
            weight = min(1.0, self.CLIP * predicted / seconds) / (predicted * predicted)
        if predicted > 0:
            rate = max(1 / (self.observations + 1), 1 - self._decay)
            self.error += (min(abs(seconds / predicted - 1), self.CLIP) - self.error) * rate
        x = features(decodes, chunks)
        for i in range(FEATURES):
            row, scaled = self._normal[i], weight * x[i]
            for j in range(FEATURES):
                row[j] = row[j] * self._decay + scaled * x[j]
            self._right[i] = self._right[i] * self._decay + weight * x[i] * seconds
        self.observations += 1
        self._effective = self._effective * self._decay + 1
        surprise = not predicted > 0 or abs(seconds / predicted - 1) > _SURPRISE
        self._stale = surprise or self.observations <= _EACH or self.observations % _EACH == 0

    def _solve(self) -> StepCost:
        """The normal equations with the prior as a ridge; a coefficient that comes out negative is 0 for the others."""
        prior = astuple(self._prior)
        normal, right = [list(row) for row in self._normal], list(self._right)
        for i in range(FEATURES):
            # A prior that is ``prior_weight`` steps' worth where the feature was seen, and decides where it was not.
            ridge = normal[i][i] * self._prior_weight / self._effective or 1.0
            if prior[i] > 0:
                ridge += self.FAITH / (prior[i] * prior[i])
            normal[i][i] += ridge
            right[i] += ridge * prior[i]
        active = list(range(FEATURES))
        while True:
            found = _solved([[normal[i][j] for j in active] for i in active], [right[i] for i in active])
            worst = min(range(len(active)), key=lambda k: found[k] * math.sqrt(normal[active[k]][active[k]]))
            if found[worst] >= 0:
                break
            del active[worst]
        values = [0.0] * FEATURES
        for i, value in zip(active, found, strict=True):
            values[i] = value
        return StepCost(*values)


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination, in place, of a positive definite matrix scaled to a diagonal of ones: needs no pivots."""
    n = len(right)
    scale = [1 / math.sqrt(matrix[i][i]) for i in range(n)]
    for i in range(n):
        right[i] *= scale[i]
        matrix[i] = [matrix[i][j] * scale[i] * scale[j] for j in range(n)]
    for k in range(n):
        top, pivot = matrix[k], max(matrix[k][k], _TINY)  # rounding may have eaten the pivot of equal features
        for i in range(k + 1, n):
            factor = matrix[i][k] / pivot
            row = matrix[i]
            for j in range(k, n):
                row[j] -= factor * top[j]
            right[i] -= factor * right[k]
    found = [0.0] * n
    for k in range(n - 1, -1, -1):
        rest = sum(matrix[k][j] * found[j] for j in range(k + 1, n))
        found[k] = (right[k] - rest) / max(matrix[k][k], _TINY)
    return [value * scale[k] for k, value in enumerate(found)]
