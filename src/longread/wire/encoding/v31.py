"""Prompts of DeepSeek-V3.1: V3's layout, a think tag behind every ``<｜Assistant｜>``, calls as bare JSON.

Layout and the wording of the tools section from the release's model card and chat template (facts: models.md section
10). Reasoning of earlier turns is always dropped. The card documents tool calls for thinking off; with thinking on the
prompt is the same but for the last tag. Behind a tool result the answer goes on without a header, so without thinking.
"""

from longread.wire.encoding.conversation import Conversation, Turn, to_json
from longread.wire.encoding.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, PieceWriter, Rendered
from longread.wire.encoding.v3 import (
    CALL,
    CALLS,
    END_CALL,
    END_CALLS,
    END_RESULT,
    RESULT,
    SEP,
    TOOL_MARKUP,
    joined,
    system_text,
)

_RULES = (
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{CALLS}{CALL}tool_call_name{SEP}tool_call_arguments{END_CALL}{{additional_tool_calls}}{END_CALLS}\n\n"
    "Where:\n"
    "- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces"
)


def _write_tools(out: PieceWriter, conv: Conversation) -> None:
    out.text("## Tools\nYou have access to the following tools:\n\n")
    for tool in conv.tools:
        out.text("### ", tool["name"], "\nDescription: ", tool.get("description") or "")
        out.text("\n\nParameters: ", to_json(tool.get("parameters") or {}), "\n\n")
    out.mixed(_RULES, TOOL_MARKUP)


def _write_calls(out: PieceWriter, turn: Turn) -> None:
    out.markup(CALLS)
    for call in turn.calls:
        out.markup(CALL)
        out.text(call.name)
        out.markup(SEP)
        out.text(call.arguments)
        out.markup(END_CALL)
    out.markup(END_CALLS)


def render_v31(conv: Conversation) -> Rendered:
    """V3.1 and V3.1-Terminus."""
    out = PieceWriter()
    out.markup(BOS)
    system = system_text(conv)
    out.text(system)
    if conv.tools:
        out.text("\n\n")
        _write_tools(out, conv)
    turns = [turn for turn in conv.turns if turn.role != "system"]
    after_tool = False
    for i, turn in enumerate(turns):
        if turn.role == "user":
            out.markup(USER)
            out.text(joined(turn))
        elif turn.role == "tool":
            out.markup(RESULT)
            out.text(joined(turn))
            out.markup(END_RESULT)
        else:
            open_end = conv.continue_final and i == len(turns) - 1
            inside = open_end and conv.thinking and bool(turn.reasoning) and not any(turn.parts)
            if not after_tool:
                out.markup(ASSISTANT, THINK if inside else END_THINK)
            out.text(turn.reasoning if inside else _answer(turn))
            if turn.calls:
                _write_calls(out, turn)
            if open_end:
                return Rendered(out.done(), in_reasoning=inside and not after_tool)
            out.markup(EOS)
        after_tool = turn.role == "tool"
    thinking = conv.thinking and conv.add_generation_prompt and not after_tool
    if conv.add_generation_prompt and not after_tool:
        out.markup(ASSISTANT, THINK if thinking else END_THINK)
    return Rendered(out.done(), in_reasoning=thinking)


def _answer(turn: Turn) -> str:
    """An earlier answer without the reasoning that a client may have left in its content (cut at the first tag)."""
    text = joined(turn)
    return text.partition(END_THINK)[2] if END_THINK in text else text
