"""Prompts of DeepSeek-V3.2: V3.1's layout with DSML calls and results in ``<function_results>``.

Layout from the release's encoder (facts: models.md section 10). System texts stay where they stand; tools follow the
first one. Reasoning is kept behind the last user turn only.
"""

from longread.wire.encoding import dsml
from longread.wire.encoding.conversation import Conversation
from longread.wire.encoding.pieces import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, PieceWriter, Rendered
from longread.wire.encoding.v3 import joined


def render_v32(conv: Conversation) -> Rendered:
    """V3.2-Exp and V3.2."""
    out = PieceWriter()
    out.markup(BOS)
    turns, last_user = conv.turns, conv.last_user()
    if conv.tools and (not turns or turns[0].role != "system"):
        out.text("\n\n")
        dsml.write_tools(out, conv, dsml.V32)
    headed = False
    for i, turn in enumerate(turns):
        last = i == len(turns) - 1
        if turn.role == "assistant":
            open_end = last and conv.continue_final
            inside = open_end and conv.thinking and bool(turn.reasoning) and not any(turn.parts) and not turn.calls
            keeps = conv.thinking and i > last_user
            if not headed:
                out.markup(ASSISTANT, THINK if keeps else END_THINK)
            if keeps:
                out.text(turn.reasoning)
                if not inside:
                    out.markup(END_THINK)
            out.text(joined(turn))
            if turn.calls:
                dsml.write_calls(out, turn.calls, dsml.V32)
            if open_end:
                return Rendered(out.done(), in_reasoning=inside)
            out.markup(EOS)
            headed = False
            continue
        headed = False
        if turn.role == "system":
            out.text(joined(turn))
            if conv.tools and i == 0:
                out.text("\n\n")
                dsml.write_tools(out, conv, dsml.V32)
        elif turn.role == "user":
            out.markup(USER)
            out.text(joined(turn))
            if not last:  # the header belongs to the user turn, whatever follows it
                out.markup(ASSISTANT, THINK if conv.thinking and i == last_user else END_THINK)
                headed = True
        else:
            headed = _write_result(out, conv, i, last_user)
    return _finish(out, conv)


def _write_result(out: PieceWriter, conv: Conversation, i: int, last_user: int) -> bool:
    """One tool result; the first opens the block, the last closes it and opens the next answer (without a header)."""
    turns = conv.turns
    if turns[i - 1].role != "tool":
        out.text("\n\n<function_results>")
    out.text("\n<result>", joined(turns[i]), "</result>")
    last = i == len(turns) - 1
    if not last and turns[i + 1].role == "tool":
        return False
    out.text("\n</function_results>")
    if last or turns[i + 1].role != "assistant":
        return False
    out.text("\n\n")
    out.markup(THINK if conv.thinking and i >= last_user else END_THINK)
    return True


def _finish(out: PieceWriter, conv: Conversation) -> Rendered:
    if not conv.add_generation_prompt:
        return Rendered(out.done(), in_reasoning=False)
    if conv.turns and conv.turns[-1].role == "tool":
        out.text("\n\n")
    else:
        out.markup(ASSISTANT)
    out.markup(THINK if conv.thinking else END_THINK)
    return Rendered(out.done(), in_reasoning=conv.thinking)
