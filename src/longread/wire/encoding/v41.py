"""Prompts of DeepSeek-V4.1: V4's turns, ``<｜System｜>`` before system text, effort as a number, spaced DSML names.

Layout from the release's encoder (facts: models.md sections 8 and 10). The effort line stands in thinking mode only,
behind ``<｜System｜>``, whether or not there is a system text.
"""

from longread.wire.encoding import dsml
from longread.wire.encoding.conversation import Conversation
from longread.wire.encoding.pieces import Rendered
from longread.wire.encoding.v4 import Style, render_turns

SYSTEM = "<｜System｜>"
EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
_STYLE = Style(dsml.V41, SYSTEM)


def render_v41(conv: Conversation) -> Rendered:
    """V4.1-Flash and V4.1-Flash-1017. ``conv.effort`` is the number, 1 to 100."""
    effort = (
        f"Reasoning Effort: {conv.effort or EFFORTS['high']} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )
    return render_turns(conv, _STYLE, effort)
