"""A conversation as the encoders take it: plain turns, decided switches, no HTTP.

``conversation`` turns a request into one and decides whether the model thinks and how hard. The spelling is vLLM's:
``chat_template_kwargs.thinking`` or ``enable_thinking``, ``reasoning_effort`` beside or inside it; an effort other than
"none" turns thinking on, "none" turns it off. What a family cannot do is refused with what it can.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from longread.spec.errors import InvalidRequestError
from longread.wire.types import ChatRequest, ChatTemplateKwargs, Message, TokenizeChatRequest

Thinking = Literal["never", "always", "switch"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a family's encoding can express. ``efforts`` maps accepted names to the family's own levels (``none`` is
    implied by "switch"); ``numeric_effort``: an integer from 1 to 100 is accepted too. ``keeps_reasoning``: reasoning
    of earlier answers can stay in the prompt (``drop_thinking`` false).
    """

    name: str
    thinking: Thinking
    default_thinking: bool
    efforts: Mapping[str, str | int]
    default_effort: str | int | None = None
    numeric_effort: bool = False
    keeps_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an earlier assistant turn; ``arguments`` is the text the model wrote, normally JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Turn:
    """``parts``: the content's text parts; each family joins them in its own way. Role "developer" is "system" here."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[str, ...]
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Everything a prompt depends on. ``effort`` is the family's own level, None where thinking is off."""

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = False
    effort: str | int | None = None
    drop_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final: bool = False

    def last_user(self) -> int:
        """Index of the last user turn, -1 where there is none."""
        return max((i for i, turn in enumerate(self.turns) if turn.role == "user"), default=-1)


def to_json(value: object) -> str:
    """JSON as DeepSeek's encoders write it: non-ASCII as it is, a space behind comma and colon."""
    return json.dumps(value, ensure_ascii=False)


def _turn(message: Message, documents: Mapping[str, str]) -> Turn:
    calls = tuple(Call(call.id or "", call.function.name, call.function.arguments) for call in message.tool_calls or ())
    role = "system" if message.role == "developer" else message.role
    return Turn(role, message.texts(documents), message.thoughts or "", calls, message.tool_call_id or "")


def conversation(
    request: ChatRequest | TokenizeChatRequest,
    abilities: Abilities,
    defaults: ChatTemplateKwargs | None = None,
    documents: Mapping[str, str] | None = None,
) -> Conversation:
    """Decide the switches. ``defaults`` are the server's own chat_template_kwargs; what the request says wins.
    ``documents``: the text of each of ``request.named_documents``, which stands in the prompt as if it had been sent.

    Raises InvalidRequestError for a switch, an effort or a ``drop_thinking`` that the family does not have, and for
    tool results that answer no call.
    """
    asked = request.chat_template_kwargs or ChatTemplateKwargs()
    thinking, effort = _decide(request.reasoning_effort, asked, defaults or ChatTemplateKwargs(), abilities)
    turns = tuple(_turn(message, documents or {}) for message in request.messages)
    _check_tool_results(turns)
    final = bool(request.continue_final_message)
    drop = next((k.drop_thinking for k in (asked, defaults) if k is not None and k.drop_thinking is not None), True)
    if not drop and not abilities.keeps_reasoning:
        raise InvalidRequestError(
            f"drop_thinking: encoding {abilities.name} always drops the reasoning of earlier answers, got False; "
            "leave it out",
            "chat_template_kwargs.drop_thinking",
        )
    return Conversation(
        turns=turns,
        tools=tuple(tool.function for tool in request.offered_tools),
        thinking=thinking,
        effort=effort,
        drop_reasoning=drop,
        add_generation_prompt=request.add_generation_prompt is not False and not final,
        continue_final=final,
    )


def _decide(
    outer: str | None, asked: ChatTemplateKwargs, defaults: ChatTemplateKwargs, abilities: Abilities
) -> tuple[bool, str | int | None]:
    switch = asked.thinking if asked.thinking is not None else asked.enable_thinking
    effort: str | int | None = outer if outer is not None else asked.reasoning_effort
    if switch is False and effort not in (None, "none"):
        raise InvalidRequestError(f"reasoning_effort {effort!r} needs thinking, which is off", "reasoning_effort")
    if switch is None and effort is None:
        switch = defaults.thinking if defaults.thinking is not None else defaults.enable_thinking
    if effort is None and switch is not False:
        effort = defaults.reasoning_effort
    if effort == "none":
        switch, effort = False, None
    elif effort is not None:
        switch = True
    if switch is not None:
        _check_switch(switch, abilities)
    thinking = abilities.default_thinking if switch is None else switch
    return thinking, _level(effort, abilities) if thinking else None


def _check_switch(switch: bool, abilities: Abilities) -> None:
    if abilities.thinking == "never" and switch:
        raise InvalidRequestError(f"encoding {abilities.name}: this model has no thinking mode", "chat_template_kwargs")
    if abilities.thinking == "always" and not switch:
        raise InvalidRequestError(f"encoding {abilities.name}: thinking cannot be switched off", "chat_template_kwargs")


def _level(effort: str | int | None, abilities: Abilities) -> str | int | None:
    if effort is None:
        return abilities.default_effort
    if isinstance(effort, int):
        if abilities.numeric_effort and 1 <= effort <= 100:
            return effort
    elif effort in abilities.efforts:
        return abilities.efforts[effort]
    names = [*(["none"] if abilities.thinking == "switch" else []), *abilities.efforts]
    numbers = " or an integer from 1 to 100" if abilities.numeric_effort else ""
    known = ", ".join(names) or "no efforts"
    raise InvalidRequestError(
        f"reasoning_effort: encoding {abilities.name} knows {known}{numbers}, got {effort!r}", "reasoning_effort"
    )


def _check_tool_results(turns: tuple[Turn, ...]) -> None:
    """A result must follow the assistant turn whose call it answers, with only results between."""
    open_calls: set[str] = set()
    for i, turn in enumerate(turns):
        if turn.role == "tool":
            if turn.call_id not in open_calls:
                raise InvalidRequestError(
                    f"messages[{i}]: tool_call_id {turn.call_id[:64]!r} answers no call of the assistant before it",
                    f"messages[{i}].tool_call_id",
                )
        else:
            open_calls = {call.id for call in turn.calls}
