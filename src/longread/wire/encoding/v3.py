"""Prompts of DeepSeek-V3 and R1: system text first, ``<｜User｜>u<｜Assistant｜>a``, tool calls as fenced JSON.

Layout from the releases' chat templates (facts: models.md section 10). All system texts are joined at the front. The
releases define no tools section; the wording of ours is Longread's own, its markup theirs. R1 always thinks: the prompt
ends in ``<think>\\n``. An assistant text that still carries its reasoning is cut behind the last ``</think>``.
"""

from longread.wire.encoding.conversation import Conversation, Turn, to_json
from longread.wire.encoding.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, PieceWriter, Rendered

CALLS = "<｜tool▁calls▁begin｜>"
END_CALLS = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
END_CALL = "<｜tool▁call▁end｜>"
SEP = "<｜tool▁sep｜>"
RESULTS = "<｜tool▁outputs▁begin｜>"
END_RESULTS = "<｜tool▁outputs▁end｜>"
RESULT = "<｜tool▁output▁begin｜>"
END_RESULT = "<｜tool▁output▁end｜>"
TOOL_MARKUP = (CALLS, END_CALLS, CALL, END_CALL, SEP)

_TOOLS_HEAD = "## Tools\n\nThese functions are available, each given by its JSON schema:\n"
_TOOLS_RULES = (
    "\n\nTo call functions, end the answer with exactly this, one call part for each call:\n"
    f"{CALLS}{CALL}function{SEP}NAME\n```json\nARGUMENTS\n```{END_CALL}{END_CALLS}\n\n"
    "NAME is the name of one of the functions. ARGUMENTS is one JSON object that fits its parameters."
)


def joined(turn: Turn) -> str:
    """A turn's text parts, a line each."""
    return "\n".join(turn.parts)


def system_text(conv: Conversation) -> str:
    """All system texts, a blank line apart; V3 to V3.1 have them in front wherever they stood."""
    return "\n\n".join(joined(turn) for turn in conv.turns if turn.role == "system")


def answer_text(turn: Turn) -> str:
    """An earlier answer without the reasoning that a client may have left in its content."""
    return joined(turn).rpartition(END_THINK)[2]


def _write_tools(out: PieceWriter, conv: Conversation) -> None:
    out.text(_TOOLS_HEAD)
    for tool in conv.tools:
        out.text("\n", to_json(tool))
    out.mixed(_TOOLS_RULES, TOOL_MARKUP)


def _write_calls(out: PieceWriter, turn: Turn) -> None:
    out.markup(CALLS)
    for i, call in enumerate(turn.calls):
        if i:
            out.text("\n")
        out.markup(CALL)
        out.text("function")
        out.markup(SEP)
        out.text(call.name, "\n```json\n", call.arguments, "\n```")
        out.markup(END_CALL)
    out.markup(END_CALLS)


def _render(conv: Conversation, *, thinks: bool) -> Rendered:
    out = PieceWriter()
    out.markup(BOS)
    system = system_text(conv)
    out.text(system)
    if conv.tools:
        out.text("\n\n" if system else "")
        _write_tools(out, conv)
    turns = [turn for turn in conv.turns if turn.role != "system"]
    results = 0
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        if turn.role == "tool":
            out.text("\n") if results else out.markup(RESULTS)
            out.markup(RESULT)
            out.text(joined(turn))
            out.markup(END_RESULT)
            results += 1
            continue
        if results:
            out.markup(END_RESULTS)
        if turn.role == "user":
            out.markup(USER)
            out.text(joined(turn))
        else:
            if not results:
                out.markup(ASSISTANT)
            if last and conv.continue_final:
                return _continued(out, turn, thinks=thinks)
            out.text(answer_text(turn))
            if turn.calls:
                _write_calls(out, turn)
            out.markup(EOS)
        results = 0
    if results:
        out.markup(END_RESULTS)
    if conv.add_generation_prompt:
        if not results:
            out.markup(ASSISTANT)
        if thinks:
            out.markup(THINK)
            out.text("\n")
    return Rendered(out.done(), in_reasoning=thinks and conv.add_generation_prompt)


def _continued(out: PieceWriter, turn: Turn, *, thinks: bool) -> Rendered:
    """The last assistant message stays open: inside its reasoning where it has no text yet, else inside its text."""
    inside = thinks and bool(turn.reasoning) and not any(turn.parts)
    if thinks and turn.reasoning:
        out.markup(THINK)
        out.text("\n", turn.reasoning)
        if not inside:
            out.markup(END_THINK)
    out.text(joined(turn))
    if turn.calls:
        _write_calls(out, turn)
    return Rendered(out.done(), in_reasoning=inside)


def render_v3(conv: Conversation) -> Rendered:
    """V3 and V3-0324: no thinking."""
    return _render(conv, thinks=False)


def render_r1(conv: Conversation) -> Rendered:
    """R1 and R1-0528: always thinking."""
    return _render(conv, thinks=True)
