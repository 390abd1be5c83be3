"""How many slots long prompts may hold together: a pure function over plain numbers.

Knows counts; must not know entries, classes or timelines. A prompt is long where one step cannot read what of it is not
cached. Long ones keep their slots for long, so ``max_num_seqs`` of them would leave a short one nothing but to wait for
the first of them to end; a share of the budget is of no use to who has no slot. So the last ``1/KEPT`` of the slots is
not given to long ones. Only where short ones do come: a machine that reads nothing but books uses all of its slots.
No long one starves: all but these slots are theirs as well as anybody's, in the order of ``waiting``, and while they
cannot start others who do start do not keep them from it.
"""

KEPT = 8
LATELY = 64  # arrivals


def most_long(slots: int, since_short: int) -> int:
    """Of ``slots``, how many long prompts may hold. ``since_short``: arrivals since one that was short."""
    return slots if since_short > LATELY else slots - slots // KEPT
