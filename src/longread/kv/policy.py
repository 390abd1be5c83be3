"""Where in a prompt its state is kept so that it can be reused later: a pure policy over positions."""

from longread.spec.state import PAGE_TOKENS

SNAPSHOT_INTERVAL = 32768  # tokens between the snapshots of a long prompt
SNAPSHOT_MIN_PROMPT = PAGE_TOKENS  # a shorter prompt is recomputed faster than a snapshot row is worth
# Page ends kept before a prompt's end. Where the text ends that the next question shares is not known; while at most
# 2 * 256 + 2 tokens follow it, its last page end is one of three, so less than a page of it is computed again.
LAST_PAGE_ENDS = 3
WAIT_GAIN = 16  # tokens; waiting for another sequence costs a step, so it must save more than a few tokens


def landing_points(prompt_length: int, start: int, stop: int, interval: int, rings: bool) -> list[int]:
    """The positions in ``start`` < position <= ``stop`` that are worth publishing, ascending.

    With ring groups: one token before the end (the same prompt again costs one token), the last page ends before that
    (the same document under another question), and each ``interval``. Without: the prompt's end, for its partial page.
    """
    if not rings:
        return [prompt_length] if start < prompt_length <= stop else []
    if prompt_length < SNAPSHOT_MIN_PROMPT:
        return []
    last = prompt_length - 1
    page_end = (last - 1) // PAGE_TOKENS * PAGE_TOKENS
    ends = (last, *(page_end - back * PAGE_TOKENS for back in range(LAST_PAGE_ENDS)))
    found = {point for point in ends if max(start, 0) < point <= stop}
    found.update(range((start // interval + 1) * interval, min(stop + 1, last), interval))
    return sorted(found)


def promised_point(prompt_length: int, position: int, limit: int, interval: int, rings: bool) -> int:
    """The last point up to ``limit`` that a sequence at ``position`` of its prompt will still publish; 0 if none.

    Without ring groups every page end is published as it is computed.
    """
    points = landing_points(prompt_length, position, limit, interval, rings)
    if not rings:
        points.append(min(limit, prompt_length) // PAGE_TOKENS * PAGE_TOKENS)
    best = max(points, default=0)
    return best if best > position else 0
