"""Chunks and answers, checked with the OpenAI SDK's own types."""

import orjson
import pytest

from longread.spec.errors import ContextLengthError, InvalidRequestError, OverloadedError
from longread.wire import responses as r
from longread.wire import sse
from longread.wire.parsing import (
    ContentDelta,
    ParsedCall,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)


def data(chunk):
    assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and chunk.count(b"\n") == 2
    return orjson.loads(chunk[6:])


def chunk(raw):
    from openai.types.chat import ChatCompletionChunk

    return ChatCompletionChunk.model_validate(data(raw), strict=True)


def test_a_chat_stream():
    stream = sse.ChatStream("chatcmpl-1", "m", 5)
    first = chunk(stream.role(0, prompt_token_ids=[1]))
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    events = [
        ReasoningDelta("a"),
        ReasoningDelta("b\n"),
        ContentDelta("c"),
        ToolCallStart(0, "id", "f"),
        ToolArgumentsDelta(0, '{"a":'),
        ToolArgumentsDelta(0, "1}"),
        ToolCallEnd(0),
    ]
    entry = r.token_logprob("a", b"a", -0.5, [("b", b"b", -1.0)])
    raw = stream.deltas(0, events, logprobs=[entry], token_ids=[7])
    parts = [chunk(c) for c in raw]
    assert len(parts) == 4
    assert data(raw[0])["choices"][0]["delta"] == {"reasoning": "ab\n", "reasoning_content": "ab\n"}
    assert parts[0].choices[0].logprobs.content[0].top_logprobs[0].token == "b"
    assert parts[1].choices[0].delta.content == "c" and parts[1].choices[0].logprobs is None
    assert parts[2].choices[0].delta.tool_calls[0].function.name == "f"
    assert parts[3].choices[0].delta.tool_calls[0].function.arguments == '{"a":1}'
    assert chunk(stream.finish(0, "tool_calls")).choices[0].finish_reason == "tool_calls"
    usage = chunk(stream.usage(r.usage(3, 4, cached=2, reasoning=1)))
    assert usage.choices == [] and usage.usage.prompt_tokens_details.cached_tokens == 2
    assert usage.usage.completion_tokens_details.reasoning_tokens == 1 and usage.usage.total_tokens == 7


def test_logprobs_without_text_still_make_a_chunk():
    stream = sse.ChatStream("x", "m", 5)
    assert stream.deltas(0, []) == []
    (only,) = stream.deltas(0, [], logprobs=[r.token_logprob("\ufffd", b"\xf0", -1.0)])
    assert chunk(only).choices[0].logprobs.content[0].bytes == [0xF0]


def test_a_completion_stream():
    from openai.types.completion import Completion

    stream = sse.CompletionStream("cmpl-1", "m", 5)
    entries = [r.token_logprob("ab", b"ab", -0.5, [("c", b"c", -1.0)]), r.token_logprob("d", b"d", -0.25)]
    logprobs = r.completion_logprobs(entries, 10)
    body = data(stream.text(0, "abd", logprobs=logprobs))
    assert body["choices"][0].pop("finish_reason") is None  # the SDK's type has no null, its stream lets it pass
    body["choices"][0]["finish_reason"] = "stop"
    part = Completion.model_validate(body)
    assert part.choices[0].logprobs.text_offset == [10, 12]
    assert part.choices[0].logprobs.top_logprobs[0] == {"ab": -0.5, "c": -1.0}
    assert data(stream.finish(0, "length"))["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("calls", [[], [ParsedCall("id", "f", ["{}"], True)]])
def test_whole_answers(calls):
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

    choice = r.chat_choice(0, "", "why", calls, "tool_calls" if calls else "stop", token_ids=[1])
    body = r.chat_response("i", "m", [choice], r.usage(1, 2, cached=0), created=3)
    parsed = ChatCompletion.model_validate(body, strict=True)
    message = parsed.choices[0].message
    assert message.content == (None if calls else "")
    assert [c.function.name for c in message.tool_calls or []] == [c.name for c in calls]
    assert message.model_extra == {"reasoning": "why", "reasoning_content": "why"}
    plain = r.completion_response("i", "m", [r.completion_choice(0, "t", "stop")], r.usage(1, 2, cached=0), created=3)
    assert Completion.model_validate(plain, strict=True).choices[0].text == "t"


def test_usage_of_several_choices_counts_the_prompt_once():
    from openai.types import CompletionUsage

    parts = [r.usage(5, 2, cached=4, reasoning=1), r.usage(5, 3, cached=4, reasoning=2)]
    total = CompletionUsage.model_validate(r.total_usage(parts, 5, cached=4))
    assert (total.prompt_tokens, total.completion_tokens, total.total_tokens) == (5, 5, 10)
    assert total.completion_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("m", "p"), 400),
        (ContextLengthError("m"), "context_length_exceeded"),
        (OverloadedError("m"), 503),
    ],
)
def test_errors(error, code):
    body = r.error_body(error)["error"]
    assert body == {"message": "m", "type": error.kind, "param": error.param, "code": code}
    assert data(sse.error_event(error)) == {"error": body}


@pytest.mark.parametrize("text", ["plain", '"quoted" \\ \n\t\x00', "é 文 \U0001f600 \u2028", ""])
def test_a_chunk_of_nothing_but_text_is_written_as_any_other(text):
    head = {"id": 'a"b', "created": 5, "model": "m/ö"}
    for index in (0, 12):
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        chunk = sse.CompletionStream('a"b', "m/ö", 5).text(index, text)
        assert chunk == sse.event(_ordered(head, "text_completion", choice))
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        (chunk,) = sse.ChatStream('a"b', "m/ö", 5).deltas(index, [ContentDelta(text[:1]), ContentDelta(text[1:])])
        assert chunk == sse.event(_ordered(head, "chat.completion.chunk", choice))


def _ordered(head, kind, choice):
    return {"id": head["id"], "object": kind, "created": 5, "model": head["model"], "choices": [choice]}
