"""Prompts of DeepSeek-V4 (preview, and the 0731/0813 releases): no tool role, effort as a text before the system text.

Layout from the release's encoder (facts: models.md section 10). Neighbouring user turns and tool results are one user
turn, its parts a blank line apart, results in the order of their calls. Earlier reasoning is dropped before the last
user turn, but kept everywhere where tools are offered. ``v41`` shares the turn writer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longread.wire.encoding import dsml
from longread.wire.encoding.conversation import Conversation, Turn
from longread.wire.encoding.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, PieceWriter, Rendered

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
PREVIEW_EFFORTS = {"high": "", "max": _ABSOLUTE}
EFFORTS_0731 = {"low": "", "high": _ABSOLUTE, "max": _BEYOND}


@dataclass(frozen=True, slots=True)
class Style:
    """Where V4 and V4.1 differ. ``system``: the token before system text, which then also counts as a user turn
    wherever it is not the first message.
    """

    names: dsml.Names
    system: str | None


V4 = Style(dsml.V4, None)


def render_v4(conv: Conversation) -> Rendered:
    """V4-Flash and V4-Pro, preview."""
    return render_turns(conv, V4, PREVIEW_EFFORTS[str(conv.effort or "high")])


def render_v4_0731(conv: Conversation) -> Rendered:
    """V4-Flash-0731 and V4-Pro-0813."""
    return render_turns(conv, V4, EFFORTS_0731[str(conv.effort or "high")])


def merged(turns: Sequence[Turn]) -> list[Turn]:
    """Tool results become parts of user turns; neighbouring user turns become one."""
    out: list[Turn] = []
    for turn in turns:
        if turn.role not in ("user", "tool"):
            out.append(turn)
        elif out and out[-1].role == "user":
            out[-1] = Turn("user", out[-1].parts + _user_parts(turn))
        else:
            out.append(Turn("user", _user_parts(turn)))
    return out


def _user_parts(turn: Turn) -> tuple[str, ...]:
    return turn.parts if turn.role == "user" else (f"<tool_result>{joined(turn)}</tool_result>",)


def joined(turn: Turn) -> str:
    """A turn's text parts, a blank line apart."""
    return "\n\n".join(turn.parts)


def in_call_order(turns: Sequence[Turn]) -> list[Turn]:
    """Each run of tool results sorted by the order of the calls before it."""
    out: list[Turn] = []
    order: dict[str, int] = {}
    run: list[Turn] = []
    for turn in turns:
        if turn.role == "tool":
            run.append(turn)
            continue
        out.extend(sorted(run, key=lambda t: order[t.call_id]))
        run = []
        order = {call.id: i for i, call in enumerate(turn.calls)}
        out.append(turn)
    out.extend(sorted(run, key=lambda t: order[t.call_id]))
    return out


def render_turns(conv: Conversation, style: Style, effort: str) -> Rendered:
    """The whole prompt. ``effort``: the text that opens it, empty for none (and always where thinking is off)."""
    out = PieceWriter()
    out.markup(BOS)
    turns = merged(in_call_order(conv.turns))
    if conv.tools and (not turns or turns[0].role != "system"):
        turns.insert(0, Turn("system", ()))
    drop = conv.drop_reasoning and not conv.tools
    asks = [
        t.role == "user" or (style.system is not None and t.role == "system" and i > 0) for i, t in enumerate(turns)
    ]
    last_ask = max((i for i, ask in enumerate(asks) if ask), default=-1)
    prefix = effort if conv.thinking else ""
    if style.system is not None and (prefix or (turns and turns[0].role == "system")):
        out.markup(style.system)
    out.text(prefix)
    headed = False
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        keeps = conv.thinking and not (drop and i < last_ask)
        if turn.role == "assistant":
            if not headed:
                out.markup(ASSISTANT, THINK if keeps else END_THINK)
            open_end = last and conv.continue_final
            inside = _write_answer(out, turn, style, keeps=keeps, open_end=open_end)
            if open_end:
                return Rendered(out.done(), in_reasoning=inside)
            headed = False
            continue
        _write_ask(out, conv, style, turn, first=i == 0)
        headed = asks[i] and (turns[i + 1].role == "assistant" if not last else conv.add_generation_prompt)
        if headed:
            out.markup(ASSISTANT, THINK if keeps else END_THINK)
    if conv.add_generation_prompt and not headed:
        out.markup(ASSISTANT, THINK if conv.thinking else END_THINK)
    return Rendered(out.done(), in_reasoning=conv.thinking and conv.add_generation_prompt)


def _write_ask(out: PieceWriter, conv: Conversation, style: Style, turn: Turn, *, first: bool) -> None:
    if turn.role == "user":
        out.markup(USER)
    elif style.system is not None and not first:
        out.markup(style.system)
    out.text(joined(turn))
    if first and turn.role == "system" and conv.tools:
        out.text("\n\n")
        dsml.write_tools(out, conv, style.names)


def _write_answer(out: PieceWriter, turn: Turn, style: Style, *, keeps: bool, open_end: bool) -> bool:
    """One assistant turn behind its header. Returns whether it ends inside open reasoning."""
    inside = open_end and keeps and bool(turn.reasoning) and not any(turn.parts) and not turn.calls
    if keeps:
        out.text(turn.reasoning)
        if not inside:
            out.markup(END_THINK)
    out.text(joined(turn))
    if turn.calls:
        dsml.write_calls(out, turn.calls, style.names)
    if not open_end:
        out.markup(EOS)
    return inside
