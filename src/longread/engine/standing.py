"""Why a request waits or how it gets on, in words and numbers, and when it may be expected to.

Knows entries and what a step costs; decides nothing. Names no other request: whoever asks may be one of several
parties.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longread.engine.waiting import Entry
from longread.spec.cost import StepCost
from longread.spec.engine import Phase, Standing, WaitReason
from longread.spec.step_target import StepTarget

NO_TARGET = StepTarget(None, "")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prediction is made from. ``cost`` None: not known yet. ``hold``: mean seconds that a request keeps its
    slot, None: none ended yet. ``target``: of a step.
    """

    cost: StepCost | None
    budget: int
    slots: int
    running: Sequence[Entry]
    num_waiting: int
    hold: float | None
    target: StepTarget = NO_TARGET


def standing(entry: Entry, ahead: Sequence[Entry], outlook: Outlook, waited: float) -> Standing:
    """``ahead``: the waiting entries that come before it."""
    timeline = entry.timeline
    phase, reason, detail = _told(entry, len(ahead), outlook)
    starts = None if entry.running else _starts_in(ahead, outlook)
    return Standing(
        request_id=timeline.key,
        phase=phase,
        reason=reason,
        detail=detail,
        request_class=entry.request_class,
        position=len(ahead),
        num_waiting=outlook.num_waiting,
        num_running=len(outlook.running),
        prompt_tokens=timeline.prompt_length,
        computed_tokens=timeline.computed,
        preemptions=entry.preemptions,
        waited=waited,
        starts_in=starts,
        first_token_in=_first_token_in(entry, starts, outlook),
        cost_known=outlook.cost is not None,
        step_target=outlook.target.seconds,
        step_reason=outlook.target.reason,
    )


def _told(entry: Entry, position: int, outlook: Outlook) -> tuple[Phase, WaitReason, str]:
    timeline = entry.timeline
    if entry.transfer is not None:
        return "loading", "load", f"{len(entry.transfer.load.pages)} pages of its prompt are being loaded"
    if not entry.running:
        if entry.reason == "turn" and len(outlook.running) >= outlook.slots:
            return (
                "waiting",
                "slots",
                f"all {outlook.slots} slots are taken, and {_counted(position, 'request')} before it",
            )
        if entry.reason == "turn" and not entry.detail:
            return "waiting", "turn", f"{_counted(position, 'request')} before it"
        return "waiting", entry.reason, entry.detail
    if timeline.remaining == 1:
        return "decode", "", "it gets a token in every step"
    others = sum(other.timeline.remaining > 1 for other in outlook.running) - 1
    detail = (
        f"{timeline.computed} of {len(timeline.tokens)} tokens are read; it got {entry.granted} of the last step's "
        f"{outlook.budget} at most, beside {_counted(others, 'other prompt')}"
    )
    return "prefill", "step", detail


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


def _starts_in(ahead: Sequence[Entry], outlook: Outlook) -> float | None:
    """Seconds until a slot and its share of the steps: the prompts before it have to be read, and where no slot is
    free, one for each of them and one for itself must become so.
    """
    if outlook.cost is None:
        return None
    seconds = sum(_read_seconds(each, outlook) for each in (*outlook.running, *ahead))
    lacking = len(outlook.running) + len(ahead) + 1 - outlook.slots
    if lacking > 0 and outlook.hold is not None:
        seconds = max(seconds, outlook.hold * lacking / outlook.slots)
    return seconds


def _first_token_in(entry: Entry, starts: float | None, outlook: Outlook) -> float | None:
    cost, timeline = outlook.cost, entry.timeline
    if cost is None or len(timeline.tokens) > timeline.prompt_length:
        return None
    if starts is not None:
        # What it waits for is most of its prompt, and comes with it; what else is cached is only known at the start.
        own = cost.seconds((0, 0), [(1, timeline.remaining)]) if entry.reason == "prefix" else None
        return starts + (own if own is not None else _read_seconds(entry, outlook))
    decoding = [each.timeline for each in outlook.running if each.timeline.remaining == 1]
    beside = cost.decode_seconds(len(decoding), sum(len(each.tokens) for each in decoding))
    if not entry.granted:
        return None
    steps = -(-timeline.remaining // entry.granted)
    read = cost.prefill_seconds(timeline.remaining, timeline.computed, entry.granted)
    # What the others' prompts take of these steps is not known ahead; that the step is full is.
    others = max(outlook.budget - entry.granted - len(decoding), 0) if len(outlook.running) > len(decoding) + 1 else 0
    return read + steps * (beside - cost.launch + others * cost.token)


def _read_seconds(entry: Entry, outlook: Outlook) -> float:
    """Seconds to read what is left of its prompt, alone."""
    assert outlook.cost is not None
    remaining = entry.timeline.remaining
    if entry.running and remaining == 1:
        return 0.0
    return outlook.cost.prefill_seconds(remaining, entry.timeline.computed, outlook.budget)
