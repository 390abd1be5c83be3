"""Where a prompt's prefill is cut so that its state can be reused later: a pure policy over positions."""

from collections.abc import Iterator

from longread.spec.state import PAGE_TOKENS

SNAPSHOT_INTERVAL = 32768  # tokens between the snapshots of a long prompt
SNAPSHOT_MIN_PROMPT = PAGE_TOKENS  # a shorter prompt is recomputed faster than a snapshot row is worth
# Page ends kept before a prompt's end. Where the text ends that the next question shares is not known; while at most
# 2 * 256 + 2 tokens follow it, its last page end is one of three, so less than a page of it is computed again.
LAST_PAGE_ENDS = 3


def _landing_points(prompt_length: int, interval: int, rings: bool) -> Iterator[int]:
    """Positions of a prompt at which the engine calls ``snapshot``; unordered, possibly repeated or <= 0.

    With ring groups: one token before the end (the same prompt again costs one token), the last page ends before that
    (the same document under another question), and each ``interval``. Without: the prompt's end, for its partial page.
    """
    if not rings:
        yield prompt_length
    elif prompt_length >= SNAPSHOT_MIN_PROMPT:
        last = prompt_length - 1
        page_end = (last - 1) // PAGE_TOKENS * PAGE_TOKENS
        yield last
        yield from (page_end - back * PAGE_TOKENS for back in range(LAST_PAGE_ENDS))
        yield from range(interval, last, interval)


def next_landing_point(prompt_length: int, position: int, interval: int, rings: bool) -> int | None:
    """The nearest point behind ``position`` that is worth publishing; None if there is none."""
    return min((p for p in _landing_points(prompt_length, interval, rings) if p > max(position, 0)), default=None)


def promised_point(prompt_length: int, position: int, limit: int, interval: int, rings: bool) -> int:
    """The last point up to ``limit`` that a sequence at ``position`` of its prompt will still publish; 0 if none.

    Without ring groups every page end is published as it is computed.
    """
    points = [p for p in _landing_points(prompt_length, interval, rings) if p <= limit]
    if not rings:
        points.append(min(limit, prompt_length) // PAGE_TOKENS * PAGE_TOKENS)
    best = max(points, default=0)
    return best if best > position else 0
