"""How a step's tokens are shared among prompts, and how large a step may be: pure functions over plain numbers.

Knows classes, owners, arrival and what a step costs; must not know timelines, pages, tensors or clocks.

Share. Classes get their ``WEIGHTS`` of what the decodes leave, the owners inside a class equal parts, and what one does
not need goes to the others (weighted max-min fairness), so nothing is idle while anybody wants it and nobody gets
nothing for long. Of an owner's part, the prompt that arrived first gets half and the rest goes to the others, shortest
remainder first: a short prompt passes beside a book, and every prompt becomes the oldest in the end.

Patience. A long prompt hardly notices what a short one takes. So a prompt more than twice as long as the shortest of
its class or a higher one takes ``1/PATIENCE`` where it could claim more, also of what the others leave: a step in which
somebody waits for a first token is not filled up with a book. That ends when what has passed it is ``1/PATIENCE`` of
its own length; from then on it takes its full claim. It is late by that little, and the short ones come as if it were
not there.

Size. A step carries as many prompt tokens as its target allows by its predicted time (``spec.step_target``), but always
some: at least ``LEAST_TOKENS``, and as many as cost what starting costs, since smaller steps would mostly start. It may
take longer where every prompt that is not held back ends with it: two steps would bring none of them earlier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longread.spec.cost import StepCost
from longread.spec.engine import RequestClass
from longread.spec.step_target import LEAST_TOKENS, Bounds, least_seconds

LEVELS: tuple[RequestClass, ...] = ("interactive", "batch", "ingest")
WEIGHTS = (16, 4, 1)  # of a step's prompt tokens, by level
BYPASS_FACTORS = (1, 4, 16)  # how much more often a lower class may be passed before nobody passes it any more
PATIENCE = 8
CLOSE = 0.97  # of a target is as good as all of it
MOST_TRIES = 16
MOST_WORTH = 1024  # tokens that starting a step may count as: a stall is no reason for impatience


@dataclass(frozen=True, slots=True)
class Demand:
    """A prompt's wish for one step: ``want`` tokens of the ``remaining`` ones, behind ``prefix`` computed ones.
    ``level`` is an index of LEVELS. ``patient``: less than its limit has passed it so far.
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
        if len(party) == 1:
            lengths[party[0]] = part
            continue
        inside = [(demands[i].want, demands[i].remaining) for i in party]
        for i, length in zip(party, split_budget(part, inside, PATIENCE if yields else 2), strict=True):
            lengths[i] = length


def fit(
    limit: int,
    demands: Sequence[Demand],
    decodes: tuple[int, int],
    cost: StepCost | None = None,
    within: Bounds | None = None,
    turn: int = 0,
) -> list[int]:
    """As ``split``, of at most ``limit`` tokens, and fewer where the step would take longer than ``within`` allows
    beside ``decodes`` (rows, tokens of their contexts); never fewer than the least that is worth a step.
    """
    if cost is None or within is None or within.target is None:
        return split(limit, demands, turn)
    demands, held = hold_back(demands, cost)
    lengths = split(limit, demands, turn)
    deepest = max((prefix for _, prefix in chunks(demands, lengths)), default=0)
    target = max(within.target, least_seconds(cost, decodes, deepest))
    above = cost.seconds(decodes, chunks(demands, lengths))
    if above <= target or (within.most is not None and above <= within.most and _all_end(demands, lengths, held)):
        return lengths
    low, high = min(LEAST_TOKENS, sum(lengths)), sum(lengths)
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


def hold_back(demands: Sequence[Demand], cost: StepCost) -> tuple[Sequence[Demand], frozenset[int]]:
    """The demands, where those that are held back want ``1/PATIENCE`` of the step's time together, or nothing where
    that would not pay for starting their chunks; and which these are.
    """
    if not any(demand.patient for demand in demands):
        return demands, frozenset()
    shortest = [min((d.remaining for d in demands if d.level <= level), default=0) for level in range(len(LEVELS))]
    held = frozenset(i for i, d in enumerate(demands) if d.patient and d.remaining > 2 * shortest[d.level])
    if not held:
        return demands, held
    others = cost.seconds((0, 0), [(d.want, d.prefix) for i, d in enumerate(demands) if i not in held])
    room = others / (PATIENCE - 1) / len(held)
    return [replace(d, want=_within(room, d, cost)) if i in held else d for i, d in enumerate(demands)], held


def _within(seconds: float, demand: Demand, cost: StepCost) -> int:
    return int(min(cost.tokens_within(seconds, demand.prefix), demand.want))


def passed(total: int, length: int, cost: StepCost | None) -> int:
    """Tokens by which a prompt is later for a step of ``total`` prompt tokens, ``length`` of them its own: starting a
    step that is not filled for its sake counts, too.
    """
    per_token = cost.token if cost is not None else 0.0
    worth = int((cost.launch + cost.chunk) / per_token) if cost is not None and per_token > 0 else 0
    return max(total, min(worth, MOST_WORTH)) - length


def _all_end(demands: Sequence[Demand], lengths: Sequence[int], held: frozenset[int]) -> bool:
    """Whether every prompt but those held back has its last token in the step."""
    return all(
        i in held or length == demand.remaining for i, (demand, length) in enumerate(zip(demands, lengths, strict=True))
    )


def chunks(demands: Sequence[Demand], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of each prompt that is in the step, as ``StepCost`` counts them."""
    return [(length, demand.prefix) for demand, length in zip(demands, lengths, strict=True) if length]


def level_of(request_class: RequestClass, preemptions: int) -> int:
    """The index in LEVELS that a request is served at. Each preemption raises it by one, so that nobody is preempted
    again and again for whoever comes later: at the first level only the arrival counts.
    """
    return max(LEVELS.index(request_class) - preemptions, 0)
