"""Every chat encoding through the real client: reasoning and a streamed tool call in that family's own markup."""

import json

import pytest
from serving import MODEL, serving

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "Look at Bern, 3 days."}]


def fenced() -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"city": "Bern", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )


def bare() -> str:
    return (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
        '{"city": "Bern", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )


def dsml(block: str, space: str = "") -> str:
    d = f"｜DSML｜{space}"
    return (
        f'<{d}{block}>\n<{d}invoke name="look">\n<{d}parameter name="city" string="true">Bern</{d}parameter>\n'
        f'<{d}parameter name="days" string="false">3</{d}parameter>\n</{d}invoke>\n</{d}{block}>'
    )


FAMILIES = {
    "v3": (fenced(), False),
    "r1": (fenced(), True),
    "v3.1": (bare(), True),
    "v3.2": (dsml("function_calls"), True),
    "v4": (dsml("tool_calls"), True),
    "v4-0731": (dsml("tool_calls"), True),
    "v4.1": (dsml("calls", " "), True),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_and_tool_call_whole_and_streamed(name: str) -> None:
    import openai

    call, thinks = FAMILIES[name]
    extra = {"chat_template_kwargs": {"thinking": True}} if thinks else {}
    with serving(encoding=name) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        server.answers.text = ("It is a city.</think>" if thinks else "") + "Wait.\n\n" + call
        whole = client.chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, extra_body=extra)
        stream = client.chat.completions.create(
            model=MODEL,
            messages=ASK,
            tools=TOOLS,
            extra_body=extra,
            stream=True,
            stream_options={"include_usage": True},
        )
        arguments, names, content, reasoning = "", [], "", ""
        for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                for part in choice.delta.tool_calls or []:
                    names += [part.function.name] if part.function.name else []
                    arguments += part.function.arguments or ""
            counts = chunk.usage
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert [c.function.name for c in message.tool_calls] == names == ["look"]
    assert message.tool_calls[0].function.arguments == arguments
    assert json.loads(arguments) == {"city": "Bern", "days": 3}
    assert message.content.strip() == content.strip() == "Wait."
    assert (message.model_extra["reasoning_content"] or "") == reasoning == ("It is a city." if thinks else "")
    assert counts.completion_tokens_details.reasoning_tokens == (
        len(server.answers.tokenizer.encode("It is a city.</think>", special=True)) if thinks else 0
    )
