"""What a request reused of what was read before, and why not more: the words that engine, server and CLI share.

Knows token ids and positions; not text, pages or tiers' insides.
"""

from dataclasses import dataclass
from typing import Literal, get_args

MissReason = Literal[
    "complete",
    "new text",
    "never seen",
    "differs",
    "evicted",
    "other model or format",
    "no snapshot",
    "corrupt record",
    "store failed",
    "caching off",
]
MISS_REASONS: tuple[MissReason, ...] = get_args(MissReason)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Token ids from position ``start``: of this prompt (``asked``) and of what was read before (``known``). Both are
    bounded and equal up to the first difference.
    """

    start: int
    asked: tuple[int, ...]
    known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reuse:
    """How a prompt's tokens were come by when the request was first admitted.

    The four parts add up to ``prompt_tokens``. A token counts for the tier that its page came from: ``host`` and
    ``disk`` were loaded for this request. At least one token is always recomputed. ``reason`` says why no more was
    reused: "complete" if all but the last token were (or all that any landing rule allows before it), "new text" if
    the prompt goes on from what was reused as nothing that was read before does, "never seen" if nothing was reused.
    ``at``: the position up to which the prompt was known to some tier, where it differs, or where the broken record
    lies; None where no position is meant. ``note``: one sentence for a person. ``excerpt``: for "differs".
    """

    prompt_tokens: int
    device_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    recomputed_tokens: int = 0
    reason: MissReason = "never seen"
    at: int | None = None
    note: str = ""
    excerpt: Excerpt | None = None

    @property
    def reused_tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.disk_tokens
