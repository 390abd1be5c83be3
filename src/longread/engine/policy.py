"""How a step's tokens are shared among prompts, and how large a step may be: pure functions over plain numbers.

Knows classes, owners, arrival and what a step costs; must not know timelines, pages, tensors or clocks.

Share. Classes get their ``WEIGHTS`` of what the decodes leave, the owners inside a class equal parts, and what one does
not need goes to the others (weighted max-min fairness), so nothing is idle while anybody wants it and nobody gets
nothing for long. Of an owner's part, the prompt that arrived first gets half and the rest goes to the others, shortest
remainder first: a short prompt passes beside a book, and every prompt becomes the oldest in the end.

Patience. A long prompt hardly notices what a short one takes. So a prompt more than twice as long as the shortest of
its class takes ``1/PATIENCE`` where it could claim more, until what has passed it is ``1/PATIENCE`` of its own length;
from then on it takes its full claim. It is late by that little, and the short ones come as if it were not there.

Size. Under a latency target a step carries as many prompt tokens as its predicted time allows, but always some: at
least ``LEAST_TOKENS``, and as many as cost what starting a step costs, since smaller steps would mostly start.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longread.spec.cost import StepCost
from longread.spec.engine import RequestClass

LEVELS: tuple[RequestClass, ...] = ("interactive", "batch", "ingest")
WEIGHTS = (16, 4, 1)  # of a step's prompt tokens, by level
BYPASS_FACTORS = (1, 4, 16)  # how much more often a lower class may be passed before nobody passes it any more
PATIENCE = 8
LEAST_TOKENS = 64  # on a CPU they cost a sixth more each than 256 do (reader-v4), on a busy one far more
LONE_TOKENS = 256  # of a prompt that nobody decodes or reads beside: smaller steps would spare nobody anything
CLOSE = 0.97  # of a target is as good as all of it
MOST_TRIES = 16


@dataclass(frozen=True, slots=True)
class Demand:
    """A prompt's wish for one step: ``want`` tokens (a chunk may have to end early at a snapshot point) of the
    ``remaining`` ones, behind ``prefix`` computed ones. ``level`` is an index of LEVELS. ``patient``: less than its
    limit has passed it so far.
    """

    want: int
    remaining: int
    prefix: int = 0
    level: int = 0
    owner: str = ""
    patient: bool = False


def share(amount: int, wants: Sequence[int], weights: Sequence[int], turn: int = 0) -> list[int]:
    """Divide ``amount`` tokens by weight, nobody more than it wants (weighted max-min fairness).

    The parts add up to ``amount``, or to all wants if that is less. Whoever wants anything gets a token; where there
    are fewer tokens than that, they go around with ``turn``, which the caller counts up.
    """
    given = [0] * len(wants)
    active = [i for i, want in enumerate(wants) if want > 0]
    left = min(amount, sum(wants))
    if left < len(active):
        for k in range(left):
            given[active[(turn + k) % len(active)]] = 1
        return given
    for i in active:
        given[i] = 1
    left -= len(active)
    active = [i for i in active if wants[i] > 1]
    while left > 0 and active:
        total = sum(weights[i] for i in active)
        content = [i for i in active if (wants[i] - given[i]) * total <= left * weights[i]]
        if content:
            for i in content:
                left -= wants[i] - given[i]
                given[i] = wants[i]
            active = [i for i in active if given[i] < wants[i]]
            continue
        whole = left
        for i in active:
            part = whole * weights[i] // total
            given[i] += part
            left -= part
        for k in range(left):  # fewer than there are active ones, who all want one more
            given[active[(turn + k) % len(active)]] += 1
        left = 0
    return given


def split_budget(budget: int, demands: Sequence[tuple[int, int]], part: int = 2) -> list[int]:
    """Share ``budget`` tokens among one owner's prompts in order of arrival; one length each (0: not in this step).

    ``demands``: (tokens wanted in this step, tokens remaining in all). The first is sure of ``1/part`` of the budget.
    """
    lengths = [0] * len(demands)
    if not demands or budget <= 0:
        return lengths
    lengths[0] = min(demands[0][0], -(-budget // part))
    left = budget - lengths[0]
    for i in sorted(range(1, len(demands)), key=lambda i: (demands[i][1], i)):
        lengths[i] = min(demands[i][0], left)
        left -= lengths[i]
    lengths[0] += min(demands[0][0] - lengths[0], left)
    return lengths


def split(budget: int, demands: Sequence[Demand], turn: int = 0) -> list[int]:
    """Share ``budget`` tokens among prompts in order of arrival; one length each. Adds up to the budget, or to all that
    is wanted; see the module's text.
    """
    lengths = [0] * len(demands)
    levels: dict[int, list[int]] = {}
    for i, demand in enumerate(demands):
        levels.setdefault(demand.level, []).append(i)
    order = sorted(levels)
    wants = [sum(demands[i].want for i in levels[level]) for level in order]
    parts = share(max(budget, 0), wants, [WEIGHTS[level] for level in order], turn)
    for level, amount in zip(order, parts, strict=True):
        _split_level(amount, demands, levels[level], turn, lengths)
    return lengths


def _split_level(amount: int, demands: Sequence[Demand], members: list[int], turn: int, lengths: list[int]) -> None:
    """Share one class's part among its owners and each one's prompts; writes ``lengths``."""
    shortest = min(demands[i].remaining for i in members)
    parties: dict[str, list[int]] = {}
    for i in members:
        parties.setdefault(demands[i].owner, []).append(i)
    yielding = [demands[party[0]].patient and demands[party[0]].remaining > 2 * shortest for party in parties.values()]
    wants = [sum(demands[i].want for i in party) for party in parties.values()]
    parts = share(amount, wants, [1 if yields else PATIENCE for yields in yielding], turn)
    for party, part, yields in zip(parties.values(), parts, yielding, strict=True):
        inside = [(demands[i].want, demands[i].remaining) for i in party]
        for i, length in zip(party, split_budget(part, inside, PATIENCE if yields else 2), strict=True):
            lengths[i] = length


def fit(
    limit: int,
    demands: Sequence[Demand],
    decodes: tuple[int, int],
    cost: StepCost | None = None,
    target: float | None = None,
    turn: int = 0,
) -> list[int]:
    """As ``split``, of at most ``limit`` tokens, and fewer where the step would take longer than ``target`` seconds
    beside ``decodes`` (rows, tokens of their contexts); never fewer than ``least_tokens``, for one prompt by itself
    never fewer than ``LONE_TOKENS``.
    """
    lengths = split(limit, demands, turn)
    if cost is None or target is None:
        return lengths
    above = cost.seconds(decodes, chunks(demands, lengths))
    if above <= target:
        return lengths
    least = max(least_tokens(cost), LONE_TOKENS if len(demands) == 1 and not decodes[0] else 0)
    low, high = min(least, sum(lengths)), sum(lengths)
    lengths = split(low, demands, turn)
    below = cost.seconds(decodes, chunks(demands, lengths))
    # Time is nearly linear in the tokens, so that two or three tries by proportion are enough; every other one halves.
    for turns in range(MOST_TRIES):
        if below >= target * CLOSE or high - low <= max(low // 16, 1):
            break
        part = (target - below) / (above - below) if turns % 2 == 0 and above > below else 0.5
        middle = min(max(low + int((high - low) * part), low + 1), high - 1)
        tried = split(middle, demands, turn)
        seconds = cost.seconds(decodes, chunks(demands, tried))
        if seconds <= target:
            low, below, lengths = middle, seconds, tried
        else:
            high, above = middle, seconds
    return lengths


def chunks(demands: Sequence[Demand], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of each prompt that is in the step, as ``StepCost`` counts them."""
    return [(length, demand.prefix) for demand, length in zip(demands, lengths, strict=True) if length]


def least_tokens(cost: StepCost) -> int:
    """Prompt tokens that a step carries whatever its target is."""
    worth = math.ceil(cost.launch / cost.token) if cost.token > 0 else 0
    return max(LEAST_TOKENS, worth)


def level_of(request_class: RequestClass, preemptions: int) -> int:
    """The index in LEVELS that a request is served at. Each preemption raises it by one, so that nobody is preempted
    again and again for whoever comes later: at the first level only the arrival counts.
    """
    return max(LEVELS.index(request_class) - preemptions, 0)
